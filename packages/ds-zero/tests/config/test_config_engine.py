"""The engine's configuration: defaults, B02, B04, B05, B07, B08, and what is not there yet."""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from ds_comm.config import ConfigReportError, ProblemKind, Renamed
from ds_comm.errors import ConfigError
from ds_zero.config import EngineConfig, OptimizerSection, ZeroSection

UNKNOWN, MALFORMED, AUTO = ProblemKind.UNKNOWN, ProblemKind.MALFORMED, ProblemKind.AUTO
UNAVAILABLE, REMOVED = ProblemKind.UNAVAILABLE, ProblemKind.REMOVED
CONTRADICTION = ProblemKind.CONTRADICTION


def load(config: Any = None, **more: Any) -> EngineConfig:
    document = {"train_batch_size": 4, **(config or {}), **more}
    return EngineConfig.load(document, data_parallel_size=2)


def refused(config: Any = None, **more: Any) -> dict[str, ProblemKind]:
    with pytest.raises(ConfigReportError) as caught:
        load(config, **more)
    found = {problem.path: problem.kind for problem in caught.value.problems}
    assert len(found) == len(caught.value.problems)
    return found


def message(config: Any = None, **more: Any) -> str:
    with pytest.raises(ConfigReportError) as caught:
        load(config, **more)
    return str(caught.value)


def test_defaults() -> None:
    config = load()
    assert config.gradient_clipping == 1.0
    assert config.steps_per_print is None
    assert config.optimizer is None
    assert config.scheduler is None
    assert config.communication_data_type is None
    assert config.compute_dtype == "float32"
    assert config.data_types.grad_accum_dtype is None
    assert config.checkpoint.tag_validation == "Fail"
    zero = config.zero_optimization
    assert (zero.stage, zero.overlap_comm, zero.ignore_unused_parameters) == (0, None, True)
    assert zero.prefetch_bucket_size == 50_000_000
    assert zero.param_persistence_threshold == 100_000
    assert zero.model_persistence_threshold == sys.maxsize
    flags = (
        config.bf16.enabled,
        config.zero_allow_untested_optimizer,
        config.dataloader_drop_last,
        config.wall_clock_breakdown,
        config.dump_state,
    )
    assert not any(flags)


def test_values_of_the_document() -> None:
    config = load(
        optimizer={"type": "adamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95]}},
        scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        bf16={"enabled": True},
        gradient_clipping=0,
        steps_per_print=10,
        communication_data_type="fp32",
        data_types={"grad_accum_dtype": "bf16", "param_dtype": "bfloat16"},
        checkpoint={"tag_validation": "FAIL"},
        zero_optimization={
            "stage": 3,
            "stage3_param_persistence_threshold": 10,
            "stage3_model_persistence_threshold": 1e4,
            "stage3_prefetch_bucket_size": 0,
            "leaf_module": {"classes": ["Block"], "names": ["a.b"], "name_suffixes": ["mlp"]},
        },
    )
    assert config.optimizer == OptimizerSection(
        type="adamW", params={"lr": 1e-3, "betas": [0.9, 0.95]}
    )
    assert config.scheduler is not None
    assert config.scheduler.params == {"warmup_num_steps": 10}
    assert config.compute_dtype == "bfloat16"
    assert config.gradient_clipping == 0.0
    assert config.communication_data_type == "float32"
    assert config.data_types.grad_accum_dtype == "bfloat16"
    assert config.checkpoint.tag_validation == "Fail"
    zero = config.zero_optimization
    assert zero.param_persistence_threshold == 10
    assert zero.model_persistence_threshold == 10_000
    assert zero.prefetch_bucket_size == 0
    assert zero.leaf_module.classes == ("Block",)
    assert zero.leaf_module.names == ("a.b",)
    assert zero.leaf_module.name_suffixes == ("mlp",)


# B02
def test_a_misspelt_key_is_refused_with_the_nearest_one() -> None:
    config = {"train_batch_size": 4, "gradient_clipp1ng": 1.0}
    assert refused(config) == {"gradient_clipp1ng": UNKNOWN}
    assert 'did you mean "gradient_clipping"' in message(config)


@pytest.mark.parametrize(
    ("config", "path", "hint"),
    [
        ({"zero_optimization": {"stge": 1}}, "zero_optimization.stge", "stage"),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"devise": "none"}}},
            "zero_optimization.offload_param.devise",
            "device",
        ),
        (
            {"zero_optimization": {"leaf_module": {"class": ["a"]}}},
            "zero_optimization.leaf_module.class",
            "classes",
        ),
        ({"optimizer": {"type": "Adam", "parms": {}}}, "optimizer.parms", "params"),
        (
            {"checkpoint": {"parallel_write": {"pipeline_stages": True}}},
            "checkpoint.parallel_write.pipeline_stages",
            "pipeline_stage",
        ),
        ({"fp16": {"enabled": False, "loss_scal": 1}}, "fp16.loss_scal", "loss_scale"),
        ({"stage": 2}, "stage", "zero_optimization.stage"),
        ({"optimiser": {"type": "Adam"}}, "optimiser", "optimizer"),
    ],
)
def test_at_every_depth(config: Any, path: str, hint: str) -> None:
    assert refused(config) == {path: UNKNOWN}
    assert f'"{hint}"' in message(config)


# B04
@pytest.mark.parametrize("value", [5e8, "5e8", 500_000_000])
def test_scientific_notation(value: Any) -> None:
    size = load(zero_optimization={"reduce_bucket_size": value}).zero_optimization
    assert size.reduce_bucket_size == 500_000_000
    assert type(size.reduce_bucket_size) is int


def test_a_fraction_is_no_size() -> None:
    found = refused(zero_optimization={"reduce_bucket_size": 1.5})
    assert found == {"zero_optimization.reduce_bucket_size": MALFORMED}


# B05
@pytest.mark.parametrize(
    ("text", "path"),
    [
        ('{"train_batch_size": 4, "fp16": {}, "fp16": {}}', "fp16"),
        (
            '{"train_batch_size": 4, "zero_optimization": {"stage": 1, "stage": 2}}',
            "zero_optimization.stage",
        ),
    ],
)
def test_duplicate_keys(text: str, path: str, tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=f"{path}: given 2 times"):
        EngineConfig.load(file, data_parallel_size=1)


# B07
@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}},
            {
                "zero_optimization.offload_optimizer.nvme_path": CONTRADICTION,
                "zero_optimization.offload_optimizer.device": UNAVAILABLE,
            },
        ),
        ({"gradient_clipping": -1}, {"gradient_clipping": MALFORMED}),
        (
            {"zero_optimization": {"sub_group_size": 0}},
            {"zero_optimization.sub_group_size": MALFORMED},
        ),
    ],
)
def test_incomplete_values(config: Any, expected: dict[str, ProblemKind]) -> None:
    assert refused(config) == expected


def test_fp16_and_bf16() -> None:
    text = message(fp16={"enabled": True}, bf16={"enabled": True})
    assert "fp16.enabled: bf16 is enabled too" in text
    text = message(fp16={"enabled": True}, torch_autocast={"enabled": True})
    assert "torch_autocast.enabled: fp16 is enabled too" in text


def test_precision_modes() -> None:
    config = load(fp16={"enabled": True, "loss_scale_window": 5})
    assert (config.compute_dtype, config.scales_loss) == ("float16", True)
    assert (config.fp16.loss_scale, config.fp16.initial_scale_power) == (0, 16)
    assert (config.fp16.hysteresis, config.fp16.min_loss_scale) == (2, 1)
    config = load(torch_autocast={"enabled": True, "dtype": "fp16"})
    assert (config.compute_dtype, config.scales_loss) == ("float32", True)
    config = load(torch_autocast={"enabled": True})
    assert (config.torch_autocast.dtype, config.scales_loss) == ("bfloat16", False)
    narrow = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    config = load(bf16={"enabled": True, **narrow})
    assert (config.narrow_masters, config.optimizer_state_dtype) == (True, "bfloat16")
    config = load(bf16={"enabled": False, **narrow})
    assert (config.narrow_masters, config.optimizer_state_dtype) == (False, None)
    config = load(fp16={"enabled": True, "fp16_master_weights_and_grads": True})
    assert (config.narrow_masters, config.optimizer_state_dtype) == (True, None)


def test_precision_values_that_make_no_sense() -> None:
    config = {"fp16": {"enabled": True, "initial_scale_power": 2, "min_loss_scale": 8}}
    assert refused(config) == {"fp16.min_loss_scale": CONTRADICTION}
    assert refused(torch_autocast={"enabled": True, "dtype": "fp32"}) == {
        "torch_autocast.dtype": CONTRADICTION
    }
    for key, value in {
        "loss_scale": -1,
        "initial_scale_power": 128,
        "loss_scale_window": 0,
        "hysteresis": 0,
        "min_loss_scale": 0,
    }.items():
        assert refused(fp16={"enabled": True, key: value}) == {f"fp16.{key}": MALFORMED}
    assert refused(gradient_predivide_factor=0) == {"gradient_predivide_factor": MALFORMED}
    assert refused(gradient_allreduce_op="max") == {"gradient_allreduce_op": MALFORMED}


def test_a_boolean_as_text_is_said(caplog: pytest.LogCaptureFixture) -> None:
    assert load(bf16={"enabled": "true"}).bf16.enabled is True
    assert 'bf16.enabled: the text "true" was read as the boolean true' in caplog.messages
    assert load(fp16={"enabled": "true"}).fp16.enabled is True


def test_contradictions_over_stages() -> None:
    nvme = {"device": "nvme", "nvme_path": "/x"}
    device = "zero_optimization.offload_param.device"
    text = message(zero_optimization={"stage": 2, "offload_param": nvme})
    assert f"{device}: parameters are sharded" in text
    text = message(zero_optimization={"stage": 2, "offload_optimizer": nvme})
    assert 'device "nvme" needs stage 3' in text
    text = message(zero_optimization={"offload_optimizer": {"device": "cpu"}})
    assert "from stage 1 on" in text
    text = message(zero_optimization={"zero_hpz_partition_size": 2, "mics_shard_size": 2})
    assert "mics_shard_size: two ways to shard hierarchically" in text


def test_param_dtype_must_be_that_of_the_mode() -> None:
    found = refused(data_types={"param_dtype": "bf16"})
    assert found == {"data_types.param_dtype": CONTRADICTION}
    assert refused(data_types={"grad_accum_dtype": "fp16"}) == {
        "data_types.grad_accum_dtype": CONTRADICTION
    }
    load(bf16={"enabled": True}, data_types={"param_dtype": "bf16", "grad_accum_dtype": "fp32"})
    load(fp16={"enabled": True}, data_types={"param_dtype": "fp16", "grad_accum_dtype": "fp16"})


def test_max_grad_norm_is_not_an_optimiser_argument() -> None:
    optimizer = {"type": "Adam", "params": {"lr": "auto", "max_grad_norm": 1.0}}
    assert refused(optimizer=optimizer) == {
        "optimizer.params.lr": AUTO,
        "optimizer.params.max_grad_norm": CONTRADICTION,
    }
    assert "gradient_clipping" in message(optimizer=optimizer)


@pytest.mark.parametrize("name", ["OneBitAdam", "onebitlamb", "ZeroOneAdam"])
def test_compressed_optimisers_are_refused_by_name(name: str) -> None:
    assert refused(optimizer={"type": name}) == {"optimizer.type": UNAVAILABLE}
    assert "ds-compress" in message(optimizer={"type": name})


# B08
@pytest.mark.parametrize("value", [None, {}, {"enabled": False}, False])
@pytest.mark.parametrize(
    ("key", "replacement"),
    [
        ("amp", "bf16"),
        ("nebula", "save_checkpoint"),
        ("datastates_ckpt", "save_checkpoint"),
        ("sparse_attention", "flex_attention"),
        ("eigenvalue", "delete it"),
        ("quantize_training", "compression_training"),
    ],
)
def test_leftover_keys_of_features_that_are_not_shipped(
    key: str, replacement: str, value: Any
) -> None:
    assert refused({key: value}) == {key: REMOVED}
    assert replacement in message({key: value})


@pytest.mark.parametrize("value", [None, False, True])
def test_legacy_stage1_is_refused(value: Any) -> None:
    found = refused(zero_optimization={"legacy_stage1": value})
    assert found == {"zero_optimization.legacy_stage1": REMOVED}


def only_warning(caplog: pytest.LogCaptureFixture, old: str, new: str) -> None:
    about = [text for text in caplog.messages if "old name" in text or "old form" in text]
    assert len(about) == 1
    assert old in about[0]
    assert new in about[0]


def test_bfloat16(caplog: pytest.LogCaptureFixture) -> None:
    assert load(bfloat16={"enabled": True}).bf16.enabled
    only_warning(caplog, "bfloat16", "bf16")


def test_bool_form_of_zero_optimization(caplog: pytest.LogCaptureFixture) -> None:
    assert load(zero_optimization=True).zero_optimization.stage == 1
    only_warning(caplog, "zero_optimization", '{"stage": 1}')
    assert load(zero_optimization=False).zero_optimization.stage == 0


def test_allgather_size(caplog: pytest.LogCaptureFixture) -> None:
    config = load(zero_optimization=True, allgather_size=5e7)
    assert config.zero_optimization.stage == 1
    assert config.zero_optimization.allgather_bucket_size == 50_000_000
    about = [text for text in caplog.messages if "old" in text]
    assert len(about) == 2


@pytest.mark.parametrize(
    ("old", "section"),
    [
        ("cpu_offload", "offload_optimizer"),
        ("cpu_offload_param", "offload_param"),
        ("cpu_offload_params", "offload_param"),
    ],
)
def test_cpu_offload(old: str, section: str, caplog: pytest.LogCaptureFixture) -> None:
    zero = load(zero_optimization={"stage": 3, old: False}).zero_optimization
    parts = {"offload_optimizer": zero.offload_optimizer, "offload_param": zero.offload_param}
    part = parts[section]
    assert part is not None
    assert part.device == "none"
    only_warning(caplog, old, f"{section}.device")
    found = refused(zero_optimization={"stage": 3, old: True})
    assert found == {f"zero_optimization.{section}.device": UNAVAILABLE}
    found = refused(zero_optimization={"stage": 3, old: "yes"})
    assert found == {f"zero_optimization.{old}": MALFORMED}
    both = {"stage": 3, old: False, section: {"device": "none"}}
    assert refused(zero_optimization=both) == {f"zero_optimization.{old}": CONTRADICTION}


def test_cpu_offload_use_pin_memory(caplog: pytest.LogCaptureFixture) -> None:
    zero = load(zero_optimization={"cpu_offload_use_pin_memory": False}).zero_optimization
    assert zero.offload_param is not None
    assert zero.offload_optimizer is not None
    assert (zero.offload_param.pin_memory, zero.offload_optimizer.pin_memory) == (False, False)
    only_warning(caplog, "cpu_offload_use_pin_memory", "offload_optimizer.pin_memory")


OLD_ZERO_KEYS = {
    "cpu_offload": False,
    "cpu_offload_param": False,
    "cpu_offload_params": False,
    "cpu_offload_use_pin_memory": True,
    "stage3_gather_fp16_weights_on_model_save": True,
    "gather_16bit_weights_on_model_save": True,
    "allgather_size": 7,
    "prefetch_bucket_size": 7,
    "param_persistence_threshold": 7,
    "model_persistence_threshold": 7,
    "max_live_parameters": 7,
    "max_reuse_distance": 7,
    "module_granularity_threshold": 0,
    "use_all_reduce_for_fetch_params": True,
    "allgather_sequential": True,
}


def test_the_table_of_old_zero_keys_is_complete() -> None:
    assert set(OLD_ZERO_KEYS) == {rule.old for rule in ZeroSection.key_rules.renamed}


@pytest.mark.parametrize("rule", ZeroSection.key_rules.renamed, ids=lambda rule: rule.old)
def test_every_old_zero_key_maps_with_one_warning(
    rule: Renamed, caplog: pytest.LogCaptureFixture
) -> None:
    zero = load(zero_optimization={rule.old: OLD_ZERO_KEYS[rule.old]}).zero_optimization
    only_warning(caplog, rule.old, rule.new[0])
    document = zero.model_dump(by_alias=True, exclude_unset=True)
    for target in rule.new:
        value: Any = document
        for key in target.split("."):
            value = value[key]
        assert value == rule.convert(OLD_ZERO_KEYS[rule.old])


def test_old_names_of_stage_3_sizes() -> None:
    zero = load(
        zero_optimization={
            "prefetch_bucket_size": 1,
            "param_persistence_threshold": 2,
            "model_persistence_threshold": 3,
            "stage3_gather_fp16_weights_on_model_save": True,
        }
    ).zero_optimization
    assert (zero.prefetch_bucket_size, zero.param_persistence_threshold) == (1, 2)
    assert zero.model_persistence_threshold == 3
    assert zero.gather_16bit_weights_on_model_save is True


# Ruling "auto".
def test_auto_that_the_core_resolves() -> None:
    resolved = (
        "reduce_bucket_size",
        "allgather_bucket_size",
        "stage3_prefetch_bucket_size",
        "stage3_param_persistence_threshold",
        "stage3_model_persistence_threshold",
        "stage3_gather_16bit_weights_on_model_save",
    )
    config = load(zero_optimization=dict.fromkeys(resolved, "auto"))
    assert config.zero_optimization == ZeroSection()


def test_the_rest_is_one_error_with_every_path() -> None:
    config = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, "auto"]}},
        "scheduler": {"type": "auto", "params": {"x": {"y": "auto"}}},
        "zero_optimization": {"stage": "auto", "stage3_max_live_parameters": "auto"},
    }
    assert refused(config) == dict.fromkeys(
        [
            "train_batch_size",
            "train_micro_batch_size_per_gpu",
            "gradient_accumulation_steps",
            "gradient_clipping",
            "bf16.enabled",
            "optimizer.params.lr",
            "optimizer.params.betas[1]",
            "scheduler.type",
            "scheduler.params.x.y",
            "zero_optimization.stage",
            "zero_optimization.stage3_max_live_parameters",
        ],
        AUTO,
    )


# Features that are not there yet.
@pytest.mark.parametrize(
    ("config", "path"),
    [
        *(
            ({"compile": {"deepcompile": True, key: value}}, f"compile.{key}")
            for key, value in {
                "offload_activation": True,
                "offload_opt_states": True,
                "offload_parameters": True,
                "symmetric_memory": True,
                "debug_log": True,
                "sync_before_reduce": True,
                "sync_after_reduce": True,
                "sync_before_allgather": True,
                "sync_after_allgather": True,
                "passes": ["z3", "autosp"],
            }.items()
        ),
        ({"checkpoint": {"writer": {"type": "fast"}}}, "checkpoint.writer"),
        ({"checkpoint": {"use_node_local_storage": True}}, "checkpoint.use_node_local_storage"),
        ({"sequence_parallel_size": 2}, "sequence_parallel_size"),
        ({"memory_breakdown": True}, "memory_breakdown"),
        ({"graph_harvesting": True}, "graph_harvesting"),
        ({"log_level": "info"}, "log_level"),
        *(
            ({"zero_optimization": {"stage": 3, key: value}}, f"zero_optimization.{key}")
            for key, value in {
                "zero_hpz_partition_size": 2,
                "zero_quantized_weights": True,
                "zero_quantized_nontrainable_weights": True,
                "zero_quantized_gradients": True,
                "zeropp_loco_param": {"err_beta": 0.8},
                "mics_shard_size": 2,
                "mics_hierarchical_params_gather": True,
                "zenflow": {},
                "stage3_module_granularity_threshold": 10,
                "load_from_fp32_weights": False,
            }.items()
        ),
        *(
            (
                {"zero_optimization": {"stage": 3, key: {"device": "cpu"}}},
                f"zero_optimization.{key}.device",
            )
            for key in ("offload_param", "offload_optimizer")
        ),
    ],
)
def test_a_feature_that_is_not_there_yet_is_refused_by_name(config: Any, path: str) -> None:
    assert refused(config) == {path: UNAVAILABLE}
    assert "not available yet in this version" in message(config)


@pytest.mark.parametrize(
    "config",
    [
        {"fp16": {"enabled": False, "loss_scale": 0, "hysteresis": 2}},
        {"torch_autocast": {"enabled": False, "dtype": "float16"}},
        {"zero_optimization": {"offload_optimizer": {"device": "none"}}},
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "none"}}},
        {"zero_optimization": {"offload_param": None, "offload_optimizer": None}},
        {"zero_optimization": {"zero_hpz_partition_size": 1, "mics_shard_size": -1}},
        {"zero_optimization": {"zenflow": None, "zeropp_loco_param": None}},
        {"compile": {"deepcompile": False, "debug_log": True, "passes": ["autotp"]}},
        {"compile": {"offload_activation": True}},
        {"compile": {"deepcompile": True, "double_buffer": True, "passes": ["z1", "z3"]}},
        {"prescale_gradients": True, "gradient_predivide_factor": 1.0},
        {"sequence_parallel_size": 1},
        {"data_parallel_size": 2},
        {"activation_checkpointing": {"partition_activations": False}},
        {"optimizer": None, "scheduler": None},
        {"checkpoint": {"writer": None}},
    ],
)
def test_what_is_switched_off_is_accepted(config: Any) -> None:
    assert load(config).batch == (4, 2, 1)


def test_data_parallel_size_must_be_the_actual_one() -> None:
    assert refused(data_parallel_size=4) == {"data_parallel_size": CONTRADICTION}


@pytest.mark.parametrize("value", [None, {}, {"enabled": False}, {"enabled": True}])
@pytest.mark.parametrize(
    ("key", "owner"),
    [
        ("tensorboard", "ds-comm"),
        ("pipeline", "ds-pipe"),
        ("expert_parallel", "ds-moe"),
        ("compression_training", "ds-compress"),
        ("hybrid_engine", "ds-inference"),
        ("elasticity", "ds-launch"),
        ("aio", "ds-aio"),
    ],
)
def test_keys_of_other_packages_are_refused_by_name(key: str, owner: str, value: Any) -> None:
    assert refused({key: value}) == {key: UNAVAILABLE}
    text = message({key: value})
    assert f"belongs to {owner}" in text
    assert "ds_all" in text


def test_keys_without_effect_are_listed_in_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    load(
        disable_allgather=True,
        zero_optimization={"stage": 2, "contiguous_gradients": True, "round_robin_gradients": True},
    )
    assert len(caplog.messages) == 1
    for path in (
        "disable_allgather",
        "zero_optimization.contiguous_gradients",
        "zero_optimization.round_robin_gradients",
    ):
        assert path in caplog.messages[0]


@pytest.mark.parametrize("stage", [-1, 4, 1.5, True, "all", None])
def test_stages(stage: Any) -> None:
    found = refused(zero_optimization={"stage": stage})
    assert found == {"zero_optimization.stage": MALFORMED}


@pytest.mark.parametrize("value", [None, 3, "stage 2", [], "auto"])
def test_sections_must_be_objects(value: Any) -> None:
    kind = AUTO if value == "auto" else MALFORMED
    assert refused(zero_optimization=value) == {"zero_optimization": kind}


def test_everything_in_one_report() -> None:
    found = refused(
        {
            "train_batch_size": 7,
            "gradient_clipp1ng": 1.0,
            "gradient_clipping": -1,
            "amp": None,
            "tensorboard": {},
            "zero_optimization": {"stage": 5, "reduce_bucket_size": 1.5, "stge": 1},
            "optimizer": {"params": {"lr": "auto"}},
        }
    )
    assert found == {
        "train_batch_size": CONTRADICTION,
        "gradient_clipp1ng": UNKNOWN,
        "gradient_clipping": MALFORMED,
        "amp": REMOVED,
        "tensorboard": UNAVAILABLE,
        "zero_optimization.stage": MALFORMED,
        "zero_optimization.reduce_bucket_size": MALFORMED,
        "zero_optimization.stge": UNKNOWN,
        "optimizer.type": MALFORMED,
        "optimizer.params.lr": AUTO,
    }


def test_a_misspelt_batch_key_is_one_problem() -> None:
    with pytest.raises(ConfigReportError) as caught:
        EngineConfig.load({"train_bach_size": 4}, data_parallel_size=1)
    assert [problem.path for problem in caught.value.problems] == ["train_bach_size"]


def test_a_file_is_named_in_the_error(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"train_batch_size": 4, "zero_optimisation": {} /* , */}')
    for path in (file, str(file)):
        with pytest.raises(ConfigError, match="1 problem in .*ds.json"):
            EngineConfig.load(path, data_parallel_size=1)


def test_base64() -> None:
    encoded = base64.urlsafe_b64encode(json.dumps({"train_batch_size": 4}).encode()).decode()
    assert EngineConfig.load(encoded, data_parallel_size=4).batch == (4, 1, 1)


def test_a_loaded_configuration_can_be_loaded_again() -> None:
    config = load()
    assert EngineConfig.load(config, data_parallel_size=2) == config
    with pytest.raises(ConfigError, match="2 x 1 x 3 = 6, not 4"):
        EngineConfig.load(config, data_parallel_size=3)


def test_batch_of_a_configuration_made_by_hand() -> None:
    with pytest.raises(ConfigError, match="not resolved yet"):
        _ = EngineConfig(train_batch_size=4).batch
    by_hand = EngineConfig(train_batch_size=4, bf16={"enabled": True})  # type: ignore[arg-type]
    config = EngineConfig.load(by_hand, data_parallel_size=2)
    assert config.batch == (4, 2, 1)
    assert config.bf16.enabled


def test_the_document_is_not_changed() -> None:
    document = {"train_batch_size": 4, "zero_optimization": {"cpu_offload": False}}
    copy = json.loads(json.dumps(document))
    EngineConfig.load(document, data_parallel_size=1)
    assert document == copy
