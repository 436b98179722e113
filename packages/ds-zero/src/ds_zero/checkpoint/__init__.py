"""Sharded checkpoints that any world size and ZeRO stage can load; see docs/checkpoint-format.md.

Saving is collective (`save_checkpoint`), reading is not (`open_checkpoint`).  No pickle is written
or read, so loading runs no code.
"""

from __future__ import annotations

from ds_comm.errors import CheckpointError, CheckpointNotFoundError
from ds_zero.checkpoint.coordinator import Coordinator, SoloCoordinator
from ds_zero.checkpoint.dtypes import dtype_name
from ds_zero.checkpoint.folders import list_tags
from ds_zero.checkpoint.load import Checkpoint, open_checkpoint
from ds_zero.checkpoint.save import save_checkpoint
from ds_zero.checkpoint.types import BUFFER, PARAM, Chunk, Manifest, TensorInfo

__all__ = [
    "BUFFER",
    "PARAM",
    "Checkpoint",
    "CheckpointError",
    "CheckpointNotFoundError",
    "Chunk",
    "Coordinator",
    "Manifest",
    "SoloCoordinator",
    "TensorInfo",
    "dtype_name",
    "list_tags",
    "open_checkpoint",
    "save_checkpoint",
]
