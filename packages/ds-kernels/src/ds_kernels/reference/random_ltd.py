"""Random layer-token drop in pure torch: sort, gather and scatter of token indices."""

from __future__ import annotations

from torch import Tensor

__all__ = ["token_gather", "token_sort", "token_spread"]


def token_sort(indices: Tensor, length: int, /) -> Tensor:
    """Each row of ``indices`` in ascending order."""
    return indices.sort(-1).values


def token_gather(x: Tensor, indices: Tensor, /) -> Tensor:
    """``out[b, k] = x[b, indices[b, k]]``."""
    return x.gather(1, indices[..., None].expand(-1, -1, x.shape[2]))


def token_spread(
    indices: Tensor, base: Tensor | None, rows: Tensor | None, length: int, /
) -> Tensor:
    """``base`` with ``rows`` at ``indices``; zeros stand for what is None."""
    given = rows if base is None else base
    assert given is not None
    places = indices[..., None].expand(-1, -1, given.shape[2])
    if base is None:
        base = given.new_zeros(given.shape[0], length, given.shape[2])
    if rows is None:
        return base.scatter(1, places, 0.0)
    return base.scatter(1, places, rows)
