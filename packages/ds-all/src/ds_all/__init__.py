"""The whole toolkit under the familiar names: ``import ds_all as deepspeed``.

Names are imported when they are first used, so that ``import ds_all`` costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from ds_all._version import __version__

if TYPE_CHECKING:
    from ds_all import checkpointing, linear, ops, utils, zero
    from ds_all.arguments import add_config_arguments
    from ds_all.config import DSConfig
    from ds_all.facade import initialize
    from ds_comm.init import init_distributed
    from ds_zero import Engine, OnDevice, add_tuning_arguments

__all__ = [
    "DSConfig",
    "Engine",
    "OnDevice",
    "__version__",
    "add_config_arguments",
    "add_tuning_arguments",
    "checkpointing",
    "init_distributed",
    "initialize",
    "linear",
    "ops",
    "utils",
    "zero",
]

_HOMES = {
    "DSConfig": "ds_all.config",
    "Engine": "ds_zero.engine",
    "OnDevice": "ds_zero.on_device",
    "add_config_arguments": "ds_all.arguments",
    "add_tuning_arguments": "ds_zero.schedules",
    "init_distributed": "ds_comm.init",
    "initialize": "ds_all.facade",
}


def __getattr__(name: str) -> object:
    """Import a public name from its home."""
    if name in ("checkpointing", "linear", "ops", "utils", "zero"):
        return importlib.import_module(f"ds_all.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = vars(importlib.import_module(_HOMES[name]))[name]
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
