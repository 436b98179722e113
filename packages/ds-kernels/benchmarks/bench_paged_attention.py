"""Paged attention against torch: gather the cache, then scaled_dot_product_attention."""

from __future__ import annotations

import torch
from harness import Result, compare, main
from torch import Tensor

from ds_kernels.ops.paged_attention import paged_attention


def _eager(
    query: Tensor, keys: Tensor, values: Tensor, tables: Tensor, starts: Tensor, contexts: Tensor
) -> Tensor:
    out = torch.empty_like(query)
    group = query.shape[1] // keys.shape[2]
    bounds = starts.tolist()
    for index, context in enumerate(contexts.tolist()):
        begin, end = bounds[index], bounds[index + 1]
        used = tables[index, : -(-context // keys.shape[1])].long()
        key, value = (
            cache[used].flatten(0, 1)[:context].repeat_interleave(group, 1).transpose(0, 1)[None]
            for cache in (keys, values)
        )
        mask = torch.ones(end - begin, context, dtype=torch.bool).tril(context - (end - begin))
        attended = torch.nn.functional.scaled_dot_product_attention(
            query[begin:end].transpose(0, 1)[None], key, value, attn_mask=mask
        )
        out[begin:end] = attended[0].transpose(0, 1)
    return out


def _tensors(lengths: list[tuple[int, int]], dtype: torch.dtype) -> list[Tensor]:
    block, heads, kv_heads, dim = 64, 16, 4, 64
    counts = [-(-context // block) for _, context in lengths]
    tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    order = torch.randperm(sum(counts)).to(torch.int32)
    used = 0
    for row, count in enumerate(counts):
        tables[row, :count] = order[used : used + count]
        used += count
    query = torch.randn(sum(q for q, _ in lengths), heads, dim, dtype=dtype)
    keys, values = (torch.randn(sum(counts), block, kv_heads, dim).to(dtype) for _ in range(2))
    starts = torch.tensor([0, *(q for q, _ in lengths)]).cumsum(0).to(torch.int32)
    return [query, keys, values, tables, starts, torch.tensor([c for _, c in lengths]).int()]


def measure() -> list[Result]:
    """Decoding of 16 sequences, prefill of one, and both in one batch."""
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        for name, lengths in {
            "decode 16 x 512": [(1, 512)] * 16,
            "prefill 1 x 512": [(512, 512)],
            "mixed": [(1, 512)] * 8 + [(128, 384)],
        }.items():
            tensors = _tensors(lengths, dtype)
            results.append(
                compare(
                    f"{name} {str(dtype).removeprefix('torch.')}",
                    {
                        "paged_attention": lambda t=tensors: paged_attention(*t),
                        "gather + sdpa": lambda t=tensors: _eager(*t),
                    },
                    bars={"gather + sdpa": 1.0},
                )
            )
    return results


if __name__ == "__main__":
    main("paged_attention", measure)
