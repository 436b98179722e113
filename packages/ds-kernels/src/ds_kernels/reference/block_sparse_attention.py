"""Attention with a layout of visible blocks, in pure torch."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["block_sparse_attention", "block_sparse_attention_backward"]


def _scores(
    query: Tensor,
    key: Tensor,
    layout: Tensor,
    block: int,
    scale: float,
    causal: bool,
    key_bias: Tensor | None,
) -> Tensor:
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    scores = query.to(wide) @ key.to(wide).transpose(-1, -2) * scale
    if key_bias is not None:
        scores = scores + key_bias.to(wide)[:, None, None]
    visible = layout.bool().repeat_interleave(block, 1).repeat_interleave(block, 2)[None]
    if causal:
        visible = visible & torch.ones_like(visible[0, 0]).tril()
    return scores.masked_fill(~visible, float("-inf"))


def block_sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Tensor,
    block: int,
    scale: float,
    causal: bool,
    key_bias: Tensor | None,
    /,
) -> tuple[Tensor, Tensor]:
    """Attended values in the dtype of ``query`` and the log-sum-exp of every row."""
    scores = _scores(query, key, layout, block, scale, causal, key_bias)
    lse = scores.logsumexp(-1)
    blind = (lse == float("-inf"))[..., None]
    weights = (scores - lse.masked_fill(lse == float("-inf"), 0)[..., None]).exp()
    out = weights.masked_fill(blind, 0) @ value.to(scores.dtype)
    return out.to(query.dtype), lse.detach()


def block_sparse_attention_backward(
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Tensor,
    block: int,
    scale: float,
    causal: bool,
    key_bias: Tensor | None,
    /,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value (Dao et al. 2022, section B.2)."""
    scores = _scores(query, key, layout, block, scale, causal, key_bias)
    wide = scores.dtype
    finite = lse.masked_fill(lse == float("-inf"), float("inf"))
    weights = (scores - finite[..., None].to(wide)).exp()
    upstream = grad.to(wide)
    delta = (upstream * out.to(wide)).sum(-1, keepdim=True)
    change = weights * (upstream @ value.to(wide).transpose(-1, -2) - delta)
    return (
        (change @ key.to(wide) * scale).to(query.dtype),
        (change.transpose(-1, -2) @ query.to(wide) * scale).to(key.dtype),
        (weights.transpose(-1, -2) @ upstream).to(value.dtype),
    )
