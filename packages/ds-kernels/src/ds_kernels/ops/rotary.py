"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864, equation 34) of queries and keys.

Pair i of a head is turned by the angle of its token. The pairs are halves of the turned elements
(GPT-NeoX) or neighbours (GPT-J). The gradient is the same rotation the other way round, so nothing
but the angles is kept; it can be differentiated again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ds_kernels.functional import Functional, Mutating, contiguous
from ds_kernels.reference import rotary as reference
from ds_kernels.registry import Op

if TYPE_CHECKING:
    from ds_kernels._native import Native

__all__ = ["rotary", "rotary_", "rotary_angles"]


def rotary_angles(
    length: int,
    dim: int,
    *,
    base: float = 10_000.0,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions 0 to length - 1.

    Args:
        length: Positions.
        dim: Elements of a head that are turned, even.
        base: Pair i turns by ``position * base ** (-2 * i / dim)``.
        device: Where they go.

    Returns:
        Two float32 ``[length, dim / 2]``, computed in float64.
    """
    pairs = torch.arange(0, dim, 2, dtype=torch.float64)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), base ** (-pairs / dim))
    return angles.cos().to(device, torch.float32), angles.sin().to(device, torch.float32)


def rotary(
    query: Tensor,
    key: Tensor | None,
    cosine: Tensor,
    sine: Tensor,
    positions: Tensor | None = None,
    *,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Turn queries and keys.

    Args:
        query: ``[..., tokens, heads, dim]``; float32, bfloat16 or float16, copied first if not
            contiguous.
        key: The same with its own number of heads; None for none.
        cosine: float32 ``[positions, rotary / 2]``, ``rotary <= dim``: the first ``rotary``
            elements of each head are turned (at most 1024), the others copied.
        sine: The same.
        positions: int64, a row of ``cosine`` for each token: ``[..., tokens]``, or ``[tokens]`` for
            all sequences alike. None for 0, 1, 2 and so on.
        interleaved: Pairs are neighbours; else element i and i + rotary / 2.

    Returns:
        Turned query and key (None without one), contiguous, in their dtypes. Differentiable in
        ``query`` and ``key``.

    Raises:
        KernelArgumentError: A wrong dtype, shape, device or layout; on the CPU also a position that
            is not there. On a GPU positions are trusted.
    """
    turned_query, turned_key = _ROTARY(query, key, cosine, sine, positions, interleaved, False)
    return turned_query, None if key is None else turned_key


def rotary_(
    query: Tensor,
    key: Tensor | None,
    cosine: Tensor,
    sine: Tensor,
    positions: Tensor | None = None,
    *,
    interleaved: bool = False,
) -> None:
    """Turn queries and keys in place, without autograd; ``query`` and ``key`` must be contiguous.

    Args:
        query: See :func:`rotary`.
        key: See :func:`rotary`.
        cosine: See :func:`rotary`.
        sine: See :func:`rotary`.
        positions: See :func:`rotary`.
        interleaved: See :func:`rotary`.

    Raises:
        KernelArgumentError: As :func:`rotary`, or a tensor is not contiguous.
    """
    _ROTARY_IN_PLACE(query, key, cosine, sine, positions, interleaved)


_Rotary = Callable[
    [Tensor, Tensor | None, Tensor, Tensor, Tensor | None, bool, bool],
    tuple[Tensor, Tensor | None],
]
_RotaryInPlace = Callable[[Tensor, Tensor | None, Tensor, Tensor, Tensor | None, bool], None]


def _native(module: Native) -> _Rotary:
    kernel = module.rotary_

    def run(
        query: Tensor,
        key: Tensor | None,
        cosine: Tensor,
        sine: Tensor,
        positions: Tensor | None,
        interleaved: bool,
        inverse: bool,
        /,
    ) -> tuple[Tensor, Tensor | None]:
        query, key = query.contiguous(), contiguous(key)
        query_out = torch.empty_like(query)
        key_out = None if key is None else torch.empty_like(key)
        kernel(
            query_out, key_out, query, key, cosine.contiguous(), sine.contiguous(),
            contiguous(positions), interleaved, inverse,
        )  # fmt: skip
        return query_out, key_out

    return run


def _native_in_place(module: Native) -> _RotaryInPlace:
    kernel = module.rotary_

    def run(
        query: Tensor,
        key: Tensor | None,
        cosine: Tensor,
        sine: Tensor,
        positions: Tensor | None,
        interleaved: bool,
        /,
    ) -> None:
        kernel(
            query, key, query, key, cosine.contiguous(), sine.contiguous(), contiguous(positions),
            interleaved, False,
        )  # fmt: skip

    return run


def _fake(
    query: Tensor, key: Tensor | None, *angles: Tensor | bool | None
) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape), query.new_empty(0 if key is None else key.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:  # noqa: ANN401
    _, key, cosine, sine, positions, ctx.interleaved, ctx.inverse = inputs
    ctx.has_key = key is not None
    ctx.save_for_backward(cosine, sine, positions)
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any,  # noqa: ANN401
    grad_query: Tensor | None,
    grad_key: Tensor | None,
) -> tuple[Tensor | None, ...]:
    cosine, sine, positions = ctx.saved_tensors
    if not ctx.has_key:
        grad_key = None
    first, second = (grad_query, grad_key) if grad_query is not None else (grad_key, None)
    if first is None:
        return (None,) * 7
    turned = _ROTARY(first, second, cosine, sine, positions, ctx.interleaved, not ctx.inverse)
    from_query, from_key = turned if grad_query is not None else (None, turned[0])
    return from_query, from_key if grad_key is not None else None, *((None,) * 5)


_ROTARY_OP = Op("rotary", reference.rotary, native=_native, cuda=True)
_ROTARY = Functional(
    _ROTARY_OP,
    "(Tensor query, Tensor? key, Tensor cosine, Tensor sine, Tensor? positions, bool interleaved, "
    "bool inverse) -> (Tensor, Tensor)",
    _fake,
    save=_save,
    backward=_backward,
)
_ROTARY_IN_PLACE = Mutating(
    Op("rotary_", reference.rotary_, native=_native_in_place, source="rotary", cuda=True),
    "(Tensor(a!) query, Tensor(b!)? key, Tensor cosine, Tensor sine, Tensor? positions, "
    "bool interleaved)",
)
