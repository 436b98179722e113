"""The module-level functions, in the place of ``deepspeed.checkpointing``.

Their signatures leave no argument for an object, so the present choice is one per process.  A
program that wants several holds :class:`ActivationCheckpointing` objects instead.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from ds_comm import device
from ds_comm.config import build, load_document
from ds_comm.errors import ConfigError
from ds_comm.group import Group
from ds_comm.logging import get_logger
from ds_comm.mesh import Mesh
from ds_comm.mpu import groups_of
from ds_zero.checkpointing.rng import MODEL_PARALLEL_RNG, RngTracker
from ds_zero.checkpointing.run import ActivationCheckpointing
from ds_zero.config import ActivationCheckpointingSection, EngineConfig

__all__ = [
    "checkpoint",
    "configure",
    "configure_engine",
    "get_cuda_rng_tracker",
    "is_configured",
    "model_parallel_cuda_manual_seed",
    "non_reentrant_checkpoint",
    "partition_activations_in_checkpoint",
    "reset",
    "set_num_layers",
]

logger = get_logger(__name__)

_TENSOR_SEED_OFFSET = 2718
"""Megatron-LM's: far from the seeds that people choose."""


@dataclass
class _Present:
    """What the functions of this module act on."""

    tracker: RngTracker = field(default_factory=RngTracker)
    tensor: Group = field(default_factory=Group.solo)
    runner: ActivationCheckpointing | None = None
    """None until :func:`configure` was called, or the first checkpoint ran."""
    configured: bool = False
    by_hand: bool = False
    """Whether :func:`configure` was called, which wins over the section of an engine."""

    def get(self) -> ActivationCheckpointing:
        if self.runner is None:
            self.runner = ActivationCheckpointing(None, self.tensor, self.tracker)
        return self.runner

    def choose(self, options: ActivationCheckpointingSection, tensor: Group | None) -> None:
        self.tensor = tensor or self.tensor
        self.runner = ActivationCheckpointing(options, self.tensor, self.tracker)


_present = _Present()


def configure(
    mpu_: Any = None,
    deepspeed_config: Mapping[str, Any] | str | os.PathLike[str] | EngineConfig | None = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Choose how the inputs of checkpoints are kept.  Collective over the tensor ranks.

    Arguments that are given win over the document; what neither says stays as it was.

    Args:
        mpu_: A Megatron-style object with the tensor-parallel group, or a
            :class:`~ds_comm.mesh.Mesh`; None keeps the present one, at first a single rank.
        deepspeed_config: A ``ds_config``, of which the section ``activation_checkpointing`` is
            read: a mapping, a path, base64 JSON text, or a loaded configuration.
        partition_activations: Cut inputs over the tensor ranks.
        contiguous_checkpointing: Copy the parts into one buffer; needs ``num_checkpoints``.
        num_checkpoints: Checkpoints that are alive at once.
        checkpoint_in_cpu: Keep inputs in host memory.
        synchronize: Synchronise the device around every checkpoint.
        profile: Log the times of every checkpoint.

    Raises:
        ConfigError: A value is malformed, or the values do not go together.
        MeshError: ``mpu_`` lacks a verb.
    """
    options = _present.get().options
    if deepspeed_config is not None:
        options = _section_of(deepspeed_config)
    _present.choose(
        _changed(
            options,
            partition_activations=partition_activations,
            contiguous_memory_optimization=contiguous_checkpointing,
            number_checkpoints=num_checkpoints,
            cpu_checkpointing=checkpoint_in_cpu,
            synchronize_checkpoint_boundary=synchronize,
            profile=profile,
        ),
        _tensor_group(mpu_),
    )
    _present.configured = _present.by_hand = True


def configure_engine(options: ActivationCheckpointingSection, mesh: Mesh) -> None:
    """Apply the section of an engine's configuration, unless :func:`configure` was called.

    Args:
        options: The section.
        mesh: The engine's groups.
    """
    if _present.by_hand:
        if options != _present.get().options:
            logger.warning(
                "activation_checkpointing of the configuration is not applied, because "
                "checkpointing.configure() was called with other values: %s",
                _present.get().options,
            )
        return
    _present.choose(options, mesh.tensor)
    _present.configured = True


def is_configured() -> bool:
    """Whether :func:`configure` was called, or an engine had the section in its configuration."""
    return _present.configured


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run ``function`` and recompute it in backward, by reentrant autograd.

    See :meth:`ActivationCheckpointing.checkpoint`; works without :func:`configure` too.
    """
    return _present.get().checkpoint(function, *args, **kwargs)


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run ``function`` and recompute in backward what that needs.

    See :meth:`ActivationCheckpointing.non_reentrant_checkpoint`; works without :func:`configure`.
    """
    return _present.get().non_reentrant_checkpoint(function, *args, **kwargs)


def reset() -> None:
    """Drop the buffers of stored inputs.  Never needed between iterations."""
    _present.get().reset()


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Switch the cutting of inputs over the tensor ranks.  Collective over them."""
    options = _changed(_present.get().options, partition_activations=partition_activation)
    _present.choose(options, None)


def set_num_layers(nlayers: int) -> None:
    """Set the number of checkpoints that the contiguous buffer has room for."""
    _present.choose(_changed(_present.get().options, number_checkpoints=nlayers), None)


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the device with ``seed`` and the state of :func:`get_cuda_rng_tracker` per tensor rank.

    Args:
        seed: Equal on all ranks; the tensor ranks' states start at ``seed + 2718 + rank``.
    """
    device.manual_seed(seed)
    _present.tracker.reset()
    _present.tracker.add(MODEL_PARALLEL_RNG, seed + _TENSOR_SEED_OFFSET + _present.tensor.rank)


def get_cuda_rng_tracker() -> RngTracker:
    """Return the named random states that recomputations restore, on any device."""
    return _present.tracker


def _changed(
    options: ActivationCheckpointingSection, **values: Any
) -> ActivationCheckpointingSection:
    """Options with those of ``values`` that are not None."""
    given = {name: value for name, value in values.items() if value is not None}
    try:
        return ActivationCheckpointingSection(**{**options.model_dump(), **given})
    except ValidationError as error:
        lines = "; ".join(
            f"{'.'.join(map(str, e['loc'])) or 'activation_checkpointing'}: {e['msg']}"
            for e in error.errors()
        )
        raise ConfigError(f"activation checkpointing: {lines}; given {given}") from None


def _section_of(
    config: Mapping[str, Any] | str | os.PathLike[str] | EngineConfig,
) -> ActivationCheckpointingSection:
    if isinstance(config, EngineConfig):
        return config.activation_checkpointing
    document = load_document(config)
    section = document.get("activation_checkpointing", {})
    return build(ActivationCheckpointingSection, section, where="activation_checkpointing")


def _tensor_group(mpu: Any) -> Group | None:
    if mpu is None:
        return None
    return mpu.tensor if isinstance(mpu, Mesh) else groups_of(mpu).tensor
