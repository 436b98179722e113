"""Gated linear units (Shazeer 2020, arXiv:2002.05202): activation(gate) * up in one pass.

``silu`` gives SwiGLU, ``gelu`` and ``gelu_tanh`` GeGLU, ``relu`` ReGLU. Computed in float32
whatever the dtype and rounded once; the backward recomputes the activation, so only the inputs are
kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ds_kernels.functional import Functional, contiguous
from ds_kernels.ops.bias_activation import Activation, activation_index
from ds_kernels.reference import gated_activation as reference
from ds_kernels.registry import Op

if TYPE_CHECKING:
    from ds_kernels._native import Native

__all__ = ["gated_activation"]


def gated_activation(
    gate: Tensor, up: Tensor | None = None, *, activation: Activation = "silu"
) -> Tensor:
    """Multiply ``up`` by an activation of ``gate``.

    Args:
        gate: float32, bfloat16 or float16, any shape; without ``up`` ``[..., 2 * H]``, the gate in
            the first half of the last dimension and up in the second. Copied first if not
            contiguous.
        up: Shape, dtype and device of ``gate``; None where it is in ``gate``.
        activation: Which one.

    Returns:
        Shape of ``gate``, or ``[..., H]`` without ``up``; contiguous. Differentiable once in both.

    Raises:
        KernelArgumentError: Wrong dtype, shape or device, or an unknown activation.
    """
    activation_index(activation)
    out: Tensor = _FORWARD(gate, up, activation)
    return out


def _result(gate: Tensor, up: Tensor | None) -> Tensor:
    """Room for the result; wrong shapes are left to the binding's checks."""
    if up is not None or gate.ndim == 0:
        return gate.new_empty(gate.shape)
    return gate.new_empty((*gate.shape[:-1], gate.shape[-1] // 2))


def _native_forward(module: Native) -> Callable[[Tensor, Tensor | None, str], Tensor]:
    kernel = module.gated_activation_

    def run(gate: Tensor, up: Tensor | None, activation: str, /) -> Tensor:
        out = _result(gate, up)
        kernel(out, gate.contiguous(), contiguous(up), activation_index(activation))
        return out

    return run


def _native_backward(
    module: Native,
) -> Callable[[Tensor, Tensor, Tensor | None, str], tuple[Tensor, Tensor | None]]:
    kernel = module.gated_activation_backward_

    def run(
        grad: Tensor, gate: Tensor, up: Tensor | None, activation: str, /
    ) -> tuple[Tensor, Tensor | None]:
        gate, up = gate.contiguous(), contiguous(up)
        grad_gate = torch.empty_like(gate)
        grad_up = None if up is None else torch.empty_like(up)
        kernel(grad_gate, grad_up, grad.contiguous(), gate, up, activation_index(activation))
        return grad_gate, grad_up

    return run


def _fake_backward(
    grad: Tensor, gate: Tensor, up: Tensor | None, activation: str
) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), gate.new_empty(0 if up is None else up.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ANN401
    gate, up, ctx.activation = inputs
    ctx.save_for_backward(gate, up)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # noqa: ANN401
    gate, up = ctx.saved_tensors
    grad_gate, grad_up = _BACKWARD(grad, gate, up, ctx.activation)
    wants_gate, wants_up = ctx.needs_input_grad[:2]
    return grad_gate if wants_gate else None, grad_up if wants_up else None, None


_BACKWARD_OP = Op(
    "gated_activation_backward",
    reference.gated_activation_backward,
    native=_native_backward,
    source="gated_activation",
    cuda=True,
)
_BACKWARD = Functional(
    _BACKWARD_OP,
    "(Tensor grad, Tensor gate, Tensor? up, str activation) -> (Tensor, Tensor)",
    _fake_backward,
)
_FORWARD_OP = Op("gated_activation", reference.gated_activation, native=_native_forward, cuda=True)
_FORWARD = Functional(
    _FORWARD_OP,
    "(Tensor gate, Tensor? up, str activation) -> Tensor",
    lambda gate, up, activation: _result(gate, up),
    save=_save,
    backward=_backward,
)
