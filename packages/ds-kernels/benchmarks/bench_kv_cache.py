"""Cache update with rotary embedding against the same in eager torch."""

from __future__ import annotations

import torch
from harness import Result, compare, main
from torch import Tensor

from ds_kernels.ops.kv_cache import kv_cache_update_


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def measure() -> list[Result]:
    """A prefill of 1024 tokens and a decode step of 32."""
    heads, kv_heads, dim, block = 16, 4, 128, 64
    angle = torch.rand(4096, dim // 2)
    cosine, sine = angle.cos(), angle.sin()
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        for tokens in (1024, 32):
            query = torch.randn(tokens, heads, dim).to(dtype)
            key, value = (torch.randn(tokens, kv_heads, dim).to(dtype) for _ in range(2))
            caches = [torch.zeros(64, block, kv_heads, dim, dtype=dtype) for _ in range(2)]
            slots = torch.randperm(64 * block)[:tokens]
            positions = torch.randint(0, 4096, (tokens,))

            def ours(
                q: Tensor = query,
                k: Tensor = key,
                v: Tensor = value,
                c: list[Tensor] = caches,
                s: Tensor = slots,
                p: Tensor = positions,
            ) -> None:
                kv_cache_update_(q, k, v, *c, s, positions=p, cosine=cosine, sine=sine)

            def eager(
                q: Tensor = query,
                k: Tensor = key,
                v: Tensor = value,
                c: list[Tensor] = caches,
                s: Tensor = slots,
                p: Tensor = positions,
            ) -> None:
                cos, sin = (t[p][:, None].to(q.dtype) for t in (cosine, sine))
                q.copy_(_turn(q, cos, sin))
                c[0].flatten(0, 1)[s] = _turn(k, cos, sin)
                c[1].flatten(0, 1)[s] = v

            results.append(
                compare(
                    f"{tokens} tokens {str(dtype).removeprefix('torch.')}",
                    {"kv_cache_update_": ours, "eager": eager},
                    bars={"eager": 1.0},
                    repeat=4,
                )
            )
    return results


if __name__ == "__main__":
    main("kv_cache", measure)
