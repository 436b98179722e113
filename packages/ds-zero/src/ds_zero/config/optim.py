"""Sections that name an optimiser and a learning-rate schedule."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field

from ds_comm.config import Contradiction, Flag, NotYet, ProblemKind, Section

__all__ = ["OptimizerSection", "SchedulerSection"]

# Optimisers that compress their own reduction; they come from another distribution.
_COMPRESSED = frozenset({"onebitadam", "zerooneadam", "onebitlamb"})


class OptimizerSection(Section):
    """``optimizer``: which optimiser updates the parameters, unless the caller passes one."""

    type: str
    """Name of the optimiser, in any case: ``Adam`` (decoupled weight decay unless
    ``adam_w_mode`` is false), ``AdamW``, ``Adam8bit``, ``Adagrad``, ``Lamb``, ``Lion``, ``Muon``,
    ``SGD``, ``MuAdam``, ``MuAdamW``, ``MuSGD``, or a class of ``torch.optim``."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the optimiser, such as ``lr``, ``betas``, ``eps``, ``weight_decay``.
    ``Muon`` takes ``muon_lr`` and ``adam_lr`` for its two kinds of parameters."""
    legacy_fusion: Annotated[Flag, NotYet("leave it out")] = False
    """Fusion of the first generation of fp16 optimisers."""

    def contradictions(self) -> Iterator[Contradiction]:
        """``max_grad_norm`` among the parameters, and names of packages that are not here."""
        if "max_grad_norm" in self.params:
            yield Contradiction(
                "params.max_grad_norm",
                'not an optimiser argument; write the top-level "gradient_clipping" instead',
                ("params.max_grad_norm",),
            )
        if self.type.lower() in _COMPRESSED:
            yield Contradiction(
                "type",
                f"{self.type!r} is not available yet in this version (will come with "
                'ds-compress); use "AdamW"',
                ("type",),
                ProblemKind.UNAVAILABLE,
            )


class SchedulerSection(Section):
    """``scheduler``: how the learning rate moves, unless the caller passes a schedule."""

    type: str
    """``LRRangeTest``, ``OneCycle``, ``WarmupLR``, ``WarmupDecayLR``, ``WarmupCosineLR``, or a
    class of ``torch.optim.lr_scheduler``."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the schedule."""
