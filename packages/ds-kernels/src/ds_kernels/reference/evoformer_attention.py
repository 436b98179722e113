"""Attention with two broadcast biases, in pure torch."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["evoformer_attention", "evoformer_attention_backward"]


def _scores(
    query: Tensor, key: Tensor, mask_bias: Tensor | None, pair_bias: Tensor | None, scale: float
) -> Tensor:
    """``[batch, rows, heads, length, length]``."""
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    left, right = (tensor.to(wide).transpose(2, 3) for tensor in (query, key))
    scores = left @ right.transpose(-1, -2) * scale
    for bias in (mask_bias, pair_bias):
        if bias is not None:
            scores = scores + bias.to(wide)
    return scores


def evoformer_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask_bias: Tensor | None,
    pair_bias: Tensor | None,
    scale: float,
    /,
) -> tuple[Tensor, Tensor]:
    """Attended values in the dtype of ``query`` and the log-sum-exp of every row."""
    scores = _scores(query, key, mask_bias, pair_bias, scale)
    lse = scores.logsumexp(-1)
    blind = (lse == float("-inf"))[..., None]
    weights = (scores - lse.masked_fill(lse == float("-inf"), 0)[..., None]).exp()
    out = weights.masked_fill(blind, 0) @ value.to(scores.dtype).transpose(2, 3)
    return out.transpose(2, 3).contiguous().to(query.dtype), lse.detach()


def evoformer_attention_backward(
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask_bias: Tensor | None,
    pair_bias: Tensor | None,
    scale: float,
    with_mask: bool,
    with_pair: bool,
    /,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value and both biases; empty ones for biases without gradient."""
    scores = _scores(query, key, mask_bias, pair_bias, scale)
    wide = scores.dtype
    finite = lse.masked_fill(lse == float("-inf"), float("inf"))
    weights = (scores - finite[..., None].to(wide)).exp()
    upstream, attended, left, right, values = (
        tensor.to(wide).transpose(2, 3) for tensor in (grad, out, query, key, value)
    )
    delta = (upstream * attended).sum(-1, keepdim=True)
    change = weights * (upstream @ values.transpose(-1, -2) - delta)
    empty = query.new_empty(0)
    mask_grad = pair_grad = empty
    if with_mask and mask_bias is not None:
        mask_grad = change.sum((2, 3))[:, :, None, None].to(mask_bias.dtype)
    if with_pair and pair_bias is not None:
        pair_grad = change.sum(1, keepdim=True).to(pair_bias.dtype)
    return (
        (change @ right * scale).transpose(2, 3).contiguous().to(query.dtype),
        (change.transpose(-1, -2) @ left * scale).transpose(2, 3).contiguous().to(key.dtype),
        (weights.transpose(-1, -2) @ upstream).transpose(2, 3).contiguous().to(value.dtype),
        mask_grad,
        pair_grad,
    )
