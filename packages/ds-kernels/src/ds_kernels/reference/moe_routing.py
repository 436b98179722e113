"""Choosing experts and moving rows to them and back, in pure torch."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["expert_rows", "moe_combine", "moe_scatter", "top_k_gating"]


def top_k_gating(logits: Tensor, k: int, normalize: bool, /) -> tuple[Tensor, Tensor]:
    """The largest of the softmax scores of each row and their columns; ties go to the lower one."""
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    scores = logits.to(wide).softmax(-1)
    order = torch.sort(logits.to(wide), dim=-1, descending=True, stable=True).indices[:, :k]
    weights = scores.gather(1, order)
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, order


def expert_rows(experts: Tensor, count: int, /) -> tuple[Tensor, Tensor]:
    """Place of each pair among the pairs sorted by expert, and where each expert's begin."""
    flat = experts.flatten()
    kept = (flat >= 0).nonzero().flatten()
    order = kept[torch.sort(flat[kept], stable=True).indices]
    rows = torch.full_like(flat, -1)
    rows[order] = torch.arange(order.numel(), device=flat.device)
    counts = torch.bincount(flat[kept], minlength=count)
    return rows.view_as(experts), torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def moe_scatter(x: Tensor, rows: Tensor, total: int, /) -> Tensor:
    """``out[rows[token, j]] = x[token]``; rows that nobody names are zero."""
    out = x.new_zeros(total, x.shape[1])
    kept = rows >= 0
    tokens = torch.arange(rows.shape[0], device=x.device)[:, None].expand_as(rows)
    out[rows[kept]] = x[tokens[kept]]
    return out


def moe_combine(x: Tensor, rows: Tensor, weights: Tensor, /) -> Tensor:
    """``out[token] = sum over j of weights[token, j] * x[rows[token, j]]``."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    # Taken by index, not multiplied by zero: the row of a pair without expert may hold NaN.
    picked = x.to(wide)[rows.clamp(min=0)] if x.shape[0] else x.new_zeros(*rows.shape, x.shape[1])
    terms = (picked * weights.to(wide)[..., None]).masked_fill((rows < 0)[..., None], 0)
    return terms.sum(1).to(x.dtype)
