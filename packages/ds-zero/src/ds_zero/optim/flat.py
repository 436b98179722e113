"""Optimisers that run on long flat segments instead of one tensor per parameter."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ds_comm.collectives import Collectives
from ds_comm.errors import EngineError
from ds_zero.layout import VECTOR_NUMEL, Piece
from ds_zero.memory import flat_buffer
from ds_zero.optim.base import OptimizedRun, StateRange, StateSource, StepGradients
from ds_zero.optim.rooms import Room, Segment, Stretch, make_rooms

__all__ = ["FlatOptimizer", "family_of", "granularity_of"]


class FlatOptimizer(torch.optim.Optimizer):
    """Base of the optimisers on flat segments.  See [Note: sharded optimisers] in ``base``.

    ``param_groups`` list the model's parameters, as in any torch optimiser.  Before an engine takes
    it over it is one: ``step()`` updates the parameters from their ``grad``, with states of their
    shape in ``state``.  Afterwards the states are flat tensors per room, and step counts are kept
    per parameter.
    """

    family: str = ""
    """Optimisers of one family can load each other's states from a checkpoint."""
    granularity: int = VECTOR_NUMEL
    """Parameters start, and shards are cut, at multiples of this many elements."""

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        """Register parameter groups, as ``torch.optim.Optimizer`` does."""
        super().__init__(params, defaults)
        self._runs: tuple[OptimizedRun, ...] | None = None
        self._collectives: Collectives | None = None
        self._rooms: tuple[Room, ...] = ()
        self._pending: StepGradients | None = None
        self._state_dtype: torch.dtype | None = None
        self.fp32_optimizer_states = True
        """Whether states of 16-bit parameters are fp32."""

    # ---- what an optimiser is made of --------------------------------------------------------

    @abstractmethod
    def state_kinds(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Names of the states that parameters of ``group`` need with its present values."""

    def update_stretch(
        self, group: Mapping[str, Any], segment: Segment, stretch: Stretch, grad_scale: float
    ) -> None:
        """Update one stretch in place.

        Args:
            group: The hyper-parameters.
            segment: Its history.
            stretch: Parameters, gradients and states.
            grad_scale: Factor by which gradients are multiplied first.
        """
        raise NotImplementedError

    def new_state(self, kind: str, numel: int, like: Tensor) -> Tensor:
        """Allocate the state ``kind`` of ``numel`` elements for ``like``."""
        dtype = self._state_dtype or like.dtype
        if self._state_dtype is None and self.fp32_optimizer_states:
            dtype = torch.promote_types(dtype, torch.float32)
        return flat_buffer(numel, dtype, like.device).tensor

    def state_range(self, states: Mapping[str, Tensor], kind: str, start: int, stop: int) -> Tensor:
        """Elements ``start`` to ``stop`` of a state, counted in its room."""
        return states[kind][start:stop]

    # ---- step --------------------------------------------------------------------------------

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """This object."""
        return self

    def attach(
        self,
        runs: Sequence[OptimizedRun],
        collectives: Collectives,
        state_dtype: torch.dtype | None = None,
    ) -> None:
        """Take over the masters of ``runs``; states begin at their initial values.

        Args:
            runs: The masters that it will update.
            collectives: Of the ranks that hold the other shards.
            state_dtype: Dtype of the states; by default that of the masters, and at least fp32.
        """
        for run in runs:
            run.check_granularity(self.granularity)
        self._runs = tuple(runs)
        self._collectives = collectives
        self._state_dtype = state_dtype
        self.state.clear()
        self._rooms = tuple(
            room
            for index, run in enumerate(runs)
            for room in make_rooms(index, run, self.granularity)
        )
        for room in self._rooms:
            self._complete(room)

    def _complete(self, room: Room) -> None:
        """Give a room the states that its group needs now and that it has not."""
        kinds = self.state_kinds(self.param_groups[room.group])
        missing = [kind for kind in kinds if kind not in room.states]
        if missing:
            numel, master = room.stop - room.start, self._run(room).master
            room.add_states({kind: self.new_state(kind, numel, master) for kind in missing})

    def _run(self, room: Room) -> OptimizedRun:
        assert self._runs is not None
        return self._runs[room.run]

    def update(self, gradients: StepGradients) -> None:
        """See :meth:`ds_zero.optim.base.ShardOptimizer.update`."""
        self._pending = gradients
        self.step()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Apply the gradients.

        Args:
            closure: Evaluates the model anew and returns the loss, as in any torch optimiser; not
                under an engine.

        Returns:
            What ``closure`` returned.

        Raises:
            EngineError: An engine has taken the optimiser over; use ``engine.step()``.
        """
        if self._runs is None:
            return self._step_alone(closure)
        if self._pending is None:
            raise EngineError(
                f"{type(self).__name__}.step() has no gradients: they live in the engine's "
                "shards. Call engine.step()."
            )
        gradients, self._pending = self._pending, None
        with torch.no_grad():
            self.apply(gradients)
        for room in self._rooms:
            if gradients.grads[room.run] is not None:
                room.count(gradients.used[room.run])
        return None

    def apply(self, gradients: StepGradients) -> None:
        """Update all rooms; element by element unless a subclass says otherwise."""
        for room in self._rooms:
            group = self.param_groups[room.group]
            for segment, stretch in self.stretches(room, gradients):
                self.update_stretch(group, segment, stretch, gradients.scale)

    def stretches(self, room: Room, gradients: StepGradients) -> Iterator[tuple[Segment, Stretch]]:
        """The stretches of ``room`` that have a gradient."""
        grad = gradients.grads[room.run]
        if grad is None:
            return
        self._complete(room)
        for segment in room.segments(gradients.used[room.run]):
            start, stop, *_ = segment
            part = room.parts.get((start, stop))
            if part is None:
                part = room.parts[start, stop] = self._cut(room, segment)
            yield segment, Stretch(part.param, grad[start:stop], part.states, part.copy)

    def _cut(self, room: Room, segment: Segment) -> Stretch:
        """A stretch without its gradient."""
        run, start, stop = self._run(room), segment.start, segment.stop
        inside = start - room.start, stop - room.start
        return Stretch(
            run.master[start:stop],
            run.master[:0],
            {kind: self.state_range(room.states, kind, *inside) for kind in room.states},
            run.copy[start:stop] if run.copy is not None else None,
        )

    # ---- without an engine -------------------------------------------------------------------

    @torch.no_grad()
    def _step_alone(self, closure: Callable[[], Any] | None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None and param.numel():
                    self.update_alone(group, param)
        return loss

    def update_alone(self, group: Mapping[str, Any], param: nn.Parameter) -> None:
        """Update a whole parameter from its ``grad``, with states in ``self.state``."""
        segment, stretch = self.stretch_alone(group, param)
        self.update_stretch(group, segment, stretch, 1.0)
        self.finish_alone(param, stretch)

    def stretch_alone(
        self, group: Mapping[str, Any], param: nn.Parameter
    ) -> tuple[Segment, Stretch]:
        """A whole parameter as a stretch; its states are made if it has none."""
        state = self.state[param]
        missing = [kind for kind in self.state_kinds(group) if kind not in state]
        for kind in missing:
            flat = self.new_state(kind, param.numel(), param)
            state[kind] = flat.view(self.shape_alone(kind, param))
        segment = Segment(0, param.numel(), int(state.get("step", 0)), bool(missing))
        assert param.grad is not None
        grad = param.grad.to_dense() if param.grad.is_sparse else param.grad
        states = {kind: state[kind].view(-1) for kind in state if kind != "step"}
        # A copy of the gradient: it may be used as working space.
        copied = grad.detach().clone(memory_format=torch.contiguous_format).view(-1)
        flat = param.detach().contiguous().view(-1)
        return segment, Stretch(flat, copied, states, None)

    def shape_alone(self, kind: str, param: nn.Parameter) -> tuple[int, ...]:
        """Shape of a state of a whole parameter."""
        return tuple(param.shape)

    def finish_alone(self, param: nn.Parameter, stretch: Stretch) -> None:
        """Bring a stretch's values to its parameter and count the step."""
        if stretch.param.data_ptr() != param.data_ptr():
            param.copy_(stretch.param.view(param.shape))
        else:
            torch.autograd.graph.increment_version(param)
        state = self.state[param]
        state["step"] = torch.tensor(float(state.get("step", 0)) + 1)

    # ---- checkpoints -------------------------------------------------------------------------

    def state_ranges(self) -> Iterator[StateRange]:
        """See :meth:`ds_zero.optim.base.ShardOptimizer.state_ranges`."""
        for room in self._rooms:
            steps = {p.spec.name: step for p, step in zip(room.pieces, room.steps, strict=True)}
            for piece in self._run(room).stored_pieces():
                if steps.get(piece.spec.name):
                    begin = piece.shard_start - room.start
                    for kind in self.stored_kinds(room):
                        data = self.export_state(room, kind, begin, begin + piece.numel)
                        yield StateRange(kind, piece.spec.name, piece.param_start, data)

    def stored_kinds(self, room: Room) -> tuple[str, ...]:
        """Names under which the states of ``room`` are stored."""
        return tuple(room.states)

    def export_state(self, room: Room, kind: str, start: int, stop: int) -> Tensor:
        """Values of a stored state, counted in the room, 1-D."""
        return room.states[kind][start:stop]

    def import_state(self, room: Room, kind: str, start: int, values: Tensor) -> None:
        """Replace values (1-D) of a stored state from ``start`` on, counted in the room."""
        room.states[kind][start : start + values.numel()].copy_(values)

    def scalars(self) -> dict[str, dict[str, float]]:
        """See :meth:`ds_zero.optim.base.ShardOptimizer.scalars`."""
        return {
            piece.spec.name: {"step": step}
            for room in self._rooms
            for piece, step in zip(room.pieces, room.steps, strict=True)
            if step
        }

    def state_shapes(self) -> dict[str, dict[str, tuple[int, ...]]]:
        """See :meth:`ds_zero.optim.base.ShardOptimizer.state_shapes`."""
        return {}

    def load(self, source: StateSource, names: Collection[str] | None = None) -> None:
        """See :meth:`ds_zero.optim.base.ShardOptimizer.load`."""
        for room in self._rooms:
            self._complete(room)
            for index, piece in enumerate(room.pieces):
                name = piece.spec.name
                if names is not None and name not in names:
                    continue
                room.steps[index] = int(source.scalars(name).get("step", 0))
                room.fresh[index] = not source.kinds(name).issuperset(self.stored_kinds(room))
                self._load_piece(room, piece, source)

    def _load_piece(self, room: Room, piece: Piece, source: StateSource) -> None:
        name = piece.spec.name
        stored = source.kinds(name)
        master = self._run(room).master
        dtype = torch.promote_types(master.dtype, torch.float32)
        for kind in self.stored_kinds(room):
            values = torch.zeros(piece.numel, dtype=dtype, device=master.device)
            if kind in stored:
                source.read(kind, name, piece.param_start, values)
            self.import_state(room, kind, piece.shard_start - room.start, values)


def family_of(optimizer: torch.optim.Optimizer | str) -> str:
    """Name of the optimisers that can load this one's states; takes the name of a class too."""
    if isinstance(optimizer, FlatOptimizer):
        return optimizer.family
    name = optimizer if isinstance(optimizer, str) else type(optimizer).__name__
    return name.removeprefix("Flat").lower().removesuffix("w")


def granularity_of(optimizer: torch.optim.Optimizer | None) -> int:
    """Elements of the blocks that the layout must not cut for ``optimizer``."""
    return optimizer.granularity if isinstance(optimizer, FlatOptimizer) else 1
