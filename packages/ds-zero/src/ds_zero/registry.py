"""Which core owns a parameter, without attaching anything to the parameter.

The notes are weak on both sides: a core lives as long as its engine or its model, whose hooks
refer to it.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

if TYPE_CHECKING:
    from ds_zero.core import ZeroCore

__all__ = ["core_of", "forget", "register"]

_OWNERS: WeakIdKeyDictionary = WeakIdKeyDictionary()


def register(core: ZeroCore, params: list[nn.Parameter]) -> None:
    """Note that ``core`` owns ``params``."""
    for param in params:
        _OWNERS[param] = weakref.ref(core)


def forget(params: list[nn.Parameter]) -> None:
    """Drop the notes on ``params``."""
    for param in params:
        _OWNERS.pop(param, None)


def core_of(param: nn.Parameter) -> ZeroCore | None:
    """Return the core that owns ``param``, or None."""
    found: weakref.ref[ZeroCore] | None = _OWNERS.get(param)
    return found() if found is not None else None
