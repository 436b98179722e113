"""The ops: one module each, named like its reference, sources, tests and benchmark."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

from ds_kernels.registry import Op

__all__ = ["OP_MODULES", "all_ops"]

OP_MODULES: tuple[str, ...] = ("adam",)
"""Names of the modules here, in alphabetical order."""


def all_ops() -> Iterator[Op[Any, Any]]:
    """Every op of every module; imports them all."""
    for name in OP_MODULES:
        module = import_module(f"ds_kernels.ops.{name}")
        yield from (value for value in vars(module).values() if isinstance(value, Op))
