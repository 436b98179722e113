"""Random module trees x stages x world sizes against plain torch (fp32, 1e-5 relative).

A tree is a list of layer kinds, drawn by hypothesis, so that a failure shrinks to few layers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import ds_zero
from ds_comm.testing.plugin import Ranks

WIDTH = 6
STEPS = 3


class Plain(nn.Module):
    """One weight and one bias, both used."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, step: int) -> Tensor:
        out: Tensor = x + torch.tanh(self.linear(x))
        return out


class Frozen(Plain):
    """The weight is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.linear.weight.requires_grad_(False)


class Unused(Plain):
    """A second layer that nothing runs."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(3, 5)


class Empty(Plain):
    """Parameters without elements, used times zero, and one with a single element."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Linear(WIDTH, 0)
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, step: int) -> Tensor:
        return super().forward(x, step) * self.gain + self.nothing(x).sum()


class Transposed(nn.Module):
    """A parameter whose strides are those of a transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter((0.3 * torch.randn(WIDTH, WIDTH)).t())

    def forward(self, x: Tensor, step: int) -> Tensor:
        return x + torch.sin(x @ self.weight)


class Conditional(nn.Module):
    """One of two branches a step, the same one on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([Plain(), Plain()])

    def forward(self, x: Tensor, step: int) -> Tensor:
        out: Tensor = self.branches[step % 2](x, step)
        return out


class Parametrised(Plain):
    """Weight norm, whose weight is computed on access."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = weight_norm(self.linear)


class Recurrent(nn.Module):
    """An LSTM over the rows, batch first."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor, step: int) -> Tensor:
        out: Tensor = x + self.lstm(x[None])[0][0]
        return out


class Nested(nn.Module):
    """Two levels of containers."""

    def __init__(self) -> None:
        super().__init__()
        self.levels = nn.ModuleDict({"a": nn.ModuleList([Plain(), Frozen()]), "b": Plain()})

    def forward(self, x: Tensor, step: int) -> Tensor:
        for layer in self.levels["a"]:  # type: ignore[attr-defined]
            x = layer(x, step)
        out: Tensor = self.levels["b"](x, step)
        return out


KINDS: dict[str, Callable[[], nn.Module]] = {
    kind.__name__: kind
    for kind in (
        Plain, Frozen, Unused, Empty, Transposed, Conditional, Parametrised, Recurrent, Nested,
    )
}  # fmt: skip
SHARED = "shared"
"""The first layer once more."""
TIED = "tied"
"""A new layer with the first one's parameters of the same name and shape."""


class Tree(nn.Module):
    """The layers of a list of kinds, run one after another."""

    def __init__(self, kinds: Sequence[str]) -> None:
        super().__init__()
        self.first = Plain()
        self.layers = nn.ModuleList()
        for kind in kinds:
            if kind == SHARED:
                self.layers.append(self.first)
            elif kind == TIED:
                layer = Plain()
                layer.linear.weight = self.first.linear.weight
                self.layers.append(layer)
            else:
                self.layers.append(KINDS[kind]())

    def forward(self, x: Tensor, step: int) -> Tensor:
        x = self.first(x, step)
        for layer in self.layers:
            x = layer(x, step)
        return x.square().mean()


def make(kinds: Sequence[str]) -> Tree:
    torch.manual_seed(3)
    return Tree(kinds)


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def plain(kinds: Sequence[str], world: int) -> dict[str, Tensor]:
    """Train in one process on the batches of all ranks."""
    torch.set_num_threads(1)
    model = make(kinds)
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01, eps=1e-3, weight_decay=0.1)
    for step in range(STEPS):
        for rank in range(world):
            (model(batch(step, rank), step) / world).backward()
        nn.utils.clip_grad_norm_(trained, 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach() for name, param in model.named_parameters()}


def sharded(kinds: Sequence[str], threshold: int) -> list[dict[str, Tensor]]:
    """Train under every stage on this rank; the parameters of each."""
    rank = torch.distributed.get_rank()
    found = []
    for stage in range(4):
        model: Any = make(kinds)
        engine = ds_zero.initialize(
            model=model,
            config={
                "train_micro_batch_size_per_gpu": 3,
                "gradient_clipping": 0.5,
                "optimizer": {
                    "type": "AdamW",
                    "params": {"lr": 0.01, "eps": 1e-3, "weight_decay": 0.1},
                },
                "zero_optimization": {
                    "stage": stage,
                    "stage3_param_persistence_threshold": threshold,
                },
            },
        ).engine
        for step in range(STEPS):
            engine.backward(engine(batch(step, rank), step))
            engine.step()
        state = engine.module_state_dict()
        found.append({name: state[name] for name, _ in model.named_parameters()})
        engine.destroy()
    return found


@pytest.mark.slow
@given(
    kinds=st.lists(st.sampled_from([*KINDS, SHARED, TIED]), min_size=1, max_size=6),
    world=st.integers(1, 4),
    threshold=st.sampled_from([0, 7, 10**6]),
)
@settings(
    max_examples=16,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_random_trees(ranks: Ranks, kinds: list[str], world: int, threshold: int) -> None:
    """Every stage and rank ends with the same bits, within 1e-5 of one plain process."""
    wanted = plain(kinds, world)
    by_rank = ranks(world, sharded, kinds, threshold)
    first = by_rank[0][0]
    assert first.keys() == wanted.keys()
    for name, value in first.items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-5, atol=1e-6, msg=name)
    for stages in by_rank:
        for stage, found in enumerate(stages):
            for name, value in found.items():
                assert torch.equal(value, first[name]), f"{name} at stage {stage}"


def test_the_comparison_notices_a_difference() -> None:
    """Other batches give other parameters: the tolerance above is not too wide."""
    kinds = random.Random(0).choices(list(KINDS), k=4)
    one, two = plain(kinds, 1), plain(kinds, 2)
    assert any(not torch.allclose(one[k], two[k], rtol=1e-5, atol=1e-6) for k in one)
