"""Stochastic gradient descent with momentum on flat segments, as ``torch.optim.SGD`` defines it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ds_comm.errors import ConfigError
from ds_zero.optim.flat import FlatOptimizer
from ds_zero.optim.rooms import Segment, Stretch, scaled, widened

__all__ = ["FlatSGD"]


class FlatSGD(FlatOptimizer):
    """SGD with optional momentum, dampening, Nesterov momentum and L2 decay."""

    family = "sgd"

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        """Register the parameter groups.

        Args:
            params: Parameters or group dictionaries of the model.
            lr: Learning rate.
            momentum: Decay rate of the velocity; 0 keeps none.
            dampening: Part of the gradient that does not enter the velocity.
            weight_decay: L2 factor.
            nesterov: Look ahead along the velocity.

        Raises:
            ConfigError: A value is out of its range.
        """
        if lr < 0 or momentum < 0 or weight_decay < 0 or (nesterov and (not momentum or dampening)):
            raise ConfigError(
                "SGD needs lr, momentum and weight_decay >= 0, and for nesterov a momentum without "
                f"dampening; got lr={lr}, momentum={momentum}, dampening={dampening}, "
                f"weight_decay={weight_decay}, nesterov={nesterov}"
            )
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
        }
        super().__init__(params, defaults)

    def state_kinds(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """See :meth:`FlatOptimizer.state_kinds`; a schedule may switch momentum on later."""
        return ("momentum_buffer",) if group["momentum"] else ()

    def update_stretch(
        self, group: Mapping[str, Any], segment: Segment, stretch: Stretch, grad_scale: float
    ) -> None:
        """See :meth:`FlatOptimizer.update_stretch`."""
        with widened(stretch) as wide:
            param = wide.param
            grad = scaled(wide.grad, grad_scale, param.dtype)
            if group["weight_decay"]:
                grad.add_(param, alpha=group["weight_decay"])
            if group["momentum"]:
                velocity = wide.states["momentum_buffer"]
                if segment.fresh:
                    velocity.copy_(grad)
                else:
                    velocity.mul_(group["momentum"]).add_(grad, alpha=1 - group["dampening"])
                nesterov = group["nesterov"]
                grad = grad.add_(velocity, alpha=group["momentum"]) if nesterov else velocity
            param.add_(grad, alpha=-float(group["lr"]))
            if wide.copy is not None:
                wide.copy.copy_(param)
