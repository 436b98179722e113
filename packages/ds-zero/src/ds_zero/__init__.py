"""ZeRO training engine: stages 0 to 3 as one mechanism, from a ``ds_config``.

Names are imported when they are first used, so that ``import ds_zero`` costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from ds_zero._version import __version__

if TYPE_CHECKING:
    from ds_zero import checkpointing
    from ds_zero.builder import Initialized, initialize
    from ds_zero.config import EngineConfig
    from ds_zero.core import StepReport, ZeroCore
    from ds_zero.data import DistributedLoader, RepeatingLoader
    from ds_zero.engine import Engine
    from ds_zero.external import register_external_parameter, unregister_external_parameter
    from ds_zero.fragments import (
        safe_get_full_fp32_param,
        safe_get_full_grad,
        safe_get_full_optimizer_state,
        safe_get_local_fp32_param,
        safe_get_local_grad,
        safe_get_local_optimizer_state,
        safe_set_full_fp32_param,
        safe_set_full_grad,
        safe_set_full_optimizer_state,
        safe_set_local_fp32_param,
        safe_set_local_grad,
        safe_set_local_optimizer_state,
        safe_update_full_grad_vectorized,
    )
    from ds_zero.gather_once import unwrap_model_for_generation
    from ds_zero.gathered import GatheredParameters
    from ds_zero.init import Init
    from ds_zero.leaf_modules import (
        get_z3_leaf_modules,
        set_z3_leaf_module,
        set_z3_leaf_modules,
        set_z3_leaf_modules_by_name,
        set_z3_leaf_modules_by_suffix,
        unset_z3_leaf_modules,
        unset_z3_leaf_modules_by_name,
        unset_z3_leaf_modules_by_suffix,
        z3_leaf_module,
        z3_leaf_parameter,
    )
    from ds_zero.on_device import OnDevice
    from ds_zero.options import CoreOptions
    from ds_zero.schedules import add_tuning_arguments

__all__ = [
    "CoreOptions",
    "DistributedLoader",
    "Engine",
    "EngineConfig",
    "GatheredParameters",
    "Init",
    "Initialized",
    "OnDevice",
    "RepeatingLoader",
    "StepReport",
    "ZeroCore",
    "__version__",
    "add_tuning_arguments",
    "checkpointing",
    "get_z3_leaf_modules",
    "initialize",
    "register_external_parameter",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "safe_update_full_grad_vectorized",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix",
    "unregister_external_parameter",
    "unset_z3_leaf_modules",
    "unset_z3_leaf_modules_by_name",
    "unset_z3_leaf_modules_by_suffix",
    "unwrap_model_for_generation",
    "z3_leaf_module",
    "z3_leaf_parameter",
]

_HOMES = {
    "CoreOptions": "ds_zero.options",
    "DistributedLoader": "ds_zero.data",
    "Engine": "ds_zero.engine",
    "EngineConfig": "ds_zero.config",
    "GatheredParameters": "ds_zero.gathered",
    "Init": "ds_zero.init",
    "Initialized": "ds_zero.builder",
    "OnDevice": "ds_zero.on_device",
    "RepeatingLoader": "ds_zero.data",
    "StepReport": "ds_zero.core",
    "ZeroCore": "ds_zero.core",
    "add_tuning_arguments": "ds_zero.schedules",
    "initialize": "ds_zero.builder",
    "safe_get_full_fp32_param": "ds_zero.fragments",
    "safe_get_full_grad": "ds_zero.fragments",
    "safe_get_full_optimizer_state": "ds_zero.fragments",
    "safe_get_local_fp32_param": "ds_zero.fragments",
    "safe_get_local_grad": "ds_zero.fragments",
    "safe_get_local_optimizer_state": "ds_zero.fragments",
    "safe_set_full_fp32_param": "ds_zero.fragments",
    "safe_set_full_grad": "ds_zero.fragments",
    "safe_set_full_optimizer_state": "ds_zero.fragments",
    "safe_set_local_fp32_param": "ds_zero.fragments",
    "safe_set_local_grad": "ds_zero.fragments",
    "safe_set_local_optimizer_state": "ds_zero.fragments",
    "safe_update_full_grad_vectorized": "ds_zero.fragments",
    "get_z3_leaf_modules": "ds_zero.leaf_modules",
    "set_z3_leaf_module": "ds_zero.leaf_modules",
    "set_z3_leaf_modules": "ds_zero.leaf_modules",
    "set_z3_leaf_modules_by_name": "ds_zero.leaf_modules",
    "set_z3_leaf_modules_by_suffix": "ds_zero.leaf_modules",
    "unset_z3_leaf_modules": "ds_zero.leaf_modules",
    "unset_z3_leaf_modules_by_name": "ds_zero.leaf_modules",
    "unset_z3_leaf_modules_by_suffix": "ds_zero.leaf_modules",
    "z3_leaf_module": "ds_zero.leaf_modules",
    "z3_leaf_parameter": "ds_zero.leaf_modules",
    "unwrap_model_for_generation": "ds_zero.gather_once",
    "register_external_parameter": "ds_zero.external",
    "unregister_external_parameter": "ds_zero.external",
}


def __getattr__(name: str) -> object:
    """Import a public name from its home."""
    if name == "checkpointing":
        return importlib.import_module("ds_zero.checkpointing")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = vars(importlib.import_module(_HOMES[name]))[name]
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
