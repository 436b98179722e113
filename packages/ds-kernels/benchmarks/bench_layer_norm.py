"""Layer norm against torch's fused op, with a residual against addition and torch's fused op."""

from __future__ import annotations

import torch
from harness import DTYPES, SHAPES, Result, compare_both_ways, main
from torch import Tensor
from torch.nn import functional as F

from ds_kernels.ops.layer_norm import add_layer_norm, layer_norm


def _eager(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return F.layer_norm(total, total.shape[-1:], weight, bias), total


def measure() -> list[Result]:
    """In and out of cache, and many short rows."""
    results = []
    for dtype in DTYPES:
        for shape in (*SHAPES, (4096, 128)):
            x, residual, grad = (torch.randn(shape).to(dtype) for _ in range(3))
            weight, bias = (torch.randn(shape[1]).to(dtype) for _ in range(2))
            results += compare_both_ways(
                f"layer_norm {shape} {dtype}",
                [x, weight, bias],
                grad,
                ours=layer_norm,
                theirs={"fused": (lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b), 1.05)},
            )
            results += compare_both_ways(
                f"add_layer_norm {shape} {dtype}",
                [x, residual, weight, bias],
                grad,
                ours=add_layer_norm,
                theirs={"eager": (_eager, 1.0)},
            )
    return results


if __name__ == "__main__":
    main("layer_norm", measure)
