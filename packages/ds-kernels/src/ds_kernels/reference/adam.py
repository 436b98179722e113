"""Adam and AdamW in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["adam_", "adam_list_", "adam_rollback_"]


@torch.no_grad()
def adam_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    adamw: bool,
    bias_correction: bool,
    grad_scale: float,
    out: Tensor | None,
    undo: Tensor | None,
    /,
) -> None:
    """See :func:`ds_kernels.ops.adam.adam_`. float64 tensors are computed in float64."""
    work = torch.float64 if param.dtype == torch.float64 else torch.float32
    p, m, v = param.to(work), exp_avg.to(work), exp_avg_sq.to(work)
    if undo is not None:
        undo.view(3, -1).copy_(torch.stack([p.reshape(-1), m.reshape(-1), v.reshape(-1)]))
    g = grad.to(work).view_as(p) * grad_scale
    if adamw:
        decay = 1 - lr * weight_decay
    else:
        decay = 1.0
        if weight_decay != 0:
            g = g + weight_decay * p
    m = m.view_as(p)
    v = v.view_as(p)
    m = m + (1 - beta1) * (g - m)
    v = beta2 * v + (1 - beta2) * g * g
    correction1 = 1 - beta1**step if bias_correction else 1.0
    correction2 = 1 - beta2**step if bias_correction else 1.0
    denominator = v.sqrt() / correction2**0.5 + eps
    p = p * decay - (lr / correction1) * m / denominator
    param.copy_(p)
    exp_avg.copy_(m.view_as(exp_avg))
    exp_avg_sq.copy_(v.view_as(exp_avg_sq))
    if out is not None:
        out.copy_(p.view_as(out))


def adam_list_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    adamw: bool,
    bias_correction: bool,
    grad_scale: float,
    outs: Sequence[Tensor] | None,
    undos: Sequence[Tensor] | None,
    /,
) -> None:
    """See :func:`ds_kernels.ops.adam.adam_list_`."""
    none: list[Tensor | None] = [None] * len(params)
    for param, grad, exp_avg, exp_avg_sq, out, undo in zip(
        params, grads, exp_avgs, exp_avg_sqs, outs or none, undos or none, strict=True
    ):
        adam_(
            param, grad, exp_avg, exp_avg_sq, step, lr, beta1, beta2, eps, weight_decay, adamw,
            bias_correction, grad_scale, out, undo,
        )  # fmt: skip


@torch.no_grad()
def adam_rollback_(
    param: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, undo: Tensor, out: Tensor | None, /
) -> None:
    """See :func:`ds_kernels.ops.adam.adam_rollback_`."""
    for target, saved in zip((param, exp_avg, exp_avg_sq), undo.view(3, -1), strict=True):
        target.view(-1).copy_(saved)
    if out is not None:
        out.view(-1).copy_(undo.view(3, -1)[0])
