"""Attention with two broadcast biases: rows of the Evoformer (Jumper et al. 2021, algorithm 7).

``softmax(scale q k^T + mask_bias + pair_bias) v`` for every row of an alignment, without keeping
the scores: float32 sums in an online softmax (Dao et al. 2022).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ds_kernels.functional import Functional
from ds_kernels.reference import evoformer_attention as reference
from ds_kernels.registry import Op

if TYPE_CHECKING:
    from ds_kernels._native import Native

__all__ = ["evoformer_attention"]

_Forward = Callable[
    [Tensor, Tensor, Tensor, Tensor | None, Tensor | None, float], tuple[Tensor, Tensor]
]
_Grads = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _lse_like(query: Tensor) -> Tensor:
    batch, rows, length, heads, _ = query.shape
    return query.new_empty((batch, rows, heads, length), dtype=torch.float32)


def _forward_native(module: Native) -> _Forward:
    run = module.evoformer_attention

    def call(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        if query.ndim != 5:
            # The binding says it better, but the result has to be allocated first.
            run(query, query, query, key, value, *rest)
        out, lse = torch.empty_like(query), _lse_like(query)
        run(out, lse, query, key, value, *rest)
        return out, lse

    return call


def _backward_native(module: Native) -> Callable[..., _Grads]:
    run = module.evoformer_attention_backward

    def call(
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
    ) -> _Grads:
        batch, rows, length, heads, _ = query.shape
        grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        masks = pairs = None
        if with_mask and mask_bias is not None:
            masks = query.new_zeros((batch, heads, rows, length), dtype=torch.float32)
        if with_pair and pair_bias is not None:
            pairs = query.new_zeros((batch, heads, length, length), dtype=torch.float32)
        run(
            *grads, masks, pairs, grad.contiguous(), out, lse, query, key, value, mask_bias,
            pair_bias, scale,
        )  # fmt: skip
        empty = query.new_empty(0)
        mask_grad = pair_grad = empty
        if masks is not None and mask_bias is not None:
            mask_grad = masks.sum(1)[:, :, None, None].to(mask_bias.dtype)
        if pairs is not None and pair_bias is not None:
            pair_grad = pairs[:, None].to(pair_bias.dtype)
        return *grads, mask_grad, pair_grad

    return call


def _fake(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), _lse_like(query)


def _fake_backward(
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
) -> _Grads:
    grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    empty = query.new_empty(0)
    mask_grad = torch.empty_like(mask_bias) if with_mask and mask_bias is not None else empty
    pair_grad = torch.empty_like(pair_bias) if with_pair and pair_bias is not None else empty
    return *grads, mask_grad, pair_grad


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*output, *tensors)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> Any:
    wanted = ctx.needs_input_grad[3:5]
    *found, masks, pairs = _BACKWARD(grad, *ctx.saved_tensors, ctx.scale, *wanted)
    return *found, masks if wanted[0] else None, pairs if wanted[1] else None, None


_INPUTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? mask_bias, Tensor? pair_bias, float scale"
)
_FORWARD = Functional(
    Op("evoformer_attention", reference.evoformer_attention, native=_forward_native, cuda=True),
    f"({_INPUTS}) -> (Tensor, Tensor)",
    _fake,
    save=_save,
    backward=_backward,
)
_BACKWARD = Functional(
    Op(
        "evoformer_attention_backward",
        reference.evoformer_attention_backward,
        native=_backward_native,
        source="evoformer_attention",
        cuda=True,
    ),
    f"(Tensor grad, Tensor out, Tensor lse, {_INPUTS}, bool with_mask, bool with_pair) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fake_backward,
)


def evoformer_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask_bias: Tensor | None = None,
    pair_bias: Tensor | None = None,
    *,
    scale: float | None = None,
) -> Tensor:
    """Attend within each row; differentiable in all tensors.

    Args:
        query: ``[batch, rows, length, heads, dim]``; float32, bfloat16 or float16, contiguous;
            ``dim`` up to 256.
        key: The same.
        value: The same.
        mask_bias: ``[batch, rows, 1, 1, length]``, added to the scores of each key.
        pair_bias: ``[batch, 1, heads, length, length]``, added to those of each pair.
        scale: Factor of the scores; ``1 / sqrt(dim)`` by default.

    Returns:
        ``[batch, rows, length, heads, dim]``.

    Raises:
        KernelArgumentError: A wrong dtype, shape, device or layout in memory.
    """
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    out: Tensor = _FORWARD(query, key, value, mask_bias, pair_bias, factor)[0]
    return out
