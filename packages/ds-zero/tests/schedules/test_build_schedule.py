"""From a section to a schedule, command-line flags, and the peer's values."""

from __future__ import annotations

import argparse
import importlib.util
import inspect
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from ds_comm.errors import ConfigError
from ds_zero.schedules import (
    SCHEDULES,
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
    add_tuning_arguments,
    build_schedule,
    torch_schedules,
)


@dataclass(frozen=True)
class Section:
    type: str
    params: dict[str, Any] = field(default_factory=dict)


def adam(lr: float = 0.1) -> torch.optim.Adam:
    return torch.optim.Adam([torch.nn.Parameter(torch.ones(2))], lr=lr)


MINIMAL: dict[str, dict[str, Any]] = {
    "LRRangeTest": {},
    "OneCycle": {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0},
    "WarmupLR": {},
    "WarmupDecayLR": {"total_num_steps": 2000},
    "WarmupCosineLR": {"total_num_steps": 2000},
}


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_every_own_name_builds(name: str) -> None:
    schedule = build_schedule(Section(name, MINIMAL[name]), adam())
    assert type(schedule) is SCHEDULES[name]
    schedule.step()
    assert len(schedule.get_last_lr()) == 1


def test_a_torch_name_builds_with_its_params() -> None:
    optimizer = adam()
    schedule = build_schedule(Section("StepLR", {"step_size": 1, "gamma": 0.5}), optimizer)
    assert isinstance(schedule, torch.optim.lr_scheduler.StepLR)
    optimizer.step()
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)


def test_torch_names_are_schedules_only() -> None:
    names = torch_schedules()
    assert {"StepLR", "CosineAnnealingLR", "ReduceLROnPlateau"} <= set(names)
    assert not {"LRScheduler", "Optimizer", "Counter"} & set(names)


@pytest.mark.parametrize(
    ("given", "meant"),
    [("WarmupRL", "WarmupLR"), ("warmuplr", "WarmupLR"), ("CosineAnealingLR", "CosineAnnealingLR")],
)
def test_an_unknown_name_suggests_the_nearest(given: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"scheduler.type: '{given}'.*did you mean '{meant}'"):
        build_schedule(Section(given), adam())


def test_unknown_and_missing_params_are_all_named() -> None:
    params = {"warmup_num_step": 3, "colour": "red"}
    with pytest.raises(ConfigError) as caught:
        build_schedule(Section("WarmupDecayLR", params), adam())
    text = str(caught.value)
    assert "scheduler.params.warmup_num_step" in text
    assert "did you mean 'warmup_num_steps'" in text
    assert "scheduler.params.colour" in text
    assert "scheduler.params.total_num_steps: required" in text


def test_torch_params_are_checked_and_its_refusals_are_typed() -> None:
    with pytest.raises(ConfigError, match=r"params\.gama: .*did you mean 'gamma'"):
        build_schedule(Section("StepLR", {"step_size": 1, "gama": 0.5}), adam())
    with pytest.raises(ConfigError, match=r"params\.step_size: required"):
        build_schedule(Section("StepLR", {}), adam())
    with pytest.raises(ConfigError, match="OneCycleLR refused"):
        build_schedule(Section("OneCycleLR", {"max_lr": 0.1, "total_steps": -5}), adam())


def test_unresolved_auto_is_named() -> None:
    with pytest.raises(ConfigError, match="warmup_num_steps: .*'auto'"):
        build_schedule(Section("WarmupLR", {"warmup_num_steps": "auto"}), adam())


def test_flags_carry_the_parameter_names() -> None:
    parser = add_tuning_arguments(argparse.ArgumentParser())
    args = parser.parse_args(
        ["--lr_schedule", "WarmupLR", "--warmup_num_steps", "5", "--cycle_momentum", "false"]
    )
    assert (args.lr_schedule, args.warmup_num_steps, args.cycle_momentum) == ("WarmupLR", 5, False)
    assert args.warmup_max_lr is None
    assert parser.parse_args(["--lr_range_test_staircase"]).lr_range_test_staircase is True
    with pytest.raises(SystemExit):
        parser.parse_args(["--cycle_momentum", "perhaps"])


def test_every_schedule_parameter_has_a_flag() -> None:
    args = vars(add_tuning_arguments(argparse.ArgumentParser()).parse_args([]))
    for cls in SCHEDULES.values():
        for name in inspect.signature(cls).parameters:
            if name not in ("optimizer", "last_batch_iteration"):
                assert name in args


@pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="the peer package is not installed"
)
@pytest.mark.parametrize(
    ("ours", "params"),
    [
        (WarmupLR, {"warmup_max_lr": 0.1, "warmup_num_steps": 7, "warmup_type": "log"}),
        (WarmupLR, {"warmup_max_lr": 0.1, "warmup_num_steps": 7, "warmup_type": "linear"}),
        (WarmupDecayLR, {"total_num_steps": 20, "warmup_max_lr": 0.1, "warmup_num_steps": 7}),
        (WarmupCosineLR, {"total_num_steps": 20, "warmup_num_steps": 7}),
        (LRRangeTest, {"lr_range_test_step_size": 3, "lr_range_test_staircase": True}),
        (
            OneCycle,
            {
                "cycle_min_lr": 0.1,
                "cycle_max_lr": 1.0,
                "cycle_first_step_size": 5,
                "decay_step_size": 3,
                "decay_lr_rate": 0.5,
            },
        ),
    ],
)
def test_same_rates_as_the_peer(ours: Any, params: dict[str, Any]) -> None:
    peer_module = importlib.import_module("deepspeed.runtime.lr_schedules")
    mine, theirs = adam(), adam()
    one, two = ours(mine, **params), vars(peer_module)[ours.__name__](theirs, **params)
    for _ in range(25):
        one.step()
        two.step()
        assert mine.param_groups[0]["lr"] == pytest.approx(theirs.param_groups[0]["lr"], abs=1e-12)
