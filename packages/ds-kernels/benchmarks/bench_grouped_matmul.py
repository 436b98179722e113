"""Grouped matmul against a loop of torch products, forward and with gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch
from harness import Result, compare, main
from torch import Tensor

from ds_kernels.ops.grouped_matmul import grouped_matmul


def _loop(x: Tensor, weight: Tensor, bounds: Tensor) -> Tensor:
    edges = bounds.tolist()
    return torch.cat(
        [x[a:b] @ w for a, b, w in zip(edges, edges[1:], weight.unbind(0), strict=False)]
    )


def measure() -> list[Result]:
    """Eight experts: even, 8:1 uneven, and decoding of a few tokens."""
    depth, columns = 512, 1024
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        for name, sizes in {
            "even": [64] * 8,
            "uneven": [256, 32, 32, 32, 64, 32, 32, 32],
            "decode": [1, 0, 2, 0, 1, 3, 0, 1],
        }.items():
            x = torch.randn(sum(sizes), depth).to(dtype)
            weight = torch.randn(8, depth, columns).to(dtype)
            bounds = torch.tensor([0, *sizes]).cumsum(0)
            for backward in (False, True):
                leaves = [t.detach().requires_grad_(backward) for t in (x, weight)]

                def run(
                    function: Callable[..., Tensor],
                    leaves: list[Tensor] = leaves,
                    bounds: Tensor = bounds,
                    backward: bool = backward,
                ) -> None:
                    out = function(*leaves, bounds)
                    if backward:
                        out.backward(torch.ones_like(out))

                results.append(
                    compare(
                        f"{name} {str(dtype).removeprefix('torch.')}, "
                        f"{'forward and backward' if backward else 'forward'}",
                        {
                            "grouped_matmul": lambda run=run: run(grouped_matmul),
                            "loop": lambda run=run: run(_loop),
                        },
                        rounds=7,
                        bars={"loop": 1.05},
                    )
                )
    return results


if __name__ == "__main__":
    main("grouped_matmul", measure)
