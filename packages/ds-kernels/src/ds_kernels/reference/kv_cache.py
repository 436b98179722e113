"""Writing into a key-value cache, in pure torch."""

from __future__ import annotations

from torch import Tensor

from ds_kernels.reference.rotary import turned

__all__ = ["kv_cache_update_"]


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
        key = turned(key, *angles, interleaved)
        if query is not None:
            query.copy_(turned(query, *angles, interleaved))
    stored = slots >= 0
    for cache, rows in ((key_cache, key), (value_cache, value)):
        cache.flatten(0, 1)[slots[stored]] = rows[stored].to(cache.dtype)
