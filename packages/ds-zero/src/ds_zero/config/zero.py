"""``zero_optimization``: what is sharded, and how much is gathered at once."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

from pydantic import Field

from ds_comm.config import (
    Auto,
    Contradiction,
    Flag,
    KeyRules,
    NoEffect,
    NotYet,
    Removed,
    Renamed,
    Section,
    Strings,
    Whole,
)
from ds_zero.config.offload import OffloadOptimizerSection, OffloadParamSection

__all__ = ["LeafModuleSection", "ZeroSection"]

_PLAIN = "leave it out: collectives move the compute dtype as it is"
_ONE_RUN = NoEffect("a unit is reduced straight out of its one flat buffer and gathered into it")
_AT_LEAST_0 = Field(ge=0)


def _device_of(value: object) -> str:
    if not isinstance(value, bool):
        raise ValueError("true or false is expected")
    return "cpu" if value else "none"


class LeafModuleSection(Section):
    """``zero_optimization.leaf_module``: modules gathered as one unit with all inside."""

    classes: Strings = (
        "MixtralSparseMoeBlock",
        "Qwen2MoeSparseMoeBlock",
        "Qwen3MoeSparseMoeBlock",
    )
    """Class names, bare or with their module."""
    names: Strings = ()
    """Full names of modules in the model."""
    name_suffixes: Strings = ()
    """Endings of full names."""


class ZeroSection(Section):
    """``zero_optimization``: which states are sharded over the data-parallel ranks."""

    stage: Annotated[Whole, Field(ge=0, le=3)] = 0
    """0 shards nothing, 1 the optimiser states and fp32 masters, 2 also the gradients, 3 also the
    parameters."""
    overlap_comm: Flag | None = None
    """Reduce gradients and gather parameters while computing; ``null`` decides by the stage."""
    prefetch_bucket_size: Annotated[Whole, _AT_LEAST_0, Auto()] = Field(
        default=50_000_000, alias="stage3_prefetch_bucket_size"
    )
    """Elements that may be gathered ahead of their use at stage 3; 0 gathers nothing ahead."""
    param_persistence_threshold: Annotated[Whole, _AT_LEAST_0, Auto()] = Field(
        default=100_000, alias="stage3_param_persistence_threshold"
    )
    """Parameters with fewer elements stay gathered at stage 3."""
    model_persistence_threshold: Annotated[Whole, _AT_LEAST_0, Auto()] = Field(
        default=sys.maxsize, alias="stage3_model_persistence_threshold"
    )
    """Elements that may stay gathered in all at stage 3."""
    ignore_unused_parameters: Flag = True
    """Leave parameters without a gradient alone; ``false`` raises and names them."""
    leaf_module: LeafModuleSection = Field(default_factory=LeafModuleSection)
    """Modules that are gathered whole at stage 3."""

    offload_param: OffloadParamSection | None = None
    """Where parameter shards live."""
    offload_optimizer: OffloadOptimizerSection | None = None
    """Where optimiser states live."""
    zero_hpz_partition_size: Annotated[
        Whole, Field(ge=1), NotYet("leave it at 1: one shard per data-parallel rank")
    ] = 1
    """Ranks that share a second copy of the parameters (hierarchical partitioning)."""
    zero_quantized_weights: Annotated[Flag, NotYet(_PLAIN)] = False
    """Quantise parameters while they are gathered."""
    zero_quantized_nontrainable_weights: Annotated[Flag, NotYet(_PLAIN)] = False
    """Quantise frozen parameters in their shards."""
    zero_quantized_gradients: Annotated[Flag, NotYet(_PLAIN)] = False
    """Quantise gradients while they are reduced."""
    zeropp_loco_param: Annotated[dict[str, Any] | None, NotYet(_PLAIN)] = None
    """Error feedback of quantised gradients."""
    mics_shard_size: Annotated[
        Whole, NotYet("leave it at -1: states are sharded over all data-parallel ranks")
    ] = -1
    """Ranks that share one copy of the states; -1 for all."""
    mics_hierarchical_params_gather: Annotated[Flag, NotYet(_PLAIN)] = False
    """Gather between nodes first, then inside them."""
    zenflow: Annotated[dict[str, Any] | None, NotYet("leave it out")] = None
    """Update the most important gradients at once and the rest later, on the host."""
    module_granularity_threshold: Annotated[
        Whole, _AT_LEAST_0, NotYet('name the modules in "leaf_module" instead')
    ] = Field(default=0, alias="stage3_module_granularity_threshold")
    """Modules with fewer parameters per submodule than this become leaf modules."""
    save_muon_momentum_buffer_in_memory: Annotated[Flag, NotYet("leave it out")] = False
    """Keep the momentum of Muon in memory when states are on NVMe."""
    load_from_fp32_weights: Annotated[
        Flag, NotYet("leave it true: checkpoints hold the fp32 masters")
    ] = True
    """Restore masters from the fp32 copy of a checkpoint rather than from its model weights."""

    contiguous_gradients: Annotated[
        Flag, NoEffect("gradients are always in one flat buffer per unit")
    ] = True
    """Copy gradients into one buffer."""
    reduce_scatter: Annotated[
        Flag, NoEffect("the stage decides whether gradients are scattered or kept whole")
    ] = True
    """Reduce-scatter rather than all-reduce."""
    reduce_bucket_size: Annotated[Whole, Field(gt=0), Auto(), _ONE_RUN] = 500_000_000
    """Elements reduced at once."""
    allgather_bucket_size: Annotated[Whole, Field(gt=0), Auto(), _ONE_RUN] = 500_000_000
    """Elements gathered at once."""
    use_multi_rank_bucket_allreduce: Annotated[Flag, _ONE_RUN] = True
    """Reduce a bucket for several owners in one call."""
    allgather_partitions: Annotated[
        Flag, NoEffect("updated parameters are always gathered, never broadcast owner by owner")
    ] = True
    """Gather updated parameters instead of broadcasting them."""
    round_robin_gradients: Annotated[
        Flag, NoEffect("every rank owns an equal range of every unit")
    ] = False
    """Deal gradients out to ranks in turn."""
    elastic_checkpoint: Annotated[
        Flag, NoEffect("every checkpoint loads on any number of ranks")
    ] = False
    """Write checkpoints that load on another number of ranks."""
    sub_group_size: Annotated[
        Whole, Field(gt=0), NoEffect("the optimiser runs unit by unit, in place")
    ] = 1_000_000_000
    """Elements updated at once at stage 3."""
    max_live_parameters: Annotated[
        Whole, _AT_LEAST_0, NoEffect("a unit is released as soon as it has been passed")
    ] = Field(default=1_000_000_000, alias="stage3_max_live_parameters")
    """Elements that may be gathered at a time."""
    max_reuse_distance: Annotated[
        Whole, _AT_LEAST_0, NoEffect("a unit is released as soon as it has been passed")
    ] = Field(default=1_000_000_000, alias="stage3_max_reuse_distance")
    """Keep a parameter that is used again within so many elements."""
    gather_16bit_weights_on_model_save: Annotated[
        Flag, Auto(), NoEffect("verbs that return or save whole weights always gather them")
    ] = Field(default=False, alias="stage3_gather_16bit_weights_on_model_save")
    """Gather the weights when the model is saved at stage 3."""
    use_all_reduce_for_fetch_params: Annotated[
        Flag, NoEffect("the algorithm of a gather is picked per backend")
    ] = Field(default=False, alias="stage3_use_all_reduce_for_fetch_params")
    """Gather parameters by all-reduce."""
    allgather_sequential: Annotated[Flag, NoEffect("a unit is one gather")] = Field(
        default=False, alias="stage3_allgather_sequential"
    )
    """Gather parameters one by one."""
    memory_efficient_linear: Annotated[
        Flag, NoEffect("a unit comes back at its old address, so torch's own linear is used")
    ] = True
    """Replace the linear function by one that keeps no reference to gathered weights."""
    pipeline_loading_checkpoint: Annotated[
        Flag, NoEffect("every rank reads only the ranges that it owns")
    ] = False
    """Overlap reading a checkpoint with distributing it."""
    override_module_apply: Annotated[Flag, NoEffect("torch's own modules are never patched")] = True
    """Gather parameters inside ``Module.apply``."""
    log_trace_cache_warnings: Annotated[
        Flag, NoEffect("there is no trace to invalidate; ranks that diverge raise")
    ] = False
    """Warn when the order of modules changes between steps."""
    enable_sanity_checks: Annotated[
        Flag, NoEffect("pointers and values of released parameters are always checked")
    ] = False
    """Check the states of parameters at every step."""

    key_rules: ClassVar[KeyRules] = KeyRules(
        renamed=(
            Renamed("cpu_offload", ("offload_optimizer.device",), _device_of),
            Renamed("cpu_offload_param", ("offload_param.device",), _device_of),
            Renamed("cpu_offload_params", ("offload_param.device",), _device_of),
            Renamed(
                "cpu_offload_use_pin_memory",
                ("offload_optimizer.pin_memory", "offload_param.pin_memory"),
            ),
            Renamed(
                "stage3_gather_fp16_weights_on_model_save",
                ("stage3_gather_16bit_weights_on_model_save",),
            ),
            Renamed(
                "gather_16bit_weights_on_model_save", ("stage3_gather_16bit_weights_on_model_save",)
            ),
            Renamed("allgather_size", ("allgather_bucket_size",)),
            Renamed("prefetch_bucket_size", ("stage3_prefetch_bucket_size",)),
            Renamed("param_persistence_threshold", ("stage3_param_persistence_threshold",)),
            Renamed("model_persistence_threshold", ("stage3_model_persistence_threshold",)),
            Renamed("max_live_parameters", ("stage3_max_live_parameters",)),
            Renamed("max_reuse_distance", ("stage3_max_reuse_distance",)),
            Renamed("module_granularity_threshold", ("stage3_module_granularity_threshold",)),
            Renamed("use_all_reduce_for_fetch_params", ("stage3_use_all_reduce_for_fetch_params",)),
            Renamed("allgather_sequential", ("stage3_allgather_sequential",)),
        ),
        removed=(Removed("legacy_stage1", 'stage 1 has one implementation: write "stage": 1'),),
    )

    def contradictions(self) -> Iterator[Contradiction]:
        """Offload that the stage does not have, and the two kinds of hierarchical sharding."""
        param = self.offload_param
        if param is not None and param.device != "none" and self.stage != 3:
            yield Contradiction(
                "offload_param.device",
                f"parameters are sharded, and can be offloaded, at stage 3, not {self.stage}",
                ("offload_param.device", "stage"),
            )
        optimizer = self.offload_optimizer
        if optimizer is not None and optimizer.device != "none" and self.stage == 0:
            yield Contradiction(
                "offload_optimizer.device",
                "optimiser states are sharded, and so can be offloaded, from stage 1 on",
                ("offload_optimizer.device", "stage"),
            )
        if optimizer is not None and optimizer.device == "nvme" and self.stage in (1, 2):
            yield Contradiction(
                "offload_optimizer.device",
                f'device "nvme" needs stage 3; at stage {self.stage} write "cpu"',
                ("offload_optimizer.device", "stage"),
            )
        if self.zero_hpz_partition_size > 1 and self.mics_shard_size > 0:
            yield Contradiction(
                "mics_shard_size",
                "two ways to shard hierarchically; give this or zero_hpz_partition_size",
                ("zero_hpz_partition_size", "mics_shard_size"),
            )
