"""Errors of ds_kernels."""

from __future__ import annotations

__all__ = ["BackendUnavailableError", "KernelArgumentError"]


class KernelArgumentError(ValueError):
    """An argument of an op cannot be used; the message begins with the argument's name.

    Raised by the Python ops and by the native module alike.
    """


class BackendUnavailableError(RuntimeError):
    """A backend of an op was asked for and cannot run here; the message says why."""
