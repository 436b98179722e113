"""What crosses the wire in a step, call by call and byte by byte, and what stays in memory.

The model is four linear layers of 8 x 8 without bias: four units of 64 elements.  Over N ranks a
run of 64 fp32 elements is padded to a multiple of 16 N, so a shard has 32 elements for N = 2 and 3:
128 bytes in fp32, which a rank sends to each of the N - 1 others in a gather as in a reduction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ds_comm.collectives import Call, RecordingCollectives, collectives_for
from ds_comm.group import Group
from ds_comm.testing.plugin import Ranks
from ds_zero import CoreOptions, ZeroCore
from ds_zero.flat import Presence
from ds_zero.gradients import POOL_LIMIT
from ds_zero.optim import FlatSGD, attach_optimizer
from ds_zero.units import UnitRules

SHARD_BYTES = 128
# Norm and trace hash (16 bytes), a byte a unit, a byte a parameter.
ROW_BYTES = 16 + 4 + 4

Step = list[tuple[str, int]]
"""Kinds of calls with the number of the block; -1 for the agreement."""


class Blocks(nn.Module):
    """Equal blocks in a row, four by default."""

    def __init__(
        self,
        make: Callable[[], nn.Module] = lambda: nn.Linear(8, 8, bias=False),
        count: int = 4,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(make() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def _core(model: nn.Module, stage: int, **options: Any) -> tuple[ZeroCore, RecordingCollectives]:
    log = RecordingCollectives(collectives_for(Group.world()))
    params = list(model.parameters())
    chosen = CoreOptions(**{"stage": stage, "rules": UnitRules(persistence_numel=0), **options})
    core = ZeroCore(model, [params], log, chosen)
    core.optimizer = attach_optimizer(
        FlatSGD(params, lr=0.1),
        core.optimized_runs(),
        log,
        sharded=stage > 0,
        allow_untested=False,
    )
    log.calls.clear()
    return core, log


def _backward(core: ZeroCore, step: int, dtype: torch.dtype = torch.float32) -> None:
    seed = 10 * step + core.collectives.group.rank
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(seed)).to(dtype)
    core.model(x).square().mean().backward()


def _short(calls: list[Call]) -> Step:
    return [(c.kind, -1 if c.kind == "exchange" else int(c.label.split(".")[1])) for c in calls]


def _steady(stage: int, options: dict[str, Any]) -> list[Call]:
    """The calls of the third step, when the order of units is known."""
    core, log = _core(Blocks(), stage, **options)
    dtype = options.get("compute_dtype", torch.float32)
    for step in range(3):
        log.calls.clear()
        _backward(core, step, dtype)
        core.step()
    return log.calls


def _gathers(*blocks: int) -> Step:
    return [("gather", block) for block in blocks]


def _reduces(*blocks: int) -> Step:
    return [("reduce", block) for block in blocks]


AGREE: Step = [("exchange", -1)]
EXPECTED: dict[int, Step] = {
    # Reduce-scatter and all-gather of the gradients: an all-reduce in two halves.
    0: _reduces(3, 2, 1, 0) + _gathers(3, 2, 1, 0) + AGREE,
    # Reduce-scatter of the gradients, all-gather of the updated parameters.
    1: _reduces(3, 2, 1, 0) + AGREE + _gathers(0, 1, 2, 3),
    2: _reduces(3, 2, 1, 0) + AGREE + _gathers(0, 1, 2, 3),
    # Forward gathers ahead by one; block 3 stays for the backward, which gathers ahead by one too.
    3: (
        _gathers(0, 1, 2, 3, 2)
        + _reduces(3)
        + _gathers(1)
        + _reduces(2)
        + _gathers(0)
        + _reduces(1, 0)
        + AGREE
    ),
}
NO_PREFETCH: Step = (
    _gathers(0, 1, 2, 3)
    + _reduces(3)
    + _gathers(2)
    + _reduces(2)
    + _gathers(1)
    + _reduces(1)
    + _gathers(0)
    + _reduces(0)
    + AGREE
)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world", [2, 3])
def test_sequence_of_a_step(ranks: Ranks, world: int, stage: int) -> None:
    """Every call, in order, the same on every rank."""
    for calls in ranks(world, _steady, stage, {}):
        assert _short(calls) == EXPECTED[stage]


def test_sequence_without_prefetch(ranks: Ranks) -> None:
    """Stage 3: a gather when a unit is entered, and none for the last of the forward."""
    for calls in ranks(2, _steady, 3, {"prefetch": False}):
        assert _short(calls) == NO_PREFETCH


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world", [2, 3])
def test_bytes_of_a_step(ranks: Ranks, world: int, stage: int) -> None:
    """Units times shard bytes times peers: 8 transfers a step, 4 + 7 at stage 3."""
    num_gathers = 7 if stage == 3 else 4
    for calls in ranks(world, _steady, stage, {}):
        sent: Counter[str] = Counter()
        for call in calls:
            sent[call.kind] += call.sent_bytes
        assert sent == {
            "reduce": 4 * SHARD_BYTES * (world - 1),
            "gather": num_gathers * SHARD_BYTES * (world - 1),
            "exchange": ROW_BYTES * (world - 1),
        }


def test_bf16_halves_the_traffic(ranks: Ranks) -> None:
    """Compute dtype bf16: parameters travel in it, and gradients unless they are accumulated."""
    # 64 bf16 elements over 2 ranks: 32 elements of 2 bytes to the other one.
    half = SHARD_BYTES // 2
    options = {"compute_dtype": torch.bfloat16}
    for stage in (1, 3):
        (calls, _) = ranks(2, _steady, stage, options)
        assert {c.sent_bytes for c in calls if c.kind != "exchange"} == {half}
    (calls, _) = ranks(2, _steady, 1, {"wire_dtype": torch.bfloat16})
    assert {c.sent_bytes for c in calls if c.kind == "reduce"} == {half}
    assert {c.sent_bytes for c in calls if c.kind == "gather"} == {SHARD_BYTES}


def _accumulated(stage: int) -> tuple[Step, Step]:
    """Calls of two micro-steps, the second with the step."""
    core, log = _core(Blocks(), stage, accumulation=2)
    for step in range(3):
        log.calls.clear()
        core.tracker.synced = stage >= 2
        _backward(core, 2 * step)
        first = _short(log.calls)
        log.calls.clear()
        core.tracker.synced = True
        _backward(core, 2 * step + 1)
        core.step()
    return first, _short(log.calls)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_accumulation(ranks: Ranks, stage: int) -> None:
    """Stages 0 and 1 are silent until the boundary; 2 and 3 reduce after every micro-step."""
    quiet = [call for call in EXPECTED[stage] if call[0] == "reduce"]
    (first, second), _ = ranks(2, _accumulated, stage)
    assert second == EXPECTED[stage]
    if stage < 2:
        assert first == []
    elif stage == 2:
        assert first == quiet
    else:
        assert first == [call for call in EXPECTED[3] if call[0] != "exchange"]


def _evaluated() -> Step:
    core, log = _core(Blocks(), 3)
    for step in range(2):
        _backward(core, step)
        core.step()
    log.calls.clear()
    with torch.no_grad():
        core.model(torch.ones(3, 8))
    return _short(log.calls)


def test_evaluation_gathers_each_unit_once(ranks: Ranks) -> None:
    """And nothing else."""
    for calls in ranks(2, _evaluated):
        assert calls == _gathers(0, 1, 2, 3)


def _frozen(stage: int) -> Step:
    model = Blocks()
    model.blocks[1].requires_grad_(False)
    core, log = _core(model, stage)
    for step in range(3):
        log.calls.clear()
        _backward(core, step)
        core.step()
    return _short(log.calls)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_frozen_block_sends_no_gradient(ranks: Ranks, stage: int) -> None:
    """And is published by nobody; at stage 3 its values are needed all the same."""
    (calls, _) = ranks(2, _frozen, stage)
    assert calls == [
        call
        for call in EXPECTED[stage]
        if call != ("reduce", 1) and (stage == 3 or call != ("gather", 1))
    ]


# ---- resident parameters, and memory -----------------------------------------------------------


def _biased() -> nn.Module:
    return nn.Linear(8, 8)


def _with_resident(stage: int) -> list[Call]:
    """Biases are resident: 8 elements each."""
    core, log = _core(Blocks(_biased), stage, rules=UnitRules(persistence_numel=8))
    for step in range(3):
        log.calls.clear()
        _backward(core, step)
        core.step()
    return log.calls


@pytest.mark.parametrize("stage", [1, 3])
def test_resident_parameters_do_not_hold_reductions_up(ranks: Ranks, stage: int) -> None:
    """Their unit is reduced last: blocks go out while the backward runs, as without biases."""
    (calls, _) = ranks(2, _with_resident, stage)
    (plain, _) = ranks(2, _steady, stage, {})
    blocks = [call for call in calls if call.kind == "exchange" or "blocks" in call.label]
    assert _short(blocks) == _short(plain)
    kinds = [call.label for call in calls if call.kind == "reduce"]
    assert kinds == ["blocks.3", "blocks.2", "blocks.1", "blocks.0", "resident.0"]


@dataclass
class Peak:
    """Largest numbers seen while gradients arrive."""

    present: int = 0
    """Releasable units in memory."""
    local: int = 0
    """Unreduced gradient buffers."""


def _watch(core: ZeroCore, blocks: nn.ModuleList, peak: Peak) -> None:
    """Look at memory when a gradient leaves each block."""

    def look(grad: Tensor) -> None:
        units = [u for u in core.units if u.releasable and u.presence is not Presence.RELEASED]
        peak.present = max(peak.present, len(units))
        held = [g for g in core.gradients.all_runs() if g.local is not None]
        peak.local = max(peak.local, len(held))

    def enter(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        if args[0].requires_grad:
            args[0].register_hook(look)

    for block in blocks:
        block.register_forward_pre_hook(enter)


class Shared(nn.Module):
    """A block with a weight that all blocks share."""

    def __init__(self, common: nn.Linear) -> None:
        super().__init__()
        self.own = nn.Linear(8, 8, bias=False)
        self.common = nn.Linear(8, 8, bias=False)
        self.common.weight = common.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.own(torch.tanh(self.common(x)))
        return out


@dataclass
class Output:
    """What a block may return."""

    hidden: Tensor


class Boxed(nn.Linear):
    """Returns a dataclass."""

    def forward(self, x: Tensor) -> Output:  # type: ignore[override]
        return Output(super().forward(x))


class Unboxing(Blocks):
    def __init__(self) -> None:
        super().__init__(lambda: Boxed(8, 8, bias=False), 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x).hidden)
        return x


class AddingInPlace(nn.Linear):
    """Returns its input, changed in place; what it changes was saved by nobody."""

    def forward(self, x: Tensor) -> Tensor:
        return x.add_(super().forward(x.clone()))


class Scaled(Blocks):
    """Blocks with a scaling between them, which saves no tensor."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x * 0.5)
        return x


def _peak(kind: str, stage: int) -> Peak:
    """Train eight blocks and watch."""
    common = nn.Linear(8, 8, bias=False)
    rules = UnitRules(persistence_numel=0)
    if kind == "shared":
        model: Blocks = Blocks(lambda: Shared(common), 8)
    elif kind == "boxed":
        model = Unboxing()
    elif kind == "in place":
        model = Scaled(lambda: AddingInPlace(8, 8, bias=False), 8)
    elif kind == "resident":
        model = Blocks(_biased, 8)
        rules = UnitRules(persistence_numel=8)
    else:
        model = Blocks(count=8)
    core, _ = _core(model, stage, prefetch=False, rules=rules)
    peak = Peak()
    _watch(core, model.blocks, peak)
    for step in range(3):
        _backward(core, step)
        core.step()
    return peak


@pytest.mark.parametrize(
    ("kind", "most"), [("plain", 1), ("resident", 1), ("boxed", 1), ("in place", 1), ("shared", 2)]
)
def test_units_in_memory_at_stage_3(ranks: Ranks, kind: str, most: int) -> None:
    """Without prefetch one block at a time, and the one that holds what they share.

    A hook on a block's input may fire before the block is passed, so one more is allowed.
    """
    for peak in ranks(2, _peak, kind, 3):
        assert 1 <= peak.present <= most + 1


@pytest.mark.parametrize("kind", ["plain", "resident", "boxed"])
@pytest.mark.parametrize("stage", [2, 3])
def test_gradient_buffers_in_memory(ranks: Ranks, kind: str, stage: int) -> None:
    """The reductions in flight, one that is being filled, and that of the resident unit."""
    for peak in ranks(2, _peak, kind, stage):
        assert peak.local <= POOL_LIMIT + 1 + (kind == "resident")
