"""Attention over a cache in blocks, in pure torch."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["paged_attention"]


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    scale: float,
    window: int,
    alibi_slopes: Tensor | None,
    /,
) -> Tensor:
    """See :func:`ds_kernels.ops.paged_attention.paged_attention`."""
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    out = torch.empty_like(query)
    block_size, kv_heads = key_cache.shape[1], key_cache.shape[2]
    group = query.shape[1] // kv_heads
    starts = query_start.tolist()
    for sequence, context in enumerate(context_lens.tolist()):
        begin, end = starts[sequence], starts[sequence + 1]
        if begin == end:
            continue
        used = block_tables[sequence, : -(-context // block_size)].long()
        # [keys, kv heads, dim] -> [heads, keys, dim]
        keys, values = (
            cache[used].flatten(0, 1)[:context].to(wide).repeat_interleave(group, 1).transpose(0, 1)
            for cache in (key_cache, value_cache)
        )
        scores = query[begin:end].to(wide).transpose(0, 1) @ keys.transpose(1, 2) * scale
        position = torch.arange(context - (end - begin), context, device=query.device)[:, None]
        distance = torch.arange(context, device=query.device)[None] - position
        if alibi_slopes is not None:
            scores = scores + alibi_slopes.to(wide)[:, None, None] * distance
        hidden = distance > 0
        if window > 0:
            hidden = hidden | (distance <= -window)
        scores = scores.masked_fill(hidden, float("-inf"))
        out[begin:end] = (scores.softmax(-1) @ values).transpose(0, 1).to(out.dtype)
    return out
