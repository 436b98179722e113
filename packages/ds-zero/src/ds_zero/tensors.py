"""Finding tensors in what a module takes and returns."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["changed_or_new", "fingerprint", "map_tensors", "tensor_versions", "tensors_in"]


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested mappings, sequences and dataclasses, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from tensors_in(item)
    elif is_dataclass(value) and not isinstance(value, type):
        yield from tensors_in(vars(value))


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Copy nested containers with each tensor of :func:`tensors_in` replaced; pure.

    Containers keep their type.  What holds no tensor that changed is returned itself.

    Args:
        value: Tensors in nested mappings, sequences and dataclasses.
        function: Gives the tensor that stands in the copy.
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        items = {key: map_tensors(item, function) for key, item in value.items()}
        if all(items[key] is item for key, item in value.items()):
            return value
        if not isinstance(value, dict):
            return items
        copied = copy.copy(value)
        for key, item in items.items():
            copied[key] = item
        return copied
    if isinstance(value, list | tuple | set | frozenset):
        members = [map_tensors(item, function) for item in value]
        if all(new is old for new, old in zip(members, value, strict=True)):
            return value
        named = isinstance(value, tuple) and hasattr(value, "_fields")
        return type(value)(*members) if named else type(value)(members)
    if is_dataclass(value) and not isinstance(value, type):
        fields = map_tensors(vars(value), function)
        if fields is vars(value):
            return value
        replaced = copy.copy(value)
        for name, item in fields.items():
            object.__setattr__(replaced, name, item)
        return replaced
    return value


def tensor_versions(inputs: Any) -> dict[int, int]:
    """The version counter of each tensor in ``inputs``, by its id."""
    return {id(t): t._version for t in tensors_in(inputs) if not t.is_inference()}


def changed_or_new(output: Any, before: Mapping[int, int]) -> list[Tensor]:
    """The tensors in ``output`` through which gradients enter what computed it.

    Leaves have no graph, and an input that is passed through unchanged gets its gradient last.

    Args:
        output: What a module returned.
        before: :func:`tensor_versions` of what it was given.
    """
    return [
        tensor
        for tensor in tensors_in(output)
        if tensor.grad_fn is not None and before.get(id(tensor), -1) != tensor._version
    ]


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
