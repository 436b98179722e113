"""LAMB on flat segments (You et al. 2020, arXiv:1904.00962, algorithm 2).

The trust ratio of a parameter needs two norms of all of it.  Each rank sums the squares of its
shard, the sums are exchanged once for all parameters, and every rank adds them in rank order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ds_comm.errors import ConfigError
from ds_zero.agreement import squared_norm
from ds_zero.optim.base import StepGradients
from ds_zero.optim.checks import check_betas, check_not_negative
from ds_zero.optim.flat import FlatOptimizer
from ds_zero.optim.rooms import Room, Segment, Stretch, scaled, widened

__all__ = ["FlatLamb"]


class _Move(NamedTuple):
    """A stretch whose direction is known and whose trust ratios are not."""

    room: Room
    segment: Segment
    stretch: Stretch
    direction: Tensor


class FlatLamb(FlatOptimizer):
    """Adam's direction with decoupled decay, scaled per parameter by ``|param| / |direction|``."""

    family = "lamb"

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
    ) -> None:
        """Register the parameter groups.

        Args:
            params: Parameters or group dictionaries of the model.
            lr: Learning rate.
            bias_correction: Correct the moments for their zero start.
            betas: Decay rates of the two moments, each in [0, 1).
            eps: Added to the root of the second moment.
            weight_decay: Decay factor; the decay is part of the direction.
            max_coeff: Largest trust ratio.
            min_coeff: Smallest trust ratio.

        Raises:
            ConfigError: A value is out of its range.
        """
        check_not_negative("LAMB", lr=lr, eps=eps, weight_decay=weight_decay, min_coeff=min_coeff)
        if max_coeff < min_coeff:
            raise ConfigError(f"LAMB needs max_coeff >= min_coeff; got {max_coeff} and {min_coeff}")
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": check_betas("LAMB", betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
        }
        super().__init__(params, defaults)
        self._ratios: dict[str, float] = {}

    def state_kinds(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """See :meth:`FlatOptimizer.state_kinds`."""
        return ("exp_avg", "exp_avg_sq")

    def get_lamb_coeffs(self) -> list[float]:
        """Trust ratios of the last step, of the parameters that it updated."""
        return list(self._ratios.values())

    def apply(self, gradients: StepGradients) -> None:
        """Update all rooms; collective."""
        moves = [
            _Move(room, *pair, self._direct(self.param_groups[room.group], *pair, gradients.scale))
            for room in self._rooms
            for pair in self.stretches(room, gradients)
        ]
        sums = self._sums(moves)
        self._ratios = {}
        for move in moves:
            group = self.param_groups[move.room.group]
            for name, start, stop in _members(move):
                ratio = _trust_ratio(group, *sums[name])
                self._ratios[name] = ratio
                part = move.stretch.param[start:stop]
                part.add_(move.direction[start:stop], alpha=-float(group["lr"]) * ratio)
            if move.stretch.copy is not None:
                move.stretch.copy.copy_(move.stretch.param)

    @staticmethod
    def _direct(
        group: Mapping[str, Any], segment: Segment, stretch: Stretch, grad_scale: float
    ) -> Tensor:
        """Update the moments; return the direction, in the gradient's place where it fits."""
        beta1, beta2 = group["betas"]
        count = segment.step + 1
        correct1, correct2 = (
            (1 - beta1**count, 1 - beta2**count) if group["bias_correction"] else (1.0, 1.0)
        )
        with widened(stretch) as wide:
            mean, square = wide.states["exp_avg"], wide.states["exp_avg_sq"]
            grad = scaled(wide.grad, grad_scale, mean.dtype)
            mean.lerp_(grad, 1 - beta1)
            square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            root = torch.sqrt(square).div_(math.sqrt(correct2)).add_(group["eps"])
            direction = torch.div(mean, root, out=grad).div_(correct1)
            if group["weight_decay"]:
                direction.add_(wide.param, alpha=group["weight_decay"])
        return direction

    def _sums(self, moves: list[_Move]) -> dict[str, tuple[float, float]]:
        """Squared norms of every parameter and its direction, over all ranks."""
        assert self._runs is not None and self._collectives is not None
        names = [slot.spec.name for run in self._runs for slot in run.run.layout.slots]
        place = {name: index for index, name in enumerate(names)}
        # A shard only, also where the master is whole: the same sums at every stage.
        own = {
            piece.spec.name: (piece.shard_start, piece.shard_start + piece.numel)
            for run in self._runs
            for piece in run.stored_pieces()
        }
        row = torch.zeros(len(names), 2, dtype=torch.float64)
        for move in moves:
            for name, _, _ in _members(move):
                if name in own:
                    part = slice(*(edge - move.segment.start for edge in own[name]))
                    row[place[name], 0] = squared_norm(move.stretch.param[part])
                    row[place[name], 1] = squared_norm(move.direction[part])
        if not names:
            return {}
        device = self._runs[0].master.device
        rows = self._collectives.exchange(row.flatten().to(device)).cpu().view(-1, len(names), 2)
        total = torch.zeros(len(names), 2, dtype=torch.float64)
        for found in rows:
            total += found
        return dict(zip(names, map(tuple, total.tolist()), strict=True))

    def update_alone(self, group: Mapping[str, Any], param: nn.Parameter) -> None:
        """See :meth:`FlatOptimizer.update_alone`."""
        segment, stretch = self.stretch_alone(group, param)
        direction = self._direct(group, segment, stretch, 1.0)
        ratio = _trust_ratio(group, squared_norm(stretch.param), squared_norm(direction))
        self._ratios[str(id(param))] = ratio
        stretch.param.add_(direction, alpha=-float(group["lr"]) * ratio)
        self.finish_alone(param, stretch)


def _members(move: _Move) -> list[tuple[str, int, int]]:
    """Name and place in the stretch of each piece in it."""
    begin, end = move.segment.start, move.segment.stop
    return [
        (piece.spec.name, piece.shard_start - begin, piece.shard_start - begin + piece.numel)
        for piece in move.room.pieces
        if begin <= piece.shard_start < end
    ]


def _trust_ratio(group: Mapping[str, Any], param_square: float, direction_square: float) -> float:
    """``|param| / |direction|`` within its bounds; 1 where either is zero."""
    if param_square == 0 or direction_square == 0:
        return 1.0
    ratio = math.sqrt(param_square) / math.sqrt(direction_square)
    return float(min(max(ratio, group["min_coeff"]), group["max_coeff"]))
