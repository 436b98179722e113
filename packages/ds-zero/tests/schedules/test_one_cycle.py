"""OneCycle and LRRangeTest against closed forms and the input of B22."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_comm.errors import ConfigError
from ds_zero.schedules import LRRangeTest, OneCycle
from ds_zero.schedules.factors import inverse_time_decay, one_cycle_scale, range_test_factor


def adam(lr: float = 0.1) -> torch.optim.Adam:
    return torch.optim.Adam([torch.nn.Parameter(torch.ones(2))], lr=lr, betas=(0.9, 0.99))


def sgd(lr: float = 0.1, momentum: float = 0.5) -> torch.optim.SGD:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=lr, momentum=momentum)


@given(first=st.integers(1, 80), second=st.integers(1, 80), at=st.integers(-1, 400))
def test_triangle_equals_its_closed_form(first: int, second: int, at: int) -> None:
    count = at + 1
    want = max(0.0, min(count / first, 1 - (count - first) / second))
    got = one_cycle_scale(at, first_steps=first, second_steps=second)
    assert got == pytest.approx(want, abs=1e-12)
    assert 0.0 <= got <= 1.0


@given(
    first=st.integers(1, 60),
    second=st.integers(1, 60),
    stairs=st.tuples(st.integers(1, 9), st.integers(1, 9)),
)
def test_stairs_take_few_levels_and_meet_the_ramp_at_the_ends(
    first: int, second: int, stairs: tuple[int, int]
) -> None:
    values = [
        one_cycle_scale(
            at,
            first_steps=first,
            second_steps=second,
            first_stairs=stairs[0],
            second_stairs=stairs[1],
        )
        for at in range(-1, first + second)
    ]
    assert (values[0], values[first], values[-1]) == (0.0, 1.0, 0.0)
    assert len(set(values[: first + 1])) <= stairs[0] + 1
    assert len(set(values[first:])) <= stairs[1] + 1
    assert values[: first + 1] == sorted(values[: first + 1])
    assert values[first:] == sorted(values[first:], reverse=True)


@given(count=st.integers(0, 10**6), step_size=st.integers(1, 1000), rate=st.floats(0, 100))
def test_decay_falls_and_stays_positive(count: int, step_size: int, rate: float) -> None:
    now = inverse_time_decay(count, step_size=step_size, rate=rate)
    assert 0.0 < inverse_time_decay(count + 1, step_size=step_size, rate=rate) <= now <= 1.0
    assert now == pytest.approx(step_size / (step_size + rate * count))


def test_decay_without_step_size_is_off() -> None:
    assert inverse_time_decay(10, step_size=0, rate=3.0) == 1.0


def test_rates_and_first_beta_over_a_whole_cycle() -> None:
    optimizer = adam()
    schedule = OneCycle(
        optimizer,
        cycle_min_lr=0.1,
        cycle_max_lr=0.5,
        cycle_first_step_size=2,
        cycle_second_step_size=4,
        decay_step_size=1,
        decay_lr_rate=1.0,
    )
    group = optimizer.param_groups[0]
    seen = [(group["lr"], group["betas"][0])]
    for _ in range(8):
        schedule.step()
        seen.append((group["lr"], group["betas"][0]))
        assert group["betas"][1] == 0.99
    assert [lr for lr, _ in seen] == pytest.approx(
        [0.1, 0.3, 0.5, 0.4, 0.3, 0.2, 0.1, 0.1 / 2, 0.1 / 3]
    )
    assert [mom for _, mom in seen] == pytest.approx(
        [0.9, 0.85, 0.8, 0.825, 0.85, 0.875, 0.9, 0.9, 0.9]
    )


def test_b22_momentum_decays_and_stays_between_zero_and_one() -> None:
    optimizer = adam()
    schedule = OneCycle(
        optimizer,
        cycle_min_lr=0.01,
        cycle_max_lr=0.1,
        cycle_first_step_size=2,
        decay_step_size=1,
        cycle_max_mom=0.9,
        decay_mom_rate=0.05,
    )
    for _ in range(4):
        schedule.step()
    seen = [optimizer.param_groups[0]["betas"][0]]
    for _ in range(500):
        schedule.step()
        seen.append(optimizer.param_groups[0]["betas"][0])
    assert seen[:4] == pytest.approx([0.9, 0.9 / 1.05, 0.9 / 1.10, 0.9 / 1.15])
    assert all(0.0 < later < earlier < 1.0 for earlier, later in zip(seen, seen[1:], strict=False))


def test_momentum_of_sgd_moves_and_can_be_left_alone() -> None:
    optimizer = sgd()
    kwargs: dict[str, Any] = {"cycle_min_lr": 0.0, "cycle_max_lr": 1.0, "cycle_first_step_size": 1}
    OneCycle(optimizer, **kwargs).step()
    assert optimizer.param_groups[0]["momentum"] == pytest.approx(0.8)
    untouched = sgd()
    OneCycle(untouched, cycle_momentum=False, **kwargs).step()
    assert untouched.param_groups[0]["momentum"] == 0.5


def test_an_optimizer_without_momentum_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    optimizer = torch.optim.Adagrad([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    with caplog.at_level(logging.WARNING):
        schedule = OneCycle(optimizer, cycle_min_lr=0.1, cycle_max_lr=0.2)
        schedule.step()
        schedule.step()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "momentum" in caplog.text


@pytest.mark.parametrize(
    ("kwargs", "word"),
    [
        ({"decay_mom_rate": 0.05}, "decay_mom_rate: 0.05 has no effect while decay_step_size is 0"),
        ({"decay_lr_rate": 0.05}, "decay_lr_rate"),
        ({"decay_lr_rate": -1.0}, "decay_lr_rate"),
        ({"cycle_first_step_size": 0}, "cycle_first_step_size"),
        ({"cycle_second_step_size": 0}, "cycle_second_step_size"),
        ({"cycle_max_mom": 1.0}, "cycle_max_mom"),
        ({"cycle_min_mom": 0.95}, "cycle_min_mom: 0.95 is above cycle_max_mom: 0.9"),
        ({"cycle_min_lr": 3.0}, "cycle_min_lr: 3 is above cycle_max_lr: 1"),
        ({"cycle_max_lr": [1.0, 2.0]}, "cycle_max_lr"),
        ({"cycle_momentum": "yes"}, "cycle_momentum"),
        ({"cycle_first_stair_count": -1}, "cycle_first_stair_count"),
    ],
)
def test_bad_values_are_named(kwargs: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        OneCycle(adam(), **{"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, **kwargs})


@given(at=st.integers(0, 30))
def test_state_in_the_middle_gives_the_same_future(at: int) -> None:
    kwargs: dict[str, Any] = {
        "cycle_min_lr": 0.1,
        "cycle_max_lr": 1.0,
        "cycle_first_step_size": 5,
        "decay_step_size": 2,
        "decay_lr_rate": 0.5,
        "decay_mom_rate": 0.5,
    }
    first, second = adam(), adam()
    one = OneCycle(first, **kwargs)
    for _ in range(at):
        one.step()
    two = OneCycle(second, **kwargs)
    two.load_state_dict(one.state_dict())
    for _ in range(12):
        assert first.param_groups[0]["lr"] == second.param_groups[0]["lr"]
        assert first.param_groups[0]["betas"] == second.param_groups[0]["betas"]
        one.step()
        two.step()


# ---- LRRangeTest ----------------------------------------------------------------------------


@given(at=st.integers(-1, 10_000), step_size=st.integers(1, 500), rate=st.floats(0, 10, width=32))
def test_range_factor_equals_its_closed_form(at: int, step_size: int, rate: float) -> None:
    ramp = range_test_factor(at, step_size=step_size, step_rate=rate, staircase=False)
    stairs = range_test_factor(at, step_size=step_size, step_rate=rate, staircase=True)
    assert ramp == pytest.approx(1 + rate * (at + 1) / step_size)
    assert stairs == pytest.approx(1 + rate * ((at + 1) // step_size))
    assert stairs <= ramp + 1e-9


def test_range_test_writes_the_rates() -> None:
    optimizer = adam()
    schedule = LRRangeTest(
        optimizer,
        lr_range_test_min_lr=0.01,
        lr_range_test_step_size=2,
        lr_range_test_step_rate=1.0,
        lr_range_test_staircase=True,
    )
    seen = [optimizer.param_groups[0]["lr"]]
    for _ in range(5):
        schedule.step()
        seen.append(optimizer.param_groups[0]["lr"])
    assert seen == pytest.approx([0.01, 0.01, 0.02, 0.02, 0.03, 0.03])


@pytest.mark.parametrize(
    "kwargs",
    [
        {"lr_range_test_step_size": 0},
        {"lr_range_test_min_lr": -1.0},
        {"lr_range_test_step_rate": "fast"},
        {"lr_range_test_staircase": 1},
    ],
)
def test_bad_range_values_are_named(kwargs: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(kwargs))):
        LRRangeTest(adam(), **kwargs)
