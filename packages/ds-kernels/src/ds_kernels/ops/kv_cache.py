"""New keys and values into a cache in blocks, rotated on the way (Su et al. 2021).

One pass turns the queries in place, turns the keys and writes keys and values to their slots, in
the dtype of the cache.
"""

from __future__ import annotations

from torch import Tensor

from ds_kernels.functional import Mutating
from ds_kernels.reference import kv_cache as reference
from ds_kernels.registry import Op

__all__ = ["kv_cache_update_"]

_UPDATE = Mutating(
    Op(
        "kv_cache_update_",
        reference.kv_cache_update_,
        native=lambda m: m.kv_cache_update_,
        source="kv_cache",
        cuda=True,
    ),
    "(Tensor(a!)? query, Tensor key, Tensor value, Tensor(b!) key_cache, Tensor(c!) value_cache, "
    "Tensor slots, Tensor? positions, Tensor? cosine, Tensor? sine, bool interleaved)",
)


def kv_cache_update_(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    *,
    positions: Tensor | None = None,
    cosine: Tensor | None = None,
    sine: Tensor | None = None,
    interleaved: bool = False,
) -> None:
    """Store keys and values of new tokens; changes ``query`` and both caches in place.

    Args:
        query: ``[tokens, heads, dim]``, rotated in place; None leaves queries out.
        key: ``[tokens, kv_heads, dim]``; float32, bfloat16 or float16; ``dim`` up to 1024.
        value: The same.
        key_cache: ``[blocks, block_size, kv_heads, dim]``, any of the three dtypes.
        value_cache: The same.
        slots: int64 ``[tokens]``: block times block_size plus place; negative stores nothing.  No
            slot may be named twice.
        positions: int64 ``[tokens]``: rows of ``cosine`` and ``sine``; None rotates nothing.
        cosine: float32 ``[positions, rotary / 2]``; the first ``rotary`` elements are turned.
        sine: The same.
        interleaved: Pairs are neighbours; else element i and i + rotary / 2.

    Raises:
        KernelArgumentError: A wrong dtype, shape, device, layout or overlap; on the CPU also a slot
            or position that is not there.  On a GPU they are trusted.
    """
    _UPDATE(
        query, key, value, key_cache, value_cache, slots, positions, cosine, sine, interleaved
    )  # fmt: skip
