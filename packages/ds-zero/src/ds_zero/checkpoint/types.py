"""Values exchanged between an engine and the checkpoint code; plain data, no I/O."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from torch import Tensor

__all__ = ["BUFFER", "CLIENT", "PARAM", "Chunk", "Json", "Manifest", "Scalar", "TensorInfo"]

Json: TypeAlias = "None | bool | int | float | str | list[Json] | dict[str, Json]"
"""What the standard ``json`` module reads and writes."""

Scalar: TypeAlias = "float | int | bool | str"
"""A per-parameter optimiser value that is no tensor, such as a step count."""

PARAM = "param"
"""Chunk kind of a parameter's value: the fp32 master, or the stored dtype of a frozen one."""

BUFFER = "buffer"
"""Chunk kind of a module buffer."""

CLIENT = "client"
"""Chunk kind of a tensor found in the client state; callers may not use it."""


@dataclass(frozen=True)
class TensorInfo:
    """Global description of one parameter or buffer, the same on every rank.

    Attributes:
        name: Fully-qualified name in the module, such as ``layers.0.weight``.
        shape: Shape of the whole tensor, before any sharding.
        dtype: Dtype the model computes in, as torch prints it without the prefix (``bfloat16``).
        trainable: Whether the optimiser updates it; ``False`` for buffers.
        group: Index of its optimiser parameter group; -1 where it has none.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    group: int

    @property
    def numel(self) -> int:
        """Number of elements of the whole tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Chunk:
    """One contiguous flat range of one named tensor, held by this rank.

    Attributes:
        kind: ``"param"``, ``"buffer"``, or an optimiser state key such as ``"exp_avg"``.
        name: Fully-qualified parameter or buffer name.
        start: First element, counted in the flattened global tensor.
        data: The elements; 1-D, contiguous, any device. Zero elements are allowed.
    """

    kind: str
    name: str
    start: int
    data: Tensor


@dataclass(frozen=True)
class Manifest:
    """Everything a checkpoint holds besides tensor data and client state.

    Attributes:
        parameters: All parameters, tied ones once, in the order of the module.
        buffers: All stored buffers.
        aliases: Name of a tied tensor -> name under which it is stored.
        mesh: Axis sizes of the writer, and ``world``.
        counters: Engine counters such as ``global_steps``.
        scalars: Parameter name -> optimiser scalars such as ``step``.
        schedule: State of the learning-rate schedule; plain containers.
        loss_scale: State of the loss scale, or None where losses are not scaled; a plain
            dictionary.
        data: Position of the data loader; plain containers.
        optimizer: Optimiser type and hyper-parameters per group; plain containers.
        excluded: Names in ``parameters`` whose values are left out on purpose.
        state_shapes: Parameter name -> state key -> shape, for optimiser states that are shaped
            unlike their parameter (factored moments).
    """

    parameters: tuple[TensorInfo, ...]
    buffers: tuple[TensorInfo, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    mesh: Mapping[str, int] = field(default_factory=dict)
    counters: Mapping[str, int] = field(default_factory=dict)
    scalars: Mapping[str, Mapping[str, Scalar]] = field(default_factory=dict)
    schedule: object = None
    loss_scale: object = None
    data: object = None
    optimizer: object = None
    excluded: tuple[str, ...] = ()
    state_shapes: Mapping[str, Mapping[str, tuple[int, ...]]] = field(default_factory=dict)

    def expected_numel(self) -> dict[tuple[str, str], int]:
        """Return (kind, name) -> element count of every tensor that must be stored."""
        excluded = set(self.excluded)
        wanted = {(PARAM, i.name): i.numel for i in self.parameters if i.name not in excluded}
        wanted.update({(BUFFER, i.name): i.numel for i in self.buffers})
        return wanted

    def state_numel(self) -> dict[tuple[str, str], int]:
        """Return (state key, name) -> element count of states shaped unlike their parameter."""
        return {
            (kind, name): math.prod(shape)
            for name, kinds in self.state_shapes.items()
            for kind, shape in kinds.items()
        }
