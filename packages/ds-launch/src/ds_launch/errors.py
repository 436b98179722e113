"""Typed errors of ds-launch (it imports no sibling, so it has its own)."""

from __future__ import annotations


class LaunchError(Exception):
    """The job could not be started; no rank is left running.

    The message says what was given, what is allowed and what to do. The ``ds`` command prints it
    on standard error and exits with status 2, which a rank's own failure never replaces.
    """


class UsageError(LaunchError):
    """The command line is wrong: an unknown option, a missing value, an impossible number."""
