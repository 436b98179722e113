"""Moments in 8 bits: sizes, rounding, and training beside Adam with fp32 moments."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ds_comm.collectives import LocalCollectives
from ds_comm.errors import EngineError
from ds_comm.group import Group
from ds_zero import CoreOptions, ZeroCore
from ds_zero.optim import Adam8bit, FlatAdam, attach_optimizer
from ds_zero.optim.adam8bit import pack_blocks, unpack_blocks


def _packed(values: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    codes = torch.empty(values.numel(), dtype=torch.uint8)
    scales = torch.empty(-(-values.numel() // 256))
    pack_blocks(values, codes, scales, signed=signed)
    return codes, scales


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("numel", [1, 255, 256, 257, 5000])
def test_packing_again_changes_no_bit(signed: bool, numel: int) -> None:
    """So a checkpoint with fp32 moments loses nothing; the largest element is exact."""
    torch.manual_seed(numel)
    values = torch.randn(numel) * 10 ** torch.randint(-6, 3, (numel,))
    values = values if signed else values.abs()
    codes, scales = _packed(values, signed)
    found = unpack_blocks(codes, scales, signed=signed)
    for block, was in zip(found.split(256), values.split(256), strict=True):
        largest = was.abs().argmax()
        assert block[largest] == was[largest]
        # The widest gap of the tables is 0.9 / 64 and 0.9 / 128.
        assert (block - was).abs().max() <= 0.5 * 0.0142 * was[largest].abs() + 1e-12
    again, scales_again = _packed(found, signed)
    assert torch.equal(again, codes) and torch.equal(scales_again, scales)


def test_small_values_keep_their_size() -> None:
    """An element of 1e-5 of the largest still has the right order of magnitude."""
    values = torch.tensor([1.0, -1e-5, 3e-4, 0.0])
    found = unpack_blocks(*_packed(values, True), signed=True)
    assert found[3] == 0 and (found[1:3] / values[1:3] - 1).abs().max() < 0.5


def test_zero_blocks() -> None:
    """No division by a scale of zero."""
    codes, scales = _packed(torch.zeros(300), True)
    assert not unpack_blocks(codes, scales, signed=True).any() and not scales.any()


def test_training_follows_adam() -> None:
    """A regression reaches the loss of Adam with fp32 moments, with a quarter of the bytes."""
    found = {}
    for kind in (Adam8bit, FlatAdam):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 1))
        x = torch.randn(200, 20)
        target = x[:, :3].prod(dim=1, keepdim=True)
        optimizer = kind(model.parameters(), lr=0.01)
        for _ in range(150):
            optimizer.zero_grad()
            loss = (model(x) - target).square().mean()
            loss.backward()
            optimizer.step()
        states = optimizer.state[model[0].weight]
        found[kind] = (
            loss.item(),
            sum(
                value.numel() * value.element_size()
                for key, value in states.items()
                if key != "step"
            ),
        )
    start = target.square().mean().item()
    (loss8, bytes8), (loss32, bytes32) = found[Adam8bit], found[FlatAdam]
    assert loss32 < 0.1 * start and loss8 < 1.5 * loss32 + 1e-3 * start
    assert bytes32 == 8 * 1280 and bytes8 == 2 * 1280 + 2 * 4 * 5


def test_a_layout_that_cuts_blocks_is_refused() -> None:
    """The core has to know the granularity before it places parameters."""
    model = nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 7))
    params = list(model.parameters())
    for granularity in (1, 256):
        core = ZeroCore(
            model,
            [params],
            LocalCollectives(Group.solo()),
            CoreOptions(stage=1, granularity=granularity),
        )
        runs = core.optimized_runs()
        if granularity == 1:
            with pytest.raises(EngineError, match="granularity=256"):
                attach_optimizer(
                    Adam8bit(params), runs, core.collectives, sharded=True, allow_untested=False
                )
        else:
            attach_optimizer(
                Adam8bit(params), runs, core.collectives, sharded=True, allow_untested=False
            )
        core.destroy()
