"""Attention in which a layout says which blocks of keys a block of queries sees.

Work and memory grow with the visible blocks (Child et al. 2019, section 4; layouts in
:mod:`ds_kernels.sparsity`).  Scores and sums are float32 in an online softmax (Dao et al. 2022).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ds_kernels.functional import Functional
from ds_kernels.reference import block_sparse_attention as reference
from ds_kernels.registry import Op

if TYPE_CHECKING:
    from ds_kernels._native import Native

__all__ = ["block_sparse_attention"]

_Forward = Callable[
    [Tensor, Tensor, Tensor, Tensor, int, float, bool, Tensor | None], tuple[Tensor, Tensor]
]
_Backward = Callable[..., tuple[Tensor, Tensor, Tensor]]


def _forward_native(module: Native) -> _Forward:
    run = module.block_sparse_attention

    def call(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(query)
        lse = query.new_empty(query.shape[:-1], dtype=torch.float32)
        run(out, lse, query, key, value, *rest)
        return out, lse

    return call


def _backward_native(module: Native) -> _Backward:
    run = module.block_sparse_attention_backward

    def call(
        grad: Tensor, out: Tensor, lse: Tensor, query: Tensor, key: Tensor, value: Tensor,
        *rest: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        run(*grads, grad.contiguous(), out, lse, query, key, value, *rest)
        return grads

    return call


def _fake(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), query.new_empty(query.shape[:-1], dtype=torch.float32)


def _fake_backward(
    grad: Tensor, out: Tensor, lse: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, layout, *rest, key_bias = inputs
    ctx.save_for_backward(*output, query, key, value, layout, key_bias)
    ctx.rest = rest
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> Any:
    *tensors, key_bias = ctx.saved_tensors
    return *_BACKWARD(grad, *tensors, *ctx.rest, key_bias), None, None, None, None, None


_INPUTS = (
    "Tensor query, Tensor key, Tensor value, Tensor layout, int block, float scale, bool causal, "
    "Tensor? key_bias"
)
_FORWARD = Functional(
    Op(
        "block_sparse_attention",
        reference.block_sparse_attention,
        native=_forward_native,
        cuda=True,
        triton="ds_kernels.triton.block_sparse_attention:block_sparse_attention",
    ),
    f"({_INPUTS}) -> (Tensor, Tensor)",
    _fake,
    save=_save,
    backward=_backward,
)
_BACKWARD = Functional(
    Op(
        "block_sparse_attention_backward",
        reference.block_sparse_attention_backward,
        native=_backward_native,
        source="block_sparse_attention",
        cuda=True,
        triton="ds_kernels.triton.block_sparse_attention:block_sparse_attention_backward",
    ),
    f"(Tensor grad, Tensor out, Tensor lse, {_INPUTS}) -> (Tensor, Tensor, Tensor)",
    _fake_backward,
)


def block_sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Tensor,
    block: int,
    *,
    scale: float | None = None,
    causal: bool = False,
    key_bias: Tensor | None = None,
) -> Tensor:
    """Attend where the layout allows; differentiable in query, key and value.

    Args:
        query: ``[batch, heads, length, dim]``; float32, bfloat16 or float16, contiguous; ``dim`` up
            to 256.
        key: The same.
        value: The same.
        layout: bool or uint8 ``[heads, length / block, length / block]``: whether a block of
            queries (second index) sees a block of keys (third).
        block: Positions of a block; divides ``length``.
        scale: Factor of the scores; ``1 / sqrt(dim)`` by default.
        causal: Also hide keys after the query.
        key_bias: float32 ``[batch, length]``, added to the scores of each key: ``-inf`` hides
            padding.  Gets no gradient.

    Returns:
        ``[batch, heads, length, dim]``.  A query that sees nothing gets zeros.

    Raises:
        KernelArgumentError: A wrong dtype, shape, device or layout in memory.
    """
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    out: Tensor = _FORWARD(query, key, value, layout, block, factor, causal, key_bias)[0]
    return out
