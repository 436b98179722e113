"""What ranks agree on before an optimiser step, in one small exchange.

Each rank contributes one row: the squared norm of its shards, its trace hash, which parameters
it used, and which units hold gradients that were not reduced.  See [Note: divergence] in
``trace``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_comm.collectives import Collectives, gather_objects
from ds_comm.errors import DivergenceError
from ds_zero.gradients import GradientFlow, own_shard
from ds_zero.trace import Trace, first_difference

__all__ = ["Agreement", "agree", "reduce_late", "squared_norm"]

_HEAD_BYTES = 16
_NORM_CHUNK_NUMEL = 1 << 15


@dataclass(frozen=True)
class Agreement:
    """The same on every rank."""

    grad_norm: float
    """L2 norm of the averaged gradients of the whole model, before clipping; may be non-finite."""
    used: tuple[Tensor, ...]
    """For each trainable run a bool mask over its slots: did any rank use the parameter?"""


def agree(
    gradients: GradientFlow, collectives: Collectives, trace: Trace, unit_names: Sequence[str]
) -> Agreement:
    """Reduce what is left, compare traces, and form norm and used-parameter masks.  Collective.

    Args:
        gradients: The gradients of this window.
        collectives: The group over which gradients are sharded.
        trace: The collectives that this rank issued since the last step.
        unit_names: Names for messages, by unit index.

    Raises:
        DivergenceError: Ranks issued different collectives; no update may be applied.
    """
    rows = collectives.exchange(_row(gradients, collectives, trace))
    late = rows[:, _HEAD_BYTES : _HEAD_BYTES + len(unit_names)].any(dim=0)
    if bool(late.any()):
        _check(rows, collectives, trace, unit_names)
        gradients.flush([int(index) for index in late.nonzero()])
        rows = collectives.exchange(_row(gradients, collectives, trace))
    _check(rows, collectives, trace, unit_names)
    norms = rows[:, :8].reshape(-1).view(torch.float64).tolist()
    mask = rows[:, _HEAD_BYTES + len(unit_names) :].any(dim=0)
    sizes = [len(g.run.params) for g in gradients.all_runs()]
    norm = math.sqrt(sum(norms)) / gradients.multiplier
    return Agreement(norm, mask.split(sizes) if sizes else ())


def reduce_late(gradients: GradientFlow, collectives: Collectives) -> None:
    """Reduce the gradients that any rank still holds locally, outside of a backward.  Collective.

    Args:
        gradients: The gradients of this window.
        collectives: The group over which gradients are sharded.
    """
    late = _late(gradients)
    rows = collectives.exchange(late.to(gradients.device))
    gradients.flush([int(index) for index in rows.any(dim=0).nonzero()])


def _late(gradients: GradientFlow) -> Tensor:
    """A flag a unit: whether this rank holds gradients that were not reduced."""
    late = torch.zeros(len(gradients.by_unit), dtype=torch.uint8)
    late[gradients.unreduced()] = 1
    return late


def _row(gradients: GradientFlow, collectives: Collectives, trace: Trace) -> Tensor:
    """Encode this rank's contribution as bytes."""
    own = sum(squared_norm(own_shard(g)) for g in gradients.all_runs())
    head = torch.tensor([own], dtype=torch.float64).view(torch.uint8)
    digest = torch.tensor([trace.digest], dtype=torch.int64).view(torch.uint8)
    used = [
        torch.tensor([slot in g.used for slot in range(len(g.run.params))], dtype=torch.uint8)
        for g in gradients.all_runs()
    ]
    row = torch.cat([head, digest, _late(gradients), *used])
    runs = gradients.all_runs()
    return row.to(runs[0].run.flat.device) if runs else row


def squared_norm(values: Tensor | None) -> float:
    """Sum of squares: fp32 inside of chunks that fit the cache, fp64 across them.

    Args:
        values: 1-D tensor, or None for an empty one.
    """
    if values is None:
        return 0.0
    if not values.is_cpu:
        return float(torch.linalg.vector_norm(values, dtype=torch.float32).double().square())
    total = 0.0
    for chunk in values.split(_NORM_CHUNK_NUMEL):
        wide = chunk.float() if chunk.dtype.itemsize < 4 else chunk
        total += float(torch.dot(wide, wide))
    return total


def _check(rows: Tensor, collectives: Collectives, trace: Trace, unit_names: Sequence[str]) -> None:
    digests = rows[:, 8:16]
    if bool((digests == digests[0]).all()):
        return
    traces = gather_objects(list(trace.events), collectives.group)
    raise DivergenceError(
        "ranks ran different collectives in this step, so no update was applied; "
        + first_difference(traces, unit_names)
        + ". Every rank must run the same modules in the same order."
    )
