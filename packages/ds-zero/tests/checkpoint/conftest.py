"""Ranks as threads, and random models with random layouts."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_zero.checkpoint import (
    Chunk,
    Coordinator,
    Manifest,
    SoloCoordinator,
    TensorInfo,
    dtype_name,
    rank_files,
    save,
    save_checkpoint,
)


class ThreadCoordinator:
    """One rank of a world of threads."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, slots: list[Any]) -> None:
        self.rank = rank
        self.size = size
        self._barrier = barrier
        self._slots = slots

    def gather(self, value: Any) -> list[Any] | None:
        self._slots[self.rank] = value
        self._barrier.wait()
        found = list(self._slots) if self.rank == 0 else None
        self._barrier.wait()
        return found

    def broadcast(self, value: Any) -> Any:
        if self.rank == 0:
            self._slots[0] = value
        self._barrier.wait()
        found = self._slots[0]
        self._barrier.wait()
        return found


def run_ranks(world: int, work: Callable[[Coordinator], Any]) -> list[Any]:
    """Run ``work`` once per rank; returns results or the exceptions raised, in rank order."""
    if world == 1:
        try:
            return [work(SoloCoordinator())]
        except Exception as error:
            return [error]
    barrier = threading.Barrier(world, timeout=20)
    slots: list[Any] = [None] * world
    results: list[Any] = [None] * world

    def body(rank: int) -> None:
        try:
            results[rank] = work(ThreadCoordinator(rank, world, barrier, slots))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@dataclass
class State:
    """Tensors of a model and its optimiser, keyed by (kind, name)."""

    tensors: dict[tuple[str, str], Tensor]
    frozen: set[str] = field(default_factory=set)
    aliases: Mapping[str, str] = field(default_factory=dict)
    group_of: Mapping[str, int] = field(default_factory=dict)

    def manifest(self, **more: Any) -> Manifest:
        def info(name: str, tensor: Tensor, trainable: bool) -> TensorInfo:
            dtype = dtype_name(tensor.dtype)
            group = self.group_of.get(name, 0) if trainable else -1
            return TensorInfo(name, tuple(tensor.shape), dtype, trainable, group)

        named = [(kind, name, t) for (kind, name), t in self.tensors.items()]
        return Manifest(
            parameters=tuple(info(n, t, n not in self.frozen) for k, n, t in named if k == "param"),
            buffers=tuple(info(n, t, False) for k, n, t in named if k == "buffer"),
            aliases=self.aliases,
            **more,
        )

    def cut(self, world: int, seed: int = 0, pieces: int = 3) -> list[list[Chunk]]:
        """Cut every tensor at random places and deal the pieces to random ranks."""
        rng = random.Random(seed)
        chunks: list[list[Chunk]] = [[] for _ in range(world)]
        for (kind, name), tensor in self.tensors.items():
            flat = tensor.reshape(-1)
            cuts = sorted(rng.randint(0, flat.numel()) for _ in range(rng.randint(0, pieces)))
            for low, high in zip([0, *cuts], [*cuts, flat.numel()], strict=True):
                chunk = Chunk(kind, name, low, flat[low:high])
                chunks[rng.randrange(world)].append(chunk)
        for own in chunks:
            rng.shuffle(own)
        return chunks


def example_state(seed: int = 0, scale: int = 1) -> State:
    """Sizes of B49 and their like, all storable kinds of dtype, tied, frozen, zero-size."""
    g = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    tensors = {
        ("param", "embed.weight"): rand(7 * scale, 13),
        ("exp_avg", "embed.weight"): rand(7 * scale, 13),
        ("exp_avg_sq", "embed.weight"): rand(7 * scale, 13) ** 2,
        ("param", "one.bias"): rand(1),
        ("exp_avg", "one.bias"): rand(1),
        ("param", "nothing.weight"): rand(4, 0),
        ("exp_avg", "nothing.weight"): rand(4, 0),
        ("param", "frozen.weight"): rand(5, 3 * scale).bfloat16(),
        ("param", "scalar"): rand(1).reshape(()),
        ("buffer", "half"): rand(9).half(),
        ("buffer", "count"): torch.tensor(12345678901),
        ("buffer", "mask"): rand(3, 3) > 0,
    }
    return State(tensors, {"frozen.weight"}, {"head.weight": "embed.weight"})


@dataclass(frozen=True)
class Tools:
    """What the tests of this folder share."""

    run_ranks: Callable[..., list[Any]] = run_ranks
    example_state: Callable[..., State] = example_state
    State: type[State] = State

    def save(
        self,
        directory: Path,
        tag: str | int,
        state: State,
        world: int = 2,
        seed: int = 0,
        client: Mapping[str, object] | None = None,
        save_latest: bool = True,
        **manifest: Any,
    ) -> list[Any]:
        chunks = state.cut(world, seed)
        described = state.manifest(**manifest)

        def work(coordinator: Coordinator) -> Path:
            return save_checkpoint(
                directory,
                tag,
                described,
                chunks[coordinator.rank],
                client or {},
                coordinator,
                save_latest=save_latest,
            )

        return run_ranks(world, work)


@pytest.fixture(scope="session")
def tools() -> Tools:
    return Tools()


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Checksums over 64 bytes, so that small tensors have several blocks."""
    monkeypatch.setattr(rank_files, "BLOCK_BYTES", 64)
    monkeypatch.setattr(save, "BLOCK_BYTES", 64)
    yield 64
