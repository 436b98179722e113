"""The two ends of a ragged forward pass: embeddings of all tokens, last rows of all sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from ds_kernels.functional import Functional
from ds_kernels.reference import ragged_gather as reference
from ds_kernels.registry import Op

if TYPE_CHECKING:
    from ds_kernels._native import Native

__all__ = ["last_rows", "ragged_embedding"]


def _embedding_native(
    module: Native,
) -> Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Tensor]:
    run = module.ragged_embedding

    def call(
        table: Tensor, tokens: Tensor, position_table: Tensor | None, positions: Tensor | None
    ) -> Tensor:
        out = table.new_empty(tokens.shape[0], table.shape[-1])
        run(out, table, tokens, position_table, positions)
        return out

    return call


def _last_native(module: Native) -> Callable[[Tensor, Tensor], Tensor]:
    run = module.last_rows

    def call(hidden: Tensor, query_start: Tensor) -> Tensor:
        out = hidden.new_empty(max(query_start.shape[0] - 1, 0), hidden.shape[-1])
        run(out, hidden, query_start)
        return out

    return call


_EMBEDDING = Functional(
    Op(
        "ragged_embedding",
        reference.ragged_embedding,
        native=_embedding_native,
        source="ragged_gather",
        cuda=True,
    ),
    "(Tensor table, Tensor tokens, Tensor? position_table, Tensor? positions) -> Tensor",
    lambda table, tokens, *_: table.new_empty(tokens.shape[0], table.shape[1]),
)
_LAST = Functional(
    Op("last_rows", reference.last_rows, native=_last_native, source="ragged_gather", cuda=True),
    "(Tensor hidden, Tensor query_start) -> Tensor",
    lambda hidden, start: hidden.new_empty(start.shape[0] - 1, hidden.shape[1]),
)


def ragged_embedding(
    table: Tensor,
    tokens: Tensor,
    *,
    position_table: Tensor | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """Embed the tokens of a ragged batch, learned positions included; no gradient.

    Args:
        table: ``[count, width]``; float32, bfloat16 or float16, contiguous.
        tokens: int64 ``[tokens]``.
        position_table: ``[positions, width]`` in the dtype of ``table``, added in float32.
        positions: int64 ``[tokens]``, with ``position_table``.

    Returns:
        ``[tokens, width]``.

    Raises:
        KernelArgumentError: A wrong dtype, shape or layout; on the CPU also an index out of range.
    """
    out: Tensor = _EMBEDDING(table, tokens, position_table, positions)
    return out


def last_rows(hidden: Tensor, query_start: Tensor) -> Tensor:
    """The last hidden state of every sequence, from which logits are computed; no gradient.

    Args:
        hidden: ``[tokens, width]``; float32, bfloat16 or float16, contiguous.
        query_start: int32 ``[sequences + 1]``: where the tokens of each sequence begin and end.

    Returns:
        ``[sequences, width]``; zeros for a sequence without tokens.

    Raises:
        KernelArgumentError: A wrong dtype, shape or layout; on the CPU also starts that do not
            rise from 0 to the number of tokens.
    """
    out: Tensor = _LAST(hidden, query_start)
    return out
