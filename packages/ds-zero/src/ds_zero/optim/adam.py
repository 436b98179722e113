"""Adam and AdamW on flat segments (Kingma & Ba 2015; Loshchilov & Hutter 2019)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.adam import adam
from torch.optim.adamw import adamw

from ds_kernels.ops.adam import adam_
from ds_zero.optim.checks import check_betas, check_not_negative
from ds_zero.optim.flat import FlatOptimizer
from ds_zero.optim.kernels import kernel_serves
from ds_zero.optim.rooms import Segment, Stretch, scaled, widened

__all__ = ["FlatAdam", "adam_stretch"]

_LATE = 1e30
"""A step count whose bias corrections are exactly 1."""


class FlatAdam(FlatOptimizer):
    """Adam with decoupled (AdamW) or L2 weight decay."""

    family = "adam"

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
    ) -> None:
        """Register the parameter groups.

        Args:
            params: Parameters or group dictionaries of the model.
            lr: Learning rate.
            betas: Decay rates of the two moments, each in [0, 1).
            eps: Added to the root of the second moment.
            weight_decay: Decay factor.
            bias_correction: Correct the moments for their zero start.
            adam_w_mode: Decouple the decay from the gradient (AdamW).

        Raises:
            ConfigError: A value is out of its range.
        """
        check_not_negative("Adam", lr=lr, eps=eps, weight_decay=weight_decay)
        defaults = {
            "lr": lr,
            "betas": check_betas("Adam", betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "adam_w_mode": adam_w_mode,
        }
        super().__init__(params, defaults)

    def state_kinds(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """See :meth:`FlatOptimizer.state_kinds`."""
        return ("exp_avg", "exp_avg_sq")

    def update_stretch(
        self, group: Mapping[str, Any], segment: Segment, stretch: Stretch, grad_scale: float
    ) -> None:
        """See :meth:`FlatOptimizer.update_stretch`."""
        adam_stretch(group, segment, stretch, grad_scale)


def adam_stretch(
    group: Mapping[str, Any], segment: Segment, stretch: Stretch, grad_scale: float
) -> None:
    """Adam on one stretch with states ``exp_avg`` and ``exp_avg_sq``."""
    if not kernel_serves("adam", "adam_", stretch.param):
        _by_torch(group, segment, stretch, grad_scale)
        return
    adam_(
        stretch.param,
        stretch.grad,
        stretch.states["exp_avg"],
        stretch.states["exp_avg_sq"],
        step=segment.step + 1,
        lr=float(group["lr"]),
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        adamw=group["adam_w_mode"],
        bias_correction=group["bias_correction"],
        grad_scale=grad_scale,
        out=stretch.copy,
    )


def _by_torch(
    group: Mapping[str, Any], segment: Segment, stretch: Stretch, grad_scale: float
) -> None:
    """The same by torch's fused kernel, which is faster than the reference of ds-kernels."""
    count = float(segment.step) if group["bias_correction"] else _LATE
    update = adamw if group["adam_w_mode"] else adam
    # torch's fused kernel wants one dtype.
    with widened(stretch) as wide:
        update(
            [wide.param],
            [scaled(wide.grad, grad_scale, wide.param.dtype)],
            [wide.states["exp_avg"]],
            [wide.states["exp_avg_sq"]],
            [],
            [torch.full((), count, dtype=torch.float32, device=wide.param.device)],
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=float(group["lr"]),
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        if wide.copy is not None:
            wide.copy.copy_(wide.param)
