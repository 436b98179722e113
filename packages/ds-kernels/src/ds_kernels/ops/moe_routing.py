"""Mixture-of-experts routing for serving: choose, sort, scatter, combine.

``top_k_gating`` picks experts, ``expert_rows`` sorts the pairs of token and choice by expert
without padding, ``moe_scatter`` copies rows there, the experts run as
:func:`ds_kernels.ops.grouped_matmul.grouped_matmul`, ``moe_combine`` brings rows back weighted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ds_kernels.functional import Functional
from ds_kernels.reference import moe_routing as reference
from ds_kernels.registry import Op

if TYPE_CHECKING:
    from ds_kernels._native import Native

__all__ = ["expert_rows", "moe_combine", "moe_scatter", "top_k_gating"]


def _gating_native(module: Native) -> Callable[[Tensor, int, bool], tuple[Tensor, Tensor]]:
    run = module.top_k_gating

    def call(logits: Tensor, k: int, normalize: bool) -> tuple[Tensor, Tensor]:
        weights = logits.new_empty(logits.shape[0], k, dtype=torch.float32)
        experts = logits.new_empty(logits.shape[0], k, dtype=torch.int64)
        run(weights, experts, logits, normalize)
        return weights, experts

    return call


def _rows_native(module: Native) -> Callable[[Tensor, int], tuple[Tensor, Tensor]]:
    run = module.expert_rows

    def call(experts: Tensor, count: int) -> tuple[Tensor, Tensor]:
        rows, bounds = torch.empty_like(experts), experts.new_zeros(count + 1)
        run(rows, bounds, experts)
        return rows, bounds

    return call


def _scatter_native(module: Native) -> Callable[[Tensor, Tensor, int], Tensor]:
    run = module.moe_scatter

    def call(x: Tensor, rows: Tensor, total: int) -> Tensor:
        out = x.new_zeros(total, x.shape[1])
        run(out, x, rows)
        return out

    return call


def _combine_native(module: Native) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    run = module.moe_combine

    def call(x: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
        out = x.new_empty(rows.shape[0], x.shape[1])
        run(out, x, rows, weights)
        return out

    return call


def _fake_gating(logits: Tensor, k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], k)
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int64)


def _op(name: str, reference: Callable[..., Any], native: Callable[[Native], Any]) -> Op[..., Any]:
    return Op(name, reference, native=native, source="moe_routing", cuda=True)


_GATING = Functional(
    _op("top_k_gating", reference.top_k_gating, _gating_native),
    "(Tensor logits, int k, bool normalize) -> (Tensor, Tensor)",
    _fake_gating,
)
_ROWS = Functional(
    _op("expert_rows", reference.expert_rows, _rows_native),
    "(Tensor experts, int count) -> (Tensor, Tensor)",
    lambda experts, count: (torch.empty_like(experts), experts.new_empty(count + 1)),
)
_SCATTER = Functional(
    _op("moe_scatter", reference.moe_scatter, _scatter_native),
    "(Tensor x, Tensor rows, int total) -> Tensor",
    lambda x, rows, total: x.new_empty(total, x.shape[1]),
)
_COMBINE = Functional(
    _op("moe_combine", reference.moe_combine, _combine_native),
    "(Tensor x, Tensor rows, Tensor weights) -> Tensor",
    lambda x, rows, weights: x.new_empty(rows.shape[0], x.shape[1]),
)


def top_k_gating(logits: Tensor, k: int, *, normalize: bool = True) -> tuple[Tensor, Tensor]:
    """Choose the k experts with the highest softmax score of each token; no gradient.

    Args:
        logits: ``[tokens, experts]``; float32, bfloat16 or float16, contiguous.
        k: Choices, 1 to ``experts``.
        normalize: Divide the weights by their sum over the choices.

    Returns:
        Weights, float32 ``[tokens, k]``, and experts, int64 ``[tokens, k]``, the best first; equal
        logits give the lower expert first.  A NaN logit is chosen first and its token's weights
        are NaN.

    Raises:
        KernelArgumentError: A wrong dtype, shape or layout, or ``k`` out of range.
    """
    weights, experts = _GATING(logits, k, normalize)
    return weights, experts


def expert_rows(experts: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Sort pairs of token and choice by expert, stably and without padding.

    Args:
        experts: int64 ``[tokens, k]``; negative leaves a pair out (a dropped token).
        count: Number of experts.

    Returns:
        Rows, int64 ``[tokens, k]``: the place of each pair, -1 where left out; and bounds, int64
        ``[count + 1]``: where the rows of each expert begin and end.

    Raises:
        KernelArgumentError: A wrong dtype or layout; on the CPU also an expert that is not there.
    """
    rows, bounds = _ROWS(experts, count)
    return rows, bounds


def moe_scatter(x: Tensor, rows: Tensor, total: int) -> Tensor:
    """Copy each token to the rows of its experts; no gradient.

    Args:
        x: ``[tokens, width]``; float32, bfloat16 or float16, contiguous.
        rows: int64 ``[tokens, k]`` of :func:`expert_rows`; negative copies nothing.
        total: Rows of the result; ``rows.numel()`` if no pair was left out.

    Returns:
        ``[total, width]``, zeros in rows that nobody names.

    Raises:
        KernelArgumentError: A wrong dtype, shape or layout; on the CPU also a row out of range.
    """
    out: Tensor = _SCATTER(x, rows, total)
    return out


def moe_combine(x: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
    """Sum the weighted rows of each token, in float32; no gradient.

    Args:
        x: ``[rows, width]``: what the experts gave.
        rows: int64 ``[tokens, k]`` of :func:`expert_rows`; negative adds nothing.
        weights: float32 ``[tokens, k]``.

    Returns:
        ``[tokens, width]`` in the dtype of ``x``.

    Raises:
        KernelArgumentError: A wrong dtype, shape or layout; on the CPU also a row out of range.
    """
    out: Tensor = _COMBINE(x, rows, weights)
    return out
