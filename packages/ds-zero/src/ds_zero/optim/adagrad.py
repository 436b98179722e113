"""Adagrad on flat segments (Duchi et al. 2011), as ``torch.optim.Adagrad`` defines it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ds_zero.optim.checks import check_not_negative
from ds_zero.optim.flat import FlatOptimizer
from ds_zero.optim.rooms import Segment, Stretch, scaled, widened

__all__ = ["FlatAdagrad"]


class FlatAdagrad(FlatOptimizer):
    """Steps divided by the root of the sum of squared gradients, with L2 decay."""

    family = "adagrad"

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
    ) -> None:
        """Register the parameter groups.

        Args:
            params: Parameters or group dictionaries of the model.
            lr: Learning rate.
            lr_decay: The rate is divided by ``1 + (step - 1) * lr_decay``.
            weight_decay: L2 factor.
            initial_accumulator_value: What the sums begin with.
            eps: Added to the root.

        Raises:
            ConfigError: A value is out of its range.
        """
        defaults = {
            "lr": lr,
            "lr_decay": lr_decay,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "eps": eps,
        }
        check_not_negative("Adagrad", **defaults)
        super().__init__(params, defaults)

    def state_kinds(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """See :meth:`FlatOptimizer.state_kinds`."""
        return ("sum",)

    def update_stretch(
        self, group: Mapping[str, Any], segment: Segment, stretch: Stretch, grad_scale: float
    ) -> None:
        """See :meth:`FlatOptimizer.update_stretch`."""
        lr = float(group["lr"]) / (1 + segment.step * group["lr_decay"])
        with widened(stretch) as wide:
            param, total = wide.param, wide.states["sum"]
            grad = scaled(wide.grad, grad_scale, param.dtype)
            if group["weight_decay"]:
                grad.add_(param, alpha=group["weight_decay"])
            if segment.fresh:
                total.fill_(group["initial_accumulator_value"])
            total.addcmul_(grad, grad)
            param.addcdiv_(grad, total.sqrt().add_(group["eps"]), value=-lr)
            if wide.copy is not None:
                wide.copy.copy_(param)
