"""Inputs of checkpoints cut over tensor ranks: values, strides, bytes, and what is left alone."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ds_comm.collectives import RecordingCollectives, collectives_for
from ds_comm.group import Group
from ds_comm.testing.plugin import Ranks
from ds_zero.checkpointing import ActivationCheckpointing
from ds_zero.checkpointing.memory import DevicePlace, FreshMemory
from ds_zero.checkpointing.storage import ActivationStore, make_store
from ds_zero.config import ActivationCheckpointingSection

CPU = torch.device("cpu")


def _store() -> tuple[ActivationStore, RecordingCollectives]:
    log = RecordingCollectives(collectives_for(Group.world()))
    return ActivationStore(DevicePlace(FreshMemory(CPU)), log, CPU), log


def _activation(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    numel = torch.Size(shape).numel()
    return torch.arange(numel, dtype=dtype).view(shape).requires_grad_() * 1


def _round_trips() -> None:
    world = torch.distributed.get_world_size()
    store, log = _store()
    cases = [
        _activation(4, 6),
        _activation(5),
        _activation(1),
        _activation(3, 5, 7).transpose(0, 2),
        _activation(6, 4)[:, 1:3],
        _activation(3).expand(2, 3),
        _activation(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        _activation(4, dtype=torch.bfloat16),
        _activation(2, 3, dtype=torch.float64)[1],
    ]
    for tensor in cases:
        stored = store.take(tensor)
        assert stored is not None
        part = -(-tensor.numel() // world)
        kept = stored.values.fetch()
        assert kept.numel() <= part and kept.untyped_storage().nbytes() <= part * 8
        log.calls.clear()
        back = store.give(stored)
        assert torch.equal(back, tensor) and back.dtype == tensor.dtype
        if tensor.is_contiguous() or tensor.dim() > 2:
            assert back.stride() == tensor.stride()
        sent = part * tensor.element_size() * (world - 1)
        assert [call.sent_bytes for call in log.calls] == [sent]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_rank_keeps_a_part(ranks: Ranks, world: int) -> None:
    """Uneven sizes, fewer elements than ranks, transposed, sliced, expanded, channels last."""
    ranks(world, _round_trips)


def _left_alone() -> None:
    store, _ = _store()
    for tensor in (
        torch.ones(4),
        torch.ones(4, dtype=torch.long),
        nn.Parameter(torch.ones(4)),
        torch.empty(0, requires_grad=True) * 1,
        torch.eye(3).to_sparse().requires_grad_(),
    ):
        assert store.take(tensor) is None


def test_masks_parameters_and_empty_tensors_are_left_alone() -> None:
    _left_alone()


def test_a_shared_input_is_stored_once() -> None:
    """Until it changes, and as long as somebody wants it."""
    store, _ = _store()
    tensor = _activation(4)
    first = store.take(tensor)
    assert first is not None and store.take(tensor) is first
    with torch.no_grad():
        tensor.add_(1)
    second = store.take(tensor)
    assert second is not None and second is not first
    assert torch.equal(store.give(second), tensor)
    gone = weakref.ref(second)
    del second
    gc.collect()
    assert gone() is None and store.take(tensor) is not first


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"partition_activations": True},
        {"cpu_checkpointing": True},
        {
            "cpu_checkpointing": True,
            "contiguous_memory_optimization": True,
            "number_checkpoints": 2,
        },
        {"profile": True},
    ],
)
def test_without_another_rank_or_device_inputs_stay(options: dict[str, Any]) -> None:
    """On one CPU rank a copy would only cost memory."""
    assert make_store(ActivationCheckpointingSection(**options), None, CPU) is None


class Block(nn.Module):
    """Replicated activations in, replicated activations out."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 7)
        self.down = nn.Linear(7, 5)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x))) * bias


def _train(mode: str, options: dict[str, Any]) -> list[Tensor]:
    torch.manual_seed(3)
    blocks = nn.ModuleList(Block() for _ in range(3))
    first = nn.Linear(5, 5)
    runner = ActivationCheckpointing(ActivationCheckpointingSection(**options), Group.world())
    runs: dict[str, Any] = {
        "plain": lambda function, *args: function(*args),
        "reentrant": runner.checkpoint,
        "non-reentrant": runner.non_reentrant_checkpoint,
    }
    for step in range(2):
        x = first(torch.randn(3, 5, generator=torch.Generator().manual_seed(step)))
        bias = x.mean(0)
        for block in blocks:
            x = runs[mode](block, x, bias)
        x.square().mean().backward()
    return [p.grad for p in [*blocks.parameters(), *first.parameters()] if p.grad is not None]


OPTIONS: dict[str, dict[str, Any]] = {
    "parts": {},
    "one buffer": {"contiguous_memory_optimization": True, "number_checkpoints": 4},
    "too small a buffer": {"contiguous_memory_optimization": True, "number_checkpoints": 1},
    "host": {"cpu_checkpointing": True},
}


def _partitioned() -> None:
    wanted = _train("plain", {})
    for mode in ("reentrant", "non-reentrant"):
        for name, options in OPTIONS.items():
            got = _train(mode, {"partition_activations": True, **options})
            assert len(got) == len(wanted) == 14
            for a, b in zip(got, wanted, strict=True):
                assert torch.equal(a, b), (mode, name)


@pytest.mark.parametrize("world", [2, 3])
def test_gradients_with_partitioned_inputs(ranks: Ranks, world: int) -> None:
    """Gradients of two backwards added up, fp32, bit for bit those without checkpoints."""
    ranks(world, _partitioned)


def _bytes_kept() -> list[int]:
    """For both modes, bytes that three checkpoints hold between forward and backward."""
    found = []
    for mode in ("reentrant", "non-reentrant"):
        options = ActivationCheckpointingSection(partition_activations=True)
        runner = ActivationCheckpointing(options, Group.world())
        run = runner.checkpoint if mode == "reentrant" else runner.non_reentrant_checkpoint
        kept: list[Tensor] = []
        assert runner._store is not None
        keep = runner._store._place.keep

        def noting(values: Tensor, keep: Any = keep, kept: list[Tensor] = kept) -> Any:
            kept.append(values)
            return keep(values)

        runner._store._place.keep = noting  # type: ignore[method-assign]
        x = torch.ones(3, 8, requires_grad=True) * 2
        results = []
        for _ in range(3):
            x = run(torch.sin, x)
            results.append(weakref.ref(x))
        loss = x.sum()
        del x
        gc.collect()
        assert [result() for result in results] == [None] * 3  # no input is kept whole
        loss.backward()
        found.append(sum(values.numel() * values.element_size() for values in kept))
    return found


def test_bytes_between_forward_and_backward(ranks: Ranks) -> None:
    """Two ranks keep half of three inputs of 24 fp32 elements each."""
    assert ranks(2, _bytes_kept) == [[3 * 12 * 4] * 2] * 2
