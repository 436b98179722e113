"""Random layer-token drop (Yao et al. 2022, section 3): a layer sees a random part of the tokens.

:func:`token_sort` puts sampled indices into their order in the sequence, :func:`token_gather` takes
those tokens out, the layer runs on them, :func:`token_scatter` puts them back among the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ds_kernels.functional import Functional
from ds_kernels.reference import random_ltd as reference
from ds_kernels.registry import Op

if TYPE_CHECKING:
    from ds_kernels._native import Native

__all__ = ["token_gather", "token_scatter", "token_sort"]


def token_sort(indices: Tensor, length: int) -> Tensor:
    """Sort each row of sampled token indices, by counting: linear in ``kept + length``.

    Args:
        indices: int64 ``[rows, kept]``, each in ``[0, length)``.
        length: Tokens of a sequence.

    Returns:
        The same indices, ascending in each row.

    Raises:
        KernelArgumentError: A wrong dtype, shape or layout; on the CPU also an index out of range.
    """
    out: Tensor = _SORT(indices, length)
    return out


def token_gather(x: Tensor, indices: Tensor) -> Tensor:
    """Take tokens out of every sequence; differentiable in ``x``.

    Args:
        x: ``[batch, length, width]``; float32, bfloat16 or float16, copied first if not contiguous.
        indices: int64 ``[batch, kept]``, strictly ascending in each row.

    Returns:
        ``[batch, kept, width]``.

    Raises:
        KernelArgumentError: A wrong dtype, shape or device; on the CPU also indices that do not
            rise or are out of range.
    """
    out: Tensor = _GATHER(x, indices)
    return out


def token_scatter(x: Tensor, rows: Tensor, indices: Tensor) -> Tensor:
    """Put tokens back: ``x`` with ``rows`` in place of the tokens at ``indices``.

    Args:
        x: ``[batch, length, width]``, as in :func:`token_gather`.
        rows: ``[batch, kept, width]`` in the dtype of ``x``.
        indices: int64 ``[batch, kept]``, strictly ascending in each row.

    Returns:
        ``[batch, length, width]``, a new tensor; differentiable in ``x`` and ``rows``.

    Raises:
        KernelArgumentError: As :func:`token_gather`.
    """
    out: Tensor = _SPREAD(indices, x, rows, x.shape[1])
    return out


def _sort_native(module: Native) -> Callable[[Tensor, int], Tensor]:
    run = module.token_sort

    def call(indices: Tensor, length: int, /) -> Tensor:
        out = torch.empty_like(indices)
        run(out, indices, length)
        return out

    return call


def _gather_native(module: Native) -> Callable[[Tensor, Tensor], Tensor]:
    run = module.token_gather

    def call(x: Tensor, indices: Tensor, /) -> Tensor:
        x = x.contiguous()
        if x.ndim != 3 or indices.ndim != 2:
            # The binding says it better, but the result has to be allocated first.
            run(x, x, indices)
        out = x.new_empty(x.shape[0], indices.shape[1], x.shape[2])
        run(out, x, indices)
        return out

    return call


def _spread_native(
    module: Native,
) -> Callable[[Tensor, Tensor | None, Tensor | None, int], Tensor]:
    run = module.token_spread

    def call(indices: Tensor, base: Tensor | None, rows: Tensor | None, length: int, /) -> Tensor:
        given = base if base is not None else rows
        assert given is not None
        if given.ndim != 3:
            run(given, base, rows, indices)
        out = given.new_empty(given.shape[0], length, given.shape[2])
        run(
            out,
            None if base is None else base.contiguous(),
            None if rows is None else rows.contiguous(),
            indices,
        )
        return out

    return call


def _spread_fake(indices: Tensor, base: Tensor | None, rows: Tensor | None, length: int) -> Tensor:
    given = base if base is not None else rows
    assert given is not None
    return given.new_empty(given.shape[0], length, given.shape[2])


def _save_gather(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, indices = inputs
    ctx.save_for_backward(indices)
    ctx.length = x.shape[1]


def _gather_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
    (indices,) = ctx.saved_tensors
    return _SPREAD(indices, None, grad, ctx.length), None


def _save_spread(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    indices, _, _, ctx.length = inputs
    ctx.save_for_backward(indices)


def _spread_backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, Tensor | None, None]:
    (indices,) = ctx.saved_tensors
    _, wants_base, wants_rows, _ = ctx.needs_input_grad
    return (
        None,
        _SPREAD(indices, grad, None, ctx.length) if wants_base else None,
        _GATHER(grad, indices) if wants_rows else None,
        None,
    )


_SORT = Functional(
    Op("token_sort", reference.token_sort, native=_sort_native, source="random_ltd", cuda=True),
    "(Tensor indices, int length) -> Tensor",
    lambda indices, length: torch.empty_like(indices),
)
_GATHER = Functional(
    Op(
        "token_gather",
        reference.token_gather,
        native=_gather_native,
        source="random_ltd",
        cuda=True,
    ),
    "(Tensor x, Tensor indices) -> Tensor",
    lambda x, indices: x.new_empty(x.shape[0], indices.shape[1], x.shape[2]),
    save=_save_gather,
    backward=_gather_backward,
)
_SPREAD = Functional(
    Op(
        "token_spread",
        reference.token_spread,
        native=_spread_native,
        source="random_ltd",
        cuda=True,
    ),
    "(Tensor indices, Tensor? base, Tensor? rows, int length) -> Tensor",
    _spread_fake,
    save=_save_spread,
    backward=_spread_backward,
)
