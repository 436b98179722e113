"""Named random states, on the CPU's generator."""

from __future__ import annotations

import pytest
import torch

from ds_comm.errors import EngineError
from ds_zero.checkpointing import RngTracker


def _numbers(seed: int, count: int) -> torch.Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(seed))


def test_a_fork_draws_from_its_own_state_and_goes_on() -> None:
    """Two forks continue one sequence; the device's own sequence does not notice them."""
    tracker = RngTracker()
    torch.manual_seed(1)
    tracker.add("a", 7)
    tracker.add("b", 8)
    first = torch.rand(2)
    with tracker.fork("a"):
        a = torch.rand(3)
    with tracker.fork("b"):
        b = torch.rand(3)
    with tracker.fork("a"):
        a = torch.cat([a, torch.rand(2)])
    second = torch.rand(2)
    assert torch.equal(torch.cat([first, second]), _numbers(1, 4))
    assert torch.equal(a, _numbers(7, 5))
    assert torch.equal(b, _numbers(8, 3))


def test_states_are_copies() -> None:
    tracker = RngTracker()
    tracker.add("a", 7)
    states = tracker.get_states()
    with tracker.fork("a"):
        first = torch.rand(3)
    tracker.set_states(states)
    states["a"].zero_()
    with tracker.fork("a"):
        assert torch.equal(torch.rand(3), first)


def test_an_exception_restores_the_device() -> None:
    tracker = RngTracker()
    tracker.add("a", 7)
    torch.manual_seed(1)
    with pytest.raises(ZeroDivisionError), tracker.fork("a"):
        torch.rand(3)
        raise ZeroDivisionError
    assert torch.equal(torch.rand(2), _numbers(1, 2))
    with tracker.fork("a"):
        assert torch.equal(torch.rand(1), _numbers(7, 4)[3:])


def test_wrong_names_and_seeds() -> None:
    tracker = RngTracker()
    tracker.add("a", 7)
    with pytest.raises(EngineError, match="'a' exists"):
        tracker.add("a", 8)
    with pytest.raises(EngineError, match=r"seed 7 .*\['a'\]"):
        tracker.add("b", 7)
    with (
        pytest.raises(EngineError, match=r"'model-parallel-rng'; there are \['a'\]"),
        tracker.fork(),
    ):
        pass
    tracker.reset()
    tracker.add("a", 7)
