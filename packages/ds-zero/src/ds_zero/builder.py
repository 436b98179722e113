"""``initialize``: from a model and a configuration to an engine."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from ds_comm.collectives import collectives_for
from ds_comm.device import current_device
from ds_comm.errors import ConfigError, EngineError
from ds_comm.group import Group
from ds_comm.init import init_distributed
from ds_comm.mesh import Mesh
from ds_zero.checkpointing import configure_engine
from ds_zero.config import EngineConfig, ZeroSection
from ds_zero.core import ZeroCore
from ds_zero.data import DistributedLoader
from ds_zero.engine import Engine
from ds_zero.gradients import Averaging
from ds_zero.init import building_suspended
from ds_zero.optim import attach_optimizer, granularity_of, optimizer_from_config
from ds_zero.options import CoreOptions
from ds_zero.precision import AutocastChoice, ScalePolicy
from ds_zero.protocols import Schedule
from ds_zero.schedules import build_schedule
from ds_zero.units import UnitRules

__all__ = ["Initialized", "initialize"]

Config = Mapping[str, Any] | str | os.PathLike[str] | EngineConfig
Groups = Sequence[nn.Parameter] | Sequence[dict[str, Any]]


class Initialized(NamedTuple):
    """What :func:`initialize` returns; unpacks as ``engine, optimizer, dataloader, scheduler``."""

    engine: Engine
    optimizer: torch.optim.Optimizer | None
    dataloader: DistributedLoader | None
    scheduler: Schedule | None


@building_suspended()
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
    *,
    schema: type[EngineConfig] = EngineConfig,
) -> Initialized:
    """Put a model under ZeRO.  Collective: all ranks call it with the same model.

    Parameters keep their identity; their values become those of rank 0.

    Args:
        args: May carry ``deepspeed_config``, a path, instead of ``config``.
        model: Any ``nn.Module``.
        optimizer: An optimiser on the model's parameters, or a function that builds one from
            them; wins over the configuration's.
        model_parameters: What the configuration's optimiser trains: parameters or group
            dictionaries; all that require a gradient by default.
        training_data: A dataset; the result then has a loader of micro-batches for this rank.
        lr_scheduler: A schedule, or a function that builds one from the optimiser.
        distributed_port: Port of the rendezvous if the environment names none.
        mpu: A Megatron-style description of the process groups.
        dist_init_required: False leaves ``torch.distributed`` alone.
        collate_fn: Joins samples of ``training_data``.
        config: A mapping, a path, base64 JSON text, or an :class:`EngineConfig`.
        mesh_param: (data-parallel, sequence-parallel) sizes; the second must be 1 here.
        config_params: Old name of ``config``.
        schema: What the configuration may contain; a facade passes its own class.

    Returns:
        Engine, optimiser, loader (or None) and schedule (or None).

    Raises:
        ConfigError: The configuration is wrong, given twice or missing.
        EngineError: There is no model, or its parameters belong to another engine.
    """
    if not isinstance(model, nn.Module):
        raise EngineError(f"initialize() needs a model, an nn.Module; got {type(model).__name__}")
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise EngineError(
            "the model is wrapped in DistributedDataParallel, which would reduce gradients once "
            "more; pass model.module"
        )
    if dist_init_required is not False:
        init_distributed(distributed_port=distributed_port)
    mesh = _mesh(mpu, mesh_param)
    settings = schema.load(
        _one_config(args, config, config_params), data_parallel_size=mesh.data.size
    )
    device = current_device()
    if any(param.device != device for param in model.parameters()):
        model.to(device)
    built, groups = _optimizer(settings, model, optimizer, model_parameters)
    core = ZeroCore(
        model,
        [group["params"] for group in groups],
        collectives_for(mesh.shard),
        replace(_options(settings), granularity=granularity_of(built)),
    )
    if built is not None:
        core.optimizer = attach_optimizer(
            built,
            core.optimized_runs(),
            core.collectives,
            sharded=core.options.stage > 0,
            allow_untested=settings.zero_allow_untested_optimizer,
            state_dtype=_dtype(settings.optimizer_state_dtype),
        )
    if "activation_checkpointing" in settings.model_fields_set:
        configure_engine(settings.activation_checkpointing, mesh)
    schedule = _schedule(settings, built, lr_scheduler)
    engine = Engine(model, core, settings, mesh, schedule)
    engine.collate_fn = collate_fn
    if training_data is not None:
        loader = engine.deepspeed_io(training_data)
        assert isinstance(loader, DistributedLoader)
        engine.training_dataloader = loader
    engine.describe_start()
    return Initialized(engine, engine.optimizer, engine.training_dataloader, schedule)


def _one_config(args: Namespace | None, config: Config | None, old: Config | None) -> Config:
    """The only configuration among the places where one may be given."""
    named = {
        "config": config,
        "config_params": old,
        "args.deepspeed_config": getattr(args, "deepspeed_config", None),
        "args.deepscale_config": getattr(args, "deepscale_config", None),
    }
    given = {name: value for name, value in named.items() if value is not None}
    if len(given) != 1:
        raise ConfigError(
            f"give exactly one configuration; got {sorted(given) if given else 'none'} (pass "
            "config=..., or --deepspeed_config on the command line)"
        )
    return next(iter(given.values()))


def _mesh(mpu: Any, mesh_param: tuple[int, int] | None) -> Mesh:
    if mpu is not None:
        return Mesh.from_mpu(mpu)
    if mesh_param is not None and mesh_param[1] != 1:
        raise ConfigError(
            f"mesh_param={mesh_param}: sequence parallelism is not available yet; the second size "
            "must be 1"
        )
    world = Group.world()
    return Mesh.build(world_size=world.size, rank=world.ranks[world.rank])


def _options(config: EngineConfig) -> CoreOptions:
    zero = config.zero_optimization
    compute_dtype = _dtype(config.compute_dtype)
    summed = _dtype(config.data_types.grad_accum_dtype)
    return CoreOptions(
        stage=zero.stage,
        compute_dtype=None if compute_dtype == torch.float32 else compute_dtype,
        accumulation=config.batch.accumulation,
        clip_norm=config.gradient_clipping,
        accumulation_dtype=compute_dtype if config.narrow_masters and summed is None else summed,
        wire_dtype=_dtype(config.communication_data_type),
        sparse_gradients=config.sparse_gradients,
        ignore_unused=zero.ignore_unused_parameters,
        prefetch=zero.prefetch_bucket_size > 0 and zero.overlap_comm is not False,
        averaging=Averaging(
            mean=config.gradient_allreduce_op == "mean",
            predivide=config.gradient_predivide_factor,
        ),
        scaling=_scaling(config),
        narrow_masters=config.narrow_masters,
        autocast=_autocast(config),
        buffer_dtype=_dtype(config.data_types.buffer_dtype),
        rules=_rules(zero),
    )


def _scaling(config: EngineConfig) -> ScalePolicy | None:
    """How losses are scaled, if something is computed in fp16."""
    if not config.scales_loss:
        return None
    fp16 = config.fp16
    return ScalePolicy(
        initial=fp16.loss_scale or 2.0**fp16.initial_scale_power,
        dynamic=fp16.loss_scale == 0,
        window=fp16.loss_scale_window,
        hysteresis=fp16.hysteresis,
        consecutive=fp16.consecutive_hysteresis,
        minimum=fp16.min_loss_scale,
    )


def _autocast(config: EngineConfig) -> AutocastChoice | None:
    section = config.torch_autocast
    dtype = _dtype(section.dtype)
    if not section.enabled or dtype is None:
        return None
    return AutocastChoice(dtype, tuple(section.lower_precision_safe_modules))


def _dtype(name: str | None) -> torch.dtype | None:
    names = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    return names[name] if name is not None else None


def _rules(zero: ZeroSection) -> UnitRules:
    leaf = zero.leaf_module if "leaf_module" in zero.model_fields_set else None
    return UnitRules(
        block_classes=tuple(leaf.classes) if leaf and "classes" in leaf.model_fields_set else (),
        block_names=tuple(leaf.names) if leaf else (),
        block_suffixes=tuple(leaf.name_suffixes) if leaf else (),
        persistence_numel=zero.param_persistence_threshold,
        persistence_total_numel=zero.model_persistence_threshold,
    )


def _optimizer(
    config: EngineConfig,
    model: nn.Module,
    given: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None,
    parameters: Iterable[Any] | None,
) -> tuple[torch.optim.Optimizer | None, list[dict[str, Any]]]:
    """Build or take the optimiser; return it with its groups (one group without any)."""
    groups = _clean_groups(model, parameters)
    optimizer: torch.optim.Optimizer | None = None
    if isinstance(given, torch.optim.Optimizer):
        optimizer = given
    elif given is not None:
        optimizer = given(groups)
    elif config.optimizer is not None:
        optimizer = optimizer_from_config(config.optimizer, groups, model)
    if optimizer is not None:
        _check_members(model, optimizer)
        return optimizer, optimizer.param_groups
    return None, [{"params": [p for p in model.parameters() if p.requires_grad]}]


def _clean_groups(model: nn.Module, parameters: Iterable[Any] | None) -> Any:
    """Parameters or groups for an optimiser, without empty groups and frozen parameters."""
    items: list[Any] = list(parameters) if parameters is not None else list(model.parameters())
    if items and isinstance(items[0], dict):
        for group in items:
            group["params"] = _plain_params(group["params"])
        return [group for group in items if group["params"]]
    return [param for param in _plain_params(items) if param.requires_grad]


def _plain_params(params: Any) -> list[nn.Parameter]:
    """A list of parameters from one, several, or (name, parameter) pairs."""
    if isinstance(params, torch.Tensor):
        params = [params]
    return [item[1] if isinstance(item, tuple) else item for item in params]


def _check_members(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimiser on other tensors than the model's parameters."""
    members = {id(param) for param in model.parameters()}
    foreign = sum(
        id(param) not in members for group in optimizer.param_groups for param in group["params"]
    )
    if foreign:
        raise ConfigError(
            f"{foreign} tensors in the optimiser are not parameters of the model; build it from "
            "model.parameters()"
        )


def _schedule(
    config: EngineConfig,
    optimizer: torch.optim.Optimizer | None,
    given: Schedule | Callable[[torch.optim.Optimizer], Schedule] | None,
) -> Schedule | None:
    if given is None and config.scheduler is None:
        return None
    if optimizer is None:
        raise ConfigError("a learning-rate schedule needs an optimiser")
    if given is None:
        assert config.scheduler is not None
        built: Schedule = build_schedule(config.scheduler, optimizer)
        return built
    if callable(given) and (isinstance(given, type) or not hasattr(given, "state_dict")):
        return given(optimizer)
    other = getattr(given, "optimizer", optimizer)
    if other is not optimizer:
        raise ConfigError(
            f"lr_scheduler was built on another {type(other).__name__} than the engine's "
            f"{type(optimizer).__name__}; pass both, or a function that builds it"
        )
    return given  # type: ignore[return-value]
