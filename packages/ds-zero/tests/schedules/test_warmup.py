"""Warm-up schedules against closed forms and the inputs of B21 and B24."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_comm.errors import CheckpointError, ConfigError
from ds_zero.schedules import WarmupCosineLR, WarmupDecayLR, WarmupLR
from ds_zero.schedules.factors import (
    WARMUP_KINDS,
    WarmupKind,
    peak_iteration,
    warmup_cosine_factor,
    warmup_decay_factor,
    warmup_factor,
)

kinds = st.sampled_from(WARMUP_KINDS)


def sgd(*lrs: float, **kwargs: Any) -> torch.optim.SGD:
    groups = [{"params": [torch.nn.Parameter(torch.ones(2))], "lr": lr} for lr in lrs]
    return torch.optim.SGD(groups, lr=1.0, **kwargs)


def rates(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def trace(schedule: Any, optimizer: torch.optim.Optimizer, steps: int) -> list[list[float]]:
    seen = [rates(optimizer)]
    for _ in range(steps):
        schedule.step()
        seen.append(rates(optimizer))
    return seen


# ---- factors -----------------------------------------------------------------------------


def test_log_warmup_is_ln_of_next_over_ln_of_length() -> None:
    got = [warmup_factor(i, num_steps=4, kind="log") for i in range(-1, 6)]
    want = [0, 0, math.log(2) / math.log(4), math.log(3) / math.log(4), 1, 1, 1]
    assert got == pytest.approx(want, abs=1e-15)


def test_linear_warmup_is_a_line() -> None:
    got = [warmup_factor(i, num_steps=4, kind="linear") for i in range(-1, 7)]
    assert got == [0, 0, 0.25, 0.5, 0.75, 1, 1, 1]


@given(num_steps=st.integers(0, 300), kind=kinds, at=st.integers(-1, 10_000))
def test_warmup_never_falls_and_is_complete_at_its_peak(
    num_steps: int, kind: WarmupKind, at: int
) -> None:
    now = warmup_factor(at, num_steps=num_steps, kind=kind)
    assert 0.0 <= now <= warmup_factor(at + 1, num_steps=num_steps, kind=kind) <= 1.0
    assert (now == 1.0) == (max(0, at) >= peak_iteration(num_steps, kind))


@given(num_steps=st.integers(0, 200), extra=st.integers(0, 200), kind=kinds)
def test_decay_is_a_line_to_zero(num_steps: int, extra: int, kind: WarmupKind) -> None:
    total = num_steps + extra
    values = [
        warmup_decay_factor(i, total_steps=total, num_steps=num_steps, kind=kind)
        for i in range(total + 5)
    ]
    assert values[num_steps] == 1.0
    if extra:
        assert values[total:] == [0.0] * 5
        falls = [
            a - b for a, b in zip(values[num_steps:total], values[num_steps + 1 :], strict=False)
        ]
        assert falls == pytest.approx([1 / extra] * extra, abs=1e-12)
    else:
        assert values[total + 1 :] == [0.0] * 4


@given(
    num_steps=st.integers(0, 60),
    extra=st.integers(0, 60),
    kind=kinds,
    floor=st.floats(0, 0.99),
    start=st.floats(0, 0.99),
)
def test_cosine_touches_the_peak_exactly_once_and_ends_at_its_floor(
    num_steps: int, extra: int, kind: WarmupKind, floor: float, start: float
) -> None:
    total = num_steps + extra
    values = [
        warmup_cosine_factor(
            i,
            total_steps=total,
            num_steps=num_steps,
            kind=kind,
            warmup_min_ratio=start,
            cos_min_ratio=floor,
        )
        for i in range(total + 6)
    ]
    peak = values.index(1.0)
    assert values.count(1.0) == 1
    assert peak == peak_iteration(num_steps, kind)
    assert values[:peak] == sorted(values[:peak])
    assert values[peak:] == sorted(values[peak:], reverse=True)
    last = max(total - 1, peak + 1)
    assert values[last:] == pytest.approx([floor] * len(values[last:]), abs=1e-12)
    assert values[0] == (pytest.approx(start) if num_steps else 1.0)


@given(num_steps=st.integers(2, 50), extra=st.integers(2, 50), at=st.integers(0, 120))
def test_log_cosine_equals_the_published_formula(num_steps: int, extra: int, at: int) -> None:
    total = num_steps + extra
    if at >= total:
        return
    if at < num_steps:
        want = math.log(at + 1) / math.log(num_steps)
    else:
        turn = math.pi * (at - num_steps + 1) / (total - num_steps)
        want = 1e-4 + (1 - 1e-4) * (1 + math.cos(turn)) / 2
    got = warmup_cosine_factor(
        at,
        total_steps=total,
        num_steps=num_steps,
        kind="log",
        warmup_min_ratio=0.0,
        cos_min_ratio=1e-4,
    )
    assert got == pytest.approx(want, abs=1e-12)


# ---- B21: where the rate comes from -------------------------------------------------------


def test_b21_groups_keep_their_ratio_without_a_maximum() -> None:
    optimizer = sgd(0.1, 0.01)
    schedule = WarmupLR(optimizer, warmup_num_steps=4, warmup_type="linear")
    seen = trace(schedule, optimizer, 7)
    first = [pair[0] for pair in seen]
    assert first == pytest.approx([0, 0, 0.025, 0.05, 0.075, 0.1, 0.1, 0.1])
    assert [pair[1] for pair in seen] == pytest.approx([lr / 10 for lr in first])
    assert seen[-1] == [0.1, 0.01]


@pytest.mark.parametrize("cls", [WarmupDecayLR, WarmupCosineLR])
def test_b21_holds_for_its_whole_kind(cls: Any) -> None:
    optimizer = sgd(0.1, 0.01)
    schedule = cls(optimizer, total_num_steps=10, warmup_num_steps=4, warmup_type="linear")
    seen = trace(schedule, optimizer, 12)
    for high, low in seen:
        assert low == pytest.approx(high / 10)
    assert max(seen) == [0.1, 0.01]


def test_base_rates_survive_a_second_schedule_on_the_same_optimizer() -> None:
    optimizer = sgd(0.1)
    WarmupLR(optimizer, warmup_num_steps=4)
    assert rates(optimizer) == [0.0]
    second = WarmupLR(optimizer, warmup_num_steps=0)
    assert rates(optimizer) == second.get_last_lr() == [0.1]


def test_given_maximum_is_for_all_groups_or_one_each() -> None:
    optimizer = sgd(0.1, 0.01)
    WarmupLR(optimizer, warmup_max_lr=0.5, warmup_num_steps=0)
    assert rates(optimizer) == [0.5, 0.5]
    WarmupLR(optimizer, warmup_max_lr=[0.5, 0.25], warmup_num_steps=0)
    assert rates(optimizer) == [0.5, 0.25]
    with pytest.raises(ConfigError, match=r"warmup_max_lr: .*parameter group \(2\), got 3"):
        WarmupLR(optimizer, warmup_max_lr=[1.0, 1.0, 1.0])


# ---- B24: edges -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", WARMUP_KINDS)
def test_b24_warmup_of_zero_starts_at_the_peak(kind: WarmupKind) -> None:
    optimizer = sgd(0.1)
    schedule = WarmupLR(optimizer, warmup_num_steps=0, warmup_type=kind)
    assert trace(schedule, optimizer, 3) == [[0.1]] * 4


@pytest.mark.parametrize("kind", WARMUP_KINDS)
def test_b24_warmup_of_one_spends_one_iteration_below_the_peak(kind: WarmupKind) -> None:
    optimizer = sgd(0.1)
    schedule = WarmupLR(optimizer, warmup_num_steps=1, warmup_type=kind)
    assert trace(schedule, optimizer, 3) == [[0.0], [0.0], [0.1], [0.1]]


@pytest.mark.parametrize("cls", [WarmupDecayLR, WarmupCosineLR])
def test_b24_total_shorter_than_warmup_names_both(cls: Any) -> None:
    with pytest.raises(ConfigError, match="total_num_steps: 5 .*warmup_num_steps: 10"):
        cls(sgd(0.1), total_num_steps=5, warmup_num_steps=10)


@pytest.mark.parametrize("kind", WARMUP_KINDS)
def test_b24_total_equal_to_warmup_reaches_the_peak_before_it_falls(kind: WarmupKind) -> None:
    optimizer = sgd(0.1)
    schedule = WarmupDecayLR(optimizer, total_num_steps=10, warmup_num_steps=10, warmup_type=kind)
    seen = [pair[0] for pair in trace(schedule, optimizer, 13)]
    assert seen[11] == 0.1  # iteration 10
    assert seen[1:12] == sorted(seen[1:12])
    assert seen[12:] == [0.0, 0.0]


@pytest.mark.parametrize("kind", WARMUP_KINDS)
def test_b24_cosine_of_two_of_ten_touches_the_peak_once(kind: WarmupKind) -> None:
    optimizer = sgd(0.1)
    schedule = WarmupCosineLR(optimizer, total_num_steps=10, warmup_num_steps=2, warmup_type=kind)
    seen = [pair[0] for pair in trace(schedule, optimizer, 10)]
    assert seen.count(0.1) == 1
    assert max(seen) == 0.1
    assert seen[10] == pytest.approx(0.1 * 1e-4)


# ---- bad input ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "word"),
    [
        ({"warmup_num_steps": -1}, "warmup_num_steps"),
        ({"warmup_num_steps": 2.5}, "warmup_num_steps"),
        ({"warmup_num_steps": True}, "warmup_num_steps"),
        ({"warmup_num_steps": "auto"}, "warmup_num_steps"),
        ({"warmup_min_lr": -0.1}, "warmup_min_lr"),
        ({"warmup_min_lr": math.nan}, "warmup_min_lr"),
        ({"warmup_max_lr": math.inf}, "warmup_max_lr"),
        ({"warmup_max_lr": "0.1"}, "warmup_max_lr"),
        ({"warmup_min_lr": 0.2}, "warmup_min_lr: 0.2 is above the maximum 0.1"),
        ({"warmup_type": "linaer"}, "did you mean 'linear'"),
        ({"warmup_type": None}, "warmup_type"),
    ],
)
def test_bad_values_are_named(kwargs: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        WarmupLR(sgd(0.1), **kwargs)


def test_all_problems_come_in_one_error() -> None:
    with pytest.raises(ConfigError) as caught:
        WarmupCosineLR(
            sgd(0.1), total_num_steps=0, warmup_min_ratio=2, cos_min_ratio=-1, warmup_type="x"
        )
    for name in ("total_num_steps", "warmup_min_ratio", "cos_min_ratio", "warmup_type"):
        assert name in str(caught.value)


def test_whole_floats_count_as_steps() -> None:
    optimizer = sgd(0.1)
    schedule = WarmupLR(optimizer, warmup_num_steps=4.0, warmup_type="linear")  # type: ignore[arg-type]
    schedule.step(2)
    assert rates(optimizer) == [0.05]


# ---- state and the optimizer's dictionaries -----------------------------------------------


@given(at=st.integers(0, 30), kind=kinds)
def test_state_in_the_middle_gives_the_same_future(at: int, kind: WarmupKind) -> None:
    kwargs: dict[str, Any] = {"total_num_steps": 20, "warmup_num_steps": 7, "warmup_type": kind}
    first, second = sgd(0.3, 0.03), sgd(0.3, 0.03)
    one = WarmupCosineLR(first, **kwargs)
    for _ in range(at):
        one.step()
    two = WarmupCosineLR(second, **kwargs)
    two.load_state_dict(one.state_dict())
    assert rates(second) == rates(first)
    assert trace(two, second, 10) == trace(one, first, 10)


def test_state_restores_base_rates_and_accepts_the_short_foreign_form() -> None:
    optimizer = sgd(0.5)
    schedule = WarmupLR(optimizer, warmup_num_steps=4, warmup_type="linear")
    schedule.load_state_dict({"version": 1, "last_batch_iteration": 2, "base_lrs": [0.1]})
    assert rates(optimizer) == [0.05]
    schedule.load_state_dict({"last_batch_iteration": 9})
    assert rates(optimizer) == [0.1]


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"last_batch_iteration": "3"},
        {"version": 2, "last_batch_iteration": 3},
        {"version": 1, "last_batch_iteration": 3, "base_lrs": [0.1, 0.2]},
    ],
)
def test_malformed_state_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError):
        WarmupLR(sgd(0.1)).load_state_dict(state)


def test_tensor_rates_are_written_in_place() -> None:
    lr = torch.tensor(0.1)
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([parameter], lr=lr, foreach=False)
    schedule = WarmupLR(optimizer, warmup_num_steps=2, warmup_type="linear")
    assert optimizer.param_groups[0]["lr"] is lr
    assert lr.item() == 0.0
    schedule.step(1)
    assert lr.item() == pytest.approx(0.05)
    schedule.step(5)
    assert lr.item() == pytest.approx(0.1)


def test_step_to_a_given_iteration_and_both_getters() -> None:
    optimizer = sgd(0.1)
    schedule = WarmupLR(optimizer, warmup_num_steps=4, warmup_type="linear")
    schedule.step(3)
    assert schedule.last_batch_iteration == 3
    assert schedule.get_lr() == schedule.get_last_lr() == pytest.approx([0.075])
    schedule.step()
    assert schedule.get_last_lr() == [0.1]


def test_resume_by_last_batch_iteration() -> None:
    optimizer = sgd(0.1)
    WarmupLR(optimizer, warmup_num_steps=4, warmup_type="linear", last_batch_iteration=2)
    assert rates(optimizer) == pytest.approx([0.05])


def test_groups_added_later_are_refused() -> None:
    optimizer = sgd(0.1)
    schedule = WarmupLR(optimizer)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    with pytest.raises(ConfigError, match="1 parameter groups, the optimizer now has 2"):
        schedule.step()
