"""What the engine asks of an optimiser, and the pieces that it updates.

[Note: sharded optimisers]
An element-wise optimiser gives the same result on any cut of a parameter.  So it runs on the
master ranges of this rank: own implementations on long flat segments, ``torch.optim`` ones on one
1-D tensor per piece of a parameter.  The ``param_groups`` dictionaries stay the user's own, so a
schedule that writes ``group["lr"]`` acts on both.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ds_comm.errors import EngineError
from ds_zero.flat import FlatRun
from ds_zero.layout import Piece

__all__ = ["OptimizedRun", "ShardOptimizer", "StateRange", "StateSource", "StepGradients"]


@dataclass(frozen=True)
class OptimizedRun:
    """The part of a trainable run that this rank's optimiser updates."""

    run: FlatRun
    copy: Tensor | None = None
    """1-D, as long as the master: where updated values go too, in the compute dtype."""

    @property
    def master(self) -> Tensor:
        """1-D fp32 values, updated in place."""
        return self.run.master

    def pieces(self) -> tuple[Piece, ...]:
        """The parts of parameters in the master; ``shard_start`` counts in the master."""
        begin, _ = self.run.master_range
        if self.run.master.numel() == self.run.layout.numel:
            return tuple(
                Piece(slot.spec, 0, slot.start - begin, slot.spec.numel)
                for slot in self.run.layout.slots
                if slot.spec.numel
            )
        return self.run.layout.pieces(self.run.shard)

    def slots_of_pieces(self) -> tuple[int, ...]:
        """For each piece the index of its slot in the run."""
        index = {slot.spec.name: i for i, slot in enumerate(self.run.layout.slots)}
        return tuple(index[piece.spec.name] for piece in self.pieces())

    def check_granularity(self, granularity: int) -> None:
        """Raise unless parameters start, and the master ends, at multiples of ``granularity``.

        Raises:
            EngineError: The model was laid out for another optimiser.
        """
        starts = [piece.shard_start for piece in self.pieces() if piece.param_start == 0]
        if any(start % granularity for start in (*starts, self.master.numel())):
            raise EngineError(
                f"the optimiser works on blocks of {granularity} elements, which the layout cuts; "
                f"build the model with CoreOptions(granularity={granularity})"
            )

    def stored_pieces(self) -> tuple[Piece, ...]:
        """The pieces that this rank writes to a checkpoint: its shard at every stage."""
        shift = self.run.layout.shard_range(self.run.shard)[0] - self.run.master_range[0]
        return tuple(
            piece._replace(shard_start=piece.shard_start + shift)
            for piece in self.run.layout.pieces(self.run.shard)
        )


class StateRange(NamedTuple):
    """A range of one state tensor of one parameter."""

    kind: str
    """Name of the state, such as ``exp_avg``."""
    name: str
    """Parameter name."""
    start: int
    """First element, counted in the flattened parameter."""
    data: Tensor
    """1-D values."""


class StateSource(Protocol):
    """Where stored optimiser states are read from."""

    def kinds(self, name: str) -> set[str]:
        """Kinds of state that are stored for a parameter."""
        ...

    def shape(self, kind: str, name: str) -> tuple[int, ...]:
        """Shape of a stored state."""
        ...

    def read(self, kind: str, name: str, start: int, out: Tensor) -> None:
        """Fill ``out`` (1-D) with elements from ``start`` on."""
        ...

    def scalars(self, name: str) -> Mapping[str, float]:
        """Scalar states of a parameter, such as ``step``."""
        ...


@dataclass(frozen=True)
class StepGradients:
    """What one optimiser step works from; the same step on every rank."""

    grads: Sequence[Tensor | None]
    """For each run the gradient of its master range, in any float dtype, or None.  They may be
    used as working space."""
    used: Sequence[Sequence[bool]]
    """For each run, for each of its slots: did any rank use the parameter?  Others are left
    alone."""
    scale: float = 1.0
    """Factor by which gradients are multiplied (clipping, loss scale)."""


class ShardOptimizer(Protocol):
    """An optimiser that updates this rank's masters."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The object whose ``param_groups`` hold the hyper-parameters."""
        ...

    def update(self, gradients: StepGradients) -> None:
        """Apply one step to the masters, and write what changed to each run's ``copy``.

        Collective where an algorithm needs whole parameters; all ranks call it.
        """
        ...

    def state_ranges(self) -> Iterator[StateRange]:
        """This rank's part of all state tensors."""
        ...

    def scalars(self) -> dict[str, dict[str, float]]:
        """Scalar states of each parameter of which this rank holds a piece."""
        ...

    def state_shapes(self) -> dict[str, dict[str, tuple[int, ...]]]:
        """Shapes of states that are shaped unlike their parameter: name -> kind -> shape."""
        ...

    def load(self, source: StateSource, names: Collection[str] | None = None) -> None:
        """Replace all states, or only those of parameters in ``names``, with stored ones."""
        ...
