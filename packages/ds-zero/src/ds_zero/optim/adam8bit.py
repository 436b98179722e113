"""Adam whose two moments are kept in 8 bits (Dettmers et al. 2022, arXiv:2110.02861).

[Note: blocks]
A moment is cut into blocks of 256 elements, each with one fp32 scale and codes into a table of 256
values that are dense near zero (dynamic tree quantisation, section 1.3).  The scale is the element
of largest magnitude with its sign, because the table ends at 1 and only near -1.
Parameters start at a block and shards end at one (``granularity``), so the blocks of a parameter,
and with them every bit of an update, do not depend on where shards are cut.

Checkpoints store the moments as fp32 values: any Adam can read them, and packing such values again
gives the same codes.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ds_zero.memory import flat_buffer
from ds_zero.optim.adam import FlatAdam, adam_stretch
from ds_zero.optim.rooms import Room, Segment, Stretch

__all__ = ["BLOCK_NUMEL", "Adam8bit", "pack_blocks", "unpack_blocks"]

BLOCK_NUMEL = 256
"""Elements that share a scale."""

_CHUNK_NUMEL = 1 << 20
_MOMENTS = {"exp_avg": True, "exp_avg_sq": False}
"""Names of the moments as they are stored, and whether they have a sign."""


class Adam8bit(FlatAdam):
    """Adam or AdamW with 2 bytes of state a parameter instead of 8.  See [Note: blocks]."""

    granularity = BLOCK_NUMEL

    def state_kinds(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """See :meth:`FlatOptimizer.state_kinds`."""
        return tuple(f"{moment}_{part}" for moment in _MOMENTS for part in ("codes", "scales"))

    def new_state(self, kind: str, numel: int, like: Tensor) -> Tensor:
        """See :meth:`FlatOptimizer.new_state`; a scale of 0 makes every code 0."""
        if kind.endswith("_codes"):
            return flat_buffer(numel, torch.uint8, like.device).tensor
        return flat_buffer(-(-numel // BLOCK_NUMEL), torch.float32, like.device).tensor

    def state_range(self, states: Mapping[str, Tensor], kind: str, start: int, stop: int) -> Tensor:
        """See :meth:`FlatOptimizer.state_range`."""
        if kind.endswith("_codes"):
            return states[kind][start:stop]
        return states[kind][start // BLOCK_NUMEL : -(-stop // BLOCK_NUMEL)]

    def shape_alone(self, kind: str, param: nn.Parameter) -> tuple[int, ...]:
        """See :meth:`FlatOptimizer.shape_alone`."""
        return super().shape_alone(kind, param) if kind.endswith("_codes") else (-1,)

    def update_stretch(
        self, group: Mapping[str, Any], segment: Segment, stretch: Stretch, grad_scale: float
    ) -> None:
        """See :meth:`FlatOptimizer.update_stretch`; a chunk of fp32 moments exists at a time."""
        for start in range(0, stretch.param.numel(), _CHUNK_NUMEL):
            stop = min(start + _CHUNK_NUMEL, stretch.param.numel())
            part = {
                kind: self.state_range(stretch.states, kind, start, stop) for kind in stretch.states
            }
            moments = {
                name: unpack_blocks(part[f"{name}_codes"], part[f"{name}_scales"], signed=signed)
                for name, signed in _MOMENTS.items()
            }
            copy = stretch.copy[start:stop] if stretch.copy is not None else None
            inner = Stretch(stretch.param[start:stop], stretch.grad[start:stop], moments, copy)
            adam_stretch(group, segment, inner, grad_scale)
            for name, signed in _MOMENTS.items():
                codes, scales = part[f"{name}_codes"], part[f"{name}_scales"]
                pack_blocks(moments[name], codes, scales, signed=signed)

    # ---- checkpoints -------------------------------------------------------------------------

    def stored_kinds(self, room: Room) -> tuple[str, ...]:
        """See :meth:`FlatOptimizer.stored_kinds`."""
        return tuple(_MOMENTS)

    def export_state(self, room: Room, kind: str, start: int, stop: int) -> Tensor:
        """See :meth:`FlatOptimizer.export_state`; ``start`` is at a block."""
        codes, scales = (
            self.state_range(room.states, f"{kind}_{part}", start, stop)
            for part in ("codes", "scales")
        )
        return unpack_blocks(codes, scales, signed=_MOMENTS[kind])

    def import_state(self, room: Room, kind: str, start: int, values: Tensor) -> None:
        """See :meth:`FlatOptimizer.import_state`; ``start`` is at a block."""
        stop = start + values.numel()
        codes, scales = (
            self.state_range(room.states, f"{kind}_{part}", start, stop)
            for part in ("codes", "scales")
        )
        pack_blocks(values, codes, scales, signed=_MOMENTS[kind])


@cache
def _table(device: torch.device, *, signed: bool) -> Tensor:
    """The 256 values of a code in ascending order, in [-1, 1] or [0, 1]."""
    values = [0.0, 1.0]
    for exponent in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (exponent if signed else exponent + 1) + 1)
        means = 10.0 ** (exponent - 6) * (edges[:-1] + edges[1:]) / 2
        values += means.tolist() + ((-means).tolist() if signed else [])
    return torch.tensor(sorted(values), device=device)


@cache
def _bounds(device: torch.device, *, signed: bool) -> Tensor:
    """Midpoints between neighbouring values."""
    table = _table(device, signed=signed)
    return (table[1:] + table[:-1]) / 2


def unpack_blocks(codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """Return the fp32 values of codes.

    Args:
        codes: ``[n]`` uint8.
        scales: ``[ceil(n / 256)]`` fp32.
        signed: Whether the values have a sign.
    """
    values = _table(codes.device, signed=signed)[codes.int()]
    return values.mul_(scales.repeat_interleave(BLOCK_NUMEL)[: codes.numel()])


def pack_blocks(values: Tensor, codes: Tensor, scales: Tensor, *, signed: bool) -> None:
    """Write the nearest codes of values, and the blocks' scales.

    Args:
        values: ``[n]``, any float dtype.
        codes: ``[n]`` uint8; overwritten.
        scales: ``[ceil(n / 256)]`` fp32; overwritten.
        signed: Whether the values have a sign; otherwise they are at least 0.
    """
    missing = scales.numel() * BLOCK_NUMEL - values.numel()
    blocks = nn.functional.pad(values.float(), (0, missing)).view(-1, BLOCK_NUMEL)
    scales.copy_(blocks.gather(1, blocks.abs().argmax(dim=1, keepdim=True)).view(-1))
    safe = torch.where(scales != 0, scales, 1.0).unsqueeze(1)
    bounds = _bounds(values.device, signed=signed)
    found = torch.bucketize(blocks / safe, bounds, out_int32=True)
    codes.copy_(found.view(-1)[: codes.numel()])
