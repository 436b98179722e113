"""``checkpoint`` and ``activation_checkpointing``: what is kept, on disk and for backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from ds_comm.config import Contradiction, Flag, NoEffect, NotYet, Section, Whole

__all__ = [
    "ActivationCheckpointingSection",
    "CheckpointSection",
    "ParallelWriteSection",
]

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
    """``activation_checkpointing``: how ``ds_zero.checkpointing`` keeps the inputs of checkpoints.

    Which parts of a model are recomputed is the model's own choice.
    """

    partition_activations: Flag = False
    """Cut inputs of checkpoints over the tensor-parallel ranks, which gather them in backward."""
    cpu_checkpointing: Flag = False
    """Keep inputs of checkpoints in page-locked host memory; nothing changes on the CPU."""
    contiguous_memory_optimization: Flag = False
    """Copy the parts that are kept into one buffer, against fragmentation."""
    number_checkpoints: Annotated[Whole, Field(gt=0)] | None = None
    """Checkpoints for which that buffer has room."""
    synchronize_checkpoint_boundary: Flag = False
    """Synchronise the device around every checkpoint."""
    profile: Flag = False
    """Log the times of every checkpoint; synchronises the device."""

    def contradictions(self) -> Iterator[Contradiction]:
        """One buffer without its size, or without copies to put there."""
        if not self.contiguous_memory_optimization:
            return
        if self.number_checkpoints is None:
            yield Contradiction(
                "contiguous_memory_optimization",
                "the buffer's size is needed: give number_checkpoints",
                ("contiguous_memory_optimization", "number_checkpoints"),
            )
        if not (self.partition_activations or self.cpu_checkpointing):
            yield Contradiction(
                "contiguous_memory_optimization",
                "inputs are copied only where they are cut or moved to the host: give "
                "partition_activations or cpu_checkpointing",
                (
                    "contiguous_memory_optimization",
                    "partition_activations",
                    "cpu_checkpointing",
                ),
            )
