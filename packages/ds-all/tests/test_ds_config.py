"""DSConfig: blocks of every package, off and on, and the engine's rules in full."""

from __future__ import annotations

from typing import Any

import pytest

from ds_all.config import DSConfig
from ds_comm.config import ConfigReportError, ProblemKind
from ds_zero.config import EngineConfig


def load(config: Any) -> DSConfig:
    return DSConfig.load({"train_batch_size": 4, **config}, data_parallel_size=2)


def refused(config: Any) -> dict[str, ProblemKind]:
    with pytest.raises(ConfigReportError) as caught:
        load(config)
    return {problem.path: problem.kind for problem in caught.value.problems}


def message(config: Any) -> str:
    with pytest.raises(ConfigReportError) as caught:
        load(config)
    return str(caught.value)


# Each block: switched off, switched on, the path of the switch, and the package that will have it.
BLOCKS: list[tuple[str, Any, Any, str, str]] = [
    (
        "flops_profiler",
        {"enabled": False, "top_modules": 1},
        {"enabled": True},
        "enabled",
        "ds-comm",
    ),
    ("comms_logger", {"enabled": False, "prof_ops": []}, {"enabled": True}, "enabled", "ds-comm"),
    ("tensorboard", {"enabled": False, "job_name": "x"}, {"enabled": True}, "enabled", "ds-comm"),
    ("csv_monitor", {"enabled": False}, {"enabled": True}, "enabled", "ds-comm"),
    ("wandb", {"enabled": False, "team": None}, {"enabled": True}, "enabled", "ds-comm"),
    ("comet", {"enabled": False}, {"enabled": True, "project": "p"}, "enabled", "ds-comm"),
    (
        "timers",
        {"throughput": {"enabled": False}},
        {"throughput": {"enabled": True}},
        "throughput.enabled",
        "ds-comm",
    ),
    ("pipeline", {}, {"stages": "auto"}, "", "ds-pipe"),
    ("tensor_parallel", {"autotp_size": 0}, {"autotp_size": 2}, "autotp_size", "ds-comm"),
    ("tensor_parallel", {"tp": {"tp_size": 1}}, {"tp": {"tp_size": 4}}, "tp.tp_size", "ds-comm"),
    ("expert_parallel", {"enabled": False}, {"enabled": True}, "enabled", "ds-moe"),
    ("hybrid_engine", {"enabled": False}, {"enabled": True}, "enabled", "ds-inference"),
    ("weight_quantization", {}, {"post_init_quant": {}}, "", "ds-inference"),
    (
        "data_efficiency",
        {"enabled": False, "data_sampling": {"curriculum_learning": {"enabled": True}}},
        {"enabled": True},
        "enabled",
        "ds-compress",
    ),
    ("curriculum_learning", {"enabled": False}, {"enabled": True}, "enabled", "ds-compress"),
    ("progressive_layer_drop", {"enabled": False}, {"enabled": True}, "enabled", "ds-compress"),
    (
        "compression_training",
        {"layer_reduction": {"enabled": False}},
        {"layer_reduction": {"enabled": True}},
        "layer_reduction.enabled",
        "ds-compress",
    ),
    *(
        (
            "compression_training",
            {name: {"shared_parameters": {"enabled": False}, "different_groups": {}}},
            {name: {"shared_parameters": {"enabled": True}}},
            f"{name}.shared_parameters.enabled",
            "ds-compress",
        )
        for name in (
            "weight_quantization",
            "activation_quantization",
            "sparse_pruning",
            "row_pruning",
            "head_pruning",
            "channel_pruning",
        )
    ),
    ("elasticity", {"enabled": False}, {"enabled": True}, "enabled", "ds-launch"),
    ("autotuning", {"enabled": False}, {"enabled": True}, "enabled", "ds-launch"),
    ("aio", {}, {"block_size": 1_048_576}, "", "ds-aio"),
]
IDS = [f"{block[0]}.{block[3]}" for block in BLOCKS]


@pytest.mark.parametrize(("key", "off", "on", "switch", "owner"), BLOCKS, ids=IDS)
def test_a_block_is_accepted_off_and_refused_on(
    key: str, off: Any, on: Any, switch: str, owner: str
) -> None:
    assert load({key: off}).batch == (4, 2, 1)
    path = f"{key}.{switch}" if switch else key
    assert refused({key: on}) == {path: ProblemKind.UNAVAILABLE}
    assert owner in message({key: on})
    assert refused({key: None}) == {key: ProblemKind.MALFORMED}


def test_every_block_is_in_the_table() -> None:
    assert {block[0] for block in BLOCKS} == {rule.key for rule in DSConfig.key_rules.pending}


def test_every_key_that_the_engine_leaves_to_others_is_known_here() -> None:
    known = {rule.key for rule in DSConfig.key_rules.pending}
    assert {rule.key for rule in EngineConfig.key_rules.elsewhere} <= known
    owners = {rule.key: rule.owner for rule in DSConfig.key_rules.pending}
    for rule in EngineConfig.key_rules.elsewhere:
        assert owners[rule.key] == rule.owner


@pytest.mark.parametrize(
    ("config", "path", "hint"),
    [
        (
            {"tensorboard": {"enabled": False, "outputpath": ""}},
            "tensorboard.outputpath",
            "output_path",
        ),
        ({"tensorbord": {}}, "tensorbord", "tensorboard"),
        (
            {"data_efficiency": {"data_routing": {"random_ltd": {"model_typ": "decoder"}}}},
            "data_efficiency.data_routing.random_ltd.model_typ",
            "model_type",
        ),
        (
            {
                "compression_training": {
                    "row_pruning": {"different_groups": {"rp1": {"params": {"dense_ratios": 1}}}}
                }
            },
            "compression_training.row_pruning.different_groups.rp1.params.dense_ratios",
            "dense_ratio",
        ),
    ],
)
def test_a_misspelt_key_is_found_in_a_block_that_is_off(config: Any, path: str, hint: str) -> None:
    assert refused(config) == {path: ProblemKind.UNKNOWN}
    assert f'did you mean "{hint}"' in message(config)


@pytest.mark.parametrize("value", [None, {}, {"enabled": False}])
@pytest.mark.parametrize("key", ["amp", "nebula", "sparse_attention", "eigenvalue"])
def test_features_that_are_gone_stay_refused(key: str, value: Any) -> None:
    assert refused({key: value}) == {key: ProblemKind.REMOVED}


def test_everything_in_one_report() -> None:
    found = refused(
        {
            "tensorboard": {"enabled": True, "job": "x"},
            "zero_optimization": {"stage": 9},
            "amp": {},
            "elasticity": {"enabled": "auto"},
            "unknwon": 1,
        }
    )
    assert found == {
        "tensorboard.enabled": ProblemKind.UNAVAILABLE,
        "tensorboard.job": ProblemKind.UNKNOWN,
        "zero_optimization.stage": ProblemKind.MALFORMED,
        "amp": ProblemKind.REMOVED,
        "elasticity.enabled": ProblemKind.AUTO,
        "unknwon": ProblemKind.UNKNOWN,
    }


def test_it_is_an_engine_config() -> None:
    config = load({"tensorboard": {"enabled": False}, "zero_optimization": {"stage": 2}})
    assert EngineConfig.load(config, data_parallel_size=2).zero_optimization.stage == 2
