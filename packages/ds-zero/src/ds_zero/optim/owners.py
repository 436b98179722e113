"""Whole parameters on one rank at a time, for algorithms that shards would break.

[Note: owners]
Every parameter that an algorithm needs whole has one *owner* among the ranks.  In a step the ranks
send it their pieces, it computes, and it sends the result to whoever holds a piece: each element
travels twice, once to one rank and once back, and no rank computes what another one does.  Where
masters are whole on every rank (stage 0) only the way back is needed, and it goes to all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ds_comm.collectives import Collectives
from ds_zero.layout import ParamSpec
from ds_zero.optim.base import OptimizedRun

__all__ = ["OwnerExchange", "Whole", "assign_owners"]


class Whole(NamedTuple):
    """A parameter that is computed whole."""

    run: int
    """Index of its run."""
    slot: int
    """Index of its slot in the run."""
    spec: ParamSpec
    owner: int
    """Rank that computes it."""


def assign_owners(costs: Sequence[float], num_ranks: int) -> tuple[int, ...]:
    """Give each of some jobs to a rank: the costliest first, to the rank with the least so far.

    Args:
        costs: Cost of each job.
        num_ranks: Number of ranks.

    Returns:
        For each job its rank; the costliest rank has at most 4/3 of the best possible (Graham
        1969, longest processing time first).
    """
    loads = [0.0] * num_ranks
    owners = [0] * len(costs)
    for job in sorted(range(len(costs)), key=lambda job: -costs[job]):
        owners[job] = min(range(num_ranks), key=lambda rank: loads[rank])
        loads[owners[job]] += costs[job]
    return tuple(owners)


class _Part(NamedTuple):
    """Where a rank has a part of a parameter."""

    param_start: int
    flat_start: int
    """Counted in the rank's master."""
    numel: int


class OwnerExchange:
    """Brings parameters to their owners and results back.  See [Note: owners]."""

    def __init__(
        self,
        runs: Sequence[OptimizedRun],
        collectives: Collectives,
        wanted: Callable[[ParamSpec], bool],
        cost: Callable[[ParamSpec], float],
    ) -> None:
        """Choose owners; the same on every rank.

        Args:
            runs: The masters of this rank.
            collectives: Of the ranks that hold the other shards.
            wanted: Which parameters are computed whole.
            cost: Of computing one, in any unit.
        """
        self._collectives = collectives
        group = collectives.group
        self._full = all(run.master.numel() == run.run.layout.numel for run in runs)
        places = [
            (index, number, slot.spec)
            for index, run in enumerate(runs)
            for number, slot in enumerate(run.run.layout.slots)
            if slot.spec.numel and wanted(slot.spec)
        ]
        owners = assign_owners([cost(spec) for _, _, spec in places], group.size)
        self.wholes = tuple(Whole(*p, owner) for p, owner in zip(places, owners, strict=True))
        self._parts = [_parts(run, group.size, whole=self._full) for run in runs]

    def active(self, used: Sequence[Sequence[bool]]) -> list[Whole]:
        """The parameters that take part in a step, by the masks that all ranks agree on."""
        return [whole for whole in self.wholes if used[whole.run][whole.slot]]

    def owned(self, wholes: Sequence[Whole]) -> list[Whole]:
        """Those of ``wholes`` that this rank computes."""
        return [whole for whole in wholes if whole.owner == self._collectives.group.rank]

    def collect(self, wholes: Sequence[Whole], flats: Sequence[Tensor]) -> dict[str, Tensor]:
        """Bring parameters to their owners.  Collective.

        Args:
            wholes: Which; the same on every rank.
            flats: For each run 1-D values as long as its master.

        Returns:
            What this rank owns of them, 1-D, by name; views of ``flats`` where those are whole.
        """
        me = self._collectives.group.rank
        if self._full:
            dtype = _empty(flats).dtype
            return {
                whole.spec.name: _cut(flats, whole, self._part(whole, me)).to(dtype)
                for whole in self.owned(wholes)
            }
        ranks = range(self._collectives.group.size)
        like = _empty(flats)
        send = [
            _joined([_cut(flats, w, self._part(w, me)) for w in wholes if w.owner == rank], like)
            for rank in ranks
        ]
        mine = self.owned(wholes)
        receive = [
            like.new_empty(sum(self._part(whole, rank).numel for whole in mine)) for rank in ranks
        ]
        self._collectives.all_to_all(send, receive, "parameters to their owners").wait()
        found = {w.spec.name: like.new_empty(w.spec.numel) for w in mine}
        for rank in ranks:
            for whole, values in self._split(mine, rank, receive[rank]):
                part = self._part(whole, rank)
                target = found[whole.spec.name]
                target[part.param_start : part.param_start + part.numel] = values
        return found

    def spread(
        self, values: Mapping[str, Tensor], wholes: Sequence[Whole], flats: Sequence[Tensor]
    ) -> None:
        """Bring results from owners to whoever holds a piece.  Collective.

        Args:
            values: What this rank owns of ``wholes``, 1-D, by name.
            wholes: Which; the same on every rank.
            flats: For each run 1-D values as long as its master; the results go here.
        """
        group = self._collectives.group
        like = _empty(flats)
        mine = self.owned(wholes)
        send: list[Tensor] = []
        for rank in range(group.size):
            if self._full and send:
                send.append(send[0])
                continue
            parts = [(values[whole.spec.name], self._part(whole, rank)) for whole in mine]
            cuts = [v[part.param_start : part.param_start + part.numel] for v, part in parts]
            send.append(_joined(cuts, like))
        theirs = [[whole for whole in wholes if whole.owner == rank] for rank in range(group.size)]
        receive = [
            like.new_empty(sum(self._part(whole, group.rank).numel for whole in members))
            for members in theirs
        ]
        self._collectives.all_to_all(send, receive, "results from owners").wait()
        for members, received in zip(theirs, receive, strict=True):
            for whole, result in self._split(members, group.rank, received):
                _cut(flats, whole, self._part(whole, group.rank)).copy_(result)

    def _part(self, whole: Whole, rank: int) -> _Part:
        return self._parts[whole.run].get((rank, whole.spec.name), _Part(0, 0, 0))

    def _split(
        self, wholes: Sequence[Whole], rank: int, joined: Tensor
    ) -> Iterator[tuple[Whole, Tensor]]:
        """Cut what belongs to ``rank``'s parts of ``wholes`` apart again."""
        sizes = [self._part(whole, rank).numel for whole in wholes]
        yield from zip(wholes, joined.split(sizes), strict=True)


def _parts(run: OptimizedRun, num_ranks: int, *, whole: bool) -> dict[tuple[int, str], _Part]:
    """What each rank's master has of each parameter of a run."""
    layout = run.run.layout
    if whole:
        return {
            (rank, slot.spec.name): _Part(0, slot.start, slot.spec.numel)
            for slot in layout.slots
            for rank in range(num_ranks)
        }
    return {
        (rank, piece.spec.name): _Part(piece.param_start, piece.shard_start, piece.numel)
        for rank in range(num_ranks)
        for piece in layout.pieces(rank)
    }


def _cut(flats: Sequence[Tensor], whole: Whole, part: _Part) -> Tensor:
    return flats[whole.run][part.flat_start : part.flat_start + part.numel]


def _empty(flats: Sequence[Tensor]) -> Tensor:
    """Nothing, in a dtype that holds all of ``flats`` and is no narrower than fp32."""
    dtype = torch.float32
    for flat in flats:
        dtype = torch.promote_types(dtype, flat.dtype)
    return torch.empty(0, dtype=dtype, device=flats[0].device if flats else None)


def _joined(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.cat([like, *parts])
