"""What users may do with a model between ``Init`` and ``initialize``.

Running, copying and storing it would use placeholders, and raise.  Full values, and edits, are
had inside of ``GatheredParameters``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ds_comm.errors import EditError, EngineError
from ds_zero.access import ParameterTable
from ds_zero.guards import any_released, for_this_one, guard_state_dict
from ds_zero.nursery import Newborn, newborn_of
from ds_zero.presence import Presence
from ds_zero.tensors import fingerprint

__all__ = ["NewbornGather", "guard_newborns", "unguard_newborns"]

_GUARDS: WeakKeyDictionary[nn.Module, list[Callable[[], None]]] = WeakKeyDictionary()


def guard_newborns(modules: Iterable[nn.Module]) -> None:
    """Stop what would read placeholders, on each of ``modules`` that owns a newborn.  Local."""
    for module in modules:
        if module not in _GUARDS and _newborns_inside(module):
            _GUARDS[module] = _guard(module)


def unguard_newborns(model: nn.Module) -> None:
    """Take the guards off ``model``, which an engine takes over.  Local."""
    for module in model.modules():
        for remove in _GUARDS.pop(module, ()):
            remove()


def _newborns_inside(module: nn.Module) -> dict[str, Newborn]:
    found = {name: newborn_of(param) for name, param in module.named_parameters()}
    return {name: newborn for name, newborn in found.items() if newborn is not None}


def _own_newborns(module: nn.Module) -> dict[str, Newborn]:
    params = {name: param for name, param in module._parameters.items() if param is not None}
    found = {name: newborn_of(param) for name, param in params.items()}
    return {name: newborn for name, newborn in found.items() if newborn is not None}


def _guard(module: nn.Module) -> list[Callable[[], None]]:
    name = type(module).__name__

    # Parameters of a container are read by a parent, so that each module looks at its subtree.
    def before_forward(module: nn.Module, *_: Any) -> None:
        if any_released(_newborns_inside(module)):
            raise EngineError(
                f"forward of {name!r}: its parameters were sharded by ds_zero.Init and no engine "
                "gathers them. Call ds_zero.initialize(model=...) and run the engine, or run "
                "inside `with ds_zero.GatheredParameters(model.parameters()):`."
            )

    handles = guard_state_dict(module, name, lambda: _own_newborns(module))
    handles.append(module.register_forward_pre_hook(for_this_one(module, before_forward)))
    units = {id(module._parameters[key]): unit for key, unit in _own_newborns(module).items()}
    table = ParameterTable(module._parameters, units, lambda unit: None)
    module._parameters = table

    def restore() -> None:
        if module._parameters is table:
            module._parameters = dict(table.items())

    return [*(handle.remove for handle in handles), restore]


class NewbornGather:
    """The part of ``GatheredParameters`` that concerns newborns.  Collective."""

    def __init__(self, params: Sequence[nn.Parameter], modifier_rank: int | None) -> None:
        """Gather ``params``, newborns of one nursery; :meth:`settle` and :meth:`close` follow.

        Raises:
            EngineError: They are sharded over several groups, or ``modifier_rank`` is no rank.
        """
        self._params = list({id(param): param for param in params}.values())
        self._modifier_rank = modifier_rank
        found = [newborn_of(param) for param in self._params]
        self._newborns = [newborn for newborn in found if newborn is not None]
        nurseries = {newborn.nursery.collectives.group.ranks for newborn in self._newborns}
        if len(nurseries) > 1:
            raise EngineError(
                "GatheredParameters: the parameters were built under ds_zero.Init over several "
                f"groups ({sorted(nurseries)}); gather those of one group at a time"
            )
        size = len(next(iter(nurseries), ()))
        if nurseries and modifier_rank is not None and not 0 <= modifier_rank < size:
            raise EngineError(
                f"GatheredParameters: modifier_rank={modifier_rank} is none of {size} ranks"
            )
        for newborn, param in zip(self._newborns, self._params, strict=True):
            if newborn.presence is Presence.RELEASED:
                newborn.nursery.bring(param)
            newborn.held += 1
        self._before = [fingerprint(param) for param in self._params]

    def settle(self) -> None:
        """Spread what the owner changed.  Collective.

        Raises:
            EditError: Something changed and there is no owner.
        """
        if not self._params:
            return
        collectives = self._newborns[0].nursery.collectives
        changed = [
            fingerprint(param.data.contiguous()) != before
            for param, before in zip(self._params, self._before, strict=True)
        ]
        row = torch.tensor(changed, dtype=torch.uint8, device=self._params[0].device)
        touched = collectives.exchange(row).any(dim=0).tolist()
        if self._modifier_rank is None:
            labels = [n.label for n, flag in zip(self._newborns, touched, strict=True) if flag]
            if labels:
                raise EditError(
                    f"{labels} changed inside of GatheredParameters without an owner, so the "
                    "change was not taken over. Pass modifier_rank=R, the rank whose values all "
                    "ranks shall get."
                )
            return
        for newborn, param, flag in zip(self._newborns, self._params, touched, strict=True):
            if flag:
                newborn.nursery.recut(param, self._modifier_rank)

    def close(self) -> None:
        """Let go of the full values.  Local."""
        for newborn, param in zip(self._newborns, self._params, strict=True):
            newborn.held -= 1
            if not newborn.held:
                newborn.hide(param)
