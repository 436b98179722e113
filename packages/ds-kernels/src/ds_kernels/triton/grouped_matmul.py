"""One product per group of rows, in Triton; see [Note: Triton versions].

Rows are cut into tiles within their group, so no group is padded to another's size and a tile reads
one weight (Gale et al. 2023, MegaBlocks, section 5.1).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ds_kernels.registry import triton_interprets

__all__ = ["grouped_matmul", "grouped_matmul_weight_grad"]

_ROWS, _COLUMNS, _DEPTH = 64, 64, 32


@triton.jit
def _forward(
    out, x, weight, bounds, groups, depth, columns, along_depth, along_columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    # Which group does this tile of rows belong to, and where in it?
    tile = tl.program_id(0).to(tl.int64)
    group = tile * 0
    begin = tl.load(bounds)
    end = tl.load(bounds + 1)
    tiles = tl.cdiv(end - begin, ROWS)
    while (tile >= tiles) & (group < groups - 1):
        tile -= tiles
        group += 1
        begin = end
        end = tl.load(bounds + group + 1)
        tiles = tl.cdiv(end - begin, ROWS)
    rows = begin + tile * ROWS + tl.arange(0, ROWS).to(tl.int64)
    cols = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside_rows = (rows < end)[:, None]
    inside_cols = (cols < columns)[None, :]
    weight += group * depth * columns
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, depth, DEPTH):
        k = first + tl.arange(0, DEPTH)
        left = tl.load(
            x + rows[:, None] * depth + k[None, :], inside_rows & (k < depth)[None, :], 0.0
        )
        right = tl.load(
            weight + k[:, None] * along_depth + cols[None, :] * along_columns,
            (k < depth)[:, None] & inside_cols,
            0.0,
        )
        if WIDE:
            left, right = left.to(tl.float32), right.to(tl.float32)
        total = tl.dot(left, right, total, input_precision="ieee")
    tl.store(
        out + rows[:, None] * columns + cols[None, :],
        total.to(out.dtype.element_ty),
        inside_rows & inside_cols,
    )


@triton.jit
def _weight_grad(
    out, x, grad, bounds, depth, columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(2)
    begin = tl.load(bounds + group)
    end = tl.load(bounds + group + 1)
    down = tl.program_id(0).to(tl.int64) * DEPTH + tl.arange(0, DEPTH)
    cols = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside_down = (down < depth)[:, None]
    inside_cols = (cols < columns)[None, :]
    total = tl.zeros((DEPTH, COLUMNS), tl.float32)
    first = begin
    while first < end:
        rows = first + tl.arange(0, ROWS)
        inside = rows < end
        left = tl.load(
            x + rows[None, :] * depth + down[:, None], inside_down & inside[None, :], 0.0
        )
        right = tl.load(
            grad + rows[:, None] * columns + cols[None, :], inside[:, None] & inside_cols, 0.0
        )
        if WIDE:
            left, right = left.to(tl.float32), right.to(tl.float32)
        total = tl.dot(left, right, total, input_precision="ieee")
        first += ROWS
    tl.store(
        out + group.to(tl.int64) * depth * columns + down[:, None] * columns + cols[None, :],
        total.to(out.dtype.element_ty),
        inside_down & inside_cols,
    )


def grouped_matmul(x: Tensor, weight: Tensor, bounds: Tensor, transposed: bool, /) -> Tensor:
    """As :func:`ds_kernels.reference.grouped_matmul.grouped_matmul`."""
    groups = bounds.shape[0] - 1
    depth, columns = x.shape[1], weight.shape[1 if transposed else 2]
    out = x.new_empty(x.shape[0], columns)
    if out.numel() == 0:
        return out
    strides = (1, depth) if transposed else (columns, 1)
    # A group wastes less than a tile; programs past the last tile find themselves outside of it.
    grid = (triton.cdiv(x.shape[0], _ROWS) + groups, triton.cdiv(columns, _COLUMNS))
    _forward[grid](
        out, x, weight, bounds, groups, depth, columns, *strides,
        ROWS=_ROWS, COLUMNS=_COLUMNS, DEPTH=_DEPTH, WIDE=triton_interprets(),
    )  # fmt: skip
    return out


def grouped_matmul_weight_grad(x: Tensor, grad: Tensor, bounds: Tensor, /) -> Tensor:
    """As :func:`ds_kernels.reference.grouped_matmul.grouped_matmul_weight_grad`."""
    groups = bounds.shape[0] - 1
    depth, columns = x.shape[1], grad.shape[1]
    out = torch.empty(groups, depth, columns, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    grid = (triton.cdiv(depth, _ROWS), triton.cdiv(columns, _COLUMNS), groups)
    _weight_grad[grid](
        out, x, grad, bounds, depth, columns,
        ROWS=_DEPTH, COLUMNS=_COLUMNS, DEPTH=_ROWS, WIDE=triton_interprets(),
    )  # fmt: skip
    return out
