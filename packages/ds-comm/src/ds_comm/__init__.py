"""Distributed core of the toolkit: device, process groups, mesh, logging, errors.

Collectives are in ``ds_comm.collectives``, configuration sections in ``ds_comm.config``, test
support in ``ds_comm.testing``: imported only where named.
"""

from __future__ import annotations

from ds_comm._version import __version__
from ds_comm.device import (
    MemoryStats,
    backend_name,
    current_device,
    device_count,
    device_type,
    memory,
    reset_peak_memory,
    set_device,
    supports_bf16,
    synchronize,
)
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
from ds_comm.grid import Coordinates, MeshShape
from ds_comm.group import Group
from ds_comm.init import destroy, init_distributed, is_initialized
from ds_comm.logging import get_logger, log_once
from ds_comm.mesh import Mesh
from ds_comm.rendezvous import Rendezvous, discover

__all__ = [
    "CheckpointError",
    "CheckpointNotFoundError",
    "CommError",
    "CommTimeoutError",
    "ConfigError",
    "Coordinates",
    "DSError",
    "DivergenceError",
    "EditError",
    "EngineError",
    "Group",
    "MemoryStats",
    "Mesh",
    "MeshError",
    "MeshShape",
    "Rendezvous",
    "__version__",
    "backend_name",
    "current_device",
    "destroy",
    "device_count",
    "device_type",
    "discover",
    "get_logger",
    "init_distributed",
    "is_initialized",
    "log_once",
    "memory",
    "reset_peak_memory",
    "set_device",
    "supports_bf16",
    "synchronize",
]
