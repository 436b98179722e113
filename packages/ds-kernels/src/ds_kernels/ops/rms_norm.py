"""RMS norm (Zhang & Sennrich 2019), alone or on a sum with the residual stream.

out = s / sqrt(mean(s^2) + eps) * weight over the last dimension, s = x or x + residual.  Computed
in float32 and rounded once; the sum is rounded to its dtype first, as the residual stream that goes
on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ds_kernels.functional import Functional, column_partials, contiguous
from ds_kernels.reference import rms_norm as reference
from ds_kernels.reference.bias_activation import working
from ds_kernels.registry import Op

if TYPE_CHECKING:
    from ds_kernels._native import Native

__all__ = ["add_rms_norm", "rms_norm"]


def rms_norm(x: Tensor, weight: Tensor | None = None, *, eps: float = 1e-6) -> Tensor:
    """Divide each row by its root mean square.

    Args:
        x: float32, bfloat16 or float16, at least one dimension; copied first if not contiguous.
        weight: Shape [x.shape[-1]], the dtype of ``x`` or float32; None for ones.
        eps: Added to the mean square, at least 0.

    Returns:
        Shape and dtype of ``x``, contiguous. Differentiable once in ``x`` and ``weight``.

    Raises:
        KernelArgumentError: Wrong dtype, shape or device, or a negative ``eps``.
    """
    out: Tensor = _FORWARD(x, None, weight, eps)[0]
    return out


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, *, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """Add a layer's output to the residual stream and normalise the sum, in one pass.

    Args:
        x: See :func:`rms_norm`.
        residual: Shape, dtype and device of ``x``.
        weight: See :func:`rms_norm`.
        eps: See :func:`rms_norm`.

    Returns:
        The normalised sum and the sum itself, both of shape and dtype of ``x``. Differentiable once
        in all tensors, through both results.

    Raises:
        KernelArgumentError: As :func:`rms_norm`.
    """
    out, total, _ = _FORWARD(x, residual, weight, eps)
    return out, total


_Forward = Callable[
    [Tensor, Tensor | None, Tensor | None, float], tuple[Tensor, Tensor | None, Tensor]
]
_Backward = Callable[
    [Tensor, Tensor | None, Tensor, Tensor | None, Tensor, bool], tuple[Tensor, Tensor | None]
]


def _native_forward(module: Native) -> _Forward:
    kernel = module.rms_norm_

    def run(
        x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, /
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        x = x.contiguous()
        out = torch.empty_like(x)
        total = None if residual is None else torch.empty_like(x)
        rstd = torch.empty(x.shape[:-1].numel(), dtype=torch.float32, device=x.device)
        kernel(out, total, rstd, x, contiguous(residual), contiguous(weight), eps)
        return out, total, rstd

    return run


def _native_backward(module: Native) -> _Backward:
    kernel = module.rms_norm_backward_

    def run(
        grad: Tensor,
        grad_sum: Tensor | None,
        s: Tensor,
        weight: Tensor | None,
        rstd: Tensor,
        with_weight: bool,
        /,
    ) -> tuple[Tensor, Tensor | None]:
        s, weight = s.contiguous(), contiguous(weight)
        grad_s = torch.empty_like(s)
        grad_weight = torch.empty_like(weight) if with_weight and weight is not None else None
        partials = None
        if grad_weight is not None:
            partials = column_partials(s, rstd.numel(), 2 * grad_weight.numel())
        kernel(
            grad_s, grad_weight, partials, grad.contiguous(), contiguous(grad_sum), s, weight, rstd
        )
        return grad_s, grad_weight

    return run


def _fake_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    total = x.new_empty(0) if residual is None else x.new_empty(x.shape)
    rstd = x.new_empty(x.shape[:-1].numel(), dtype=working(x.dtype))
    return x.new_empty(x.shape), total, rstd


def _fake_backward(
    grad: Tensor,
    grad_sum: Tensor | None,
    s: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    with_weight: bool,
) -> tuple[Tensor, Tensor]:
    grad_weight = (
        s.new_empty(0) if weight is None or not with_weight else weight.new_empty(weight.shape)
    )
    return s.new_empty(s.shape), grad_weight


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:  # noqa: ANN401
    x, residual, weight, _ = inputs
    out, total, rstd = output
    ctx.save_for_backward(x if residual is None else total, weight, rstd)
    ctx.has_residual = residual is not None
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any,  # noqa: ANN401
    grad: Tensor | None,
    grad_sum: Tensor | None,
    grad_rstd: Tensor | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
    s, weight, rstd = ctx.saved_tensors
    wants_x, wants_residual, wants_weight, _ = ctx.needs_input_grad
    if grad is None:  # only the sum was used
        return grad_sum, grad_sum, None, None
    grad_s, grad_weight = _BACKWARD(
        grad, grad_sum if ctx.has_residual else None, s, weight, rstd, wants_weight
    )
    return (
        grad_s if wants_x else None,
        grad_s if wants_residual else None,
        grad_weight if wants_weight else None,
        None,
    )


_BACKWARD_OP = Op(
    "rms_norm_backward",
    reference.rms_norm_backward,
    native=_native_backward,
    source="rms_norm",
    cuda=True,
)
_BACKWARD = Functional(
    _BACKWARD_OP,
    "(Tensor grad, Tensor? grad_sum, Tensor s, Tensor? weight, Tensor rstd, bool with_weight) "
    "-> (Tensor, Tensor)",
    _fake_backward,
)
_FORWARD_OP = Op("rms_norm", reference.rms_norm, native=_native_forward, cuda=True)
_FORWARD = Functional(
    _FORWARD_OP,
    "(Tensor x, Tensor? residual, Tensor? weight, float eps) -> (Tensor, Tensor, Tensor)",
    _fake_forward,
    save=_save,
    backward=_backward,
)
