"""Accumulation windows as arithmetic."""

from __future__ import annotations

import pytest

from ds_comm.errors import EngineError
from ds_zero.window import AccumulationWindow


def _ends(window: AccumulationWindow, count: int) -> list[bool]:
    return [window.end_micro_step() for _ in range(count)]


def test_windows_of_equal_length() -> None:
    window = AccumulationWindow(3)
    assert _ends(window, 7) == [False, False, True, False, False, True, False]
    assert window.micro_steps == 1


def test_a_window_that_ends_early_is_followed_by_a_whole_one() -> None:
    """Counting from the start of training would end the next one after two micro-steps."""
    window = AccumulationWindow(4)
    assert _ends(window, 1) == [False]
    window.force(True)
    assert window.is_boundary() and _ends(window, 1) == [True]
    window.force(None)
    assert _ends(window, 5) == [False, False, False, True, False]


def test_a_window_that_is_held_open_ends_at_once_when_it_is_let_go() -> None:
    window = AccumulationWindow(2)
    window.force(False)
    assert _ends(window, 5) == [False] * 5
    window.force(None)
    assert _ends(window, 3) == [True, False, True]


def test_a_restart_tells_what_it_cut() -> None:
    window = AccumulationWindow(4)
    _ends(window, 3)
    assert window.restart(2) == 3
    assert _ends(window, 3) == [False, True, False]
    assert window.restart() == 1 and window.length == 2


def test_unmanaged() -> None:
    window = AccumulationWindow(4, managed=False)
    assert _ends(window, 3) == [True] * 3
    with pytest.raises(EngineError, match="every step"):
        window.force(True)


def test_contexts_do_not_nest() -> None:
    window = AccumulationWindow(1)
    window.pause("no_sync()")
    with pytest.raises(EngineError, match=r"no_sync\(\) is already active"):
        window.pause("no_sync()")
    with pytest.raises(EngineError, match=r"coalesce_grad_reduction\(\) inside no_sync\(\)"):
        window.pause("coalesce_grad_reduction()")
    with pytest.raises(EngineError, match=r"step\(\) inside no_sync\(\)"):
        window.end_micro_step()
    window.resume()
    assert window.end_micro_step()


def test_when_gradients_may_be_sums() -> None:
    """Then they are summed in fp32."""
    window = AccumulationWindow(1)
    assert not window.sums_up()
    window.force(True)
    assert not window.sums_up()
    window.force(False)
    assert window.sums_up()
    window.force(None)
    window.pause("no_sync()")
    assert window.sums_up()
    assert AccumulationWindow(2).sums_up()
    assert AccumulationWindow(1, managed=False).sums_up()
