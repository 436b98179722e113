"""Parameters that are sharded already but belong to no engine yet.

[Note: newborn]
``Init`` cuts each parameter into equal shards as soon as it exists; which parameters will form a
unit is only known once the whole model is.  Until then a parameter is a *newborn*: this rank
keeps its range of the flattened values, ``param.data`` is a placeholder as in
[Note: placeholder], and :func:`fill` copies the full values to where the engine wants them, a
piece at a time.  ``initialize`` fills one unit after another and drops the newborns' shards on
the way, so that no rank ever holds more than its shards and one unit.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from ds_comm.collectives import Collectives
from ds_comm.errors import EditError, EngineError
from ds_zero.memory import flat_buffer
from ds_zero.presence import Presence

__all__ = ["Newborn", "Nursery", "hand_over", "newborn_of", "shardable"]

_STAGED_NUMEL = 1 << 21
"""Elements of one exchange while values are brought together."""

_MAPPED_BYTES = 1 << 20
"""Shards from this size on get a mapping of their own, which goes back to the system."""

_NEWBORNS: WeakIdKeyDictionary = WeakIdKeyDictionary()

_BY_MARK: WeakValueDictionary[int, Newborn] = WeakValueDictionary()
"""Newborns by the address of their placeholder."""


def newborn_of(param: nn.Parameter) -> Newborn | None:
    """Return what is known of ``param`` if it was built under ``Init``, else None."""
    found: Newborn | None = _NEWBORNS.get(param)
    return found


@dataclass(eq=False)
class Newborn:
    """One parameter without an engine; holds no reference to it.  See [Note: newborn]."""

    nursery: Nursery
    label: str
    """Class and name of the owner's attribute, for messages; equal on all ranks."""
    shape: torch.Size
    dtype: torch.dtype
    shard: Tensor
    """1-D: this rank's range, padded with zeros to the same length on every rank."""
    mark: Tensor
    """A NaN, ``[]``, on the device that the parameter belongs to."""
    presence: Presence = Presence.RELEASED
    held: int = 0
    """How many contexts want the full values."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.shape.numel()

    def hide(self, param: nn.Parameter) -> None:
        """Drop the full values."""
        param.data = self.mark.expand(self.shape)
        self.presence = Presence.RELEASED

    def check_hidden(self, param: nn.Parameter) -> None:
        """Raise unless ``param`` still is its untouched placeholder.

        Raises:
            EditError: It was replaced or written to.
        """
        same = param.data_ptr() == self.mark.data_ptr() and param.dtype == self.dtype
        if not same or (self.mark.is_cpu and not bool(self.mark.isnan())):
            raise EditError(
                f"parameter {self.label!r} was changed between ds_zero.Init and initialize(), and "
                "the change would be lost. Edit it inside `with ds_zero.GatheredParameters("
                "[param], modifier_rank=0):`; choose its dtype with Init(dtype=...)."
            )


class Nursery:
    """Cuts parameters into shards over one group and brings their values together again."""

    def __init__(
        self,
        collectives: Collectives,
        device: torch.device,
        *,
        shard_device: torch.device | None = None,
        pinned: bool = False,
    ) -> None:
        """Shard over the group of ``collectives``.

        Args:
            collectives: Of the group to shard over.
            device: Where parameters belong.
            shard_device: Where shards are kept; ``device`` by default.
            pinned: Page-lock shards that are on the CPU.
        """
        self.collectives = collectives
        self.device = device
        self._shard_device = shard_device or device
        self._pinned = pinned

    # Torch functions are off inside: Init's own mode, and a user's ``torch.device("meta")``.

    def settle(self, param: nn.Parameter, label: str) -> None:
        """Keep only this rank's shard of rank 0's values of a whole ``param``.  Collective.

        Does nothing where there is nothing to shard (:func:`shardable`), nor for a newborn that
        is released or held.
        """
        with torch._C.DisableTorchFunction(), torch.inference_mode(False), torch.no_grad():
            known = newborn_of(param)
            if known is not None and (known.held or known.presence is Presence.RELEASED):
                return
            if not shardable(param):
                return
            whole = param.data.to(self.device).contiguous().view(-1)
            self.collectives.broadcast(whole, 0)
            if known is None or known.dtype != param.dtype or known.shape != param.shape:
                known = self._new(param, label)
                _NEWBORNS[param] = known
                _BY_MARK[known.mark.data_ptr()] = known
            self._cut(known, whole)
            known.hide(param)

    def bring(self, param: nn.Parameter) -> None:
        """Give a released newborn its full values, in memory of its own.  Collective."""
        newborn = _NEWBORNS[param]
        with torch._C.DisableTorchFunction(), torch.inference_mode(False), torch.no_grad():
            newborn.check_hidden(param)
            whole = torch.empty(newborn.numel, dtype=newborn.dtype, device=self.device)
            self._fill(newborn, whole)
            param.data = whole.view(newborn.shape)
            newborn.presence = Presence.PRESENT

    def recut(self, param: nn.Parameter, source: int) -> None:
        """Take a present newborn's values on group rank ``source`` for all.  Collective.

        Raises:
            EditError: They have another shape or dtype.
        """
        newborn = _NEWBORNS[param]
        with torch._C.DisableTorchFunction(), torch.no_grad():
            if param.shape != newborn.shape or param.dtype != newborn.dtype:
                raise EditError(
                    f"{newborn.label!r} is {tuple(newborn.shape)} of {newborn.dtype}, not "
                    f"{tuple(param.shape)} of {param.dtype}, the values that it was given"
                )
            whole = param.data.to(self.device).contiguous().view(-1)
            self.collectives.broadcast(whole, source)
            self._cut(newborn, whole)

    def resolve(self, param: nn.Parameter) -> None:
        """Give values to ``param`` if it was made of a newborn's placeholder.  Collective then.

        ``nn.Parameter(weight)`` is the one read of a released parameter that no torch function
        reports: the new object shares the placeholder.
        """
        with torch._C.DisableTorchFunction(), torch.inference_mode(False), torch.no_grad():
            if newborn_of(param) is not None or not shardable(param):
                return
            source = _BY_MARK.get(param.data_ptr())
            if source is not None and source.shape == param.shape:
                whole = torch.empty(source.numel, dtype=source.dtype, device=self.device)
                self._fill(source, whole)
                param.data = whole.view(source.shape)

    def hand_over(self, param: nn.Parameter, out: Tensor) -> None:
        """Write the full values to ``out`` and forget ``param``.  Collective.

        Args:
            param: A newborn of this nursery.
            out: 1-D, as many elements, of any float dtype.

        Raises:
            EditError: The parameter was changed since it was built.
            EngineError: It is gathered at the moment.
        """
        newborn = _NEWBORNS[param]
        if newborn.held:
            raise EngineError(
                f"initialize(): {newborn.label!r} is inside of an active GatheredParameters; leave "
                "the context first"
            )
        newborn.check_hidden(param)
        with torch.no_grad():
            self._fill(newborn, out)
        del _NEWBORNS[param]

    def _new(self, param: nn.Parameter, label: str) -> Newborn:
        size = self.collectives.group.size
        numel = -(-param.numel() // size)
        if numel * param.element_size() >= _MAPPED_BYTES and not self._pinned:
            shard = flat_buffer(numel, param.dtype, self._shard_device).tensor
        else:
            shard = torch.zeros(
                numel, dtype=param.dtype, device=self._shard_device, pin_memory=self._pinned
            )
        mark = torch.full((), float("nan"), dtype=param.dtype, device=self.device)
        return Newborn(self, label, param.shape, param.dtype, shard, mark)

    def _cut(self, newborn: Newborn, whole: Tensor) -> None:
        """Keep this rank's range of ``whole``, 1-D."""
        begin = self.collectives.group.rank * newborn.shard.numel()
        mine = whole[begin : begin + newborn.shard.numel()]
        newborn.shard[: mine.numel()].copy_(mine)

    def _fill(self, newborn: Newborn, out: Tensor) -> None:
        """Write all ranks' ranges to ``out``, through a small staging buffer."""
        size, length = self.collectives.group.size, newborn.shard.numel()
        step = min(length, max(1, _STAGED_NUMEL // size))
        stage = torch.empty(size * step, dtype=newborn.dtype, device=self.device)
        for begin in range(0, length, step):
            count = min(step, length - begin)
            rows = stage[: size * count]
            piece = newborn.shard[begin : begin + count].to(self.device)
            self.collectives.gather(rows, newborn.label, piece).wait()
            for rank, row in enumerate(rows.view(size, count)):
                target = out[rank * length + begin : min(rank * length + begin + count, len(out))]
                target.copy_(row[: target.numel()])


def shardable(param: nn.Parameter) -> bool:
    """Whether a parameter can be cut: it has values, several, and a NaN to stand for them.

    What cannot stays an ordinary tensor, and gets rank 0's values at ``initialize``.
    """
    return (
        not is_lazy(param)
        and not param.is_meta
        and param.is_floating_point()
        and param.layout is torch.strided
        and param.numel() > 1
    )


def hand_over(param: nn.Parameter, out: Tensor) -> bool:
    """Write a newborn's full values to ``out``, and forget it.  Collective.

    Args:
        param: Any parameter.
        out: 1-D, as many elements.

    Returns:
        Whether it was a newborn; ``out`` is untouched otherwise.
    """
    newborn = newborn_of(param)
    if newborn is None:
        return False
    newborn.nursery.hand_over(param, out)
    return True
