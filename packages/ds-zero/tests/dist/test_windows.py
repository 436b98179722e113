"""Accumulation by verbs and configuration, on two ranks against plain torch, fp32, 1e-6."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from twin import engine_of, inputs
from zoo import Skipping, Stack

import ds_zero
from ds_comm.errors import ConfigError, EngineError
from ds_comm.testing.plugin import Ranks

STAGES = (0, 1, 2, 3)


def _rank() -> int:
    return torch.distributed.get_rank()


class Pair:
    """A plain model and an engine on a copy of it; the plain one sees the data of all ranks."""

    def __init__(self, stage: int, make: Callable[[], nn.Module] = Stack, **extra: Any) -> None:
        torch.manual_seed(11)
        self.plain = make()
        self.engine = engine_of(copy.deepcopy(self.plain), stage, **extra)
        self.optimizer = torch.optim.SGD(self.plain.parameters(), lr=0.1)

    def backward(self, index: int, divisor: float = 1.0, **kwargs: Any) -> None:
        """One micro-batch, ``index``, on every rank; the plain loss is divided by ``divisor``."""
        world = torch.distributed.get_world_size()
        for rank in range(world):
            loss = self.plain(inputs(world * index + rank)).square().mean()
            (loss / (world * divisor)).backward()
        loss = self.engine(inputs(world * index + _rank())).square().mean()
        self.engine.backward(loss, **kwargs)

    def step(self, applied: bool = True) -> None:
        self.engine.step()
        assert self.engine.was_step_applied() is applied
        if applied:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def check(self) -> None:
        state = self.engine.module_state_dict()
        for name, wanted in self.plain.named_parameters():
            torch.testing.assert_close(state[name], wanted.detach(), rtol=1e-6, atol=1e-6)


def _reduced(engine: ds_zero.Engine) -> list[int]:
    """Units that were reduced since the last step, in order."""
    return [unit for kind, unit in engine.core.trace.events if kind == "reduce"]


def _coalesced(stage: int) -> None:
    pair = Pair(stage)
    with pair.engine.coalesce_grad_reduction():
        for index in range(3):
            pair.backward(index)
        assert not _reduced(pair.engine)
        with pytest.raises(EngineError, match="coalesce"):
            pair.engine.step()
        with pytest.raises(EngineError, match="do not nest"), pair.engine.no_sync():
            pass
    assert sorted(_reduced(pair.engine)) == list(range(len(pair.engine.core.units)))
    pair.step()
    pair.check()
    # What comes after the context still counts.
    with pair.engine.coalesce_grad_reduction():
        pair.backward(3)
    pair.backward(4)
    pair.step()
    pair.check()
    # After an exception nothing is reduced, and a new start is one call away.
    with pytest.raises(ZeroDivisionError), pair.engine.coalesce_grad_reduction():
        pair.backward(5)
        raise ZeroDivisionError
    assert not _reduced(pair.engine)
    pair.engine.zero_grad()
    pair.optimizer.zero_grad()
    pair.backward(6)
    pair.step()
    pair.check()


@pytest.mark.parametrize("stage", STAGES)
def test_coalesced_reductions(ranks: Ranks, stage: int) -> None:
    """Three backwards, one reduction a unit."""
    ranks(2, _coalesced, stage)


def _coalesced_windows(stage: int) -> None:
    pair = Pair(stage, gradient_accumulation_steps=2)
    for window in range(2):
        for micro in range(2):
            with pair.engine.coalesce_grad_reduction():
                pair.backward(4 * window + 2 * micro, 2)
                pair.backward(4 * window + 2 * micro + 1, 2)
            assert pair.engine.is_gradient_accumulation_boundary() == (micro == 1)
            pair.step(micro == 1)
        pair.check()


def _coalesced_with_other_modules(stage: int) -> None:
    """Ranks skip another block each: the exit reduces what any of them has."""
    pair = Pair(stage, Skipping)
    with pair.engine.coalesce_grad_reduction():
        for index in range(3):
            pair.backward(index)
    pair.step()
    pair.check()


@pytest.mark.parametrize("stage", STAGES)
def test_coalesced_reductions_in_windows(ranks: Ranks, stage: int) -> None:
    ranks(2, _coalesced_windows, stage)
    if stage < 3:
        ranks(2, _coalesced_with_other_modules, stage)


def _unmanaged(stage: int) -> None:
    pair = Pair(stage, managed_gradient_accumulation=False, gradient_accumulation_steps=2)
    engine = pair.engine
    done = 0
    for count in (3, 1, 2):
        for _ in range(count):
            assert engine.is_gradient_accumulation_boundary()
            pair.backward(done, 2)
            done += 1
        pair.step()
        pair.check()
        assert engine.global_samples == done * 2 * 2
    assert (engine.micro_steps, engine.global_steps) == (3, 3)
    with pytest.raises(EngineError, match="managed_gradient_accumulation"):
        engine.set_gradient_accumulation_boundary(True)


@pytest.mark.parametrize("stage", STAGES)
def test_unmanaged_accumulation(ranks: Ranks, stage: int) -> None:
    """Every step updates; backwards are counted; gradients are divided by the configured steps."""
    ranks(2, _unmanaged, stage)


def _partial(stage: int) -> None:
    pair = Pair(stage, gradient_accumulation_steps=3)
    engine = pair.engine
    pair.backward(0, 3)
    pair.step(False)
    engine.set_gradient_accumulation_boundary(True)
    pair.backward(1, 3)
    pair.step()
    pair.check()
    engine.set_gradient_accumulation_boundary(None)
    for index in range(2, 8):
        pair.backward(index, 3)
        pair.step(index in (4, 7))
        if index in (4, 7):
            pair.check()
    # As accelerate does: step() is called at boundaries alone.
    for index in range(8, 11):
        engine.set_gradient_accumulation_boundary(index == 10)
        pair.backward(index, 3)
    pair.step()
    pair.check()
    # The decision comes after the last backward.
    engine.set_gradient_accumulation_boundary(False)
    pair.backward(11, 3)
    engine.set_gradient_accumulation_boundary(True)
    pair.step()
    pair.check()


@pytest.mark.parametrize("stage", STAGES)
def test_partial_windows(ranks: Ranks, stage: int) -> None:
    """A window that the user ended is followed by a whole one."""
    ranks(2, _partial, stage)


def _by_hand(stage: int) -> None:
    pair = Pair(stage)
    pair.engine.enable_backward_allreduce = False
    pair.backward(0)
    pair.backward(1)
    assert not _reduced(pair.engine)
    pair.engine.allreduce_gradients(bucket_size=10)
    every = list(range(len(pair.engine.core.units)))
    assert sorted(_reduced(pair.engine)) == every
    pair.engine.allreduce_gradients()  # nothing is left
    assert sorted(_reduced(pair.engine)) == every
    if stage == 0:
        for param, wanted in zip(
            pair.engine.module.parameters(), pair.plain.parameters(), strict=True
        ):
            torch.testing.assert_close(param.grad, wanted.grad, rtol=1e-6, atol=1e-7)
    pair.step()
    pair.check()
    pair.backward(2)
    pair.step()  # which reduces what was left
    pair.check()


@pytest.mark.parametrize("stage", STAGES)
def test_reductions_by_hand(ranks: Ranks, stage: int) -> None:
    """``enable_backward_allreduce = False`` and ``allreduce_gradients()``, as Megatron does."""
    ranks(2, _by_hand, stage)


def _divided_by_the_user(stage: int) -> None:
    pair = Pair(stage, gradient_accumulation_steps=4)
    for index in range(4):
        pair.backward(index, 1, scale_wrt_gas=False)
        pair.step(index == 3)
    pair.check()


@pytest.mark.parametrize("stage", [0, 3])
def test_losses_that_are_not_divided(ranks: Ranks, stage: int) -> None:
    """``scale_wrt_gas=False``: gradients of the window add up undivided."""
    ranks(2, _divided_by_the_user, stage)


def test_bf16_sums_are_fp32() -> None:
    """Windows held open by hand with one configured step: sums do not lose small addends."""
    for stage in STAGES:
        model = nn.Linear(1, 64, bias=False)
        nn.init.zeros_(model.weight)
        engine = engine_of(model, stage, bf16={"enabled": True})
        engine.set_gradient_accumulation_boundary(False)
        x = torch.ones(1, 1, dtype=torch.bfloat16)
        for index in range(33):
            factor = 1.0 if index == 0 else 2.0**-8
            engine.backward((engine(x) * factor).sum())
        engine.set_gradient_accumulation_boundary(True)
        engine.step()
        # 1 + 32/256 = 1.125; in bf16 the sum would stay at 1.
        assert torch.equal(
            engine.module_state_dict()["weight"], torch.full((64, 1), -0.1125).bfloat16()
        )


def _batch_sizes() -> None:
    pair = Pair(1, gradient_accumulation_steps=2)
    engine = pair.engine
    pair.backward(0, 2)
    pair.step(False)
    engine.set_train_batch_size(np.int64(8))  # as it is: the window goes on
    assert type(engine.train_batch_size()) is int
    pair.backward(1, 2)
    pair.step()
    pair.check()
    pair.backward(2, 2)
    pair.step(False)
    engine.set_train_batch_size(np.int32(12))  # another length: a new window
    assert engine.get_batch_info() == (12, 2, 3)
    assert all(type(size) is int for size in engine.get_batch_info())
    pair.optimizer.zero_grad()
    for index in range(3, 6):
        pair.backward(index, 3)
        pair.step(index == 5)
    pair.check()
    for value in (True, 8.0, "8", None, 0, -4, 10, 2):
        with pytest.raises(ConfigError):
            engine.set_train_batch_size(value)  # type: ignore[arg-type]
        with pytest.raises(ConfigError):
            engine.set_train_micro_batch_size(0 if value in (10, 2) else value)  # type: ignore
    assert engine.get_batch_info() == (12, 2, 3)
    engine.set_train_micro_batch_size(np.uint8(5))
    assert engine.get_batch_info() == (30, 5, 3)


def test_batch_sizes_that_change(ranks: Ranks) -> None:
    """In the middle of a window, to the same value, to values of numpy, to nonsense."""
    ranks(2, _batch_sizes)


def test_dropped_gradients_are_told(caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_of(Stack(), 0, gradient_accumulation_steps=3)
    for _ in range(2):
        engine.backward(engine(inputs(0)).sum())
        engine.step()
    engine.set_train_batch_size(engine.train_batch_size() * 2)
    assert "first 2 micro-steps are dropped" in caplog.text
