"""Runs a ``torch.optim`` optimiser on this rank's pieces of the parameters.

The client's object is taken over: its groups keep listing the model's parameters, and only while
the engine steps do they list the pieces.  A ``step()`` by anyone else would find no gradients and
do nothing, so it raises.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ds_comm.errors import CheckpointError, EngineError
from ds_zero.layout import Piece
from ds_zero.optim.base import OptimizedRun, StateRange, StateSource, StepGradients
from ds_zero.optim.flat import scaled

__all__ = ["TorchAdapter"]


class TorchAdapter:
    """An element-wise ``torch.optim`` optimiser on 1-D pieces; see [Note: sharded optimisers]."""

    def __init__(self, optimizer: torch.optim.Optimizer, runs: Sequence[OptimizedRun]) -> None:
        """Take ``optimizer`` over.

        Args:
            optimizer: Its groups list parameters of the model; states it already has are dropped.
            runs: The masters that it will update.
        """
        self.optimizer = optimizer
        self._runs = tuple(runs)
        self._stepping = False
        self._pieces: list[list[tuple[Piece, nn.Parameter]]] = [
            [(piece, nn.Parameter(self._range(run, piece))) for piece in run.pieces()]
            for run in runs
        ]
        optimizer.state.clear()
        optimizer.register_step_pre_hook(self._guard)

    @staticmethod
    def _range(run: OptimizedRun, piece: Piece) -> Tensor:
        """The master's values of a piece; in its true shape when the piece is a whole parameter."""
        values = run.master[piece.shard_start : piece.shard_start + piece.numel]
        whole = run.master.numel() == run.run.layout.numel
        return values.view(piece.spec.shape) if whole else values

    def _guard(self, *_: Any) -> None:
        if not self._stepping:
            raise EngineError(
                f"{type(self.optimizer).__name__}.step() was called directly, but its gradients "
                "live in the engine's shards. Call engine.step()."
            )

    def update(self, gradients: StepGradients) -> None:
        """See :meth:`ds_zero.optim.base.ShardOptimizer.update`."""
        lists: list[list[nn.Parameter]] = [[] for _ in self.optimizer.param_groups]
        columns = zip(self._runs, self._pieces, gradients.grads, gradients.used, strict=True)
        for run, pieces, grad, used in columns:
            if grad is not None:
                grad = scaled(grad, gradients.scale, run.master.dtype)
            for (piece, param), slot in zip(pieces, run.slots_of_pieces(), strict=True):
                if grad is not None and used[slot]:
                    part = grad[piece.shard_start : piece.shard_start + piece.numel]
                    param.grad = part.view(param.shape)
                lists[piece.spec.group].append(param)
        originals = [group["params"] for group in self.optimizer.param_groups]
        self._stepping = True
        try:
            for group, params in zip(self.optimizer.param_groups, lists, strict=True):
                group["params"] = params
            self.optimizer.step()
        finally:
            self._stepping = False
            for group, params in zip(self.optimizer.param_groups, originals, strict=True):
                group["params"] = params
            for param in (param for params in lists for param in params):
                param.grad = None
        for run in self._runs:
            if run.copy is not None:
                run.copy.copy_(run.master)

    def state_ranges(self) -> Iterator[StateRange]:
        """See :meth:`ds_zero.optim.base.ShardOptimizer.state_ranges`.

        Raises:
            CheckpointError: A state is neither a scalar nor as large as its parameter.
        """
        for run, pieces in zip(self._runs, self._pieces, strict=True):
            stored = {piece.spec.name: piece for piece in run.stored_pieces()}
            for piece, param in pieces:
                part = stored.get(piece.spec.name)
                if part is None:
                    continue
                begin = part.param_start - piece.param_start
                for kind, value in self._tensors(param):
                    if value.numel() != piece.numel:
                        raise CheckpointError(
                            f"state {kind!r} of {piece.spec.name!r} has shape "
                            f"{tuple(value.shape)}: only element-wise states can be stored"
                        )
                    data = value.reshape(-1)[begin : begin + part.numel]
                    yield StateRange(kind, piece.spec.name, part.param_start, data)

    def _tensors(self, param: nn.Parameter) -> Iterator[tuple[str, Tensor]]:
        for kind, value in self.optimizer.state.get(param, {}).items():
            if isinstance(value, Tensor) and value.dim() > 0:
                yield kind, value

    def scalars(self) -> dict[str, dict[str, float]]:
        """See :meth:`ds_zero.optim.base.ShardOptimizer.scalars`."""
        found: dict[str, dict[str, float]] = {}
        for piece, param in (item for pieces in self._pieces for item in pieces):
            for kind, value in self.optimizer.state.get(param, {}).items():
                if isinstance(value, Tensor) and value.dim() == 0:
                    found.setdefault(piece.spec.name, {})[kind] = float(value)
                elif isinstance(value, int | float):
                    found.setdefault(piece.spec.name, {})[kind] = float(value)
        return found

    def state_shapes(self) -> dict[str, dict[str, tuple[int, ...]]]:
        """See :meth:`ds_zero.optim.base.ShardOptimizer.state_shapes`."""
        return {}

    def load(self, source: StateSource) -> None:
        """See :meth:`ds_zero.optim.base.ShardOptimizer.load`."""
        self.optimizer.state.clear()
        for piece, param in (item for pieces in self._pieces for item in pieces):
            name = piece.spec.name
            state: dict[str, Tensor] = {
                kind: torch.tensor(value, dtype=torch.float32)
                for kind, value in source.scalars(name).items()
            }
            for kind in sorted(source.kinds(name)):
                flat = torch.zeros(piece.numel, dtype=param.dtype, device=param.device)
                source.read(kind, name, piece.param_start, flat)
                state[kind] = flat.view(param.shape)
            if state:
                self.optimizer.state[param] = state
