"""Rotary embedding against the eager ops that models are written with."""

from __future__ import annotations

import torch
from harness import DTYPES, Result, compare_both_ways, main
from torch import Tensor

from ds_kernels.ops.rotary import rotary, rotary_angles


def _halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


def _neighbours(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    swapped = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    return x * cos + swapped * sin


def measure() -> list[Result]:
    """Queries and keys of 16 heads of 128, in and out of cache."""
    results = []
    for dtype in DTYPES:
        for length in (64, 2048):
            shape = (1, length, 16, 128)
            query, key, grad = (torch.randn(shape).to(dtype) for _ in range(3))
            cosine, sine = rotary_angles(length, 128)
            for interleaved, eager in ((False, _halves), (True, _neighbours)):
                wide = [
                    (t.repeat_interleave(2, -1) if interleaved else torch.cat([t, t], -1))
                    .to(dtype)
                    .unsqueeze(1)
                    for t in (cosine, sine)
                ]
                results += compare_both_ways(
                    f"{'neighbours' if interleaved else 'halves'} {shape} {dtype}",
                    [query, key],
                    grad,
                    ours=lambda q, k, inter=interleaved, c=cosine, s=sine: rotary(
                        q, k, c, s, interleaved=inter
                    ),
                    theirs={
                        "eager": (
                            lambda q, k, run=eager, w=wide: (run(q, *w), run(k, *w)),
                            1.0,
                        )
                    },
                )
    return results


if __name__ == "__main__":
    main("rotary", measure)
