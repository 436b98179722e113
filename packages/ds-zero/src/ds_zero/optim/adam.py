"""Adam and AdamW on flat segments (Kingma & Ba 2015; Loshchilov & Hutter 2019)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw

from ds_comm.errors import ConfigError
from ds_zero.optim.flat import FlatOptimizer, Segment

__all__ = ["FlatAdam"]

_LATE = 1e30
"""A step count whose bias corrections are exactly 1."""


class FlatAdam(FlatOptimizer):
    """Adam with decoupled (AdamW) or L2 weight decay."""

    state_kinds = ("exp_avg", "exp_avg_sq")

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
        if not isinstance(betas, tuple | list) or len(betas) != 2:
            raise ConfigError(f"Adam needs betas of two numbers, got {betas!r}")
        if lr < 0 or eps < 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
            raise ConfigError(
                f"Adam needs lr >= 0, eps >= 0, weight_decay >= 0 and betas in [0, 1); got "
                f"lr={lr}, eps={eps}, weight_decay={weight_decay}, betas={betas}"
            )
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "adam_w_mode": adam_w_mode,
        }
        super().__init__(params, defaults)

    def _update_segments(
        self,
        group: dict[str, Any],
        step: int,
        segments: Sequence[Segment],
        grads: Sequence[Tensor | None],
    ) -> None:
        if not segments:
            return
        count = float(step) if group["bias_correction"] else _LATE
        update = adamw if group["adam_w_mode"] else adam
        update(
            self._masters(segments),
            self._gradients(segments, grads),
            self._tensors(segments, "exp_avg"),
            self._tensors(segments, "exp_avg_sq"),
            [],
            [torch.tensor(count) for _ in segments],
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=float(group["lr"]),
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
