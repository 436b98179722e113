"""``GatheredParameters``: full values for a while, and edits that every copy follows."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType

import torch
from torch import nn

from ds_comm.errors import EditError, EngineError
from ds_zero.core import ZeroCore
from ds_zero.flat import Unit
from ds_zero.init import settle_all
from ds_zero.newborn_access import NewbornGather
from ds_zero.nursery import newborn_of
from ds_zero.registry import core_of
from ds_zero.tensors import fingerprint

__all__ = ["GatheredParameters"]


class GatheredParameters:
    """Context in which parameters have their full values, at every stage.  Collective.

    Example::

        with ds_zero.GatheredParameters(model.head.parameters(), modifier_rank=0):
            if rank == 0:
                torch.nn.init.zeros_(model.head.weight)

    On exit, changes made on ``modifier_rank`` are sent to all ranks and into the fp32 masters.
    Without an owner a change is an error, since it would be lost or differ between ranks.  Either
    way all ranks hold the same values afterwards.  After an exception in the body nothing is
    spread.
    """

    def __init__(
        self,
        params: nn.Parameter | nn.Module | Iterable[nn.Parameter],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        """Choose what to gather; nothing happens before the context is entered.

        Args:
            params: A parameter, several, or a module with all inside.  Parameters that no engine
                owns are left as they are.
            modifier_rank: Rank (within the sharding group) whose values count; None for reading.
            fwd_module: Accepted for compatibility; foreign reads need no registration here.
            enabled: Whether to do anything.
        """
        if isinstance(params, nn.Module):
            found = list(params.parameters())
        elif isinstance(params, nn.Parameter):
            found = [params]
        else:
            found = [item[1] if isinstance(item, tuple) else item for item in params]
        self._given = found if enabled else []
        self._params = [p for p in self._given if core_of(p) is not None]
        self._newborns: NewbornGather | None = None
        self._modifier_rank = modifier_rank
        self._core: ZeroCore | None = None
        self._units: list[Unit] = []
        self._before: list[int] = []

    def __enter__(self) -> None:
        """Gather.

        Raises:
            EngineError: The parameters belong to several engines, the context is active already,
                or ``modifier_rank`` is no rank.
        """
        if self._core is not None or self._newborns is not None:
            raise EngineError("GatheredParameters: this context is active already; make another")
        settle_all()
        newborns = [param for param in self._given if newborn_of(param) is not None]
        if newborns:
            self._newborns = NewbornGather(newborns, self._modifier_rank)
        cores = {id(core): core for core in map(core_of, self._params) if core is not None}
        if len(cores) > 1:
            raise EngineError("GatheredParameters: the parameters belong to several engines")
        if not cores:
            return
        core = next(iter(cores.values()))
        size = core.collectives.group.size
        if self._modifier_rank is not None and not 0 <= self._modifier_rank < size:
            raise EngineError(
                f"GatheredParameters: modifier_rank={self._modifier_rank} is none of {size} ranks"
            )
        self._core = core
        wanted = {id(param) for param in self._params}
        self._units = [u for u in core.units if any(id(p) in wanted for p in u.params)]
        for unit in self._units:
            core.residency.ensure(unit)
            unit.held += 1
        self._before = [fingerprint(param) for param in self._params]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Spread changes and release.

        Raises:
            EditError: Something changed and ``modifier_rank`` is None.
        """
        newborns, self._newborns = self._newborns, None
        if newborns is not None:
            try:
                if kind is None:
                    newborns.settle()
            finally:
                newborns.close()
        core = self._core
        if core is None:
            return
        try:
            if kind is None:
                self._settle(core)
        finally:
            for unit in self._units:
                unit.held -= 1
                core.residency.release(unit, check=False)  # _settle has dealt with edits
            self._core = None

    def _settle(self, core: ZeroCore) -> None:
        """Find what any rank changed, and give all ranks the same values of it."""
        replaced = self._take_replaced(core)
        changed = [
            id(param) in replaced or fingerprint(param) != before
            for param, before in zip(self._params, self._before, strict=True)
        ]
        row = torch.tensor(changed, dtype=torch.uint8, device=self._params[0].device)
        rows = core.collectives.exchange(row)
        touched = [k for k, flag in enumerate(rows.any(dim=0).tolist()) if flag]
        for k in touched:
            source = self._modifier_rank
            if source is None:  # an unchanged rank's values, or if there is none the first one's
                source = int(rows[:, k].argmin())
            core.collectives.broadcast(self._params[k].data, source)
        # Values that came back from an unchanged rank are what the masters hold already.
        owned = self._modifier_rank is not None
        core.accept_edits([self._params[k] for k in touched if owned or bool(rows[:, k].all())])
        if touched and self._modifier_rank is None:
            names = {id(param): name for name, param in core.params.items()}
            edited = [names[id(self._params[k])] for k in touched]
            raise EditError(
                f"{edited} changed inside of GatheredParameters without an owner, so the change "
                "was not taken over. Pass modifier_rank=R, the rank whose values all ranks shall "
                "get."
            )

    def _take_replaced(self, core: ZeroCore) -> set[int]:
        """Copy values that were assigned to ``param.data`` into the buffer they belong to.

        Raises:
            EditError: They have another shape.
        """
        wanted = {id(param) for param in self._params}
        replaced: set[int] = set()
        for run in (run for unit in self._units for run in unit.runs):
            for param, view, slot in zip(run.params, run.views, run.layout.slots, strict=True):
                if id(param) not in wanted or param.data_ptr() == view.data_ptr():
                    continue
                if param.shape != view.shape:
                    raise EditError(
                        f"{slot.spec.name!r} has shape {tuple(view.shape)}, not "
                        f"{tuple(param.shape)}, the shape of the values that it was given"
                    )
                view.copy_(param.data)
                param.data = view
                replaced.add(id(param))
        return replaced
