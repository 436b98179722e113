"""Evoformer attention against eager torch and scaled_dot_product_attention with the summed bias."""

from __future__ import annotations

from collections.abc import Callable

import torch
from harness import Result, compare, main
from torch import Tensor

from ds_kernels.ops.evoformer_attention import evoformer_attention


def _eager(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, pair: Tensor) -> Tensor:
    left, right, values = (tensor.transpose(2, 3) for tensor in (query, key, value))
    scores = left @ right.transpose(-1, -2) * query.shape[-1] ** -0.5 + mask + pair
    return (scores.softmax(-1) @ values).transpose(2, 3)


def _sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, pair: Tensor) -> Tensor:
    left, right, values = (tensor.transpose(2, 3) for tensor in (query, key, value))
    out = torch.nn.functional.scaled_dot_product_attention(
        left, right, values, attn_mask=mask + pair
    )
    return out.transpose(2, 3)


def measure() -> list[Result]:
    """Sixteen rows of an alignment of 256, forward and with all gradients."""
    rows, length, heads, dim = 16, 256, 4, 32
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        tensors = [torch.randn(1, rows, length, heads, dim, dtype=dtype) for _ in range(3)]
        tensors.append(torch.randn(1, rows, 1, 1, length, dtype=dtype))
        tensors.append(torch.randn(1, 1, heads, length, length, dtype=dtype))
        for backward in (False, True):
            leaves = [tensor.detach().requires_grad_(backward) for tensor in tensors]

            def run(
                function: Callable[..., Tensor],
                leaves: list[Tensor] = leaves,
                backward: bool = backward,
            ) -> None:
                out = function(*leaves)
                if backward:
                    out.backward(torch.ones_like(out))

            results.append(
                compare(
                    f"{rows} x {length}, {str(dtype).removeprefix('torch.')}, "
                    f"{'forward and backward' if backward else 'forward'}",
                    {
                        "evoformer_attention": lambda run=run: run(evoformer_attention),
                        "eager": lambda run=run: run(_eager),
                        "sdpa": lambda run=run: run(_sdpa),
                    },
                    rounds=7,
                    bars={"eager": 1.0, "sdpa": 1.05},
                )
            )
    return results


if __name__ == "__main__":
    main("evoformer_attention", measure)
