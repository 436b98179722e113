"""RMS norm against torch's, with a residual against addition and torch's."""

from __future__ import annotations

import torch
from harness import DTYPES, SHAPES, Result, compare_both_ways, main
from torch import Tensor
from torch.nn import functional as F

from ds_kernels.ops.rms_norm import add_rms_norm, rms_norm


def _eager(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return F.rms_norm(total, total.shape[-1:], weight, 1e-6), total


def measure() -> list[Result]:
    """In and out of cache, and many short rows."""
    results = []
    for dtype in DTYPES:
        for shape in (*SHAPES, (4096, 128)):
            x, residual, grad = (torch.randn(shape).to(dtype) for _ in range(3))
            weight = torch.randn(shape[1]).to(dtype)
            results += compare_both_ways(
                f"rms_norm {shape} {dtype}",
                [x, weight],
                grad,
                ours=rms_norm,
                theirs={"torch": (lambda x, w: F.rms_norm(x, x.shape[-1:], w, 1e-6), 1.0)},
            )
            results += compare_both_ways(
                f"add_rms_norm {shape} {dtype}",
                [x, residual, weight],
                grad,
                ours=add_rms_norm,
                theirs={"eager": (_eager, 1.0)},
            )
    return results


if __name__ == "__main__":
    main("rms_norm", measure)
