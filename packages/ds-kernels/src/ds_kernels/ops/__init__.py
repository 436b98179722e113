"""The ops: one module each, named like its reference, sources, tests and benchmark."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

from ds_kernels.registry import Backend, Op

__all__ = ["OP_MODULES", "all_ops", "chosen_backend"]

OP_MODULES: tuple[str, ...] = (
    "adam",
    "bias_activation",
    "block_sparse_attention",
    "evoformer_attention",
    "grouped_matmul",
    "kv_cache",
    "layer_norm",
    "moe_routing",
    "paged_attention",
    "quantize",
    "ragged_gather",
    "rms_norm",
)
"""Names of the modules here, in alphabetical order."""


def all_ops() -> Iterator[Op[Any, Any]]:
    """Every op of every module; imports them all."""
    for name in OP_MODULES:
        module = import_module(f"ds_kernels.ops.{name}")
        yield from (value for value in vars(module).values() if isinstance(value, Op))


def chosen_backend(module: str, name: str, device_type: str) -> Backend:
    """The backend that an op takes, for callers with something better than the reference.

    Args:
        module: Name of the module here, such as ``"adam"``.
        name: Name of the op, such as ``"adam_"``.
        device_type: ``tensor.device.type``.

    Raises:
        KeyError: The module has no such op.
    """
    values = vars(import_module(f"ds_kernels.ops.{module}")).values()
    ops = {value.name: value for value in values if isinstance(value, Op)}
    return ops[name].chosen_backend(device_type)
