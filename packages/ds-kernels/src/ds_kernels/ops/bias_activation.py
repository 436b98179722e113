"""Activation of x + bias in one pass: GELU (Hendrycks & Gimpel 2016), its tanh form, SiLU, ReLU.

Computed in float32 whatever the dtype and rounded once; the backward recomputes the activation from
``x``, so nothing but the inputs is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from ds_kernels.errors import KernelArgumentError
from ds_kernels.functional import Functional, column_partials
from ds_kernels.reference import bias_activation as reference
from ds_kernels.registry import Op

if TYPE_CHECKING:
    from ds_kernels._native import Native

__all__ = ["ACTIVATIONS", "Activation", "activation_index", "bias_activation"]

Activation = Literal["gelu", "gelu_tanh", "silu", "relu"]
"""``gelu`` with erf, ``gelu_tanh`` its approximation, ``silu`` (swish), ``relu``."""

ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
"""The activations in the order of the native enum."""

_INDEX: dict[str, int] = {name: index for index, name in enumerate(ACTIVATIONS)}


def activation_index(activation: str) -> int:
    """The number of an activation in the native enum.

    Raises:
        KernelArgumentError: There is no such activation.
    """
    try:
        return _INDEX[activation]
    except KeyError:
        raise KernelArgumentError(
            f"activation: is {activation!r}, allowed are {', '.join(ACTIVATIONS)}"
        ) from None


def bias_activation(
    x: Tensor, bias: Tensor | None = None, *, activation: Activation = "gelu"
) -> Tensor:
    """Apply an activation to ``x + bias``.

    Args:
        x: float32, bfloat16 or float16, any shape; copied first if not contiguous.
        bias: Shape [x.shape[-1]], the dtype of ``x`` or float32; None for none.
        activation: Which one.

    Returns:
        Shape and dtype of ``x``, contiguous. Differentiable once in ``x`` and ``bias``.

    Raises:
        KernelArgumentError: Wrong dtype, shape or device, or an unknown activation.
    """
    activation_index(activation)
    out: Tensor = _FORWARD(x, bias, activation)
    return out


def _native_forward(module: Native) -> Callable[[Tensor, Tensor | None, str], Tensor]:
    kernel = module.bias_activation_

    def run(x: Tensor, bias: Tensor | None, activation: str, /) -> Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        kernel(out, x, None if bias is None else bias.contiguous(), activation_index(activation))
        return out

    return run


def _native_backward(
    module: Native,
) -> Callable[[Tensor, Tensor, Tensor | None, str, bool], tuple[Tensor, Tensor | None]]:
    kernel = module.bias_activation_backward_

    def run(
        grad: Tensor, x: Tensor, bias: Tensor | None, activation: str, with_bias: bool, /
    ) -> tuple[Tensor, Tensor | None]:
        x = x.contiguous()
        bias = None if bias is None else bias.contiguous()
        grad_x = torch.empty_like(x)
        grad_bias = torch.empty_like(bias) if with_bias and bias is not None else None
        partials = None
        if grad_bias is not None and grad_bias.numel() > 0:
            cols = grad_bias.numel()
            partials = column_partials(x, x.numel() // cols, cols)
        kernel(
            grad_x, grad_bias, partials, grad.contiguous(), x, bias, activation_index(activation)
        )
        return grad_x, grad_bias

    return run


def _fake_backward(
    grad: Tensor, x: Tensor, bias: Tensor | None, activation: str, with_bias: bool
) -> tuple[Tensor, Tensor]:
    grad_bias = bias.new_empty(bias.shape) if with_bias and bias is not None else x.new_empty(0)
    return x.new_empty(x.shape), grad_bias


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ANN401
    x, bias, ctx.activation = inputs
    ctx.save_for_backward(x, bias)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # noqa: ANN401
    x, bias = ctx.saved_tensors
    wants_x, wants_bias = ctx.needs_input_grad[:2]
    grad_x, grad_bias = _BACKWARD(grad, x, bias, ctx.activation, wants_bias)
    return grad_x if wants_x else None, grad_bias if wants_bias else None, None


_BACKWARD_OP = Op(
    "bias_activation_backward",
    reference.bias_activation_backward,
    native=_native_backward,
    source="bias_activation",
    cuda=True,
)
_BACKWARD = Functional(
    _BACKWARD_OP,
    "(Tensor grad, Tensor x, Tensor? bias, str activation, bool with_bias) -> (Tensor, Tensor)",
    _fake_backward,
)
_FORWARD_OP = Op("bias_activation", reference.bias_activation, native=_native_forward, cuda=True)
_FORWARD = Functional(
    _FORWARD_OP,
    "(Tensor x, Tensor? bias, str activation) -> Tensor",
    lambda x, bias, activation: x.new_empty(x.shape),
    save=_save,
    backward=_backward,
)
