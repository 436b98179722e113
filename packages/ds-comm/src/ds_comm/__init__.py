"""Distributed core of the toolkit: device, process groups, mesh, errors."""

from __future__ import annotations

from ds_comm._version import __version__
from ds_comm.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CommError,
    CommTimeoutError,
    ConfigError,
    DivergenceError,
    DSError,
    EditError,
    EngineError,
    MeshError,
)
from ds_comm.group import Group

__all__ = [
    "CheckpointError",
    "CheckpointNotFoundError",
    "CommError",
    "CommTimeoutError",
    "ConfigError",
    "DSError",
    "DivergenceError",
    "EditError",
    "EngineError",
    "Group",
    "MeshError",
    "__version__",
]
