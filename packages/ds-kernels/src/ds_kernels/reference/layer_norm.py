"""Layer norm in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_kernels.reference.bias_activation import working
from ds_kernels.reference.rms_norm import column_sum

__all__ = ["layer_norm", "layer_norm_backward"]


def layer_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    /,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The result, x + residual (None without one), [2, rows] means and 1 / deviations."""
    work = working(x.dtype)
    total = x if residual is None else (x.to(work) + residual.to(work)).to(x.dtype)
    wide = total.to(work)
    mean = wide.mean(-1, keepdim=True)
    centred = wide - mean
    rstd = (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
    out = centred * rstd
    if weight is not None:
        out = out * weight.to(work)
    if bias is not None:
        out = out + bias.to(work)
    statistics = torch.stack([mean.detach().flatten(), rstd.detach().flatten()])
    return out.to(x.dtype), None if residual is None else total, statistics


def layer_norm_backward(
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
    """Gradients of ``s`` = x + residual, ``weight`` and ``bias``; None where not wanted."""
    work = working(s.dtype)
    mean, rstd = statistics.to(work).view(2, *s.shape[:-1], 1)
    normed, wide = (s.to(work) - mean) * rstd, grad.to(work)
    g = wide if weight is None else wide * weight.to(work)
    g_mean, product_mean = g.mean(-1, keepdim=True), (g * normed).mean(-1, keepdim=True)
    grad_s = (g - g_mean - normed * product_mean) * rstd
    if grad_sum is not None:
        grad_s = grad_s + grad_sum.to(work)
    grad_weight = column_sum(wide * normed, weight if with_weight else None)
    grad_bias = column_sum(wide, bias if with_bias else None)
    return grad_s.to(s.dtype), grad_weight, grad_bias
