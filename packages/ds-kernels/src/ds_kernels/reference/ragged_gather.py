"""Gathering rows for ragged batches, in pure torch."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["last_rows", "ragged_embedding"]


def ragged_embedding(
    table: Tensor, tokens: Tensor, position_table: Tensor | None, positions: Tensor | None, /
) -> Tensor:
    """Rows of ``table``, with those of ``position_table`` added in float32."""
    if position_table is None or positions is None:
        return table[tokens]
    wide = torch.float64 if table.dtype == torch.float64 else torch.float32
    return (table[tokens].to(wide) + position_table[positions].to(wide)).to(table.dtype)


def last_rows(hidden: Tensor, query_start: Tensor, /) -> Tensor:
    """The last row of every sequence, zeros where it has none."""
    begin, end = query_start[:-1].long(), query_start[1:].long()
    if not hidden.shape[0]:
        return hidden.new_zeros(begin.shape[0], hidden.shape[1])
    picked = hidden[(end - 1).clamp(min=0)]
    return torch.where((end > begin)[:, None], picked, torch.zeros_like(picked))
