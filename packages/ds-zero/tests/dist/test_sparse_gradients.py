"""Gradients of embeddings by rows: the bits of the dense reduction, and fewer bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ds_zero
from ds_comm.collectives import LocalCollectives, RecordingCollectives, collectives_for
from ds_comm.group import Group
from ds_comm.testing.plugin import Ranks
from ds_zero import CoreOptions, ZeroCore
from ds_zero.optim import FlatSGD, attach_optimizer
from ds_zero.rows import RowCollectives
from ds_zero.units import UnitRules


def _rows(rank: int, num_rows: int, width: int, density: float, salt: int) -> Tensor:
    """A matrix whose rows are mostly zero."""
    generator = torch.Generator().manual_seed(100 * salt + rank)
    values = torch.randn(num_rows, width, generator=generator)
    return values * (torch.rand(num_rows, 1, generator=generator) < density)


def _by_rows(density: float, dtype: torch.dtype) -> list[str]:
    """Reduce and gather matrices of odd sizes both ways; the kinds of calls that were made."""
    log = RecordingCollectives(collectives_for(Group.world()))
    group = log.group
    kinds: list[str] = []
    for salt, (num_rows, width) in enumerate([(40, 5), (7, 24), (3, 64), (1, 8), (200, 1)]):
        numel = -(-num_rows * width // (16 * group.size)) * 16 * group.size
        flat = torch.zeros(numel, dtype=dtype)
        flat[: num_rows * width] = _rows(group.rank, num_rows, width, density, salt).flatten()
        rows = RowCollectives(log, num_rows, width)
        for accumulate in (False, True):
            found, wanted = (torch.arange(numel // group.size) * 0.37 for _ in range(2))
            rows.reduce(flat.clone(), found, "x", accumulate=accumulate).wait()
            kinds += [call.kind for call in log.calls]
            log.calls.clear()
            log.reduce(flat.clone(), wanted, "x", accumulate=accumulate).wait()
            log.calls.clear()
            assert torch.equal(found, wanted)
        # In place, as stages 0 and 1 do, and then back to everybody.
        found, wanted = flat.clone(), flat.clone()
        for served, whole in ((rows, found), (log, wanted)):
            own = whole[group.rank * numel // group.size :][: numel // group.size]
            served.reduce(whole, own, "y").wait()
            work = served.gather(whole, "y")
            work.wait()
            work.wait()
        assert torch.equal(found, wanted)
        log.calls.clear()
    return kinds


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_have_the_bits_of_the_dense_reduction(
    ranks: Ranks, world: int, dtype: torch.dtype
) -> None:
    """Rows cut by shard bounds, one row, rows of one element; few, half and all of them filled."""
    for density in (0.0, 0.05, 0.5, 1.0):
        for kinds in ranks(world, _by_rows, density, dtype):
            assert ("all_to_all" in kinds) or density == 1.0
            assert ("reduce" in kinds) or density < 1.0


def _nan() -> float:
    rows = RowCollectives(collectives_for(Group.world()), 8, 16)
    flat = torch.zeros(128)
    if rows._inner.group.rank == 1:
        flat[16 * 3 + 2] = torch.nan
    rows.reduce(flat, out := torch.empty(64), "x").wait()
    return float(out.isnan().sum())


def test_nan_counts_as_a_value(ranks: Ranks) -> None:
    """A row with a NaN travels: the overflow is not lost."""
    assert ranks(2, _nan) == [1.0, 0.0]


# ---- under the engine --------------------------------------------------------------------------


class Bag(nn.Module):
    """A large table, one that torch gives sparse gradients, one tied to the head, and a bag."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.words = nn.Embedding(300, 6)
        self.pairs = nn.Embedding(500, 6, sparse=True)
        self.bag = nn.EmbeddingBag(200, 6, mode="sum", sparse=True)
        self.tied = nn.Embedding(50, 6)
        self.mix = nn.Linear(6, 6)
        self.head = nn.Linear(6, 50, bias=False)
        self.head.weight = self.tied.weight

    def forward(self, ids: Tensor, pairs: bool) -> Tensor:
        x = self.words(ids) + self.tied(ids % 50) + self.bag(ids % 200).unsqueeze(1)
        x = x + self.pairs(ids) if pairs else x
        return F.cross_entropy(self.head(torch.tanh(self.mix(x))).flatten(0, 1), ids.flatten() % 50)


def train(stage: int, sparse: bool, accumulation: int, bf16: bool) -> dict[str, Tensor]:
    """The parameters after some steps."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "sparse_gradients": sparse,
        "bf16": {"enabled": bf16},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 40},
    }
    engine = ds_zero.initialize(model=Bag(), config=config).engine
    generator = torch.Generator().manual_seed(7)
    for step in range(3):
        for _ in range(accumulation):
            ids = torch.randint(300, (world, 2, 5), generator=generator)[rank]
            # One rank does not use the second table in the second step, nobody in the last.
            engine.backward(engine(ids, step == 0 or (step == 1 and rank == 0)))
            engine.step()
    state = engine.module_state_dict()
    engine.destroy()
    return state


@pytest.mark.parametrize(("accumulation", "bf16"), [(1, False), (3, False), (2, True)])
def test_training_equals_dense_reductions(ranks: Ranks, accumulation: int, bf16: bool) -> None:
    """Every stage, bit by bit."""
    for stage in range(4):
        dense = ranks(2, train, stage, False, accumulation, bf16)
        sparse = ranks(2, train, stage, True, accumulation, bf16)
        for found, wanted in zip(sparse, dense, strict=True):
            for name, value in wanted.items():
                assert torch.equal(found[name], value), (stage, name)


def _traffic(stage: int, used_rows: int) -> dict[str, int]:
    """Bytes that a rank sends for one table of 1024 x 16 in one step, by kind of call."""
    torch.manual_seed(0)
    model = nn.Embedding(1024, 16, sparse=True)
    log = RecordingCollectives(collectives_for(Group.world()))
    params = list(model.parameters())
    options = CoreOptions(stage=stage, sparse_gradients=True, rules=UnitRules(persistence_numel=0))
    core = ZeroCore(model, [params], log, options)
    core.optimizer = attach_optimizer(
        FlatSGD(params, lr=0.1), core.optimized_runs(), log, sharded=stage > 0, allow_untested=False
    )
    log.calls.clear()
    # Half of the rows in each rank's shard, the same on both ranks.
    ids = torch.cat([torch.arange(used_rows // 2), 512 + torch.arange(used_rows // 2)])
    model(ids).square().sum().backward()
    core.step()
    found: dict[str, int] = {}
    for call in log.calls:
        if not (call.kind == "gather" and stage > 0) and call.kind != "exchange":
            found[call.kind] = found.get(call.kind, 0) + call.sent_bytes
    return found


@pytest.mark.parametrize("stage", range(4))
def test_bytes_on_the_wire(ranks: Ranks, stage: int) -> None:
    """64 rows: 32 of 4 + 64 bytes to the other rank; at stage 0 the sums come back as rows too."""
    for found in ranks(2, _traffic, stage, 64):
        assert found == {"all_to_all": (2 if stage == 0 else 1) * 32 * (4 + 64)}


def test_dense_where_that_is_less(ranks: Ranks) -> None:
    """1000 of 1024 rows with numbers are more bytes than all without: 512 x 64."""
    for found in ranks(2, _traffic, 1, 1000):
        assert found == {"reduce": 512 * 64}


def test_one_rank_has_nothing_to_send() -> None:
    """The local collectives serve, and torch's sparse gradients still count."""
    model = nn.Embedding(30, 4, sparse=True)
    wanted = model.weight.detach().clone()
    params = list(model.parameters())
    core = ZeroCore(
        model, [params], LocalCollectives(Group.solo()), CoreOptions(sparse_gradients=True)
    )
    core.optimizer = attach_optimizer(
        FlatSGD(params, lr=0.5),
        core.optimized_runs(),
        core.collectives,
        sharded=False,
        allow_untested=False,
    )
    model(torch.tensor([3, 3, 7])).sum().backward()
    core.step()
    wanted[3] -= 1.0
    wanted[7] -= 0.5
    torch.testing.assert_close(model.weight.detach(), wanted, rtol=0, atol=1e-6)
    core.destroy()
