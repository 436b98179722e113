"""The package is empty and says so: only its version is public."""

from __future__ import annotations

import ds_pipe
from ds_pipe._version import __version__


def test_only_the_version_is_public() -> None:
    assert ds_pipe.__all__ == ["__version__"]
    assert ds_pipe.__version__ == __version__


def test_docstring_says_that_nothing_is_in_it() -> None:
    assert "nothing is in this package yet" in (ds_pipe.__doc__ or "")
