"""Lion on flat segments (Chen et al. 2023, arXiv:2302.06675, algorithm 2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ds_zero.optim.checks import check_betas, check_not_negative
from ds_zero.optim.flat import FlatOptimizer
from ds_zero.optim.rooms import Segment, Stretch, scaled, widened

__all__ = ["FlatLion"]


class FlatLion(FlatOptimizer):
    """Sign of an interpolated momentum, with decoupled decay; where that is 0 nothing moves."""

    family = "lion"

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
    ) -> None:
        """Register the parameter groups.

        Args:
            params: Parameters or group dictionaries of the model.
            lr: Length of every element's step.
            betas: Weight of the momentum in the direction, and its own decay rate.
            weight_decay: Decoupled decay factor.

        Raises:
            ConfigError: A value is out of its range.
        """
        check_not_negative("Lion", lr=lr, weight_decay=weight_decay)
        defaults = {
            "lr": lr,
            "betas": check_betas("Lion", betas),
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)

    def state_kinds(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """See :meth:`FlatOptimizer.state_kinds`."""
        return ("exp_avg",)

    def update_stretch(
        self, group: Mapping[str, Any], segment: Segment, stretch: Stretch, grad_scale: float
    ) -> None:
        """See :meth:`FlatOptimizer.update_stretch`."""
        lr, (beta1, beta2) = float(group["lr"]), group["betas"]
        with widened(stretch) as wide:
            param, momentum = wide.param, wide.states["exp_avg"]
            grad = scaled(wide.grad, grad_scale, param.dtype)
            direction = torch.lerp(momentum, grad, 1 - beta1).sign_()
            momentum.lerp_(grad, 1 - beta2)
            param.mul_(1 - lr * group["weight_decay"]).add_(direction, alpha=-lr)
            if wide.copy is not None:
                wide.copy.copy_(param)
