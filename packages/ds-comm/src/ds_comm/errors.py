"""Typed errors that every package of the toolkit raises.

Each class also derives from the closest builtin, so ``except ValueError`` written for another
library keeps working.  A message says what was given, what is allowed and what to do.
"""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "CheckpointNotFoundError",
    "CommError",
    "CommTimeoutError",
    "ConfigError",
    "DSError",
    "DivergenceError",
    "EditError",
    "EngineError",
    "LossScaleError",
    "MeshError",
]


class DSError(Exception):
    """Base of all errors that the toolkit raises on purpose."""


class ConfigError(DSError, ValueError):
    """A configuration value is unknown, malformed, contradictory or not available."""


class MeshError(DSError, ValueError):
    """A rank grid or process group cannot be formed as asked."""


class CommError(DSError, RuntimeError):
    """A collective or point-to-point exchange failed."""


class CommTimeoutError(CommError, TimeoutError):
    """A collective did not finish in time; the message names the operation and the rank."""


class DivergenceError(CommError):
    """Ranks issued different sequences of collectives, so their results cannot be trusted."""


class EditError(DSError, RuntimeError):
    """A parameter was changed in a way that would be lost or would corrupt training."""


class EngineError(DSError, RuntimeError):
    """An engine verb was called in a state where it has no meaning."""


class LossScaleError(EngineError, ArithmeticError):
    """Gradients overflow at the smallest loss scale, so that no step could succeed any more."""


class CheckpointError(DSError, RuntimeError):
    """A checkpoint cannot be written or read as asked."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """The checkpoint directory, tag or file does not exist."""
