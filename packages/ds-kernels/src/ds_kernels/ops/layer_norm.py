"""Layer norm (Ba, Kiros & Hinton 2016), alone or on a sum with the residual stream.

out = (s - mean(s)) / sqrt(var(s) + eps) * weight + bias over the last dimension, s = x or
x + residual.  Computed in float32 and rounded once; the sum is rounded to its dtype first, as the
residual stream that goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ds_kernels.functional import Functional, column_partials, contiguous
from ds_kernels.reference import layer_norm as reference
from ds_kernels.reference.bias_activation import working
from ds_kernels.registry import Op

if TYPE_CHECKING:
    from ds_kernels._native import Native

__all__ = ["add_layer_norm", "layer_norm"]


def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5
) -> Tensor:
    """Centre each row and divide it by its standard deviation.

    Args:
        x: float32, bfloat16 or float16, at least one dimension; copied first if not contiguous.
        weight: Shape [x.shape[-1]], the dtype of ``x`` or float32; None for ones.
        bias: The same; None for zeros.
        eps: Added to the variance, at least 0.

    Returns:
        Shape and dtype of ``x``, contiguous. Differentiable once in all tensors.

    Raises:
        KernelArgumentError: Wrong dtype, shape or device, or a negative ``eps``.
    """
    out: Tensor = _FORWARD(x, None, weight, bias, eps)[0]
    return out


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """Add a layer's output to the residual stream and normalise the sum, in one pass.

    Args:
        x: See :func:`layer_norm`.
        residual: Shape, dtype and device of ``x``.
        weight: See :func:`layer_norm`.
        bias: See :func:`layer_norm`.
        eps: See :func:`layer_norm`.

    Returns:
        The normalised sum and the sum itself, both of shape and dtype of ``x``. Differentiable once
        in all tensors, through both results.

    Raises:
        KernelArgumentError: As :func:`layer_norm`.
    """
    out, total, _ = _FORWARD(x, residual, weight, bias, eps)
    return out, total


_Forward = Callable[
    [Tensor, Tensor | None, Tensor | None, Tensor | None, float],
    tuple[Tensor, Tensor | None, Tensor],
]
_Backward = Callable[
    [Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None, Tensor, bool, bool],
    tuple[Tensor, Tensor | None, Tensor | None],
]


def _native_forward(module: Native) -> _Forward:
    kernel = module.layer_norm_

    def run(
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        /,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        x = x.contiguous()
        out = torch.empty_like(x)
        total = None if residual is None else torch.empty_like(x)
        rows = x.shape[:-1].numel()
        statistics = torch.empty(2, rows, dtype=torch.float32, device=x.device)
        kernel(
            out, total, statistics, x, contiguous(residual), contiguous(weight), contiguous(bias),
            eps,
        )  # fmt: skip
        return out, total, statistics

    return run


def _native_backward(module: Native) -> _Backward:
    kernel = module.layer_norm_backward_

    def run(
        grad: Tensor,
        grad_sum: Tensor | None,
        s: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        statistics: Tensor,
        with_weight: bool,
        with_bias: bool,
        /,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        s, weight = s.contiguous(), contiguous(weight)
        grad_s = torch.empty_like(s)
        grad_weight = torch.empty_like(weight) if with_weight and weight is not None else None
        grad_bias = bias.new_empty(bias.shape) if with_bias and bias is not None else None
        partials = None
        if grad_weight is not None or grad_bias is not None:
            partials = column_partials(s, statistics.shape[1], 2 * s.shape[-1])
        kernel(
            grad_s, grad_weight, grad_bias, partials, grad.contiguous(), contiguous(grad_sum), s,
            weight, statistics,
        )  # fmt: skip
        return grad_s, grad_weight, grad_bias

    return run


def _fake_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    total = x.new_empty(0) if residual is None else x.new_empty(x.shape)
    statistics = x.new_empty((2, x.shape[:-1].numel()), dtype=working(x.dtype))
    return x.new_empty(x.shape), total, statistics


def _fake_backward(
    grad: Tensor,
    grad_sum: Tensor | None,
    s: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    statistics: Tensor,
    with_weight: bool,
    with_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_weight, grad_bias = (
        s.new_empty(0) if vector is None or not wanted else vector.new_empty(vector.shape)
        for vector, wanted in ((weight, with_weight), (bias, with_bias))
    )
    return s.new_empty(s.shape), grad_weight, grad_bias


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:  # noqa: ANN401
    x, residual, weight, bias, _ = inputs
    out, total, statistics = output
    ctx.save_for_backward(x if residual is None else total, weight, bias, statistics)
    ctx.has_residual = residual is not None
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any,  # noqa: ANN401
    grad: Tensor | None,
    grad_sum: Tensor | None,
    grad_statistics: Tensor | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, None]:
    s, weight, bias, statistics = ctx.saved_tensors
    wants_x, wants_residual, wants_weight, wants_bias, _ = ctx.needs_input_grad
    if grad is None:  # only the sum was used
        return grad_sum, grad_sum, None, None, None
    grad_s, grad_weight, grad_bias = _BACKWARD(
        grad, grad_sum if ctx.has_residual else None, s, weight, bias, statistics, wants_weight,
        wants_bias,
    )  # fmt: skip
    return (
        grad_s if wants_x else None,
        grad_s if wants_residual else None,
        grad_weight if wants_weight else None,
        grad_bias if wants_bias else None,
        None,
    )


_BACKWARD_OP = Op(
    "layer_norm_backward",
    reference.layer_norm_backward,
    native=_native_backward,
    source="layer_norm",
    cuda=True,
)
_BACKWARD = Functional(
    _BACKWARD_OP,
    "(Tensor grad, Tensor? grad_sum, Tensor s, Tensor? weight, Tensor? bias, "
    "Tensor statistics, bool with_weight, bool with_bias) -> (Tensor, Tensor, Tensor)",
    _fake_backward,
)
_FORWARD_OP = Op("layer_norm", reference.layer_norm, native=_native_forward, cuda=True)
_FORWARD = Functional(
    _FORWARD_OP,
    "(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps) "
    "-> (Tensor, Tensor, Tensor)",
    _fake_forward,
    save=_save,
    backward=_backward,
)
