"""Optimisers under ``ds_all.ops``, as scripts written for DeepSpeed import them."""

from __future__ import annotations

import importlib

__all__ = ["adagrad", "adam", "lamb", "lion"]


def __getattr__(name: str) -> object:
    """Import a submodule when it is first used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")
