"""Random layer-token drop against torch's sort, gather and scatter."""

from __future__ import annotations

import torch
from harness import DTYPES, Result, compare, main

from ds_kernels.ops.random_ltd import token_gather, token_scatter, token_sort


def measure() -> list[Result]:
    """Half of 2048 tokens of width 1024 in 4 sequences; sorting for 24 layers."""
    sampled = torch.stack([torch.randperm(2048)[:1024] for _ in range(96)])
    results = [
        compare(
            "sort 96 x 1024 of 2048",
            {
                "token_sort": lambda: token_sort(sampled, 2048),
                "sort": lambda: sampled.sort(-1).values,
            },
            bars={"sort": 1.0},
        )
    ]
    indices = token_sort(sampled[:4].contiguous(), 2048)
    places = indices[..., None].expand(-1, -1, 1024)
    for dtype in DTYPES:
        x, rows = torch.randn(4, 2048, 1024).to(dtype), torch.randn(4, 1024, 1024).to(dtype)
        out, half = torch.empty_like(x), torch.empty_like(rows)
        results += [
            compare(
                f"gather {dtype}",
                {
                    "token_gather": lambda x=x: token_gather(x, indices),
                    "gather": lambda x=x: x.gather(1, places),
                    "bound": lambda half=half, rows=rows: half.copy_(rows),
                },
                bars={"gather": 1.0, "bound": 1 / 0.85},
            ),
            compare(
                f"scatter {dtype}",
                {
                    "token_scatter": lambda x=x, rows=rows: token_scatter(x, rows, indices),
                    "scatter": lambda x=x, rows=rows: x.scatter(1, places, rows),
                    "bound": lambda out=out, x=x: out.copy_(x),
                },
                bars={"scatter": 1.0, "bound": 1 / 0.85},
            ),
        ]
    return results


if __name__ == "__main__":
    main("random_ltd", measure)
