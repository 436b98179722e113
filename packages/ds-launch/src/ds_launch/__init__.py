"""The ``ds`` command: start a script on every rank, report the environment.

Only the standard library is imported, and almost none of it before a command needs it: no torch,
no pydantic, no other package of the toolkit.
"""

from __future__ import annotations

from ds_launch._version import __version__
from ds_launch.errors import LaunchError, UsageError

__all__ = ["LaunchError", "UsageError", "__version__"]
