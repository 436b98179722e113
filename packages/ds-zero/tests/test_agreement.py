"""The row that ranks exchange before a step: norms, used parameters, late gradients, traces."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ds_comm.collectives import RecordingCollectives, collectives_for
from ds_comm.errors import DivergenceError
from ds_comm.group import Group
from ds_comm.testing.plugin import Ranks
from ds_zero import CoreOptions, ZeroCore
from ds_zero.agreement import Agreement, agree, squared_norm
from ds_zero.units import UnitRules

# ---- norms -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", [0, 1, 7, (1 << 15), (1 << 15) + 1, 100_003])
def test_squared_norm_equals_float64(numel: int, dtype: torch.dtype) -> None:
    """fp32 within chunks, fp64 across: 1e-5 relative."""
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
    wanted = float(values.double().square().sum())
    assert squared_norm(values) == pytest.approx(wanted, rel=1e-5, abs=0)
    assert values.dtype == dtype


def test_small_values_are_not_lost_beside_large_ones() -> None:
    """2^22 ones after a 2^14: one running fp32 sum would stay at 2^28, 1.5 % too small."""
    values = torch.ones(1 << 22)
    values[0] = 2.0**14
    assert squared_norm(values) == pytest.approx(2.0**28 + (1 << 22) - 1, rel=1e-5)


def test_no_values_and_values_that_are_no_numbers() -> None:
    """None counts as nothing; infinities and NaN go through."""
    assert squared_norm(None) == 0.0
    assert squared_norm(torch.tensor([1.0, math.inf])) == math.inf
    assert math.isnan(squared_norm(torch.tensor([1.0, math.nan])))
    assert squared_norm(torch.tensor([3.0, -4.0], dtype=torch.float16)) == 25.0


# ---- agreement ---------------------------------------------------------------------------------


class Five(nn.Module):
    """Parameters of several kinds, each a unit of its own or resident."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(5, 3)
        self.b = nn.Linear(5, 3, bias=False)
        self.idle = nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.ones(()))
        self.empty = nn.Parameter(torch.ones(0, 3))
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)

    def forward(self, x: Tensor, *, only_b: bool = False) -> Tensor:
        x = x * self.frozen
        out = self.b(x) if only_b else self.a(x) + self.b(x)
        return out * self.scale + self.empty.sum()


def _core(stage: int, world_rules: UnitRules | None = None) -> tuple[Five, ZeroCore, Any]:
    model = Five()
    log = RecordingCollectives(collectives_for(Group.world()))
    params = [p for p in model.parameters() if p.requires_grad]
    rules = world_rules or UnitRules(persistence_numel=0, bucket_numel=8)
    return model, ZeroCore(model, [params], log, CoreOptions(stage=stage, rules=rules)), log


def _x(rank: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(rank))


def _agree(core: ZeroCore) -> Agreement:
    core.tracker.end_step()
    names = [unit.name for unit in core.units]
    return agree(core.gradients, core.collectives, core.trace, names)


def _used(core: ZeroCore, agreement: Agreement) -> set[str]:
    found: set[str] = set()
    for gradients, mask in zip(core.gradients.all_runs(), agreement.used, strict=True):
        assert mask.numel() == len(gradients.run.layout.slots)
        slots = zip(gradients.run.layout.slots, mask.tolist(), strict=True)
        found |= {slot.spec.name for slot, flag in slots if flag}
    return found


def _norm(stage: int) -> None:
    model, core, log = _core(stage)
    rank, world = core.collectives.group.rank, core.collectives.group.size
    model(_x(rank)).square().mean().backward()
    log.calls.clear()
    agreement = _agree(core)
    twin = Five()
    (sum(twin(_x(r)).square().mean() for r in range(world)) / world).backward()
    wanted = nn.utils.clip_grad_norm_(twin.parameters(), math.inf).item()
    assert agreement.grad_norm == pytest.approx(wanted, rel=1e-6)
    assert _used(core, agreement) == {"a.weight", "a.bias", "b.weight", "scale", "empty"}
    assert [call.kind for call in log.calls] == ["exchange"]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world", [1, 3])
def test_norm_of_the_averaged_gradients(ranks: Ranks, world: int, stage: int) -> None:
    """Equal to ``clip_grad_norm_`` of plain torch, in one exchange; unused ones are marked."""
    ranks(world, _norm, stage)


def _late(stage: int) -> None:
    """Rank 0 alone has a local gradient of an extra backward that was not reduced."""
    model, core, log = _core(stage)
    rank = core.collectives.group.rank
    model(_x(rank), only_b=True).square().mean().backward()
    core.tracker.synced = False
    if rank == 0:
        (model.idle(_x(0)).square().mean()).backward()
    # The gathers of that extra forward are rank 0's alone, so only stages without them are fair.
    core.tracker.synced = True
    log.calls.clear()
    agreement = _agree(core)
    twin = Five()
    total = sum(twin(_x(r), only_b=True).square().mean() for r in range(2))
    ((total + twin.idle(_x(0)).square().mean()) / 2).backward()
    wanted = nn.utils.clip_grad_norm_(twin.parameters(), math.inf).item()
    assert agreement.grad_norm == pytest.approx(wanted, rel=1e-6)
    assert _used(core, agreement) == {"b.weight", "scale", "empty", "idle.weight", "idle.bias"}
    assert [call.kind for call in log.calls].count("exchange") == 2
    assert core.gradients.unreduced() == []


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_late_gradients_of_one_rank(ranks: Ranks, stage: int) -> None:
    """All ranks reduce the units that any rank reports, then agree anew."""
    ranks(2, _late, stage)


def _traces() -> str:
    model, core, _ = _core(1)
    rank = core.collectives.group.rank
    model(_x(rank)).square().mean().backward()
    if rank == 1:
        core.trace.add("gather", 2)
    with pytest.raises(DivergenceError) as caught:
        _agree(core)
    return f"{core.units[2].name}\n{caught.value}"


def test_other_traces_are_named(ranks: Ranks) -> None:
    """The first difference, with each rank's event, and that nothing was applied."""
    results = ranks(3, _traces)
    assert len(set(results)) == 1
    name, message = results[0].split("\n")
    assert "no update was applied" in message
    assert "rank 0: nothing; rank 1: gather of" in message and repr(name) in message


def _not_finite(stage: int) -> float:
    model, core, _ = _core(stage)
    rank = core.collectives.group.rank
    loss = model(_x(rank)).square().mean()
    (loss * (math.inf if rank == 1 else 1.0)).backward()
    return _agree(core).grad_norm


@pytest.mark.parametrize("stage", [0, 3])
def test_one_rank_overflows(ranks: Ranks, stage: int) -> None:
    """Every rank sees the same non-finite norm."""
    assert not any(math.isfinite(norm) for norm in ranks(2, _not_finite, stage))


def test_nothing_to_train() -> None:
    """A model without trainable parameters agrees on zero."""
    model = nn.Linear(3, 3).requires_grad_(False)
    core = ZeroCore(model, [[]], collectives_for(Group.solo()), CoreOptions())
    agreement = _agree(core)
    assert agreement.grad_norm == 0.0 and list(agreement.used) == []
