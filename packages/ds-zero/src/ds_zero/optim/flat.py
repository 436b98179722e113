"""Optimisers that run on long flat segments instead of one tensor per parameter."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_comm.errors import EngineError
from ds_zero.layout import VECTOR_NUMEL, Piece
from ds_zero.memory import flat_buffer
from ds_zero.optim.base import OptimizedRun, StateRange, StateSource

__all__ = ["FlatOptimizer", "Segment"]


class Segment(NamedTuple):
    """A stretch of one master whose parameters share their group and step count."""

    run: int
    """Index of the run."""
    start: int
    stop: int
    step: int
    """Updates applied before this one."""


class FlatOptimizer(torch.optim.Optimizer):
    """Base of the optimisers on flat segments.  See [Note: sharded optimisers] in ``base``.

    ``param_groups`` list the model's parameters, as in any torch optimiser; the states are flat
    tensors per run, and step counts are kept per parameter.
    """

    state_kinds: tuple[str, ...] = ()
    """Names of the state tensors."""

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        """Register parameter groups, as ``torch.optim.Optimizer`` does."""
        super().__init__(params, defaults)
        self._runs: tuple[OptimizedRun, ...] = ()
        self._states: list[dict[str, Tensor]] = []
        self._steps: dict[str, int] = {}
        self._pending: tuple[Sequence[Tensor | None], Sequence[Tensor]] | None = None

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """This object."""
        return self

    def attach(self, runs: Sequence[OptimizedRun]) -> None:
        """Take over the masters of ``runs``; states begin at zero."""
        self._runs = tuple(runs)
        self._states = [
            {
                kind: flat_buffer(r.master.numel(), r.master.dtype, r.master.device).tensor
                for kind in self.state_kinds
            }
            for r in runs
        ]
        self._steps = {piece.spec.name: 0 for r in runs for piece in r.pieces()}

    def update(self, grads: Sequence[Tensor | None], used: Sequence[Tensor]) -> None:
        """See :meth:`ds_zero.optim.base.ShardOptimizer.update`."""
        self._pending = (grads, used)
        self.step()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Apply the gradients that the engine handed over.

        Raises:
            EngineError: Called by anyone but the engine; use ``engine.step()``.
        """
        if self._pending is None:
            raise EngineError(
                f"{type(self).__name__}.step() has no gradients: they live in the engine's "
                "shards. Call engine.step()."
            )
        grads, used = self._pending
        self._pending = None
        for index, group in enumerate(self.param_groups):
            by_step: dict[int, list[Segment]] = {}
            for segment in self._segments(index, used):
                by_step.setdefault(segment.step, []).append(segment)
            for step, segments in by_step.items():
                live = [s for s in segments if grads[s.run] is not None]
                self._update_segments(group, step, live, grads)
        for run, mask in zip(self._runs, used, strict=True):
            for piece, slot in zip(run.pieces(), run.slots_of_pieces(), strict=True):
                self._steps[piece.spec.name] += bool(mask[slot])

    def _segments(self, group: int, used: Sequence[Tensor]) -> Iterator[Segment]:
        """Join neighbouring used pieces of one group that have the same step count."""
        for index, run in enumerate(self._runs):
            current: Segment | None = None
            mask = used[index].tolist()
            for piece, slot in zip(run.pieces(), run.slots_of_pieces(), strict=True):
                wanted = piece.spec.group == group and mask[slot]
                step = self._steps[piece.spec.name]
                # Padding is zero and stays zero.  Ending on a whole vector means that no element
                # is updated by a kernel's scalar tail, whose rounding may differ: so the result
                # does not depend on where shards are cut.
                stop = -(-(piece.shard_start + piece.numel) // VECTOR_NUMEL) * VECTOR_NUMEL
                if wanted and current is not None and current.step == step:
                    current = current._replace(stop=stop)
                    continue
                if current is not None:
                    yield current
                current = Segment(index, piece.shard_start, stop, step) if wanted else None
            if current is not None:
                yield current

    def add_state(self, kind: str, run: int) -> bool:
        """Give one run a state of zeros if it has none of that kind.

        Returns:
            Whether it was added now.
        """
        if kind in self._states[run]:
            return False
        master = self._runs[run].master
        self._states[run][kind] = flat_buffer(master.numel(), master.dtype, master.device).tensor
        return True

    def _tensors(self, segments: Sequence[Segment], kind: str) -> list[Tensor]:
        return [self._states[s.run][kind][s.start : s.stop] for s in segments]

    def _masters(self, segments: Sequence[Segment]) -> list[Tensor]:
        return [self._runs[s.run].master[s.start : s.stop] for s in segments]

    @staticmethod
    def _gradients(segments: Sequence[Segment], grads: Sequence[Tensor | None]) -> list[Tensor]:
        found = [grads[s.run] for s in segments]
        return [g[s.start : s.stop] for g, s in zip(found, segments, strict=True) if g is not None]

    @abstractmethod
    def _update_segments(
        self,
        group: dict[str, Any],
        step: int,
        segments: Sequence[Segment],
        grads: Sequence[Tensor | None],
    ) -> None:
        """Update ``segments``, which all have had ``step`` updates, in place."""

    # ---- checkpoints -------------------------------------------------------------------------

    def state_ranges(self) -> Iterator[StateRange]:
        """See :meth:`ds_zero.optim.base.ShardOptimizer.state_ranges`."""
        for run, states in zip(self._runs, self._states, strict=True):
            for piece in run.stored_pieces():
                if self._steps.get(piece.spec.name):
                    for kind, values in states.items():
                        data = values[piece.shard_start : piece.shard_start + piece.numel]
                        yield StateRange(kind, piece.spec.name, piece.param_start, data)

    def scalars(self) -> dict[str, dict[str, float]]:
        """See :meth:`ds_zero.optim.base.ShardOptimizer.scalars`."""
        return {name: {"step": step} for name, step in self._steps.items() if step}

    def load(self, source: StateSource) -> None:
        """See :meth:`ds_zero.optim.base.ShardOptimizer.load`."""
        for index, run in enumerate(self._runs):
            for piece in run.pieces():
                self._load_piece(index, piece, source)

    def _load_piece(self, run: int, piece: Piece, source: StateSource) -> None:
        states = self._states[run]
        name = piece.spec.name
        stored = source.kinds(name)
        self._steps[name] = int(source.scalars(name).get("step", 0))
        for kind in stored - states.keys():
            self.add_state(kind, run)
        for kind, values in states.items():
            out = values[piece.shard_start : piece.shard_start + piece.numel]
            if kind in stored:
                source.read(kind, name, piece.param_start, out)
            else:
                out.zero_()
