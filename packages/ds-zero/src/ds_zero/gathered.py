"""``GatheredParameters``: full values for a while, and edits that every copy follows."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from types import TracebackType

import torch
from torch import Tensor, nn

from ds_comm.errors import EditError, EngineError
from ds_zero.core import ZeroCore
from ds_zero.flat import Unit
from ds_zero.registry import core_of

__all__ = ["GatheredParameters"]


class GatheredParameters:
    """Context in which parameters have their full values, at every stage.  Collective.

    Example::

        with ds_zero.GatheredParameters(model.head.parameters(), modifier_rank=0):
            if rank == 0:
                torch.nn.init.zeros_(model.head.weight)

    On exit, changes made on ``modifier_rank`` are sent to all ranks and into the fp32 masters.
    Without an owner a change is an error, since it would be lost or differ between ranks.
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
            modifier_rank: Rank (within the sharding group) whose changes count; None for reading.
            fwd_module: Accepted for compatibility; foreign reads need no registration here.
            enabled: Whether to do anything.
        """
        if isinstance(params, nn.Module):
            found = list(params.parameters())
        elif isinstance(params, nn.Parameter):
            found = [params]
        else:
            found = list(params)
        self._params = [p for p in found if enabled and core_of(p) is not None]
        self._modifier_rank = modifier_rank
        self._core: ZeroCore | None = None
        self._units: list[Unit] = []
        self._before: list[int] = []

    def __enter__(self) -> None:
        """Gather.

        Raises:
            EngineError: The parameters belong to several engines.
        """
        cores = {id(core): core for core in map(core_of, self._params) if core is not None}
        if len(cores) > 1:
            raise EngineError("GatheredParameters: the parameters belong to several engines")
        if not cores:
            return
        self._core = core = next(iter(cores.values()))
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
        changed = [
            fingerprint(param) != before
            for param, before in zip(self._params, self._before, strict=True)
        ]
        device = self._params[0].device
        row = torch.tensor(changed, dtype=torch.uint8, device=device)
        rows = core.collectives.exchange(row)
        if self._modifier_rank is None:
            self._forbid(core, rows.any(dim=0).tolist())
            return
        edited = [
            param
            for param, flag in zip(self._params, rows[self._modifier_rank].tolist(), strict=True)
            if flag
        ]
        for param in edited:
            core.collectives.broadcast(param.data, self._modifier_rank)
        core.accept_edits(edited)

    def _forbid(self, core: ZeroCore, changed: Sequence[int]) -> None:
        names = {id(param): name for name, param in core.params.items()}
        edited = [names[id(p)] for p, flag in zip(self._params, changed, strict=True) if flag]
        if edited:
            raise EditError(
                f"{edited} changed inside of GatheredParameters without an owner: the change "
                "would be lost. Pass modifier_rank=R, the rank whose values all ranks shall get."
            )


def fingerprint(tensor: Tensor) -> int:
    """Return a checksum of the tensor's bytes.

    Args:
        tensor: Contiguous, any dtype and device.
    """
    raw = tensor.detach().reshape(-1).view(torch.uint8)
    if raw.is_cpu:
        return zlib.crc32(raw.numpy().data) if raw.numel() else 0
    wide = raw.to(torch.int64)
    place = torch.arange(1, wide.numel() + 1, device=wide.device)
    return int((wide * place).sum())
