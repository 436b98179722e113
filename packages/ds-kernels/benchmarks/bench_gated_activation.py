"""Gated activations against the composed eager ops; torch has no fused one on the CPU."""

from __future__ import annotations

import torch
from harness import DTYPES, SHAPES, Result, compare_both_ways, main

from ds_kernels.ops.bias_activation import Activation
from ds_kernels.ops.gated_activation import gated_activation
from ds_kernels.reference.bias_activation import activate

_KINDS: tuple[Activation, ...] = ("silu", "gelu", "gelu_tanh", "relu")


def measure() -> list[Result]:
    """In and out of cache, gate and up in two tensors and in one."""
    results = []
    for dtype in DTYPES:
        for rows, cols in SHAPES:
            gate, up, grad = (torch.randn(rows, cols).to(dtype) for _ in range(3))
            both = torch.cat([gate, up], -1)
            for kind in _KINDS:
                results += compare_both_ways(
                    f"{kind} gate {(rows, cols)} {dtype}",
                    [gate, up],
                    grad,
                    ours=lambda g, u, kind=kind: gated_activation(g, u, activation=kind),
                    theirs={"eager": (lambda g, u, kind=kind: activate(g, kind) * u, 1.0)},
                )

            def eager(x: torch.Tensor) -> torch.Tensor:
                left, right = x.chunk(2, -1)
                return activate(left, "silu") * right

            results += compare_both_ways(
                f"silu gate and up in one {(rows, cols)} {dtype}",
                [both],
                grad,
                ours=lambda x: gated_activation(x, activation="silu"),
                theirs={"eager": (eager, 1.0)},
            )
    return results


if __name__ == "__main__":
    main("gated_activation", measure)
