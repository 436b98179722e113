"""Block-sparse attention in Triton; see [Note: Triton versions].

One program owns a block of queries (or of keys, for their gradients) and walks the visible blocks
with the online softmax (Dao et al. 2022, algorithms 1 and 4), without atomics.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ds_kernels.registry import triton_interprets

__all__ = ["block_sparse_attention", "block_sparse_attention_backward"]


@triton.jit
def _tile(pointer, rows, inside, dim, DIM: tl.constexpr, WIDE: tl.constexpr):
    """Rows of one head, [rows, DIM], zeros outside."""
    d = tl.arange(0, DIM)
    tile = tl.load(
        pointer + rows[:, None] * dim + d[None, :], inside[:, None] & (d < dim)[None, :], 0.0
    )
    if WIDE:
        tile = tile.to(tl.float32)
    return tile


@triton.jit
def _scores(
    query, key, bias, q_rows, k_rows, k_inside, scale, CAUSAL: tl.constexpr, BIASED: tl.constexpr
):
    """Scaled scores of two tiles, [queries, keys], -inf where hidden."""
    scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
    if BIASED:
        scores += tl.load(bias + k_rows, k_inside, 0.0)[None, :]
    seen = k_inside[None, :]
    if CAUSAL:
        seen = seen & (k_rows[None, :] <= q_rows[:, None])
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def _forward(
    out, lse, query, key, value, layout, bias, heads, length, dim, scale, block,
    BLOCK: tl.constexpr, DIM: tl.constexpr, CAUSAL: tl.constexpr, BIASED: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    index, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    start = head * length * dim
    bias += head // heads * length
    count = length // block
    layout += ((head % heads) * count + index) * count
    offsets = tl.arange(0, BLOCK)
    inside = offsets < block
    rows = index * block + offsets
    q = _tile(query + start, rows, inside, dim, DIM, WIDE)
    peak = tl.full((BLOCK,), float("-inf"), tl.float32)
    mass = tl.zeros((BLOCK,), tl.float32)
    total = tl.zeros((BLOCK, DIM), tl.float32)
    for j in range(0, count):
        if tl.load(layout + j) != 0:
            k_rows = j * block + offsets
            k = _tile(key + start, k_rows, inside, dim, DIM, WIDE)
            v = _tile(value + start, k_rows, inside, dim, DIM, WIDE)
            scores = _scores(q, k, bias, rows, k_rows, inside, scale, CAUSAL, BIASED)
            new_peak = tl.maximum(peak, tl.max(scores, 1))
            # A row that has seen nothing yet stays at -inf; 0 in its place avoids -inf - -inf.
            safe = tl.where(new_peak == float("-inf"), 0.0, new_peak)
            weights = tl.exp(scores - safe[:, None])
            shrink = tl.exp(peak - safe)
            mass = mass * shrink + tl.sum(weights, 1)
            total = total * shrink[:, None]
            total = tl.dot(weights.to(v.dtype), v, total, input_precision="ieee")
            peak = new_peak
    d = tl.arange(0, DIM)
    total = total / tl.where(mass == 0.0, 1.0, mass)[:, None]
    tl.store(
        out + start + rows[:, None] * dim + d[None, :],
        total.to(out.dtype.element_ty),
        inside[:, None] & (d < dim)[None, :],
    )
    found = tl.where(mass == 0.0, float("-inf"), peak + tl.log(tl.where(mass == 0.0, 1.0, mass)))
    tl.store(lse + head * length + rows, found, inside)


@triton.jit
def _change(
    q, k, v, g, row_lse, row_delta, bias, q_rows, k_rows, inside, scale,
    CAUSAL: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """Weights of a pair of tiles and the gradient of their scores, both [queries, keys]."""
    scores = _scores(q, k, bias, q_rows, k_rows, inside, scale, CAUSAL, BIASED)
    weights = tl.exp(scores - row_lse[:, None])
    upstream = tl.dot(g, tl.trans(v), input_precision="ieee")
    return weights, weights * (upstream - row_delta[:, None])


@triton.jit
def _query_grad(
    out, grad, lse, delta, query, key, value, layout, bias, heads, length, dim, scale, block,
    BLOCK: tl.constexpr, DIM: tl.constexpr, CAUSAL: tl.constexpr, BIASED: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    index, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    start = head * length * dim
    bias += head // heads * length
    count = length // block
    layout += ((head % heads) * count + index) * count
    offsets = tl.arange(0, BLOCK)
    inside = offsets < block
    rows = index * block + offsets
    q = _tile(query + start, rows, inside, dim, DIM, WIDE)
    g = _tile(grad + start, rows, inside, dim, DIM, WIDE)
    row_lse = tl.load(lse + head * length + rows, inside, float("inf"))
    row_lse = tl.where(row_lse == float("-inf"), float("inf"), row_lse)
    row_delta = tl.load(delta + head * length + rows, inside, 0.0)
    total = tl.zeros((BLOCK, DIM), tl.float32)
    for j in range(0, count):
        if tl.load(layout + j) != 0:
            k_rows = j * block + offsets
            k = _tile(key + start, k_rows, inside, dim, DIM, WIDE)
            v = _tile(value + start, k_rows, inside, dim, DIM, WIDE)
            _, change = _change(
                q, k, v, g, row_lse, row_delta, bias, rows, k_rows, inside, scale, CAUSAL, BIASED
            )
            total = tl.dot(change.to(k.dtype), k, total, input_precision="ieee")
    d = tl.arange(0, DIM)
    tl.store(
        out + start + rows[:, None] * dim + d[None, :],
        (total * scale).to(out.dtype.element_ty),
        inside[:, None] & (d < dim)[None, :],
    )


@triton.jit
def _key_grad(
    key_out, value_out, grad, lse, delta, query, key, value, layout, bias, heads, length, dim,
    scale, block,
    BLOCK: tl.constexpr, DIM: tl.constexpr, CAUSAL: tl.constexpr, BIASED: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    index, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    start = head * length * dim
    bias += head // heads * length
    count = length // block
    layout += (head % heads) * count * count + index
    offsets = tl.arange(0, BLOCK)
    inside = offsets < block
    k_rows = index * block + offsets
    k = _tile(key + start, k_rows, inside, dim, DIM, WIDE)
    v = _tile(value + start, k_rows, inside, dim, DIM, WIDE)
    key_total = tl.zeros((BLOCK, DIM), tl.float32)
    value_total = tl.zeros((BLOCK, DIM), tl.float32)
    for i in range(0, count):
        if tl.load(layout + i * count) != 0:
            rows = i * block + offsets
            q = _tile(query + start, rows, inside, dim, DIM, WIDE)
            g = _tile(grad + start, rows, inside, dim, DIM, WIDE)
            row_lse = tl.load(lse + head * length + rows, inside, float("inf"))
            row_lse = tl.where(row_lse == float("-inf"), float("inf"), row_lse)
            row_delta = tl.load(delta + head * length + rows, inside, 0.0)
            weights, change = _change(
                q, k, v, g, row_lse, row_delta, bias, rows, k_rows, inside, scale, CAUSAL, BIASED
            )
            key_total = tl.dot(tl.trans(change).to(q.dtype), q, key_total, input_precision="ieee")
            value_total = tl.dot(
                tl.trans(weights).to(g.dtype), g, value_total, input_precision="ieee"
            )
    d = tl.arange(0, DIM)
    places = start + k_rows[:, None] * dim + d[None, :]
    seen = inside[:, None] & (d < dim)[None, :]
    tl.store(key_out + places, (key_total * scale).to(key_out.dtype.element_ty), seen)
    tl.store(value_out + places, value_total.to(value_out.dtype.element_ty), seen)


def _sizes(query: Tensor, block: int) -> dict[str, int | bool]:
    return {
        "BLOCK": max(triton.next_power_of_2(block), 16),
        "DIM": max(triton.next_power_of_2(query.shape[-1]), 16),
        "WIDE": triton_interprets(),
    }


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
    """As :func:`ds_kernels.reference.block_sparse_attention.block_sparse_attention`."""
    batch, heads, length, dim = query.shape
    out = torch.empty_like(query)
    lse = query.new_empty((batch, heads, length), dtype=torch.float32)
    if out.numel() > 0:
        _forward[(length // block, batch * heads)](
            out, lse, query, key, value, layout.to(torch.uint8),
            query if key_bias is None else key_bias, heads, length, dim, scale, block,
            CAUSAL=causal, BIASED=key_bias is not None, **_sizes(query, block),
        )  # fmt: skip
    return out, lse


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
    """As :func:`ds_kernels.reference.block_sparse_attention.block_sparse_attention_backward`."""
    batch, heads, length, dim = query.shape
    grad = grad.contiguous()
    grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    if query.numel() == 0:
        return grads
    delta = (grad.float() * out.float()).sum(-1)
    rest = (
        grad, lse, delta, query, key, value, layout.to(torch.uint8),
        query if key_bias is None else key_bias, heads, length, dim, scale, block,
    )  # fmt: skip
    chosen = {"CAUSAL": causal, "BIASED": key_bias is not None, **_sizes(query, block)}
    grid = (length // block, batch * heads)
    _query_grad[grid](grads[0], *rest, **chosen)
    _key_grad[grid](grads[1], grads[2], *rest, **chosen)
    return grads
