"""Ranks that run different modules."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from twin import engine_of, inputs

from ds_comm.errors import DSError
from ds_comm.testing.plugin import Ranks


def _unequal_experts() -> str:
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 40)])
    engine = engine_of(model, 3)
    with pytest.raises(DSError) as caught:
        engine.module[torch.distributed.get_rank()](inputs(0))
    torch.distributed.barrier()
    return str(caught.value)


def test_diverging_modules_of_other_sizes(ranks: Ranks) -> None:
    """B36 with experts of different widths: an error that names both, not a crash."""
    for message in ranks(2, _unequal_experts):
        assert "'0'" in message and "'1'" in message
