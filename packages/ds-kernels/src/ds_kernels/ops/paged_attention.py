"""Attention of ragged queries over a key-value cache kept in blocks (Kwon et al. 2023, section 4).

One op serves decoding (one query a sequence), prefill (as many queries as keys) and anything
between (chunked prefill), mixed in a batch.  Scores and sums are float32 in an online softmax
(Dao et al. 2022, algorithm 1).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ds_kernels.functional import Functional
from ds_kernels.reference import paged_attention as reference
from ds_kernels.registry import Op

if TYPE_CHECKING:
    from ds_kernels._native import Native

__all__ = ["paged_attention"]

_Implementation = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float, int, Tensor | None], Tensor
]


def _native(module: Native) -> _Implementation:
    run = module.paged_attention

    def call(
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_tables: Tensor,
        query_start: Tensor,
        context_lens: Tensor,
        scale: float,
        window: int,
        alibi_slopes: Tensor | None,
    ) -> Tensor:
        out = torch.empty_like(query)
        run(
            out, query, key_cache, value_cache, block_tables, query_start, context_lens, scale,
            window, alibi_slopes,
        )  # fmt: skip
        return out

    return call


_PAGED = Functional(
    Op("paged_attention", reference.paged_attention, native=_native, cuda=True),
    "(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_tables, "
    "Tensor query_start, Tensor context_lens, float scale, int window, Tensor? alibi_slopes) "
    "-> Tensor",
    lambda query, *_: torch.empty_like(query),
)


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    *,
    scale: float | None = None,
    window: int = 0,
    alibi_slopes: Tensor | None = None,
) -> Tensor:
    """Attend causally; the keys and values of the queries are in the cache already.

    Args:
        query: ``[tokens, heads, dim]``, the queries of all sequences one after another; float32,
            bfloat16 or float16; ``dim`` up to 256.
        key_cache: ``[blocks, block_size, kv_heads, dim]``, any of the three dtypes; ``kv_heads``
            divides ``heads``, and neighbouring heads share one of them.
        value_cache: The same.
        block_tables: int32 ``[sequences, max_blocks]``: the blocks of each sequence in order.
        query_start: int32 ``[sequences + 1]``: where the queries of each sequence begin and end.
        context_lens: int32 ``[sequences]``: keys of each sequence, those of its queries included.
            The queries are the last ones of the context.
        scale: Factor of the scores; ``1 / sqrt(dim)`` by default.
        window: Keys that a query sees, its own included; 0 shows all before it.
        alibi_slopes: float32 ``[heads]``; adds slope times (key position - query position)
            (Press et al. 2022).

    Returns:
        ``[tokens, heads, dim]`` in the dtype of ``query``.

    Raises:
        KernelArgumentError: A wrong dtype, shape, device or layout; on the CPU also a table that
            names a block which is not there.  On a GPU the tables are trusted.
    """
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    out: Tensor = _PAGED(
        query, key_cache, value_cache, block_tables, query_start, context_lens, factor, window,
        alibi_slopes,
    )  # fmt: skip
    return out
