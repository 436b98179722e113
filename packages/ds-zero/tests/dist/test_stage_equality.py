"""DESIGN's stage equality: 20 steps on a hostile model, against each other and plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ds_zero
from ds_comm.testing.plugin import Ranks

STEPS = 20


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Hostile(nn.Module):
    """Tied, frozen, unused, zero-size parameters, a module that runs twice, a foreign read."""

    def __init__(self, width: int = 12, vocab: int = 37) -> None:
        super().__init__()
        self.tok = nn.Embedding(vocab, width)
        self.pos = nn.Embedding(9, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.twice = Block(width)
        self.unused = nn.Linear(width, 5)
        self.empty = nn.Linear(width, 0)
        self.scale = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tok.weight
        for param in self.blocks[1].parameters():
            param.requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok(ids) + self.pos.weight[: ids.shape[1]]
        x = self.twice(x)
        for block in self.blocks:
            x = block(x)
        x = self.twice(x) * self.scale
        x = x + self.empty(x).sum()
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.roll(-1, 1).flatten())


def _model() -> Hostile:
    torch.manual_seed(3)
    return Hostile()


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [p for n, p in named if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for n, p in named if p.dim() <= 1], "weight_decay": 0.0, "lr": 3e-3},
    ]


def _batch(step: int, world: int, accumulation: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(37, (accumulation, world, 4, 9), generator=generator)


def _config(stage: int, accumulation: int, threshold: int, optimizer: str) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": optimizer, "params": {"lr": 1e-2}},
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": threshold},
    }


def train(
    stage: int, accumulation: int, threshold: int = 20, optimizer: str = "AdamW"
) -> tuple[list[Tensor], list[float], list[float]]:
    """Train under ZeRO on this rank: final parameters, norms and losses."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    model = _model()
    engine, *_ = ds_zero.initialize(
        model=model,
        model_parameters=_groups(model),
        config=_config(stage, accumulation, threshold, optimizer),
    )
    norms, losses = [], []
    for step in range(STEPS):
        batch = _batch(step, world, accumulation)
        for micro in range(accumulation):
            loss = engine(batch[micro, rank])
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        norms.append(engine.get_global_grad_norm())
    state = engine.module_state_dict()
    engine.destroy()
    return [state[name] for name, _ in model.named_parameters()], norms, losses


def reference(
    world: int, accumulation: int, optimizer: str = "AdamW"
) -> tuple[list[Tensor], list[float]]:
    """The same training in one plain torch process on the whole batch."""
    torch.set_num_threads(1)
    model = _model()
    make = torch.optim.AdamW if optimizer == "AdamW" else torch.optim.SGD
    opt = make(_groups(model), lr=1e-2)
    norms = []
    for step in range(STEPS):
        batch = _batch(step, world, accumulation).flatten(0, 1)
        for part in batch:
            (model(part) / batch.shape[0]).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        opt.step()
        opt.zero_grad()
    return [param.detach().clone() for param in model.parameters()], norms


def _close(got: Tensor, wanted: Tensor) -> bool:
    """Largest difference at most 1e-5 of the largest value."""
    assert got.shape == wanted.shape
    return not got.numel() or bool((got - wanted).abs().max() <= 1e-5 * wanted.abs().max())


@pytest.mark.parametrize("world", [2, 3, 4])
def test_stages_are_bit_identical_and_equal_torch(ranks: Ranks, world: int) -> None:
    """fp32, no accumulation: the same bits at every stage, 1e-5 relative from torch."""
    want, want_norms = reference(world, 1)
    first: list[Tensor] | None = None
    for stage in range(4):
        results = ranks(world, train, stage, 1)
        for params, norms, _ in results:
            for got, wanted in zip(params, want, strict=True):
                assert _close(got, wanted)
            assert norms == pytest.approx(want_norms, rel=1e-5)
            first = first or params
            assert all(torch.equal(a, b) for a, b in zip(params, first, strict=True)), stage


def test_accumulation(ranks: Ranks) -> None:
    """With accumulation: bits agree within {0, 1} and within {2, 3}; 1e-5 across and from torch."""
    want, want_norms = reference(2, 3)
    found = [ranks(2, train, stage, 3)[0] for stage in range(4)]
    for params, norms, _ in found:
        assert norms == pytest.approx(want_norms, rel=1e-5)
        assert all(_close(a, b) for a, b in zip(params, want, strict=True))
    for a, b in ((0, 1), (2, 3)):
        assert all(torch.equal(x, y) for x, y in zip(found[a][0], found[b][0], strict=True))


@pytest.mark.parametrize("threshold", [0, 10**6])
def test_persistence_threshold_changes_no_bit(ranks: Ranks, threshold: int) -> None:
    """Resident or released: stages 1 and 3 agree with each other and with torch."""
    want, _ = reference(2, 1)
    one = ranks(2, train, 1, 1, threshold)[0][0]
    three = ranks(2, train, 3, 1, threshold)[1][0]
    assert all(torch.equal(a, b) for a, b in zip(one, three, strict=True))
    assert all(_close(a, b) for a, b in zip(three, want, strict=True))


def test_sgd(ranks: Ranks) -> None:
    """SGD on flat shards equals torch's."""
    want, _ = reference(2, 1, "SGD")
    for stage in (0, 3):
        params = ranks(2, train, stage, 1, 20, "SGD")[0][0]
        assert all(_close(a, b) for a, b in zip(params, want, strict=True))
