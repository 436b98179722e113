"""Checkpointed functions against the same functions run plainly, fp32, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ds_comm.errors import EngineError
from ds_zero.checkpointing import ActivationCheckpointing, RngTracker
from ds_zero.config import ActivationCheckpointingSection

Run = Callable[..., Any]


def _plainly(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _runs(**options: Any) -> dict[str, Run]:
    tracker = RngTracker()
    tracker.add("model-parallel-rng", 5)
    runner = ActivationCheckpointing(ActivationCheckpointingSection(**options), tracker=tracker)
    return {"reentrant": runner.checkpoint, "non-reentrant": runner.non_reentrant_checkpoint}


MODES = ("reentrant", "non-reentrant")


def _net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 4))


def _grads(run: Run, use: Callable[[nn.Module, Run, Tensor], Tensor]) -> list[Tensor]:
    net = _net()
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(4), requires_grad=True)
    torch.manual_seed(9)
    use(net, run, x).backward()
    grads = [param.grad for param in net.parameters()] + [x.grad]
    assert all(grad is not None for grad in grads)
    return grads  # type: ignore[return-value]


def _same(use: Callable[[nn.Module, Run, Tensor], Tensor], run: Run) -> None:
    for got, wanted in zip(_grads(run, use), _grads(_plainly, use), strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("mode", MODES)
def test_dropout_is_drawn_again(mode: str) -> None:
    """Random states of the CPU are restored for the recomputation, and afterwards."""

    def use(net: nn.Module, run: Run, x: Tensor) -> Tensor:
        first = run(net, x)
        between = torch.rand(())
        loss: Tensor = (run(net, first) * between).square().mean()
        return loss

    _same(use, _runs()[mode])
    torch.manual_seed(9)
    _grads(_runs()[mode], use)
    after = torch.rand(())
    _grads(_plainly, use)
    assert torch.equal(after, torch.rand(()))


@pytest.mark.parametrize("mode", MODES)
def test_named_random_states_are_restored(mode: str) -> None:
    """Dropout inside of a fork: recomputed alike, and the state goes on as without checkpoints."""

    def numbers(checkpointed: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
        tracker = RngTracker()
        tracker.add("model-parallel-rng", 5)
        runner = ActivationCheckpointing(tracker=tracker)
        runs: dict[str, Run] = {
            "reentrant": runner.checkpoint,
            "non-reentrant": runner.non_reentrant_checkpoint,
        }

        def block(x: Tensor) -> Tensor:
            with tracker.fork():
                x = F.dropout(torch.tanh(x), 0.5)
            return F.dropout(x, 0.5).sin()

        x = torch.linspace(-1, 1, 40).requires_grad_()
        torch.manual_seed(2)
        run = runs[mode] if checkpointed else _plainly
        y = run(block, run(block, x))
        y.sum().backward()
        assert x.grad is not None
        return [y, x.grad], tracker.get_states()

    (y, grad), states = numbers(True)
    (wanted_y, wanted_grad), wanted_states = numbers(False)
    assert torch.equal(y, wanted_y) and torch.equal(grad, wanted_grad)
    assert torch.equal(states["model-parallel-rng"], wanted_states["model-parallel-rng"])


class Pair(NamedTuple):
    left: Tensor
    right: Any


@pytest.mark.parametrize("mode", MODES)
def test_nested_arguments_and_results(mode: str) -> None:
    """Lists, dictionaries, named tuples, keywords, None, text, integers, no tensors at all."""

    def inner(net: nn.Module, x: Tensor) -> Callable[..., Any]:
        def function(parts: list[Tensor], mask: None, *, scale: dict[str, Any]) -> Any:
            assert mask is None and scale["name"] == "s"
            y = net(parts[0]) * scale["by"][0] + parts[1]
            return {"out": Pair(y, "text"), "ids": torch.arange(3), "n": 3, "none": None}

        return function

    def use(net: nn.Module, run: Run, x: Tensor) -> Tensor:
        by = x.sum() * 0.1
        found = run(inner(net, x), [x, x.sin()], None, scale={"name": "s", "by": (by,)})
        assert found["n"] == 3 and found["none"] is None and found["out"].right == "text"
        assert found["ids"].tolist() == [0, 1, 2]
        loss: Tensor = found["out"].left.square().mean()
        return loss

    _same(use, _runs()[mode])


@pytest.mark.parametrize("mode", MODES)
def test_inputs_without_gradient(mode: str) -> None:
    """Token ids, or the data itself: the parameters inside get their gradients all the same."""

    def use(net: nn.Module, run: Run, x: Tensor) -> Tensor:
        loss: Tensor = run(net, x.detach()).square().mean() + x.sum()
        return loss

    _same(use, _runs()[mode])


@pytest.mark.parametrize("mode", MODES)
def test_frozen_part(mode: str) -> None:
    net = _net().requires_grad_(False)
    x = torch.randn(6, 4)
    run = _runs()[mode]
    assert not run(net, x).requires_grad
    head = nn.Linear(4, 2)
    head(run(net, x)).sum().backward()
    assert head.weight.grad is not None


@pytest.mark.parametrize("mode", MODES)
def test_without_grad_the_function_runs_once(mode: str) -> None:
    calls: list[int] = []

    def function(x: Tensor) -> Tensor:
        calls.append(1)
        return x.sin()

    with torch.no_grad():
        assert not _runs()[mode](function, torch.ones(2, requires_grad=True)).requires_grad
    assert len(calls) == 1


@pytest.mark.parametrize("outer", MODES)
@pytest.mark.parametrize("inner", MODES)
def test_nested_checkpoints(outer: str, inner: str) -> None:
    runs = _runs()

    def use(net: nn.Module, run: Run, x: Tensor) -> Tensor:
        if run is _plainly:
            return net(torch.sin(net(x))).square().mean()  # type: ignore[no-any-return]

        def both(x: Tensor) -> Tensor:
            out: Tensor = runs[inner](net, torch.sin(runs[inner](net, x)))
            return out

        loss: Tensor = runs[outer](both, x).square().mean()
        return loss

    _same(use, runs[outer])


@dataclass
class Hidden:
    value: Tensor


def test_hidden_tensors_are_refused_in_reentrant_mode() -> None:
    """torch drops their gradients without a word; the other mode sees them."""
    runs = _runs()
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(EngineError, match="argument of type Hidden"):
        runs["reentrant"](lambda a, b: a + b.value, x, Hidden(x))
    with pytest.raises(EngineError, match="result of type Hidden"):
        runs["reentrant"](lambda a: Hidden(a.sin()), x)
    runs["non-reentrant"](lambda a, b: Hidden(a * b.value), x, Hidden(x)).value.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [2.0] * 3


@pytest.mark.parametrize("mode", MODES)
def test_autocast_is_restored(mode: str) -> None:
    dtypes: list[torch.dtype] = []

    def use(net: nn.Module, run: Run, x: Tensor) -> Tensor:
        def function(x: Tensor) -> Tensor:
            dtypes.append((x @ x.t()).dtype)
            out: Tensor = net(x)
            return out

        with torch.autocast("cpu", torch.bfloat16):
            out = run(function, x)
        loss: Tensor = out.float().square().mean()
        return loss

    _same(use, _runs()[mode])
    assert set(dtypes) == {torch.bfloat16} and len(dtypes) == 3


def test_profile_logs_times(caplog: pytest.LogCaptureFixture) -> None:
    runs = _runs(profile=True, synchronize_checkpoint_boundary=True)
    with caplog.at_level("INFO", logger="ds_zero"):
        for mode in MODES:
            runs[mode](torch.sin, torch.ones(3, requires_grad=True)).sum().backward()
    said = [record.getMessage().split(" took")[0] for record in caplog.records]
    assert said == [
        "checkpoint: forward",
        "checkpoint: recomputation",
        "checkpoint: recomputation and backward",
        "checkpoint: forward",
        "checkpoint: recomputation",
    ]
