"""Runs a ``torch.optim`` optimiser on pieces of the parameters, or on whole ones by their owners.

The client's object is taken over: its groups keep listing the model's parameters, and only while
the engine steps do they list stand-ins.  A ``step()`` by anyone else would find no gradients and
do nothing, so it raises.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ds_comm.collectives import Collectives
from ds_comm.errors import CheckpointError, EngineError
from ds_zero.layout import ParamSpec, Piece
from ds_zero.optim.base import OptimizedRun, StateRange, StateSource, StepGradients
from ds_zero.optim.owners import OwnerExchange, Whole
from ds_zero.optim.rooms import scaled

__all__ = ["OwnerAdapter", "TorchAdapter"]


class TakenOver:
    """A client's optimiser that steps on stand-ins, and only when the engine says so."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Take ``optimizer`` over; states that it already has are dropped."""
        self.optimizer = optimizer
        self._stepping = False
        optimizer.state.clear()
        optimizer.register_step_pre_hook(self._guard)

    def _guard(self, *_: Any) -> None:
        if not self._stepping:
            raise EngineError(
                f"{type(self.optimizer).__name__}.step() was called directly, but its gradients "
                "live in the engine's shards. Call engine.step()."
            )

    def step(self, stand_ins: Iterable[tuple[int, nn.Parameter]]) -> None:
        """Step on ``stand_ins`` (group index, parameter); their gradients are dropped."""
        groups = self.optimizer.param_groups
        lists: list[list[nn.Parameter]] = [[] for _ in groups]
        for group, param in stand_ins:
            lists[group].append(param)
        originals = [entry["params"] for entry in groups]
        self._stepping = True
        try:
            for entry, params in zip(groups, lists, strict=True):
                entry["params"] = params
            self.optimizer.step()
        finally:
            self._stepping = False
            for entry, params in zip(groups, originals, strict=True):
                entry["params"] = params
            for param in (param for params in lists for param in params):
                param.grad = None

    def tensors(self, param: nn.Parameter) -> Iterator[tuple[str, Tensor]]:
        """States of a stand-in that are no numbers."""
        for kind, value in self.optimizer.state.get(param, {}).items():
            if isinstance(value, Tensor) and value.dim() > 0:
                yield kind, value

    def numbers(self, param: nn.Parameter) -> dict[str, float]:
        """States of a stand-in that are numbers."""
        return {
            kind: float(value)
            for kind, value in self.optimizer.state.get(param, {}).items()
            if isinstance(value, int | float) or (isinstance(value, Tensor) and value.dim() == 0)
        }

    def replace(
        self, param: nn.Parameter, numbers: Mapping[str, float], states: Mapping[str, Tensor]
    ) -> None:
        """Set all states of a stand-in; numbers become 0-dim fp32 tensors, as torch has them."""
        found = {k: torch.tensor(v, dtype=torch.float32) for k, v in numbers.items()}
        found.update(states)
        if found:
            self.optimizer.state[param] = found
        else:
            self.optimizer.state.pop(param, None)


class TorchAdapter:
    """An element-wise ``torch.optim`` optimiser on 1-D pieces; see [Note: sharded optimisers]."""

    def __init__(self, optimizer: torch.optim.Optimizer, runs: Sequence[OptimizedRun]) -> None:
        """Take ``optimizer`` over.

        Args:
            optimizer: Its groups list parameters of the model.
            runs: The masters that it will update.
        """
        self._taken = TakenOver(optimizer)
        self._runs = tuple(runs)
        self._pieces: list[list[tuple[Piece, nn.Parameter]]] = [
            [(piece, nn.Parameter(self._range(run, piece))) for piece in run.pieces()]
            for run in runs
        ]

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The client's object."""
        return self._taken.optimizer

    @staticmethod
    def _range(run: OptimizedRun, piece: Piece) -> Tensor:
        """The master's values of a piece; in its true shape when the piece is a whole parameter."""
        values = run.master[piece.shard_start : piece.shard_start + piece.numel]
        whole = run.master.numel() == run.run.layout.numel
        return values.view(piece.spec.shape) if whole else values

    def update(self, gradients: StepGradients) -> None:
        """See :meth:`ds_zero.optim.base.ShardOptimizer.update`."""
        stand_ins: list[tuple[int, nn.Parameter]] = []
        columns = zip(self._runs, self._pieces, gradients.grads, gradients.used, strict=True)
        for run, pieces, grad, used in columns:
            if grad is not None:
                grad = scaled(grad, gradients.scale, run.master.dtype)
            for (piece, param), slot in zip(pieces, run.slots_of_pieces(), strict=True):
                if grad is not None and used[slot]:
                    part = grad[piece.shard_start : piece.shard_start + piece.numel]
                    param.grad = part.view(param.shape)
                stand_ins.append((piece.spec.group, param))
        self._taken.step(stand_ins)
        publish(self._runs)

    def state_ranges(self) -> Iterator[StateRange]:
        """See :meth:`ds_zero.optim.base.ShardOptimizer.state_ranges`.

        Raises:
            CheckpointError: A state of a piece is neither a scalar nor as large as the piece.
        """
        for run, pieces in zip(self._runs, self._pieces, strict=True):
            stored = {piece.spec.name: piece for piece in run.stored_pieces()}
            for piece, param in pieces:
                part = stored.get(piece.spec.name)
                if part is None:
                    continue
                begin = part.param_start - piece.param_start
                for kind, value in self._taken.tensors(param):
                    if value.shape == param.shape:
                        data = value.reshape(-1)[begin : begin + part.numel]
                        yield StateRange(kind, piece.spec.name, part.param_start, data)
                    elif piece.numel != piece.spec.numel:
                        raise CheckpointError(
                            f"state {kind!r} of {piece.spec.name!r} has shape "
                            f"{tuple(value.shape)}: only element-wise states of pieces can be "
                            "stored"
                        )
                    elif part.param_start == 0:
                        yield StateRange(kind, piece.spec.name, 0, value.reshape(-1))

    def scalars(self) -> dict[str, dict[str, float]]:
        """See :meth:`ds_zero.optim.base.ShardOptimizer.scalars`."""
        found: dict[str, dict[str, float]] = {}
        for piece, param in (item for pieces in self._pieces for item in pieces):
            numbers = self._taken.numbers(param)
            if numbers:
                found.setdefault(piece.spec.name, {}).update(numbers)
        return found

    def state_shapes(self) -> dict[str, dict[str, tuple[int, ...]]]:
        """See :meth:`ds_zero.optim.base.ShardOptimizer.state_shapes`."""
        return _odd_shapes(
            self._taken,
            ((p.spec, q) for pieces in self._pieces for p, q in pieces if p.numel == p.spec.numel),
        )

    def load(self, source: StateSource, names: Collection[str] | None = None) -> None:
        """See :meth:`ds_zero.optim.base.ShardOptimizer.load`."""
        for piece, param in (item for pieces in self._pieces for item in pieces):
            name = piece.spec.name
            if names is not None and name not in names:
                continue
            states: dict[str, Tensor] = {}
            for kind in sorted(source.kinds(name)):
                shape = source.shape(kind, name)
                if shape == piece.spec.shape:
                    shape, start = tuple(param.shape), piece.param_start
                else:
                    start = 0
                states[kind] = torch.zeros(shape, dtype=param.dtype, device=param.device)
                source.read(kind, name, start, states[kind].view(-1))
            self._taken.replace(param, source.scalars(name), states)


class OwnerAdapter:
    """A ``torch.optim`` optimiser on whole parameters, each by its owner.

    For algorithms that treat every parameter by itself but not every element.  See [Note: owners]
    in ``owners``.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        runs: Sequence[OptimizedRun],
        collectives: Collectives,
    ) -> None:
        """Take ``optimizer`` over.

        Args:
            optimizer: Its groups list parameters of the model.
            runs: The masters that it will update.
            collectives: Of the ranks that hold the other shards.
        """
        self._taken = TakenOver(optimizer)
        self._runs = tuple(runs)
        self._exchange = OwnerExchange(
            runs, collectives, wanted=lambda spec: True, cost=lambda spec: float(spec.numel)
        )
        # A stand-in has memory only while it is updated.
        self._stand_ins: dict[str, tuple[Whole, nn.Parameter]] = {
            whole.spec.name: (whole, nn.Parameter(runs[whole.run].master.new_empty(0)))
            for whole in self._exchange.owned(self._exchange.wholes)
        }

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The client's object."""
        return self._taken.optimizer

    def update(self, gradients: StepGradients) -> None:
        """See :meth:`ds_zero.optim.base.ShardOptimizer.update`; collective."""
        masters = [run.master for run in self._runs]
        grads = [
            scaled(grad, gradients.scale, master.dtype) if grad is not None else master[:0]
            for grad, master in zip(gradients.grads, masters, strict=True)
        ]
        active = self._exchange.active(gradients.used)
        values = self._exchange.collect(active, masters)
        slopes = self._exchange.collect(active, grads)
        members = [self._stand_ins[whole.spec.name] for whole in self._exchange.owned(active)]
        for whole, param in members:
            name, shape = whole.spec.name, whole.spec.shape
            param.data = values[name].view(shape)
            param.grad = slopes[name].view(shape)
        self._taken.step((whole.spec.group, param) for whole, param in members)
        results = {whole.spec.name: param.detach().reshape(-1) for whole, param in members}
        self._exchange.spread(results, active, masters)
        for _, param in members:
            param.data = param.data.new_empty(0)
        publish(self._runs)

    def state_ranges(self) -> Iterator[StateRange]:
        """See :meth:`ds_zero.optim.base.ShardOptimizer.state_ranges`; the owner stores all."""
        for name, (_, param) in self._stand_ins.items():
            for kind, value in self._taken.tensors(param):
                yield StateRange(kind, name, 0, value.reshape(-1))

    def scalars(self) -> dict[str, dict[str, float]]:
        """See :meth:`ds_zero.optim.base.ShardOptimizer.scalars`."""
        found = {name: self._taken.numbers(param) for name, (_, param) in self._stand_ins.items()}
        return {name: numbers for name, numbers in found.items() if numbers}

    def state_shapes(self) -> dict[str, dict[str, tuple[int, ...]]]:
        """See :meth:`ds_zero.optim.base.ShardOptimizer.state_shapes`."""
        return _odd_shapes(
            self._taken, ((whole.spec, param) for whole, param in self._stand_ins.values())
        )

    def load(self, source: StateSource, names: Collection[str] | None = None) -> None:
        """See :meth:`ds_zero.optim.base.ShardOptimizer.load`."""
        for name, (whole, param) in self._stand_ins.items():
            if names is not None and name not in names:
                continue
            master = self._runs[whole.run].master
            dtype = torch.promote_types(master.dtype, torch.float32)
            states: dict[str, Tensor] = {}
            for kind in sorted(source.kinds(name)):
                shape = source.shape(kind, name)
                states[kind] = torch.zeros(shape, dtype=dtype, device=master.device)
                source.read(kind, name, 0, states[kind].view(-1))
            self._taken.replace(param, source.scalars(name), states)


def _odd_shapes(
    taken: TakenOver, stand_ins: Iterable[tuple[ParamSpec, nn.Parameter]]
) -> dict[str, dict[str, tuple[int, ...]]]:
    """Shapes of states that are shaped unlike their whole parameter."""
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    for spec, param in stand_ins:
        for kind, value in taken.tensors(param):
            if tuple(value.shape) not in (spec.shape, (spec.numel,)):
                found.setdefault(spec.name, {})[kind] = tuple(value.shape)
    return found


def publish(runs: Iterable[OptimizedRun]) -> None:
    """Bring all masters to their copies."""
    for run in runs:
        if run.copy is not None:
            run.copy.copy_(run.master)
