"""The whole toolkit under the familiar names: ``import ds_all as deepspeed``."""

from __future__ import annotations

from ds_all import zero
from ds_all._version import __version__
from ds_all.arguments import add_config_arguments
from ds_all.config import DSConfig
from ds_all.initialize import initialize
from ds_comm.init import init_distributed
from ds_zero import Engine, add_tuning_arguments

__all__ = [
    "DSConfig",
    "Engine",
    "__version__",
    "add_config_arguments",
    "add_tuning_arguments",
    "init_distributed",
    "initialize",
    "zero",
]
