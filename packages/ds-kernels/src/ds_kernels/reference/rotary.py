"""Rotary embedding in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_kernels.reference.bias_activation import working

__all__ = ["rotary", "rotary_", "turned"]


def turned(x: Tensor, cosine: Tensor, sine: Tensor, interleaved: bool) -> Tensor:
    """``x`` of ``[..., heads, dim]`` with the first elements rotated, in float32 or float64.

    ``cosine`` and ``sine`` are ``[..., rotary / 2]``.
    """
    wide = working(x.dtype)
    half = cosine.shape[-1]
    cos, sin = cosine.to(wide).unsqueeze(-2), sine.to(wide).unsqueeze(-2)
    part = x[..., : 2 * half].to(wide)
    if interleaved:
        a, b = part[..., ::2], part[..., 1::2]
    else:
        a, b = part[..., :half], part[..., half:]
    first, second = a * cos - b * sin, b * cos + a * sin
    if interleaved:
        rotated = torch.stack([first, second], -1).flatten(-2)
    else:
        rotated = torch.cat([first, second], -1)
    return torch.cat([rotated, x[..., 2 * half :].to(wide)], -1)


def rotary(
    query: Tensor,
    key: Tensor | None,
    cosine: Tensor,
    sine: Tensor,
    positions: Tensor | None,
    interleaved: bool,
    inverse: bool,
    /,
) -> tuple[Tensor, Tensor | None]:
    """Rotated query and key; ``inverse`` turns the other way."""
    rows = slice(query.shape[-3]) if positions is None else positions
    cos, sin = cosine[rows], sine[rows]
    sin = -sin if inverse else sin
    return (
        turned(query, cos, sin, interleaved).to(query.dtype),
        None if key is None else turned(key, cos, sin, interleaved).to(key.dtype),
    )


def rotary_(
    query: Tensor,
    key: Tensor | None,
    cosine: Tensor,
    sine: Tensor,
    positions: Tensor | None,
    interleaved: bool,
    /,
) -> None:
    """The same in place."""
    new_query, new_key = rotary(query, key, cosine, sine, positions, interleaved, False)
    query.copy_(new_query)
    if key is not None and new_key is not None:
        key.copy_(new_key)
