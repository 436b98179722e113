"""Gated activations in plain torch."""

from __future__ import annotations

from torch import Tensor

from ds_kernels.functional import gradients_of
from ds_kernels.reference.bias_activation import activate, working

__all__ = ["gated_activation", "gated_activation_backward"]


def gated_activation(gate: Tensor, up: Tensor | None, activation: str, /) -> Tensor:
    """See :func:`ds_kernels.ops.gated_activation.gated_activation`."""
    work = working(gate.dtype)
    left, right = gate.chunk(2, -1) if up is None else (gate, up)
    return (activate(left.to(work), activation) * right.to(work)).to(gate.dtype)


def gated_activation_backward(
    grad: Tensor, gate: Tensor, up: Tensor | None, activation: str, /
) -> tuple[Tensor, Tensor | None]:
    """Gradients of ``gate`` and ``up``, which is None where they are side by side."""
    grad_gate, grad_up = gradients_of(
        lambda a, b: gated_activation(a, b, activation), (gate, up), grad, (True, up is not None)
    )
    assert grad_gate is not None
    return grad_gate, grad_up
