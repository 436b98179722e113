"""One gather for many forwards: evaluation and generation of a sharded model.

[Note: gather once]
At stage 3 every forward gathers every unit, so generating a token costs as much communication as a
forward of a batch.  Inside of this context units stay gathered, up to a budget of bytes; what fits
is not communicated again, so ranks may generate different numbers of tokens.  Values are those at
the entry: whatever would change the masters meanwhile is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from ds_comm.errors import EditError, EngineError
from ds_zero.core import ZeroCore
from ds_zero.flat import Unit
from ds_zero.readings import EngineReadings
from ds_zero.registry import core_of

__all__ = ["gathered_units", "unwrap_model_for_generation"]


@contextmanager
def gathered_units(core: ZeroCore, max_bytes: int | None = None) -> Iterator[int]:
    """Keep units gathered within the block.  Collective at the entry, not at the exit.

    Args:
        core: The sharded model.
        max_bytes: Gathered bytes on this device; units that no longer fit are gathered for each
            use as ever.  None keeps all.

    Yields:
        How many releasable units did not fit.

    Raises:
        EngineError: ``max_bytes`` is negative.
        EditError: At the exit: a parameter was written to inside of the block.
    """
    if max_bytes is not None and max_bytes < 0:
        raise EngineError(f"max_bytes={max_bytes}: it must not be negative; None keeps all units")
    core.tracker.end_step()
    left = max_bytes
    kept, outside = [], 0
    for unit in core.units:
        if not unit.releasable:
            continue
        num_bytes = sum(run.flat.numel() * run.flat.element_size() for run in unit.runs)
        if left is not None and num_bytes > left:
            outside += 1
            continue
        if left is not None:
            left -= num_bytes
        kept.append(unit)
    try:
        for unit in kept:
            unit.held += 1
            core.residency.ensure(unit)
        yield outside
    except BaseException:
        _let_go(core, kept, check=False)
        raise
    else:
        _let_go(core, kept, check=True)


def _let_go(core: ZeroCore, kept: list[Unit], *, check: bool) -> None:
    """Release all units, also where one of them was edited; the first edit is raised."""
    problem = None
    for unit in kept:
        unit.held -= 1
        try:
            core.residency.release(unit, check=check)
        except EditError as error:
            problem = problem or error
            core.residency.release(unit, check=False)
    if problem is not None:
        raise problem


@contextmanager
def unwrap_model_for_generation(
    model: nn.Module, max_bytes: int | None = None
) -> Iterator[nn.Module]:
    """Keep the parameters of a model gathered, for ``generate`` or evaluation.  Collective.

    Works at every stage; see [Note: gather once].  An exit without communication means that ranks
    may leave at different times.

    Example::

        with ds_zero.unwrap_model_for_generation(engine) as model:
            tokens = model.generate(prompt, max_new_tokens=100)

    Args:
        model: An engine, its module, or a part of that.
        max_bytes: See :func:`gathered_units`.

    Yields:
        The module to call ``generate`` on; of an engine its module.

    Raises:
        EngineError: The model belongs to no engine.
        EditError: At the exit: a parameter was written to inside of the block.
    """
    inner = model.module if isinstance(model, EngineReadings) else model
    core = next((c for c in map(core_of, inner.parameters()) if c is not None), None)
    if core is None:
        raise EngineError(f"this {type(inner).__name__} belongs to no engine: nothing to gather")
    with gathered_units(core, max_bytes):
        yield inner
