"""Loads the pool of ranks (the `ranks` fixture) wherever ds_comm is installed.

Environments that hold only ds-launch or ds-aio have no torch and no ds_comm: there the plugin
is left out and tests that do not ask for ranks run as usual.
"""

from __future__ import annotations

from importlib.util import find_spec

pytest_plugins = (
    ["ds_comm.testing.plugin"] if find_spec("ds_comm") and find_spec("torch") else []
)
