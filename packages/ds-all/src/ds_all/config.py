"""The whole ``ds_config`` document: what the engine reads and every other package's block.

A block of a feature that is not available yet is refused by name while it is switched on, and
accepted while it is off.  Its keys are known here in either case, so a misspelt one is found.  When
a package gains the feature, its section replaces the entry below.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from ds_comm.config import KeyRules, Pending
from ds_zero.config import EngineConfig

__all__ = ["DSConfig"]


def _leaves(names: str, **inner: Any) -> dict[str, Any]:
    """A key tree: leaves by name, and inner objects by keyword."""
    return {**dict.fromkeys(names.split()), **inner}


def _technique(shared: str, group: str, **shared_inner: Any) -> dict[str, Any]:
    """Keys of a compression technique: parameters of all groups, and named groups of modules."""
    one_group = _leaves("modules related_modules", params=_leaves(group))
    return {
        "shared_parameters": _leaves(f"enabled {shared}", **shared_inner),
        "different_groups": {"*": one_group},
    }


_NO_LOG = "delete it or switch it off"
_SINK = "log what engine.get_global_grad_norm() and engine.get_lr() return"

_TELEMETRY = (
    Pending(
        "flops_profiler",
        "ds-comm",
        "use torch.utils.flop_counter.FlopCounterMode around a step",
        _leaves(
            "enabled recompute_fwd_factor profile_step module_depth top_modules detailed "
            "output_file"
        ),
    ),
    Pending(
        "comms_logger",
        "ds-comm",
        "use torch.profiler",
        _leaves("enabled prof_all prof_ops verbose debug"),
    ),
    Pending("tensorboard", "ds-comm", _SINK, _leaves("enabled output_path job_name")),
    Pending("csv_monitor", "ds-comm", _SINK, _leaves("enabled output_path job_name")),
    Pending("wandb", "ds-comm", _SINK, _leaves("enabled group team project")),
    Pending(
        "comet",
        "ds-comm",
        _SINK,
        _leaves(
            "enabled samples_log_interval project workspace api_key experiment_name "
            "experiment_key online mode"
        ),
    ),
    Pending(
        "timers",
        "ds-comm",
        _NO_LOG,
        {"throughput": _leaves("enabled synchronized")},
        switches=("throughput.enabled",),
    ),
)

_PARALLEL = (
    Pending(
        "pipeline",
        "ds-pipe",
        "delete it: there is no pipeline yet",
        _leaves(
            "stages partition seed_layers activation_checkpoint_interval pipe_partitioned "
            "grad_partitioned use_reentrant"
        ),
        switches=(),
    ),
    Pending(
        "tensor_parallel",
        "ds-comm",
        "shard the states with ZeRO stage 3 instead",
        _leaves(
            "autotp_size dtype tp_overlap_comm preset_model injection_policy_tuple "
            "keep_module_on_host replace_with_kernel_inject partition_config",
            tp=_leaves("tp_size tp_grain_size mpu tp_group"),
        ),
        switches=("autotp_size", "tp.tp_size"),
        neutral=1,
    ),
    Pending(
        "expert_parallel",
        "ds-moe",
        "shard the states with ZeRO stage 3 instead",
        _leaves(
            "enabled autoep_size expert_tensor_parallel_size validate_folding_routing "
            "preset_model moe_layer_pattern expert_pattern router_pattern use_grouped_mm "
            "disable_triton_grouped_mm route_norm route_scale score_func score_apply top_k "
            "combine_impl num_expert_groups num_limited_groups routed_scaling_factor "
            "load_balance_coeff expert_w1 expert_w2 expert_w3 num_experts_attr top_k_attr "
            "has_shared_experts shared_experts_pattern shared_experts_gate_pattern"
        ),
    ),
)

_INFERENCE = (
    Pending(
        "hybrid_engine",
        "ds-inference",
        "generate with the model itself, which works at every stage",
        _leaves(
            "enabled max_out_tokens inference_tp_size release_inference_cache pin_parameters "
            "tp_gather_partition_size enable_cuda_graph"
        ),
    ),
    Pending(
        "weight_quantization",
        "ds-inference",
        "delete it: weights are not quantised yet",
        _leaves("quantized_initialization post_init_quant"),
        switches=(),
    ),
)

_SCHEDULE = "schedule_type schedule_config min_difficulty max_difficulty"

_DATA_EFFICIENCY = _leaves(
    "enabled seed",
    data_sampling=_leaves(
        "enabled num_epochs num_workers pin_memory",
        curriculum_learning=_leaves(
            "enabled data_cluster_path",
            curriculum_metrics={
                "*": _leaves(
                    "index_to_sample_path index_to_metric_path difficulty_type clustering_type "
                    + _SCHEDULE
                )
            },
        ),
        dynamic_batching=_leaves(
            "enabled metrics_path max_tokens lr_scaling_method min_batch_size max_batch_size "
            "sequence_picking_order verbose"
        ),
    ),
    data_routing=_leaves(
        "enabled",
        random_ltd=_leaves(
            "enabled total_layer_num random_ltd_layer_num random_ltd_layer_id model_mask_name "
            "model_type hidden_state_order layer_token_lr_schedule",
            random_ltd_schedule=_leaves("min_value max_value schedule_type schedule_config"),
        ),
    ),
)

_PRUNING = "schedule_offset method"

_COMPRESSION = {
    "layer_reduction": _leaves(
        "enabled keep_number_layer module_name_prefix teacher_layer other_module_name"
    ),
    "weight_quantization": _technique(
        "quantizer_kernel schedule_offset quantize_groups quantize_verbose quantization_type "
        "rounding quantize_weight_in_forward",
        "start_bits target_bits quantization_period",
        fp16_mixed_quantize=_leaves("enabled quantize_change_ratio"),
    ),
    "activation_quantization": _technique(
        "quantization_type range_calibration schedule_offset", "bits"
    ),
    "sparse_pruning": _technique(
        f"{_PRUNING} schedule_offset_end schedule_offset_stride block_pattern dense_ratio "
        "excluded_modules",
        "dense_ratio",
    ),
    "row_pruning": _technique(_PRUNING, "dense_ratio"),
    "head_pruning": _technique(f"{_PRUNING} num_heads", "dense_ratio"),
    "channel_pruning": _technique(_PRUNING, "dense_ratio"),
}

_COMPRESS = (
    Pending(
        "data_efficiency",
        "ds-compress",
        "delete it: batches hold whole samples in the order of the loader",
        _DATA_EFFICIENCY,
    ),
    Pending(
        "curriculum_learning",
        "ds-compress",
        "delete it: batches hold whole samples in the order of the loader",
        _leaves(f"enabled curriculum_type {_SCHEDULE}"),
    ),
    Pending(
        "progressive_layer_drop",
        "ds-compress",
        "delete it: every layer runs at every step",
        _leaves("enabled theta gamma"),
    ),
    Pending(
        "compression_training",
        "ds-compress",
        "switch the technique off: the model is trained as it is",
        _COMPRESSION,
        switches=tuple(
            f"{name}.enabled" if name == "layer_reduction" else f"{name}.shared_parameters.enabled"
            for name in _COMPRESSION
        ),
    ),
)

_LAUNCH = (
    Pending(
        "elasticity",
        "ds-launch",
        "give the batch sizes; checkpoints load on any number of ranks",
        _leaves(
            "enabled max_train_batch_size micro_batch_sizes min_gpus max_gpus min_time version "
            "prefer_larger_batch ignore_non_elastic_batch_info num_gpus_per_node "
            "model_parallel_size"
        ),
    ),
    Pending(
        "autotuning",
        "ds-launch",
        "give the values yourself",
        _leaves(
            "enabled fast results_dir exps_dir overwrite start_profile_step end_profile_step "
            "metric metric_path tuner_type tuner_early_stopping tuner_num_trials "
            "model_info_path mp_size max_train_batch_size min_train_batch_size "
            "max_train_micro_batch_size_per_gpu min_train_micro_batch_size_per_gpu "
            "num_tuning_micro_batch_sizes arg_mappings",
            model_info=_leaves("profile num_params hidden_size num_layers"),
        ),
    ),
)

_STORAGE = (
    Pending(
        "aio",
        "ds-aio",
        "delete it: nothing is offloaded to files yet",
        _leaves("block_size queue_depth intra_op_parallelism single_submit overlap_events use_gds"),
        switches=(),
    ),
)


class DSConfig(EngineConfig):
    """Everything a ``ds_config`` document may hold; an ``EngineConfig`` that knows all packages.

    ``DSConfig.load(config, data_parallel_size=n)`` reads it as ``EngineConfig.load`` does, and
    the result can be passed wherever an ``EngineConfig`` is expected.
    """

    key_rules: ClassVar[KeyRules] = replace(
        EngineConfig.key_rules,
        elsewhere=(),
        pending=(
            *EngineConfig.key_rules.pending,
            *_TELEMETRY,
            *_PARALLEL,
            *_INFERENCE,
            *_COMPRESS,
            *_LAUNCH,
            *_STORAGE,
        ),
    )
