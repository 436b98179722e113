"""Ragged embedding against eager torch."""

from __future__ import annotations

import torch
from harness import Result, compare, main

from ds_kernels.ops.ragged_gather import ragged_embedding


def measure() -> list[Result]:
    """4096 tokens of width 1024, with and without learned positions."""
    results = []
    tokens, positions = torch.randint(0, 32000, (4096,)), torch.randint(0, 2048, (4096,))
    for dtype in (torch.float32, torch.bfloat16):
        table, places = (torch.randn(n, 1024).to(dtype) for n in (32000, 2048))
        name = str(dtype).removeprefix("torch.")
        results += [
            compare(
                f"tokens {name}",
                {
                    "ragged_embedding": lambda t=table: ragged_embedding(t, tokens),
                    "embedding": lambda t=table: torch.nn.functional.embedding(tokens, t),
                },
                bars={"embedding": 1.05},
            ),
            compare(
                f"tokens and positions {name}",
                {
                    "ragged_embedding": lambda t=table, p=places: ragged_embedding(
                        t, tokens, position_table=p, positions=positions
                    ),
                    "eager": lambda t=table, p=places: (
                        torch.nn.functional.embedding(tokens, t)
                        + torch.nn.functional.embedding(positions, p)
                    ),
                },
                bars={"eager": 1.0},
            ),
        ]
    return results


if __name__ == "__main__":
    main("ragged_gather", measure)
