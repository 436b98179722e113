"""The frozen base weight of a layer: as a parameter, or held in pieces outside of the engine.

[Note: held weights]
A base weight that all ranks share, or that stays in host memory, is no parameter of its module:
an engine would give every rank the whole of rank 0's.  The module *holds* its bytes, this rank's
part of them, and gathers them for each use, forward and backward.  So all ranks must use the layer
together, as at stage 3.  The engine's checkpoints and state dicts ask such modules for what they
hold (``ds_zero.protocols.HoldsTensors``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ds_comm.collectives import Collectives, LocalCollectives, collectives_for
from ds_comm.errors import ConfigError
from ds_comm.group import Group
from ds_zero.linear.packed import PackedFormat
from ds_zero.protocols import HeldTensor

__all__ = ["HeldWeight", "frozen_linear"]

_ALIGNMENT = 16


class HeldWeight:
    """A weight's bytes, cut over the ranks; see [Note: held weights]."""

    def __init__(
        self, weight: Tensor, packing: PackedFormat, num_shards: int, host_share: float
    ) -> None:
        """Keep this rank's part of ``weight``.

        Args:
            weight: The whole weight, equal on all ranks.
            packing: How it becomes bytes.
            num_shards: 1, or the number of all ranks.
            host_share: Part of the bytes that stays in host memory.

        Raises:
            ConfigError: There is another number of ranks.
        """
        self.packing = packing
        self._collectives = _collectives(num_shards)
        self._host_share = host_share
        self._shard_bytes = -(-packing.num_bytes // (num_shards * _ALIGNMENT)) * _ALIGNMENT
        self._device = weight.device
        self.take(weight)

    @property
    def device(self) -> torch.device:
        """Where the weight is used."""
        return self._device

    def __deepcopy__(self, memo: dict[int, Any]) -> HeldWeight:
        """Copy the bytes; the ranks stay the same."""
        copied = object.__new__(HeldWeight)
        copied.__dict__.update(self.__dict__)
        copied._keep(self.shard())
        memo[id(self)] = copied
        return copied

    def _keep(self, shard: Tensor) -> None:
        cut = int(self._host_share * self._shard_bytes)
        host = shard[:cut].cpu().clone()
        self._host = host.pin_memory() if self._device.type == "cuda" and cut else host
        self._rest = shard[cut:].to(self._device, copy=True)

    def shard(self) -> Tensor:
        """This rank's bytes, on the device."""
        return torch.cat([self._host.to(self._device, non_blocking=True), self._rest])

    def gathered(self) -> Tensor:
        """All bytes.  Collective where the weight is cut."""
        size, rank = self._collectives.group.size, self._collectives.group.rank
        if size == 1:
            return self.shard()
        flat = torch.empty(size * self._shard_bytes, dtype=torch.uint8, device=self._device)
        flat[rank * self._shard_bytes :][: self._shard_bytes] = self.shard()
        rows, columns = self.packing.shape
        self._collectives.gather(flat, f"base weight {rows} x {columns}").wait()
        return flat

    def full(self) -> Tensor:
        """The weight in its own shape and dtype.  Collective where it is cut."""
        return self.packing.unpack(self.gathered()[: self.packing.num_bytes])

    def move(self, device: torch.device) -> None:
        """Bring what is not to stay in host memory to ``device``."""
        if device != self._device:
            shard = self.shard()
            self._device = device
            self._keep(shard)

    def held(self) -> HeldTensor:
        """What the engine stores: this rank's codes and scales as bytes, or plain elements."""
        packing = self.packing
        begin = min(self._collectives.group.rank * self._shard_bytes, packing.num_bytes)
        num_bytes = min(self._shard_bytes, packing.num_bytes - begin)
        return HeldTensor(
            shape=packing.stored_shape,
            start=begin // packing.stored_dtype.itemsize,
            data=self.shard()[:num_bytes].view(packing.stored_dtype),
            replicated=self._collectives.group.size == 1,
        )

    def stored(self) -> Tensor:
        """All of what :meth:`held` describes.  Collective where the weight is cut."""
        packing = self.packing
        whole = self.gathered()[: packing.num_bytes]
        return whole.view(packing.stored_dtype).view(packing.stored_shape)

    def take(self, weight: Tensor) -> None:
        """Set this rank's bytes from the whole weight, or from what is stored of it."""
        packed = weight if weight.dtype == torch.uint8 else self.packing.pack(weight)
        whole_bytes = self._collectives.group.size * self._shard_bytes
        packed = F.pad(packed, (0, whole_bytes - packed.numel()))
        begin = self._collectives.group.rank * self._shard_bytes
        self._keep(packed[begin : begin + self._shard_bytes].to(self._device))

    def replace(self, data: Tensor) -> None:
        """Set this rank's part, as :meth:`held` gave it."""
        raw = data.to(self._device).contiguous().view(torch.uint8)
        self._keep(F.pad(raw, (0, self._shard_bytes - raw.numel())))


def _collectives(num_shards: int) -> Collectives:
    if num_shards == 1:
        return LocalCollectives(Group.solo())
    world = Group.world()
    if num_shards != world.size:
        raise ConfigError(
            f"base_weight_sharding={num_shards}, but there are {world.size} ranks: it must be 1 or "
            "the number of all ranks, and init_distributed() comes before the model"
        )
    return collectives_for(world)


class _FrozenLinear(torch.autograd.Function):
    """``x W^T + b`` with a weight that is made again for the backward instead of being kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, weight: Callable[[], Tensor]) -> Tensor:
        ctx.weight = weight
        return F.linear(x, weight().to(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (grad,) = grads
        down = grad @ ctx.weight().to(grad.dtype) if ctx.needs_input_grad[0] else None
        bias = grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        return down, bias, None


def frozen_linear(x: Tensor, weight: Callable[[], Tensor], bias: Tensor | None) -> Tensor:
    """``x W^T + b`` without keeping ``W``.

    Args:
        x: ``[..., in]``.
        weight: Makes ``[out, in]``; called in the forward, and in the backward if ``x`` needs a
            gradient.
        bias: ``[out]``, or None.

    Returns:
        ``[..., out]``, in the dtype of ``x``, or that of autocast.
    """
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    result: Tensor = _FrozenLinear.apply(x, bias, weight)  # type: ignore[no-untyped-call]
    return result
