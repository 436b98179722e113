"""The whole configuration that the engine reads."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import Field

from ds_comm.config import (
    Contradiction,
    DTypeName,
    Flag,
    KeyRules,
    NoEffect,
    NotYet,
    Number,
    ProblemKind,
    Renamed,
    Report,
    Section,
    Shorthand,
    Whole,
    collect,
    load_document,
)
from ds_comm.errors import ConfigError
from ds_zero.config.absent import ELSEWHERE, REMOVED
from ds_zero.config.batch import BatchSizes, resolve_batch_sizes
from ds_zero.config.compile import CompileSection
from ds_zero.config.optim import OptimizerSection, SchedulerSection
from ds_zero.config.precision import (
    Bf16Section,
    DataTypesSection,
    Fp16Section,
    TorchAutocastSection,
)
from ds_zero.config.storage import ActivationCheckpointingSection, CheckpointSection
from ds_zero.config.zero import ZeroSection

__all__ = ["EngineConfig"]

_E = TypeVar("_E", bound="EngineConfig")
_BATCH_KEYS = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)


class EngineConfig(Section):
    """What the engine needs to know, read from a ``ds_config`` document.

    ``EngineConfig.load`` is the way to get one: it resolves the batch sizes, so that the three
    batch fields are integers afterwards.
    """

    train_batch_size: Whole | None = None
    """Samples per optimiser step over all data-parallel ranks."""
    train_micro_batch_size_per_gpu: Whole | None = None
    """Samples per forward pass on one rank."""
    gradient_accumulation_steps: Whole | None = None
    """Micro-batches per optimiser step."""
    steps_per_print: Annotated[Whole, Field(gt=0)] | None = None
    """Optimiser steps between progress lines; ``null`` prints none."""
    optimizer: OptimizerSection | None = None
    """Which optimiser updates the parameters."""
    scheduler: SchedulerSection | None = None
    """How the learning rate moves."""
    gradient_clipping: Annotated[Number, Field(ge=0)] = 1.0
    """Largest norm of all gradients together; 0 turns clipping off."""
    zero_optimization: ZeroSection = Field(default_factory=ZeroSection)
    """What is sharded over the ranks."""
    bf16: Bf16Section = Field(default_factory=Bf16Section)
    """Training in bfloat16."""
    fp16: Fp16Section = Field(default_factory=Fp16Section)
    """Training in float16."""
    torch_autocast: TorchAutocastSection = Field(default_factory=TorchAutocastSection)
    """Training under torch's autocast."""
    data_types: DataTypesSection = Field(default_factory=DataTypesSection)
    """Dtypes other than those of the precision mode."""
    communication_data_type: DTypeName | None = None
    """Dtype in which gradients are reduced; ``null`` means fp32 when accumulating and the compute
    dtype otherwise."""
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    """Saving and loading."""
    activation_checkpointing: ActivationCheckpointingSection = Field(
        default_factory=ActivationCheckpointingSection
    )
    """How checkpointed activations are stored."""
    compile: CompileSection = Field(default_factory=CompileSection)
    """What ``engine.compile()`` does."""
    zero_allow_untested_optimizer: Flag = False
    """Take an optimiser that is not known to work on shards: each parameter is updated whole, by
    one rank."""
    dataloader_drop_last: Flag = False
    """Drop the last, smaller batch of an epoch."""
    wall_clock_breakdown: Flag = False
    """Time forward, backward and step; synchronises the device."""
    dump_state: Flag = False
    """Log the configuration and the model's units at the start."""

    managed_gradient_accumulation: Flag = True
    """Let the engine decide which step() updates; ``false`` makes every step() update. Gradients
    are divided by ``gradient_accumulation_steps`` either way."""
    gradient_allreduce_op: Literal["mean", "sum"] = "mean"
    """How gradients of the ranks are combined; micro-batches are averaged in either case."""
    prescale_gradients: Annotated[
        Flag, NoEffect("gradients are divided before the reduction anyway")
    ] = False
    """Divide gradients before rather than after the reduction."""
    gradient_predivide_factor: Annotated[Number, Field(gt=0)] = 1.0
    """Divide gradients by this before the reduction and by the rest after it; 1 divides by
    everything before it. Another factor leaves ``param.grad`` empty at stage 0."""
    seq_parallel_communication_data_type: Annotated[
        DTypeName, NotYet("leave it out: there is no sequence parallelism yet")
    ] = "float32"
    """Dtype of reductions over the sequence-parallel ranks."""
    sparse_gradients: Flag = False
    """Reduce gradients of embeddings as rows, where that is fewer bytes."""
    memory_breakdown: Annotated[
        Flag, NotYet("read the device's memory statistics through ds_comm.device")
    ] = False
    """Log memory use at every phase."""
    graph_harvesting: Annotated[Flag, NotYet("leave it false")] = False
    """Capture gradient copies as a CUDA graph."""
    use_data_before_expert_parallelism: Annotated[
        Flag, NotYet("leave it false: it will come with ds-moe")
    ] = False
    """Order of the data-parallel and expert-parallel axes."""
    sequence_parallel_size: Annotated[
        Whole | None, NotYet("leave it out: there is no sequence parallelism yet", also=(1,))
    ] = None
    """Ranks that share one sequence."""
    data_parallel_size: Annotated[Whole, Field(ge=1)] | None = None
    """Number of data-parallel ranks; if given, it must be the actual one."""
    log_level: Annotated[
        str | None, NotYet('call logging.getLogger("ds_zero").setLevel(...) instead')
    ] = None
    """Level of log messages."""
    zero_force_ds_cpu_optimizer: Annotated[
        Flag, NoEffect("it only concerns optimisers on the host, and nothing is offloaded yet")
    ] = True
    """Insist on the toolkit's own optimiser for offloaded states."""
    disable_allgather: Annotated[
        Flag, NoEffect("the stage decides whether parameters are gathered")
    ] = False
    """An old switch that did nothing in its last versions either."""
    vocabulary_size: Annotated[
        Whole | None, NoEffect("the shape of an embedding is the model's own affair")
    ] = None
    """Rows of the embedding, for advice on padding."""

    key_rules: ClassVar[KeyRules] = KeyRules(
        renamed=(
            Renamed("bfloat16", ("bf16",)),
            Renamed("allgather_size", ("zero_optimization.allgather_bucket_size",)),
        ),
        shorthands=(Shorthand("zero_optimization", bool, lambda on: {"stage": 1 if on else 0}),),
        removed=REMOVED,
        elsewhere=ELSEWHERE,
    )

    def contradictions(self) -> Iterator[Contradiction]:
        """Two precision modes at once, and a parameter dtype that is not the mode's."""
        modes = {
            "bf16": self.bf16.enabled,
            "fp16": self.fp16.enabled,
            "torch_autocast": self.torch_autocast.enabled,
        }
        switches = tuple(f"{mode}.enabled" for mode in modes)
        if modes["bf16"] and modes["fp16"]:
            yield Contradiction(
                "fp16.enabled",
                "bf16 is enabled too; a model computes in one dtype, so enable one of them",
                switches[:2],
            )
        for mode in ("bf16", "fp16"):
            if modes[mode] and modes["torch_autocast"]:
                yield Contradiction(
                    "torch_autocast.enabled",
                    f"{mode} is enabled too; autocast needs fp32 parameters",
                    (f"{mode}.enabled", "torch_autocast.enabled"),
                )
        param_dtype = self.data_types.param_dtype
        if param_dtype is not None and param_dtype != self.compute_dtype:
            yield Contradiction(
                "data_types.param_dtype",
                f"{param_dtype} differs from {self.compute_dtype}, the dtype of the precision "
                "mode; leave it out",
                (*switches, "data_types.param_dtype"),
            )
        if self.data_types.grad_accum_dtype == "float16" and not self.scales_loss:
            yield Contradiction(
                "data_types.grad_accum_dtype",
                'accumulating in fp16 needs the loss scaling of fp16 training; write "fp32" or '
                '"bf16"',
                (*switches, "torch_autocast.dtype", "data_types.grad_accum_dtype"),
            )

    @property
    def scales_loss(self) -> bool:
        """Whether something is computed in fp16, so that losses are scaled."""
        autocast = self.torch_autocast
        return self.fp16.enabled or (autocast.enabled and autocast.dtype == "float16")

    @property
    def narrow_masters(self) -> bool:
        """Whether the optimiser updates 16-bit parameters without fp32 masters."""
        bf16 = self.bf16.enabled and self.bf16.bf16_master_weights_and_grads
        return bf16 or (self.fp16.enabled and self.fp16.fp16_master_weights_and_grads)

    @property
    def optimizer_state_dtype(self) -> str | None:
        """Name of torch's dtype of the optimiser's states; ``None`` leaves it to the optimiser."""
        return "bfloat16" if self.bf16.enabled and self.bf16.bf16_optimizer_states else None

    @property
    def compute_dtype(self) -> str:
        """Name of torch's dtype of the parameters that the model computes with."""
        if self.bf16.enabled:
            return "bfloat16"
        return "float16" if self.fp16.enabled else "float32"

    @property
    def batch(self) -> BatchSizes:
        """The resolved batch sizes.

        Raises:
            ConfigError: The configuration was not made by `load`, so they are not resolved.
        """
        train, micro = self.train_batch_size, self.train_micro_batch_size_per_gpu
        steps = self.gradient_accumulation_steps
        if train is None or micro is None or steps is None:
            raise ConfigError("batch sizes are not resolved yet; use EngineConfig.load")
        return BatchSizes(train, micro, steps)

    @classmethod
    def load(
        cls: type[_E],
        config: Mapping[str, Any] | str | os.PathLike[str] | EngineConfig,
        *,
        data_parallel_size: int,
    ) -> _E:
        """Reads a document, checks all of it and resolves the batch sizes. Not collective.

        Args:
            config: A mapping, the path of a JSON file (comments and trailing commas allowed),
                url-safe base64 JSON text, or a configuration of this class, whose batch sizes
                are then checked against `data_parallel_size`.
            data_parallel_size: Number of data-parallel ranks.

        Returns:
            The configuration, with the three batch fields filled in.

        Raises:
            ConfigError: With everything that is wrong in the document.
        """
        report = Report()
        section: _E | None
        if isinstance(config, EngineConfig):
            if not isinstance(config, cls):
                raise ConfigError(f"a {type(config).__name__} is not a {cls.__name__}")
            section = config
        else:
            if isinstance(config, str | os.PathLike) and os.path.exists(config):
                report.source = os.fspath(config)
            section = collect(cls, load_document(config), report)
        sizes = None
        if section is not None:
            sizes = _fit(section, data_parallel_size, report)
        report.finish()
        assert section is not None and sizes is not None
        return section.model_copy(update=dict(zip(_BATCH_KEYS, sizes, strict=True)))


def _fit(config: EngineConfig, data_parallel_size: int, report: Report) -> BatchSizes | None:
    """The batch sizes; ``None`` with the reason in the report if there are none."""
    wanted = config.data_parallel_size
    if wanted is not None and wanted != data_parallel_size:
        report.add(
            ProblemKind.CONTRADICTION,
            "data_parallel_size",
            f"{wanted} is given and there are {data_parallel_size} data-parallel ranks",
        )
    if any(report.is_unusable(key) for key in _BATCH_KEYS):
        return None
    try:
        return resolve_batch_sizes(
            config.train_batch_size,
            config.train_micro_batch_size_per_gpu,
            config.gradient_accumulation_steps,
            data_parallel_size,
        )
    except ConfigError as error:
        report.add(ProblemKind.CONTRADICTION, "train_batch_size", str(error))
        return None
