"""How the inputs of a checkpoint are kept between forward and backward.

[Note: stored inputs]
torch's checkpoint saves the inputs of a function as autograd saves any tensor, so hooks for saved
tensors decide how they are kept: cut over the tensor ranks, on the host, in one buffer.  Only
activations are treated so: floating-point tensors that require a gradient and are no parameters.
What does not depend on the model (masks, positions) is usually the same object in every layer,
and a copy a layer would cost more than it saves.  A tensor that several checkpoints share, as T5
shares its position bias, is stored once.

[Note: partitioned activations]
Between tensor-parallel layers activations are equal on all tensor ranks, so each keeps one part
and they are gathered again before the recomputation (Korthikanti et al., arXiv:2205.05198, call
it sharding of checkpointed activations; ZeRO-R in arXiv:1910.02054, section 6.1).
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ds_comm.collectives import Collectives
from ds_zero.checkpointing.memory import (
    Arena,
    DevicePlace,
    FreshMemory,
    HostPlace,
    Place,
    Stored,
    StreamMover,
)
from ds_zero.config import ActivationCheckpointingSection

__all__ = ["ActivationStore", "StoredInput", "make_store"]


@dataclass(frozen=True, eq=False)
class StoredInput:
    """One input of a checkpoint."""

    values: Stored
    shape: torch.Size
    strides: tuple[int, ...]
    label: str

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return self.shape.numel()


def make_store(
    options: ActivationCheckpointingSection, tensor: Collectives | None, device: torch.device
) -> ActivationStore | None:
    """Build what the options ask for, or None where inputs simply stay where they are.

    Args:
        options: What to do with inputs.
        tensor: The tensor-parallel group, if there is one of several ranks.
        device: Where activations are; on the CPU they are on the host already.
    """
    to_host = options.cpu_checkpointing and device.type != "cpu"
    cut = tensor if options.partition_activations else None
    if cut is None and not to_host:
        # No buffer of copies either: a copy beside the tensor itself would only cost memory.
        return None
    target = torch.device("cpu") if to_host else device
    memory: FreshMemory | Arena = FreshMemory(target, pinned=to_host)
    if options.contiguous_memory_optimization:
        assert options.number_checkpoints is not None
        memory = Arena(memory, options.number_checkpoints)
    place: Place = HostPlace(memory, StreamMover(device)) if to_host else DevicePlace(memory)
    return ActivationStore(place, cut, device)


class ActivationStore:
    """Takes inputs in and gives them back.  See [Note: stored inputs]."""

    def __init__(self, place: Place, tensor: Collectives | None, device: torch.device) -> None:
        """Keep tensors of ``device`` at ``place``, cut over the ranks of ``tensor`` if given."""
        self._place = place
        self._tensor = tensor
        self._device = device
        self._names = itertools.count()
        self._known = WeakIdKeyDictionary()

    def take(self, tensor: Tensor) -> StoredInput | None:
        """Store ``tensor``, or return None if it is no activation."""
        if (
            not tensor.requires_grad
            or not tensor.is_floating_point()
            or isinstance(tensor, nn.Parameter)
            or tensor.layout is not torch.strided
            or tensor.device != self._device
            or not tensor.numel()
        ):
            return None
        known: tuple[int, weakref.ref[StoredInput]] | None = self._known.get(tensor)
        if known is not None and known[0] == tensor._version:
            present = known[1]()
            if present is not None:
                return present
        stored = self._store(tensor.detach())
        self._known[tensor] = tensor._version, weakref.ref(stored)
        return stored

    def _store(self, tensor: Tensor) -> StoredInput:
        if not _is_dense(tensor):
            tensor = tensor.contiguous()
        flat = tensor.as_strided((tensor.numel(),), (1,))
        label = f"activation checkpoint input {next(self._names)} of shape {tuple(tensor.shape)}"
        if self._tensor is not None:
            begin, end = self._own_range(flat.numel())
            flat = flat[begin : min(end, flat.numel())]
        return StoredInput(self._place.keep(flat), tensor.shape, tensor.stride(), label)

    def give(self, stored: StoredInput) -> Tensor:
        """Return the tensor with its old shape and strides.

        Collective over the tensor ranks where inputs are cut.
        """
        values = stored.values.fetch()
        if self._tensor is not None:
            begin, end = self._own_range(stored.numel)
            whole = values.new_empty((end - begin) * self._tensor.group.size)
            whole[begin : begin + values.numel()].copy_(values)
            self._tensor.gather(whole, stored.label).wait()
            values = whole
        return values.as_strided(stored.shape, stored.strides)

    def _own_range(self, numel: int) -> tuple[int, int]:
        """This rank's part of ``numel`` elements; the last ones may reach beyond the end."""
        assert self._tensor is not None
        group = self._tensor.group
        part = -(-numel // group.size)
        return group.rank * part, (group.rank + 1) * part


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill a range of memory, in any order of dimensions."""
    expected = 1
    for size, stride in sorted(
        zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: (pair[1], pair[0])
    ):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
