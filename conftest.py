"""What tests of every package share: the fixture `ranks`, and no world left behind by a test.

Environments that hold only ds-launch or ds-aio have no torch and no ds_comm: there the plugin
is left out and tests that do not ask for ranks run as usual.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

pytest_plugins = (
    ["ds_comm.testing.plugin"] if find_spec("ds_comm") and find_spec("torch") else []
)

_RENDEZVOUS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def world_ends_with_the_test() -> Iterator[None]:
    """End a process group that the test formed in this process, and forget its variables.

    `initialize` forms a world of one where no launcher says otherwise; the next test must not
    find it.
    """
    before = {name: os.environ.get(name) for name in _RENDEZVOUS}
    yield
    comm = sys.modules.get("ds_comm.init")
    if comm is not None:
        comm.destroy()
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
