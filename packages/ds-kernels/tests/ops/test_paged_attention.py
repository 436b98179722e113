"""Paged attention: backends against float64, sdpa on plain tensors, hostile tables."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_kernels import KernelArgumentError, native_status
from ds_kernels.ops import paged_attention as module
from ds_kernels.ops.paged_attention import paged_attention
from ds_kernels.registry import Backend
from ds_kernels.testing import Case, Suite, backends, check_compiled, check_forward

needs_native = pytest.mark.skipif(
    not native_status().available, reason=native_status().reason or "native module present"
)


def _paged(
    generator: torch.Generator,
    lengths: list[tuple[int, int]],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 16,
    block: int = 16,
    dtype: torch.dtype = torch.float32,
    cache: torch.dtype | None = None,
) -> list[Tensor]:
    """Query, caches and tables for sequences of (queries, context) tokens; blocks are shuffled."""
    tokens = sum(queries for queries, _ in lengths)
    counts = [-(-context // block) for _, context in lengths]
    order = torch.randperm(sum(counts) + 2, generator=generator).to(torch.int32)
    tables = torch.full((len(lengths), max(counts, default=0) + 1), -1, dtype=torch.int32)
    used = 0
    for row, count in enumerate(counts):
        tables[row, :count] = order[used : used + count]
        used += count
    shape = (sum(counts) + 2, block, kv_heads, dim)
    query = torch.randn(tokens, heads, dim, generator=generator).to(dtype)
    keys, values = (torch.randn(shape, generator=generator).to(cache or dtype) for _ in range(2))
    starts = torch.tensor([0, *(queries for queries, _ in lengths)]).cumsum(0).to(torch.int32)
    contexts = torch.tensor([context for _, context in lengths], dtype=torch.int32)
    return [query, keys, values, tables, starts, contexts]


def _case(
    name: str,
    lengths: list[tuple[int, int]],
    *,
    window: int = 0,
    slopes: bool = False,
    speed: bool = False,
    **shape: Any,
) -> Case:
    def make(generator: torch.Generator) -> tuple[Any, ...]:
        tensors = _paged(generator, lengths, **shape)
        heads, dim = tensors[0].shape[1:]
        alibi = 2.0 ** -torch.arange(1, heads + 1).float() if slopes else None
        return (*tensors, 1 / math.sqrt(dim), window, alibi)

    return Case(name, make, speed)


MIXED = [(1, 37), (5, 5), (1, 1), (70, 133), (0, 9), (3, 64)]
CASES = (
    _case("mixed", MIXED),
    _case("decode", [(1, n) for n in (1, 15, 16, 17, 63, 64, 65, 200)], speed=True),
    _case("prefill", [(150, 150), (1, 1), (64, 64)]),
    _case("bf16", MIXED, dtype=torch.bfloat16),
    _case("fp16", MIXED, dtype=torch.float16),
    _case("fp32-query-bf16-cache", MIXED, cache=torch.bfloat16),
    _case("window", MIXED, window=7),
    _case("window-1", MIXED, window=1),
    _case("alibi", MIXED, slopes=True),
    _case("many-heads-one-key-head", MIXED, heads=71, kv_heads=1, dim=8),
    _case("no-groups", MIXED, heads=3, kv_heads=3),
    _case("odd-dim", MIXED, dim=13),
    _case("dim-1", MIXED, dim=1),
    _case("dim-256", [(2, 130)], dim=256),
    _case("block-of-one", [(2, 9)], block=1),
    _case("large-blocks", [(2, 9), (1, 300)], block=128),
    _case("nothing", []),
    _case("no-queries", [(0, 5), (0, 0)]),
)
SUITE = Suite(module._PAGED.op, CASES, call=lambda *a: torch.ops.ds_kernels.paged_attention(*a))


@pytest.mark.parametrize("backend", backends(module._PAGED.op))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_forward(case: Case, backend: Backend) -> None:
    check_forward(SUITE, case, backend)


def test_compiles() -> None:
    check_compiled(SUITE, CASES[0])


def test_opcheck() -> None:
    torch.library.opcheck(torch.ops.ds_kernels.paged_attention, CASES[0].arguments())


def test_equals_sdpa_on_plain_tensors() -> None:
    """Prefill of one sequence against torch's own attention, fp32, 1e-5."""
    query, keys, values, *tables = _paged(torch.Generator().manual_seed(0), [(50, 50)], kv_heads=4)
    used = tables[0][0, :4].long()
    plain = [cache[used].flatten(0, 1)[:50].transpose(0, 1)[None] for cache in (keys, values)]
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1)[None], *plain, is_causal=True
    )
    got = paged_attention(query, keys, values, *tables)
    torch.testing.assert_close(got, expected[0].transpose(0, 1), rtol=1e-5, atol=1e-5)


def test_infinite_and_nan_values_stay_in_their_rows() -> None:
    tensors = _paged(torch.Generator().manual_seed(0), [(1, 20), (1, 20)])
    clean = paged_attention(*tensors)
    block = int(tensors[3][0, 0])
    tensors[1][block, 3, 0, 0] = float("nan")
    got = paged_attention(*tensors)
    assert got[0, :2].isnan().all() and torch.equal(got[0, 2:], clean[0, 2:])
    assert torch.equal(got[1], clean[1])


def test_slots_beyond_the_context_are_not_read() -> None:
    tensors = _paged(torch.Generator().manual_seed(0), [(1, 20)])
    clean = paged_attention(*tensors)
    block = int(tensors[3][0, 1])
    for cache in tensors[1:3]:
        cache[block, 4:] = float("nan")
    assert torch.equal(paged_attention(*tensors), clean)


@needs_native
@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        (0, lambda t: t.double(), "query"),
        (0, lambda t: t.transpose(0, 1), "query"),
        (0, lambda t: t[:, :3].contiguous(), "key_cache: has 2 heads"),
        (0, lambda t: t[..., :8].contiguous(), "key_cache: has heads of 16"),
        (1, lambda t: t.half(), "value_cache"),
        (2, lambda t: t[:-1], "value_cache"),
        (3, lambda t: t.long(), "block_tables"),
        (3, lambda t: t.clone().fill_(99), "names block 99"),
        (3, lambda t: t.clone().fill_(-1), "names block -1"),
        (3, lambda t: t[:, :1].contiguous(), "needs 2 blocks"),
        (4, lambda t: t.flip(0), "query_start"),
        (4, lambda t: t + 1, "query_start"),
        (5, lambda t: t.clone().fill_(0), "context_lens"),
        (5, lambda t: t[:1], "block_tables"),
    ],
)
def test_bad_arguments_are_named(index: int, change: Any, message: str) -> None:
    tensors = _paged(torch.Generator().manual_seed(0), [(1, 20), (2, 18)])
    tensors[index] = change(tensors[index])
    with pytest.raises(KernelArgumentError, match=message):
        paged_attention(*tensors)


@needs_native
def test_bad_numbers_are_named() -> None:
    tensors = _paged(torch.Generator().manual_seed(0), [(1, 20)])
    with pytest.raises(KernelArgumentError, match="window"):
        paged_attention(*tensors, window=-1)
    with pytest.raises(KernelArgumentError, match="alibi_slopes"):
        paged_attention(*tensors, alibi_slopes=torch.zeros(3))
