"""What the five schedules share: a step counter and writing rates into parameter groups."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from ds_comm.errors import CheckpointError, ConfigError

__all__ = ["HasParamGroups", "LRSchedule", "ScheduleState"]

STATE_VERSION = 1

ScheduleState = dict[str, Any]


class HasParamGroups(Protocol):
    """Anything with torch-style parameter groups, e.g. a ``torch.optim.Optimizer``."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Dictionaries with at least the key ``lr``; they are written in place."""
        ...


class LRSchedule(ABC):
    """A learning-rate schedule over the parameter groups of one optimizer.

    The rate of each group is written at construction and at every ``step()``.  A rate that is a
    tensor is updated in place, so compiled and captured optimizers see it.  Nothing is attached
    to the optimizer; like torch, each group remembers the rate it started from under
    ``initial_lr``.

    Subclasses call ``_write`` at the end of their constructor.

    Args:
        optimizer: owner of the parameter groups.
        last_batch_iteration: number of the last iteration done; -1 means none.
    """

    def __init__(self, optimizer: HasParamGroups, last_batch_iteration: int) -> None:
        self.optimizer = optimizer
        self.last_batch_iteration = last_batch_iteration
        self.base_lrs = [_remember_base(group) for group in optimizer.param_groups]
        self._last_lr: list[float] = []

    @abstractmethod
    def lr_at(self, iteration: int) -> list[float]:
        """Return the rate of each group at ``iteration`` (-1: before the first step)."""

    def get_lr(self) -> list[float]:
        """Return the rate that the schedule gives each group now."""
        return self.lr_at(self.last_batch_iteration)

    def get_last_lr(self) -> list[float]:
        """Return the rates that were last written into the groups."""
        return list(self._last_lr)

    def step(self, last_step: int | None = None) -> None:
        """Move on by one iteration, or to a given one, and write the rates.

        To be called once per applied optimizer step.

        Args:
            last_step: the iteration to move to; default is the next one.

        Raises:
            ConfigError: the optimizer has another number of groups than at construction.
        """
        self.last_batch_iteration = (
            self.last_batch_iteration + 1 if last_step is None else last_step
        )
        self._write()

    def state_dict(self) -> ScheduleState:
        """Return the position as plain numbers that JSON can hold."""
        return {
            "version": STATE_VERSION,
            "last_batch_iteration": self.last_batch_iteration,
            "base_lrs": list(self.base_lrs),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state`` was taken and write the rates of that point.

        A state of DeepSpeed, which holds ``last_batch_iteration`` alone, is accepted.

        Args:
            state: what ``state_dict`` returned.

        Raises:
            CheckpointError: the state is of a newer version, malformed, or of another number of
                parameter groups.
        """
        version = state.get("version", STATE_VERSION)
        if version != STATE_VERSION:
            raise CheckpointError(
                f"LR schedule state has version {version!r}; this release reads {STATE_VERSION}"
            )
        iteration = state.get("last_batch_iteration")
        if not isinstance(iteration, int):
            raise CheckpointError(
                f"LR schedule state needs a whole number 'last_batch_iteration', got {iteration!r}"
            )
        base_lrs = state.get("base_lrs")
        if base_lrs is not None:
            if len(base_lrs) != len(self.base_lrs):
                raise CheckpointError(
                    f"LR schedule state is of {len(base_lrs)} parameter groups, "
                    f"the optimizer has {len(self.base_lrs)}"
                )
            self.base_lrs = [float(lr) for lr in base_lrs]
        self.last_batch_iteration = iteration
        self._write()

    def _write(self) -> None:
        """Write the current rates into the groups."""
        groups = self.optimizer.param_groups
        lrs = self.get_lr()
        if len(groups) != len(lrs):
            raise ConfigError(
                f"{type(self).__name__} was built for {len(lrs)} parameter groups, the optimizer "
                f"now has {len(groups)}; add groups before building the schedule"
            )
        write_lrs(groups, lrs)
        self._last_lr = lrs


def write_lrs(groups: Sequence[dict[str, Any]], lrs: Sequence[float]) -> None:
    """Write one rate per group; a tensor-valued rate keeps its identity.

    Args:
        groups: parameter groups.
        lrs: as many rates.
    """
    for group, lr in zip(groups, lrs, strict=True):
        current = group["lr"]
        if isinstance(current, torch.Tensor):
            current.fill_(lr)
        else:
            group["lr"] = lr


def _remember_base(group: dict[str, Any]) -> float:
    """Return the rate that the group started from, noting it on first sight."""
    if "initial_lr" not in group:
        # A float, since a tensor would change under us at the first write.
        group["initial_lr"] = float(group["lr"])
    return float(group["initial_lr"])
