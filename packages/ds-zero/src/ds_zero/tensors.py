"""Finding tensors in what a module takes and returns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any

from torch import Tensor

__all__ = ["changed_or_new", "tensor_versions", "tensors_in"]


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
