"""Tensors that modules keep by themselves (``ds_zero.protocols.HoldsTensors``)."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from ds_comm.collectives import broadcast
from ds_comm.group import Group
from ds_zero.protocols import HeldTensor, HoldsTensors

__all__ = ["Held", "held_tensors", "share_held"]


class Held(NamedTuple):
    """A tensor and the module that keeps it."""

    module: HoldsTensors
    key: str
    """Name within the module."""
    tensor: HeldTensor

    def replace(self, data: Tensor) -> None:
        """Set this rank's elements."""
        self.module.set_held_tensor(self.key, data)

    def replace_from(self, whole: Tensor) -> None:
        """Set this rank's elements from all of them, in their shape."""
        start, whole = self.tensor.start, whole.reshape(-1)
        self.replace(whole[start : start + self.tensor.data.numel()])

    def full(self) -> Tensor:
        """All elements, in their shape.  Collective unless it is replicated."""
        return self.module.full_held_tensor(self.key)


def held_tensors(model: nn.Module) -> dict[str, Held]:
    """What the modules of ``model`` hold, by full name."""
    found: dict[str, Held] = {}
    for prefix, module in model.named_modules():
        if isinstance(module, HoldsTensors):
            for key, tensor in module.held_tensors().items():
                found[f"{prefix}.{key}" if prefix else key] = Held(module, key, tensor)
    return found


def share_held(model: nn.Module, group: Group) -> None:
    """Give every rank rank 0's values of what all ranks have whole.  Collective."""
    for held in held_tensors(model).values():
        if held.tensor.replicated:
            data = held.tensor.data.clone()
            broadcast(data, group)
            held.replace(data)
