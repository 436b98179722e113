"""Buffers of any kind become those of rank 0."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from twin import engine_of

from ds_comm.testing.plugin import Ranks


class Buffered(nn.Module):
    """Buffers of many kinds."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.register_buffer("plain", torch.full((3,), value))
        self.register_buffer("turned", torch.full((3, 2), value).t())
        self.register_buffer("scalar", torch.tensor(value))
        self.register_buffer("flags", torch.full((3,), bool(value)))
        self.register_buffer("count", torch.tensor(int(value)))
        self.register_buffer("short", torch.full((3,), int(value), dtype=torch.int16))
        self.register_buffer("rotary", torch.full((3,), complex(value, -value)))
        self.register_buffer("wide", torch.tensor([value]).expand(4))
        self.register_buffer("none", None)
        self.register_buffer("empty", torch.empty(0), persistent=False)


def _buffers(name: str) -> None:
    rank = torch.distributed.get_rank()
    model = Buffered(float(2 - rank))
    wanted = Buffered(2.0).get_buffer(name)
    kept = {key: None for key, _ in model.named_buffers() if key != name}
    for key in kept:
        setattr(model, key, None)
    engine_of(model, 0)
    assert torch.equal(model.get_buffer(name), wanted)


@pytest.mark.parametrize(
    "name", ["plain", "turned", "scalar", "flags", "count", "short", "rotary", "wide", "empty"]
)
def test_buffers_become_those_of_rank_0(ranks: Ranks, name: str) -> None:
    """Strided, scalar, bool, integer, complex (rotary tables), expanded and empty ones."""
    ranks(2, _buffers, name)
