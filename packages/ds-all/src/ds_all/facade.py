"""``initialize`` for the whole ``ds_config``."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

import ds_zero
from ds_all.config import DSConfig
from ds_zero.builder import Config, Initialized
from ds_zero.protocols import Schedule

__all__ = ["initialize"]


def initialize(
    args: Namespace | None = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Schedule | Callable[[torch.optim.Optimizer], Schedule] | None = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Config | None = None,
    mesh_param: tuple[int, int] | None = None,
    config_params: Config | None = None,
) -> Initialized:
    """Build an engine from the whole ``ds_config``, with DeepSpeed's signature.  Collective.

    A section whose feature is not there yet is refused by name.  The arguments are those of
    :func:`ds_zero.initialize`.

    Returns:
        A named tuple that unpacks as ``engine, optimizer, dataloader, scheduler``.

    Raises:
        ConfigError: With everything that is wrong in the configuration.
        EngineError: There is no model, or its parameters belong to another engine.
    """
    return ds_zero.initialize(
        args=args,
        model=model,
        optimizer=optimizer,
        model_parameters=model_parameters,
        training_data=training_data,
        lr_scheduler=lr_scheduler,
        distributed_port=distributed_port,
        mpu=mpu,
        dist_init_required=dist_init_required,
        collate_fn=collate_fn,
        config=config,
        mesh_param=mesh_param,
        config_params=config_params,
        schema=DSConfig,
    )
