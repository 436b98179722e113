"""A block whose path depends on the data: ranks may take different ones if it is a leaf."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from twin import engine_of

import ds_zero
from ds_comm.errors import CommError
from ds_comm.testing.plugin import Ranks


class Experts(nn.Module):
    """Runs the one expert that the sign of the first element asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.experts[int(x[0, 0] > 0)](x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.inp = nn.Linear(4, 4)
        self.moe = Experts()

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(x + self.inp(x) * 0)


def _input(rank: int, step: int) -> Tensor:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))
    x[0, 0] = (-1.0 if rank == 0 else 1.0) * (1 + step)
    return x


def _trains() -> None:
    """Stage 3, fp32, 1e-5: the updates are those of plain torch on both inputs."""
    model = Net()
    plain = copy.deepcopy(model)
    assert ds_zero.set_z3_leaf_modules(model, [Experts]) == [model.moe]
    engine = engine_of(model, 3)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        rank = engine.data_group.rank
        engine.backward(engine(_input(rank, step)).square().mean())
        engine.step()
        optimizer.zero_grad()
        sum(plain(_input(r, step)).square().mean() / 2 for r in range(2)).backward()
        optimizer.step()
    state = engine.module_state_dict()
    for name, wanted in plain.state_dict().items():
        torch.testing.assert_close(state[name], wanted, rtol=1e-5, atol=1e-5)
    engine.destroy()


def test_ranks_take_different_experts(ranks: Ranks) -> None:
    ranks(2, _trains)


def _without_the_mark() -> None:
    engine = engine_of(Net(), 3)
    with pytest.raises(CommError, match="moe.experts"):
        engine.backward(engine(_input(engine.data_group.rank, 0)).square().mean())
        engine.step()


def test_without_the_mark_both_paths_are_named(ranks: Ranks) -> None:
    ranks(2, _without_the_mark)
