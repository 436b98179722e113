"""Saved-tensor hooks of the user and of torch's checkpoints stay in force at every stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from twin import check_released, compare, engine_of, square
from zoo import Block, Checkpointed, Reentrant, Segment, Stack


class CountingBlock(Block):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        CountingBlock.calls += 1
        return super().forward(x)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", [Checkpointed, Reentrant, Segment])
def test_a_checkpoint_recomputes(kind: type[Stack], stage: int) -> None:
    """Three blocks run three times in forward and three times more in backward."""
    model = kind()
    model.blocks = nn.ModuleList(CountingBlock() for _ in range(3))
    engine = engine_of(model, stage)
    CountingBlock.calls = 0
    loss = square(engine, 0)
    assert CountingBlock.calls == 3
    engine.backward(loss)
    assert CountingBlock.calls == 6
    engine.step()
    check_released(engine)


def _with_hooks(pack: Any, unpack: Any) -> Any:
    def loss(model: Any, step: int) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return square(model, step)

    return loss


@pytest.mark.parametrize("stage", [0, 3])
def test_hooks_of_the_user_see_activations(stage: int) -> None:
    """Each step the same number of tensors is packed as in plain torch, weights aside."""
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor.clone()

    def unpack(tensor: Tensor) -> Tensor:
        return tensor

    model = Stack()
    weights = {param.shape for param in model.parameters()}
    weights |= {shape[::-1] for shape in weights}
    _with_hooks(pack, unpack)(model, 0)
    plain = [t.shape for t in packed if t.shape not in weights]
    packed.clear()
    engine = engine_of(Stack(), stage)
    engine.backward(_with_hooks(pack, unpack)(engine, 0))
    assert [t.shape for t in packed if t.shape not in weights] == plain
    assert plain


@pytest.mark.parametrize("stage", [0, 3])
def test_a_pack_that_keeps_the_tensor(stage: int) -> None:
    """Hooks that return what they were given: weights are gathered again before they are read."""
    compare(Stack, _with_hooks(lambda tensor: tensor, lambda tensor: tensor), stage)


@pytest.mark.parametrize("stage", [0, 3])
def test_save_on_cpu(stage: int) -> None:
    """torch's own offload of activations, around the engine's forward."""

    def loss(model: Any, step: int) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return square(model, step)

    compare(Stack, loss, stage)
