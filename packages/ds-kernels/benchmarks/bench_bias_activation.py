"""Bias and activation against torch's fused activation and the composed eager ops."""

from __future__ import annotations

import torch
from harness import DTYPES, SHAPES, Result, compare_both_ways, main

from ds_kernels.ops.bias_activation import Activation, bias_activation
from ds_kernels.reference.bias_activation import activate

_KINDS: tuple[Activation, ...] = ("gelu", "gelu_tanh", "silu")


def measure() -> list[Result]:
    """In and out of cache, alone against torch's fused op, with a bias against two ops."""
    results = []
    for dtype in DTYPES:
        for shape in SHAPES:
            x, grad = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
            bias = torch.randn(shape[1]).to(dtype)
            for kind in _KINDS:
                results += compare_both_ways(
                    f"{kind} {shape} {dtype}",
                    [x],
                    grad,
                    ours=lambda x, kind=kind: bias_activation(x, activation=kind),
                    theirs={"fused": (lambda x, kind=kind: activate(x, kind), 1.05)},
                )
                results += compare_both_ways(
                    f"bias + {kind} {shape} {dtype}",
                    [x, bias],
                    grad,
                    ours=lambda x, b, kind=kind: bias_activation(x, b, activation=kind),
                    theirs={"eager": (lambda x, b, kind=kind: activate(x + b, kind), 1.0)},
                )
    return results


if __name__ == "__main__":
    main("bias_activation", measure)
