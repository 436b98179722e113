"""RMS norm in plain torch."""

from __future__ import annotations

from torch import Tensor

from ds_kernels.reference.bias_activation import working

__all__ = ["column_sum", "rms_norm", "rms_norm_backward"]


def column_sum(rows: Tensor, like: Tensor | None) -> Tensor | None:
    """The sum over all but the last dimension in the dtype of ``like``; None without it."""
    if like is None:
        return None
    leading = tuple(range(rows.dim() - 1))
    return (rows.sum(leading) if leading else rows).to(like.dtype)


def rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, /
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The result, x + residual (None without one) and 1 / root mean square of each row."""
    work = working(x.dtype)
    total = x if residual is None else (x.to(work) + residual.to(work)).to(x.dtype)
    wide = total.to(work)
    rstd = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    out = wide * rstd
    if weight is not None:
        out = out * weight.to(work)
    return out.to(x.dtype), None if residual is None else total, rstd.detach().flatten()


def rms_norm_backward(
    grad: Tensor,
    grad_sum: Tensor | None,
    s: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    with_weight: bool,
    /,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of ``s`` = x + residual and of ``weight``; the second is None if not wanted."""
    work = working(s.dtype)
    rstd = rstd.to(work).view(*s.shape[:-1], 1)
    normed, wide = s.to(work) * rstd, grad.to(work)
    g = wide if weight is None else wide * weight.to(work)
    grad_s = (g - normed * (g * normed).mean(-1, keepdim=True)) * rstd
    if grad_sum is not None:
        grad_s = grad_s + grad_sum.to(work)
    grad_weight = column_sum(wide * normed, weight if with_weight else None)
    return grad_s.to(s.dtype), grad_weight
