"""Adam (Kingma & Ba 2015, algorithm 1) and AdamW (Loshchilov & Hutter 2019, algorithm 2).

With g the scaled gradient and t the step: m += (1-b1)(g-m), v = b2 v + (1-b2) g^2,
p = p (1 - lr wd) - lr/(1-b1^t) m / (sqrt(v)/sqrt(1-b2^t) + eps); without ``adamw`` the decay is
added to g instead.  Computed in float32; every CPU gives the same bits, however a segment is cut.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ds_kernels import library
from ds_kernels.reference import adam as reference
from ds_kernels.registry import Op

__all__ = ["adam_", "adam_list_", "adam_rollback_"]

_ADAM = Op("adam_", reference.adam_, native=lambda m: m.adam_, source="adam", cuda=True)
_LIST = Op(
    "adam_list_", reference.adam_list_, native=lambda m: m.adam_list_, source="adam", cuda=True
)
_ROLLBACK = Op("adam_rollback_", reference.adam_rollback_)


def adam_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    adamw: bool = True,
    bias_correction: bool = True,
    grad_scale: float = 1.0,
    out: Tensor | None = None,
    undo: Tensor | None = None,
) -> None:
    """Update one segment in place, without autograd.

    Args:
        param: float32, bfloat16 or float16, contiguous, any shape.
        grad: The gradient, float32, bfloat16 or float16, as many elements.
        exp_avg: First moment, float32 or bfloat16, as many elements.
        exp_avg_sq: Second moment, the dtype of ``exp_avg``.
        step: The number of steps including this one, at least 1.
        lr: Learning rate, at least 0.
        beta1: Decay of the first moment, in [0, 1).
        beta2: Decay of the second moment, in [0, 1).
        eps: Added to the root, at least 0.
        weight_decay: At least 0.
        adamw: Decouple the decay from the gradient.
        bias_correction: Correct the moments for their zero start.
        grad_scale: The gradient is multiplied by it first: unscale times clip factor.
        out: The new parameter is also written here, in this tensor's dtype, in the same pass.
        undo: float32 of shape [3, numel]; receives what :func:`adam_rollback_` needs.

    Raises:
        KernelArgumentError: Wrong dtype, device, size or layout, overlap, or a value out of range.
    """
    if library.is_plain(param, grad):
        run = _ADAM.for_device(param.device.type)
    else:
        run = torch.ops.ds_kernels.adam_
    run(
        param, grad, exp_avg, exp_avg_sq, step, lr, beta1, beta2, eps, weight_decay, adamw,
        bias_correction, grad_scale, out, undo,
    )  # fmt: skip


def adam_list_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    *,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    adamw: bool = True,
    bias_correction: bool = True,
    grad_scale: float = 1.0,
    outs: Sequence[Tensor] | None = None,
    undos: Sequence[Tensor] | None = None,
) -> None:
    """Update many tensors in place in one call; see :func:`adam_`.

    Args:
        params: All of one dtype and on one device.
        grads: As many as ``params``, all of one dtype.
        exp_avgs: The same.
        exp_avg_sqs: The same.
        step: See :func:`adam_`.
        lr: See :func:`adam_`.
        beta1: See :func:`adam_`.
        beta2: See :func:`adam_`.
        eps: See :func:`adam_`.
        weight_decay: See :func:`adam_`.
        adamw: See :func:`adam_`.
        bias_correction: See :func:`adam_`.
        grad_scale: See :func:`adam_`.
        outs: As many as ``params``, all of one dtype, or None.
        undos: As many as ``params``, or None.

    Raises:
        KernelArgumentError: As :func:`adam_`, or lists of different lengths.
    """
    if not params:
        return
    if library.is_plain(*params):
        run = _LIST.for_device(params[0].device.type)
    else:
        run = torch.ops.ds_kernels.adam_list_
    run(
        params, grads, exp_avgs, exp_avg_sqs, step, lr, beta1, beta2, eps, weight_decay, adamw,
        bias_correction, grad_scale, outs, undos,
    )  # fmt: skip


def adam_rollback_(
    param: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, *, undo: Tensor, out: Tensor | None = None
) -> None:
    """Restore the bits from before the step that filled ``undo``.

    Args:
        param: The tensors given to :func:`adam_`.
        exp_avg: See ``param``.
        exp_avg_sq: See ``param``.
        undo: The record of the step.
        out: The old parameter is also written here.
    """
    _ROLLBACK.for_device(param.device.type)(param, exp_avg, exp_avg_sq, undo, out)


_SCALARS = (
    "int step, float lr, float beta1, float beta2, float eps, float weight_decay, bool adamw, "
    "bool bias_correction, float grad_scale"
)


def _adam_registered(param: Tensor, *rest: object) -> None:
    _ADAM.for_device(param.device.type)(param, *rest)  # type: ignore[arg-type]


def _list_registered(params: list[Tensor], *rest: object) -> None:
    if params:
        _LIST.for_device(params[0].device.type)(params, *rest)  # type: ignore[arg-type]


def _fake(*_: object) -> None:
    return None


library.define(
    "adam_(Tensor(a!) param, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, "
    f"{_SCALARS}, Tensor(d!)? out, Tensor(e!)? undo) -> ()",
    _adam_registered,
    _fake,
)
library.define(
    "adam_list_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, "
    f"Tensor(c!)[] exp_avg_sqs, {_SCALARS}, Tensor(d!)[]? outs, Tensor(e!)[]? undos) -> ()",
    _list_registered,
    _fake,
)
