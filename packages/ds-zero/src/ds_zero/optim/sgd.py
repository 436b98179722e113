"""Stochastic gradient descent with momentum on flat segments, as ``torch.optim.SGD`` defines it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ds_comm.errors import ConfigError
from ds_zero.optim.flat import FlatOptimizer, Segment

__all__ = ["FlatSGD"]


class FlatSGD(FlatOptimizer):
    """SGD with optional momentum, dampening, Nesterov momentum and L2 decay."""

    state_kinds: tuple[str, ...] = ("momentum_buffer",)

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
        # Without momentum no velocity is kept; a schedule may switch it on later.
        if not any(group["momentum"] for group in self.param_groups):
            self.state_kinds = ()

    def _update_segments(
        self,
        group: dict[str, Any],
        step: int,
        segments: Sequence[Segment],
        grads: Sequence[Tensor | None],
    ) -> None:
        momentum, lr = group["momentum"], float(group["lr"])
        masters = self._masters(segments)
        for index, (master, grad) in enumerate(
            zip(masters, self._gradients(segments, grads), strict=True)
        ):
            if group["weight_decay"]:
                grad = grad.add(master, alpha=group["weight_decay"])
            if momentum:
                new = self.add_state("momentum_buffer", segments[index].run)
                velocity = self._tensors(segments, "momentum_buffer")[index]
                if step == 0 or new:
                    velocity.copy_(grad)
                else:
                    velocity.mul_(momentum).add_(grad, alpha=1 - group["dampening"])
                grad = grad.add(velocity, alpha=momentum) if group["nesterov"] else velocity
            master.add_(grad, alpha=-lr)
