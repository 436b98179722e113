"""Which gradient was the first that is not finite, and on which ranks it came up.

[Note: first non-finite gradient]
Only a step whose norm is not finite looks.  The parameter is found in the reduced shards: of all
with a NaN or an infinity the one that stands last in the model, since a backward pass spreads them
from there towards the beginning.  The sum does not tell which rank it came from.  Two things do: a
loss that was not finite, and, where gradients are *watched*, one sum of every unit's local
gradients, taken before they are reduced and looked at only now.  They are watched under loss
scaling, where torch's own scaler takes such a pass too, and for a while after a step was skipped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_comm.collectives import Collectives
from ds_zero.gradients import GradientFlow, RunGradients, own_shard

__all__ = ["NonFinite", "find_non_finite"]

_LIMIT_NUMEL = 1 << 22


@dataclass(frozen=True)
class NonFinite:
    """The first non-finite gradient of a step; the same on every rank."""

    param: str
    """Name of the parameter; empty if the gradients are finite and only their norm overflowed."""
    unit: str
    """Name of its unit."""
    ranks: tuple[int, ...]
    """Global ranks on which the unit's gradients were not finite before they were summed; empty
    if that is not known, or if only the sum overflowed."""
    loss_ranks: tuple[int, ...]
    """Global ranks on which a loss was not finite."""

    def __str__(self) -> str:
        """Say it in words."""
        if not self.param:
            text = "every gradient is finite, but their norm is not"
        else:
            text = f"the first non-finite gradient is that of {self.param!r} in unit {self.unit!r}"
        if self.ranks:
            text += f", computed on rank {_listed(self.ranks)}"
        if self.loss_ranks:
            text += f"; the loss was not finite on rank {_listed(self.loss_ranks)}"
        return text


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(str(rank) for rank in ranks)


def find_non_finite(
    gradients: GradientFlow,
    collectives: Collectives,
    order: Sequence[str],
    unit_names: Sequence[str],
    *,
    loss_finite: bool,
) -> NonFinite:
    """Look for the first non-finite gradient.  Collective.

    Args:
        gradients: The reduced gradients of this window.
        collectives: Of the ranks that hold the other shards.
        order: All parameter names, in the order of the model.
        unit_names: Names of units, by index.
        loss_finite: Whether the losses of this rank were finite.
    """
    position = {name: index for index, name in enumerate(order)}
    found = max(
        ((position[name], unit) for name, unit in _non_finite_params(gradients)), default=(-1, -1)
    )
    suspects = torch.tensor(
        [any(g.suspect() for g in unit) for unit in gradients.by_unit], dtype=torch.int64
    )
    row = torch.cat([torch.tensor([*found, int(not loss_finite)]), suspects])
    rows = collectives.exchange(row.to(gradients.device)).cpu()
    first, unit = max((int(r[0]), int(r[1])) for r in rows)
    ranks = collectives.group.ranks
    return NonFinite(
        param=order[first] if first >= 0 else "",
        unit=unit_names[unit] if first >= 0 else "",
        ranks=tuple(ranks[i] for i, r in enumerate(rows) if first >= 0 and bool(r[3 + unit])),
        loss_ranks=tuple(ranks[i] for i, r in enumerate(rows) if bool(r[2])),
    )


def _non_finite_params(gradients: GradientFlow) -> Iterator[tuple[str, int]]:
    """Names and unit numbers of parameters of which this rank's shard is not finite."""
    for unit, runs in enumerate(gradients.by_unit):
        for run_gradients in runs:
            values = own_shard(run_gradients)
            if values is None or _all_finite(values):
                continue
            yield from ((name, unit) for name in _pieces(run_gradients, values))


def _pieces(gradients: RunGradients, values: Tensor) -> Iterator[str]:
    run = gradients.run
    for piece in run.layout.pieces(run.shard):
        part = values[piece.shard_start : piece.shard_start + piece.numel]
        if not _all_finite(part):
            yield piece.spec.name


def _all_finite(values: Tensor) -> bool:
    """Whether no element is NaN or infinite, with little working space."""
    return all(bool(torch.isfinite(chunk).all()) for chunk in values.split(_LIMIT_NUMEL))
