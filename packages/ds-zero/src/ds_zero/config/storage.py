"""``checkpoint`` and ``activation_checkpointing``: what is kept, on disk and for backward."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from ds_comm.config import Flag, NoEffect, NotYet, Section, Whole

__all__ = [
    "ActivationCheckpointingSection",
    "CheckpointSection",
    "ParallelWriteSection",
]

_TORCH = "leave it out and use torch.utils.checkpoint in the model, which works at every stage"
_WRITER = "leave it out: every rank writes its own files in parallel"


def _capitalised(value: object) -> object:
    return value.capitalize() if isinstance(value, str) else value


class ParallelWriteSection(Section):
    """``checkpoint.parallel_write``: who writes the parts of a pipeline."""

    pipeline_stage: Annotated[Flag, NoEffect("every rank always writes its own part")] = False
    """Let every pipeline stage write its layers."""


class CheckpointSection(Section):
    """``checkpoint``: saving and loading."""

    tag_validation: Annotated[
        Literal["Ignore", "Warn", "Fail"],
        BeforeValidator(_capitalised),
        NoEffect("ranks that save under different tags are always an error"),
    ] = "Fail"
    """What to do when ranks save under different tags."""
    load_universal: Annotated[
        Flag, NoEffect("every checkpoint loads at every stage and on any number of ranks")
    ] = False
    """Load a checkpoint in the layout-independent format."""
    use_node_local_storage: Annotated[Flag, NotYet("save to a folder that all ranks share")] = False
    """Write to storage that each node has for itself."""
    parallel_write: ParallelWriteSection = Field(default_factory=ParallelWriteSection)
    """Who writes what."""
    checkpoint_serialization: Annotated[
        Flag, NoEffect("tensors are stored as safetensors, not by torch's serialisation")
    ] = True
    """Use the newer of torch's two file formats."""
    writer: Annotated[dict[str, Any] | None, NotYet(_WRITER)] = None
    """A writer other than the default one."""


class ActivationCheckpointingSection(Section):
    """``activation_checkpointing``: how checkpointed activations are stored."""

    partition_activations: Annotated[Flag, NotYet(_TORCH)] = False
    """Split saved activations over the tensor-parallel ranks."""
    cpu_checkpointing: Annotated[Flag, NotYet(_TORCH)] = False
    """Keep saved activations in host memory."""
    contiguous_memory_optimization: Annotated[Flag, NotYet(_TORCH)] = False
    """Copy saved activations into one buffer."""
    number_checkpoints: Annotated[Whole | None, NotYet(_TORCH)] = None
    """Number of checkpoints in that buffer."""
    synchronize_checkpoint_boundary: Annotated[Flag, NotYet(_TORCH)] = False
    """Synchronise the device at every checkpoint."""
    profile: Annotated[Flag, NotYet(_TORCH)] = False
    """Time the forward and backward pass of every checkpoint."""
