"""Between an engine and the checkpoint format: what is written, and where it is read back to.

Every rank writes its shard at every stage, and reads whatever ranges its own layout needs, so any
stage and number of ranks loads what any other saved.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from ds_comm.collectives import broadcast_object, gather_objects
from ds_comm.errors import CheckpointError, CheckpointNotFoundError, ConfigError
from ds_comm.group import Group
from ds_comm.logging import get_logger
from ds_zero.checkpoint import (
    BUFFER,
    PARAM,
    Checkpoint,
    Chunk,
    Manifest,
    TensorInfo,
    dtype_name,
    open_checkpoint,
    save_checkpoint,
)
from ds_zero.core import ZeroCore
from ds_zero.export import persistent_buffers
from ds_zero.held import held_tensors
from ds_zero.optim.base import OptimizedRun
from ds_zero.optim.flat import family_of

if TYPE_CHECKING:
    from ds_zero.readings import EngineReadings

__all__ = ["load_engine", "save_engine"]

logger = get_logger(__name__)

T = TypeVar("T")


class GroupCoordinator:
    """The checkpoint code's view of a process group."""

    def __init__(self, group: Group) -> None:
        """Serve ``group``."""
        self._group = group

    @property
    def rank(self) -> int:
        """Index of this rank."""
        return self._group.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._group.size

    def gather(self, value: T) -> list[T] | None:
        """Collect one value a rank on rank 0."""
        values = gather_objects(value, self._group)
        return values if self._group.rank == 0 else None

    def broadcast(self, value: T) -> T:
        """Return rank 0's value."""
        return broadcast_object(value, self._group)


class StoredStates:
    """Optimiser states in a checkpoint, as the optimisers ask for them."""

    def __init__(self, checkpoint: Checkpoint | None) -> None:
        """Read from ``checkpoint``; without one there are no states."""
        self._checkpoint = checkpoint
        self._names = (
            {info.name for info in checkpoint.manifest.parameters} if checkpoint else set()
        )

    def kinds(self, name: str) -> set[str]:
        """Kinds of state that are stored for a parameter."""
        if self._checkpoint is None or name not in self._names:
            return set()
        return self._checkpoint.kinds(name) - {PARAM, BUFFER}

    def shape(self, kind: str, name: str) -> tuple[int, ...]:
        """Shape of a stored state."""
        assert self._checkpoint is not None
        return self._checkpoint.shape(kind, name)

    def read(self, kind: str, name: str, start: int, out: Tensor) -> None:
        """Fill ``out`` with elements from ``start`` on."""
        assert self._checkpoint is not None
        self._checkpoint.read(kind, name, start, out)

    def scalars(self, name: str) -> Mapping[str, float]:
        """Scalar states of a parameter."""
        if self._checkpoint is None:
            return {}
        stored = self._checkpoint.manifest.scalars.get(name, {})
        return {key: float(value) for key, value in stored.items()}


def save_engine(
    engine: EngineReadings,
    folder: str | os.PathLike[str],
    tag: str,
    client_state: Mapping[str, Any],
    *,
    save_latest: bool,
    exclude_frozen: bool,
) -> None:
    """Write the whole state of ``engine``.  Collective.  See ``Engine.save_checkpoint``."""
    manifest = _manifest(engine, exclude_frozen=exclude_frozen)
    save_checkpoint(
        folder,
        tag,
        manifest,
        _chunks(engine.core, set(manifest.excluded)),
        client_state,
        GroupCoordinator(engine.core.collectives.group),
        save_latest=save_latest,
    )


def _manifest(engine: EngineReadings, *, exclude_frozen: bool) -> Manifest:
    core = engine.core
    params = _parameter_infos(core)
    optimizer = core.optimizer
    loader = engine.training_dataloader
    return Manifest(
        parameters=params,
        buffers=_buffer_infos(core),
        aliases=core.aliases,
        mesh={"world": core.collectives.group.size, "stage": core.options.stage},
        counters=asdict(engine.counters),
        scalars=optimizer.scalars() if optimizer is not None else {},
        schedule=engine.lr_scheduler.state_dict() if engine.lr_scheduler is not None else None,
        loss_scale=core.scaler.state_dict() if core.scaler is not None else None,
        data=loader.state_dict() if loader is not None else None,
        optimizer=_describe_optimizer(core),
        excluded=tuple(i.name for i in params if exclude_frozen and not i.trainable),
        state_shapes=optimizer.state_shapes() if optimizer is not None else {},
    )


def _parameter_infos(core: ZeroCore) -> tuple[TensorInfo, ...]:
    specs = {spec.name: spec for spec in core.layout.params}
    return tuple(
        TensorInfo(
            name=name,
            shape=specs[name].shape,
            dtype=dtype_name(specs[name].dtype),
            trainable=specs[name].trainable,
            group=specs[name].group if specs[name].trainable else -1,
        )
        for name in core.params
    ) + tuple(
        TensorInfo(name, held.tensor.shape, dtype_name(held.tensor.data.dtype), False, -1)
        for name, held in held_tensors(core.model).items()
    )


def _buffer_infos(core: ZeroCore) -> tuple[TensorInfo, ...]:
    return tuple(
        TensorInfo(name, tuple(b.shape), dtype_name(b.dtype), trainable=False, group=-1)
        for name, b in persistent_buffers(core).items()
    )


def _describe_optimizer(core: ZeroCore) -> dict[str, Any] | None:
    if core.optimizer is None:
        return None
    optimizer = core.optimizer.optimizer
    groups = [
        {key: _plain(value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    return {
        "type": type(optimizer).__name__,
        "family": family_of(optimizer),
        "param_groups": groups,
    }


def _plain(value: Any) -> Any:
    """A hyper-parameter as JSON: tensors become numbers, tuples lists."""
    if isinstance(value, Tensor):
        return float(value)
    return list(value) if isinstance(value, tuple) else value


def _chunks(core: ZeroCore, excluded: set[str]) -> Iterator[Chunk]:
    for unit in core.units:
        for run in unit.runs:
            values = run.master_shard()
            for piece in run.layout.pieces(run.shard):
                if piece.spec.name not in excluded:
                    data = values[piece.shard_start : piece.shard_start + piece.numel]
                    yield Chunk(PARAM, piece.spec.name, piece.param_start, data.detach())
    if core.optimizer is not None:
        for kind, name, start, data in core.optimizer.state_ranges():
            yield Chunk(kind, name, start, data.detach().contiguous())
    if core.collectives.group.rank == 0:
        for name, buffer in persistent_buffers(core).items():
            yield Chunk(BUFFER, name, 0, buffer.detach().reshape(-1).contiguous())
    for name, held in held_tensors(core.model).items():
        mine = not held.tensor.replicated or core.collectives.group.rank == 0
        if mine and name not in excluded:
            yield Chunk(PARAM, name, held.tensor.start, held.tensor.data)


# ---- loading ---------------------------------------------------------------------------------


def load_engine(
    engine: EngineReadings,
    folder: str | os.PathLike[str],
    tag: str | int | None,
    *,
    strict: bool,
    optimizer: bool,
    schedule: bool,
    counters: bool,
    missing_ok: bool,
) -> tuple[str | None, dict[str, Any] | None]:
    """Read the whole state of ``engine``.  Collective.  See ``Engine.load_checkpoint``."""
    group = engine.core.collectives.group
    checkpoint, problem = _try_open(folder, tag)
    problems = gather_objects(problem, group)
    found = next((item for item in problems if item is not None), None)
    if found is not None:
        if missing_ok and isinstance(found, CheckpointNotFoundError):
            return None, None
        raise found
    assert checkpoint is not None
    with checkpoint:
        checkpoint.require(_parameter_infos(engine.core), _buffer_infos(engine.core), strict=strict)
        manifest = checkpoint.manifest
        # What may not fit comes first, so that an error leaves the engine as it was.
        if optimizer and engine.core.optimizer is not None:
            _check_family(engine.core.optimizer.optimizer, manifest)
        if counters:
            _load_position(engine, manifest)
        _load_weights(engine.core, checkpoint)
        if engine.core.optimizer is not None:
            _load_optimizer(engine.core, checkpoint if optimizer else None)
        if optimizer or counters:
            _load_loss_scale(engine.core, checkpoint if optimizer else None)
        if schedule and engine.lr_scheduler is not None and isinstance(manifest.schedule, dict):
            engine.lr_scheduler.load_state_dict(manifest.schedule)
        if counters:
            _load_counters(engine, manifest)
        return str(checkpoint.path), checkpoint.client_state


def _try_open(
    folder: str | os.PathLike[str], tag: str | int | None
) -> tuple[Checkpoint | None, CheckpointError | None]:
    try:
        return open_checkpoint(folder, tag), None
    except CheckpointError as error:
        return None, error


def _load_weights(core: ZeroCore, checkpoint: Checkpoint) -> None:
    core.check_not_held("load_checkpoint()")
    core.tracker.end_step()
    core.gradients.clear()
    excluded = set(checkpoint.manifest.excluded)
    stored = {info.name for info in checkpoint.manifest.parameters} - excluded
    aliases = checkpoint.manifest.aliases
    for run in (run for unit in core.units for run in unit.runs):
        for piece in OptimizedRun(run).pieces():
            if aliases.get(piece.spec.name, piece.spec.name) in stored:
                out = run.master[piece.shard_start : piece.shard_start + piece.numel]
                checkpoint.read(PARAM, piece.spec.name, piece.param_start, out)
    core.publish(frozen=True)
    names = {info.name for info in checkpoint.manifest.buffers}
    for name, buffer in persistent_buffers(core).items():
        if name in names and buffer.numel():
            flat = buffer.detach().reshape(-1).clone()
            checkpoint.read(BUFFER, name, 0, flat)
            buffer.copy_(flat.view(buffer.shape))
    for name, held in held_tensors(core.model).items():
        if name in stored:
            data = torch.empty_like(held.tensor.data)
            checkpoint.read(PARAM, name, held.tensor.start, data)
            held.replace(data)


def _load_optimizer(core: ZeroCore, checkpoint: Checkpoint | None) -> None:
    assert core.optimizer is not None
    if checkpoint is not None:
        stored = checkpoint.manifest.optimizer
        if isinstance(stored, dict):
            _load_groups(core.optimizer.optimizer.param_groups, stored.get("param_groups"))
    core.optimizer.load(StoredStates(checkpoint))


def _load_loss_scale(core: ZeroCore, checkpoint: Checkpoint | None) -> None:
    """Restore the loss scale; it begins anew where none is stored, as the optimiser does."""
    if core.scaler is None:
        return
    stored = checkpoint.manifest.loss_scale if checkpoint is not None else None
    if isinstance(stored, dict):
        core.scaler.load_state_dict(stored)
    else:
        core.scaler.reset()


def _check_family(optimizer: torch.optim.Optimizer, manifest: Manifest) -> None:
    """Refuse the states of an optimiser of another kind."""
    if not isinstance(manifest.optimizer, dict):
        return
    stored, present = str(manifest.optimizer.get("type")), type(optimizer).__name__
    # Checkpoints of the first version name no family.
    if manifest.optimizer.get("family", family_of(stored)) != family_of(optimizer):
        raise CheckpointError(
            f"the checkpoint holds states of {stored}, but the engine trains with {present}; load "
            "it with load_optimizer_states=False to start the optimiser anew"
        )


def _load_groups(groups: list[dict[str, Any]], stored: Any) -> None:
    """Restore hyper-parameters where the groups correspond."""
    if not isinstance(stored, list) or len(stored) != len(groups):
        logger.warning("the checkpoint has other parameter groups: hyper-parameters are kept")
        return
    for group, values in zip(groups, stored, strict=True):
        for key, value in values.items():
            if key not in group or key == "params":
                continue
            if isinstance(group[key], Tensor):
                group[key].fill_(value)
            else:
                group[key] = tuple(value) if isinstance(value, list) else value


def _load_counters(engine: EngineReadings, manifest: Manifest) -> None:
    counters = engine.counters
    counters.global_steps = int(manifest.counters["global_steps"])
    counters.global_samples = int(manifest.counters["global_samples"])
    counters.skipped_steps = int(manifest.counters["skipped_steps"])
    # A window that was cut by the save begins anew, whatever its length is now.
    counters.micro_steps = counters.global_steps * engine.gradient_accumulation_steps()
    engine.window.restart()
    engine.core.forget_gradients()


def _load_position(engine: EngineReadings, manifest: Manifest) -> None:
    """Restore where the data loader was.

    Raises:
        CheckpointError: The dataset has another length.
    """
    loader = engine.training_dataloader
    if loader is not None and isinstance(manifest.data, dict):
        try:
            loader.load_state_dict(manifest.data)
        except ConfigError as error:
            raise CheckpointError(f"the data position does not fit the dataset: {error}") from error
