"""Writing into a key-value cache, in pure torch."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["kv_cache_update_"]


def _turned(x: Tensor, cosine: Tensor, sine: Tensor, interleaved: bool) -> Tensor:
    """``x`` of ``[tokens, heads, dim]`` with the first elements rotated."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    half = cosine.shape[-1]
    cos, sin = cosine.to(wide)[:, None], sine.to(wide)[:, None]
    part = x[..., : 2 * half].to(wide)
    if interleaved:
        a, b = part[..., ::2], part[..., 1::2]
    else:
        a, b = part[..., :half], part[..., half:]
    first, second = a * cos - b * sin, b * cos + a * sin
    joined = torch.stack([first, second], -1).flatten(-2) if interleaved else None
    turned = torch.cat([first, second], -1) if joined is None else joined
    return torch.cat([turned, x[..., 2 * half :].to(wide)], -1)


def kv_cache_update_(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    positions: Tensor | None,
    cosine: Tensor | None,
    sine: Tensor | None,
    interleaved: bool,
    /,
) -> None:
    """See :func:`ds_kernels.ops.kv_cache.kv_cache_update_`."""
    if positions is not None and cosine is not None and sine is not None:
        angles = cosine[positions], sine[positions]
        key = _turned(key, *angles, interleaved)
        if query is not None:
            query.copy_(_turned(query, *angles, interleaved))
    stored = slots >= 0
    for cache, rows in ((key_cache, key), (value_cache, value)):
        cache.flatten(0, 1)[slots[stored]] = rows[stored].to(cache.dtype)
