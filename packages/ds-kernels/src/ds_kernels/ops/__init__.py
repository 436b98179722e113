"""The ops: one module each, named like its reference, sources, tests and benchmark."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

from ds_kernels.functional import Functional, Mutating
from ds_kernels.registry import Backend, Op

__all__ = ["OP_MODULES", "all_ops", "chosen_backend"]

OP_MODULES: tuple[str, ...] = (
    "adam",
    "bias_activation",
    "block_sparse_attention",
    "evoformer_attention",
    "gated_activation",
    "grouped_matmul",
    "kv_cache",
    "layer_norm",
    "moe_routing",
    "paged_attention",
    "quantize",
    "ragged_gather",
    "random_ltd",
    "rms_norm",
    "rotary",
)
"""Names of the modules here, in alphabetical order."""


def all_ops() -> Iterator[Op[Any, Any]]:
    """Every op of every module; imports them all."""
    for name in OP_MODULES:
        yield from _ops_of(name).values()


def chosen_backend(module: str, name: str, device_type: str) -> Backend:
    """The backend that an op takes, for callers with something better than the reference.

    Args:
        module: Name of the module here, such as ``"adam"``.
        name: Name of the op, such as ``"adam_"``.
        device_type: ``tensor.device.type``.

    Raises:
        KeyError: The module has no such op.
    """
    return _ops_of(module)[name].chosen_backend(device_type)


def _ops_of(module: str) -> dict[str, Op[Any, Any]]:
    found = {}
    for value in vars(import_module(f"ds_kernels.ops.{module}")).values():
        op = value.op if isinstance(value, Functional | Mutating) else value
        if isinstance(op, Op):
            found[op.name] = op
    return found
