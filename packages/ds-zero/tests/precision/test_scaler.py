"""The arithmetic of the loss scale: B27's table, growth, floor, resume."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_comm.errors import CheckpointError, LossScaleError
from ds_zero.precision import LossScaler, ScalePolicy, ScaleState, next_state


def scales(policy: ScalePolicy, flags: list[bool] | list[int]) -> list[float]:
    scaler = LossScaler(policy)
    found = []
    for flag in flags:
        scaler.update(overflow=bool(flag))
        found.append(scaler.scale)
    return found


@pytest.mark.parametrize(
    ("consecutive", "expected"),
    [
        (False, [256, 256, 128, 128, 64, 32]),
        (True, [256, 256, 256, 256, 256, 128]),
    ],
)
def test_hysteresis_table(consecutive: bool, expected: list[float]) -> None:
    """B27: start 256, window 3, hysteresis 2."""
    policy = ScalePolicy(256.0, window=3, hysteresis=2, consecutive=consecutive)
    assert scales(policy, [1, 0, 1, 0, 1, 1]) == expected


def test_growth_comes_after_every_window_of_clean_steps() -> None:
    policy = ScalePolicy(4.0, window=3, hysteresis=1)
    assert scales(policy, [0] * 7) == [4, 4, 8, 8, 8, 16, 16]
    # An overflow begins the window anew, a tolerated one too.
    assert scales(policy, [0, 0, 1, 0, 0, 0]) == [4, 4, 2, 2, 2, 4]
    assert scales(ScalePolicy(4.0, window=3), [0, 0, 1, 0, 0, 0]) == [4, 4, 4, 4, 4, 8]


def test_growth_refills_the_tolerance() -> None:
    policy = ScalePolicy(4.0, window=2, hysteresis=3)
    # Two are tolerated, growth refills, two more are tolerated, the next one halves.
    assert scales(policy, [1, 1, 0, 0, 1, 1, 1]) == [4, 4, 4, 8, 8, 8, 4]


def test_a_fixed_scale_never_moves() -> None:
    policy = ScalePolicy(1000.0, dynamic=False, window=1, hysteresis=1)
    assert scales(policy, [1, 0, 1, 1, 0]) == [1000.0] * 5
    scaler = LossScaler(policy)
    for _ in range(3):
        scaler.update(overflow=True)
        scaler.check()


def test_the_floor_is_an_error() -> None:
    """It is reached without one; the next overflow that would go below it raises."""
    scaler = LossScaler(ScalePolicy(4.0, hysteresis=2, minimum=2.0))
    for expected in (4.0, 2.0):
        scaler.update(overflow=True)
        scaler.check()
        assert scaler.scale == expected
    scaler.update(overflow=True)
    with pytest.raises(LossScaleError, match="min_loss_scale"):
        scaler.check()
    scaler.update(overflow=False)
    scaler.check()
    # Tolerated overflows at the floor are none.
    scaler = LossScaler(ScalePolicy(2.0, hysteresis=2, minimum=2.0))
    scaler.update(overflow=True)
    scaler.check()
    scaler.update(overflow=True)
    with pytest.raises(LossScaleError):
        scaler.check()


def test_halving_stops_at_a_floor_that_is_no_power() -> None:
    policy = ScalePolicy(4.0, hysteresis=1, minimum=3.0)
    assert scales(policy, [1, 1]) == [3.0, 3.0]


def test_state_goes_through_a_dictionary() -> None:
    policy = ScalePolicy(256.0, window=5, hysteresis=3)
    scaler = LossScaler(policy)
    for flag in (1, 0, 0):
        scaler.update(overflow=bool(flag))
    other = LossScaler(ScalePolicy(16.0, window=5, hysteresis=3))
    other.load_state_dict(scaler.state_dict())
    assert other.state == scaler.state == ScaleState(256.0, 2, 1)


def test_a_stored_state_is_bounded_by_the_present_policy() -> None:
    stored = {"scale": 0.5, "clean_steps": 900, "tolerance": 9}
    scaler = LossScaler(ScalePolicy(16.0, window=3, hysteresis=2, minimum=1.0))
    scaler.load_state_dict(stored)
    assert scaler.state == ScaleState(1.0, 2, 1)
    fixed = LossScaler(ScalePolicy(16.0, dynamic=False))
    fixed.load_state_dict(stored)
    assert fixed.scale == 16.0
    for bad in ({"scale": 4.0}, {**stored, "scale": math.nan}, {**stored, "tolerance": "1"}):
        with pytest.raises(CheckpointError, match="loss scale"):
            scaler.load_state_dict(bad)


@given(
    flags=st.lists(st.booleans(), max_size=60),
    window=st.integers(1, 5),
    hysteresis=st.integers(1, 4),
    consecutive=st.booleans(),
)
def test_laws(flags: list[bool], window: int, hysteresis: int, consecutive: bool) -> None:
    """Powers of two, at most one halving or doubling a step, clean runs grow, floor holds."""
    policy = ScalePolicy(64.0, True, window, hysteresis, consecutive, minimum=2.0)
    state = ScaleState(64.0, 0, hysteresis - 1)
    clean = 0
    for flag in flags:
        after = next_state(policy, state, overflow=flag)
        clean = 0 if flag else clean + 1
        assert after.scale in (state.scale / 2, state.scale, state.scale * 2)
        assert after.scale >= 2.0 and math.log2(after.scale).is_integer()
        assert (after.scale > state.scale) == (clean > 0 and clean % window == 0)
        assert 0 <= after.tolerance < hysteresis and 0 <= after.clean_steps < window
        state = after
