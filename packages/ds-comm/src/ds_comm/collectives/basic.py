"""The usual collectives on tensors, typed, on an explicit group, and in coalesced form.

All of them block, must be called by every rank of the group in the same order, and are local on
a group of one rank.  Shapes and dtypes must agree between ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum

import torch
import torch.distributed as dist
from torch import Tensor

from ds_comm.errors import CommError
from ds_comm.group import Group

__all__ = [
    "Reduction",
    "all_gather",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "broadcast",
    "broadcast_coalesced",
    "reduce_scatter",
]


class Reduction(Enum):
    """How values of ranks are combined."""

    SUM = "sum"
    MEAN = "mean"
    MAX = "max"
    MIN = "min"


_OPS = {
    Reduction.SUM: dist.ReduceOp.SUM,
    Reduction.MEAN: dist.ReduceOp.SUM,  # gloo has no average: divided afterwards
    Reduction.MAX: dist.ReduceOp.MAX,
    Reduction.MIN: dist.ReduceOp.MIN,
}


def all_reduce(tensor: Tensor, group: Group, op: Reduction = Reduction.SUM) -> Tensor:
    """Combine ``tensor`` over the ranks, in place.

    Args:
        tensor: Any shape, contiguous.
        group: The ranks that take part.
        op: How values are combined; the mean of integers is refused.

    Returns:
        The same tensor.

    Raises:
        CommError: The tensor is not contiguous, or the mean of integers was asked for.
    """
    _check(tensor, op)
    if group.size > 1 and tensor.numel():
        dist.all_reduce(tensor, op=_OPS[op], group=group.handle)
        if op is Reduction.MEAN:
            tensor.div_(group.size)
    return tensor


def all_reduce_coalesced(
    tensors: Sequence[Tensor], group: Group, op: Reduction = Reduction.SUM
) -> None:
    """Combine several tensors over the ranks, in place, with one collective per dtype.

    Args:
        tensors: Any shapes, dtypes and strides.
        group: The ranks that take part.
        op: How values are combined.
    """
    _coalesced(tensors, lambda flat: all_reduce(flat, group, op), group)


def broadcast(tensor: Tensor, group: Group, source: int = 0) -> Tensor:
    """Overwrite ``tensor`` with that of group rank ``source``, in place.

    Args:
        tensor: Any shape and dtype, contiguous.
        group: The ranks that take part.
        source: Group rank whose values count.

    Returns:
        The same tensor.
    """
    _check(tensor, Reduction.SUM)
    if group.size > 1 and tensor.numel():
        # Bytes, because backends know fewer dtypes than torch.
        raw = tensor.reshape(-1).view(torch.uint8)
        dist.broadcast(raw, src=group.ranks[source], group=group.handle)
    return tensor


def broadcast_coalesced(tensors: Sequence[Tensor], group: Group, source: int = 0) -> None:
    """Overwrite several tensors with those of group rank ``source``, one collective per dtype.

    Args:
        tensors: Any shapes, dtypes and strides.
        group: The ranks that take part.
        source: Group rank whose values count.
    """
    _coalesced(tensors, lambda flat: broadcast(flat, group, source), group)


def all_gather(tensor: Tensor, group: Group) -> Tensor:
    """Return the tensors of all ranks stacked, shape ``[size, *tensor.shape]``.

    Args:
        tensor: Equal shape on all ranks.
        group: The ranks that take part.
    """
    if group.size == 1:
        return tensor.unsqueeze(0).clone()
    rows = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in group.ranks]
    dist.all_gather(rows, tensor.contiguous(), group=group.handle)
    return torch.stack(rows)


def reduce_scatter(tensor: Tensor, group: Group, op: Reduction = Reduction.SUM) -> Tensor:
    """Return this rank's part, along dimension 0, of the combination over all ranks.

    Args:
        tensor: ``[size * n, ...]``.
        group: The ranks that take part.
        op: How values are combined.

    Returns:
        ``[n, ...]``.

    Raises:
        CommError: Dimension 0 does not divide by the group's size.
    """
    if tensor.dim() == 0 or tensor.shape[0] % group.size:
        raise CommError(
            f"reduce_scatter over {group.size} ranks needs a first dimension that divides by it, "
            f"got shape {tuple(tensor.shape)}"
        )
    received = all_to_all(tensor, group)
    parts = received.reshape(group.size, -1, *tensor.shape[1:])
    if op is Reduction.MAX:
        return parts.amax(dim=0)
    if op is Reduction.MIN:
        return parts.amin(dim=0)
    total = parts.sum(dim=0, dtype=tensor.dtype)
    return total.div_(group.size) if op is Reduction.MEAN else total


def all_to_all(tensor: Tensor, group: Group) -> Tensor:
    """Send the r-th part of dimension 0 to rank r; return what the ranks sent here, in order.

    Args:
        tensor: ``[size * n, ...]``.
        group: The ranks that take part.

    Returns:
        The same shape.

    Raises:
        CommError: Dimension 0 does not divide by the group's size.
    """
    if tensor.dim() == 0 or tensor.shape[0] % group.size:
        raise CommError(
            f"all_to_all over {group.size} ranks needs a first dimension that divides by it, got "
            f"shape {tuple(tensor.shape)}"
        )
    if group.size == 1:
        return tensor.clone()
    sent = tensor.contiguous()
    received = torch.empty_like(sent)
    if sent.numel():
        dist.all_to_all_single(received, sent, group=group.handle)
    return received


def _check(tensor: Tensor, op: Reduction) -> None:
    if not tensor.is_contiguous():
        raise CommError(
            f"an in-place collective needs a contiguous tensor, got strides {tensor.stride()} for "
            f"shape {tuple(tensor.shape)}; use the coalesced form, which packs"
        )
    if op is Reduction.MEAN and not (tensor.is_floating_point() or tensor.is_complex()):
        raise CommError(f"the mean of {tensor.dtype} values is not exact; use SUM")


def _coalesced(tensors: Sequence[Tensor], run: Callable[[Tensor], Tensor], group: Group) -> None:
    """Pack tensors of one dtype and device into one flat tensor, run, and unpack."""
    if group.size == 1:
        return
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for members in kinds.values():
        flat = run(torch.cat([tensor.detach().reshape(-1) for tensor in members]))
        parts = flat.split([tensor.numel() for tensor in members])
        for tensor, part in zip(members, parts, strict=True):
            tensor.detach().copy_(part.view(tensor.shape))
