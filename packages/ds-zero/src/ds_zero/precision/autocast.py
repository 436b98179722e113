"""Torch's autocast around the model, and which parameters can be gathered in its dtype.

[Note: autocast]
Parameters, their gradients and the optimiser stay fp32; the model's forward runs under
``torch.autocast`` without its weight cache, which would keep a cast of every weight from its first
use to the end of the forward.  At stage 3 the parameters of *safe* modules, whose forward casts
them anyway, are gathered in the autocast dtype: half the traffic and memory, the same values.  A
parameter that is shared with another kind of module (an embedding tied to the head) is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ds_comm.errors import ConfigError, EngineError

__all__ = ["Autocast", "AutocastChoice", "lowered_params"]


@dataclass(frozen=True)
class AutocastChoice:
    """Which autocast a model runs under."""

    dtype: torch.dtype
    """``torch.bfloat16`` or ``torch.float16``."""
    safe_classes: tuple[str, ...] = ()
    """Classes of modules whose forward casts their parameters; see :func:`lowered_params`."""


class Autocast:
    """Runs the forward of one module under autocast, whoever calls it.  See [Note: autocast]."""

    def __init__(self, model: nn.Module, device_type: str, dtype: torch.dtype) -> None:
        """Install hooks on ``model``; :meth:`remove` takes them off again.

        Args:
            model: The whole model.
            device_type: Of the device that it runs on.
            dtype: ``torch.bfloat16`` or ``torch.float16``.
        """
        self.dtype = dtype
        self._device_type = device_type
        self._regions: list[torch.autocast] = []
        # Closures act for one module only: copy.deepcopy copies them by reference.
        owner = model

        def enter(module: nn.Module, args: Any) -> None:
            if module is owner:
                self._enter()

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if module is owner:
                self._leave()

        self._handles = [
            model.register_forward_pre_hook(enter, prepend=True),
            model.register_forward_hook(leave, always_call=True),
        ]

    def _enter(self) -> None:
        kind = self._device_type
        outside = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.dtype
        if outside != self.dtype:
            raise EngineError(
                f"the engine is called inside torch.autocast with {outside}, but torch_autocast of "
                f"its configuration asks for {self.dtype}; leave the outer region, or use one dtype"
            )
        region = torch.autocast(kind, self.dtype, cache_enabled=False)
        region.__enter__()
        self._regions.append(region)

    def _leave(self) -> None:
        if self._regions:
            self._regions.pop().__exit__(None, None, None)

    def remove(self) -> None:
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()


def lowered_params(model: nn.Module, safe_classes: Sequence[str]) -> set[int]:
    """The parameters that only safe modules own, by id.

    Args:
        model: The module tree.
        safe_classes: Class names, bare or with their module (``torch.nn.Linear``); subclasses
            count.

    Raises:
        ConfigError: A name with a module is not that of a class in the model or in ``torch.nn``.
    """
    _check_known(model, safe_classes)
    safe: set[int] = set()
    others: set[int] = set()
    for module in model.modules():
        names = {name for kind in type(module).__mro__ for name in _names_of(kind)}
        target = safe if names.intersection(safe_classes) else others
        target.update(id(param) for param in module.parameters(recurse=False))
    return safe - others


def _names_of(kind: type) -> Iterable[str]:
    full = f"{kind.__module__}.{kind.__qualname__}"
    # torch.nn.Linear is defined in torch.nn.modules.linear.
    public = f"torch.nn.{kind.__qualname__}" if full.startswith("torch.nn.modules.") else full
    return kind.__qualname__, full, public


def _check_known(model: nn.Module, names: Sequence[str]) -> None:
    known = {
        name
        for module in model.modules()
        for kind in type(module).__mro__
        for name in _names_of(kind)
    }
    for name in names:
        in_torch = isinstance(getattr(nn, name.removeprefix("torch.nn."), None), type)
        if name not in known and not in_torch:
            raise ConfigError(
                f"torch_autocast.lower_precision_safe_modules names {name!r}, which is neither in "
                f"the model nor in torch.nn; the model has {sorted(_bare(model))}"
            )


def _bare(model: nn.Module) -> set[str]:
    return {type(module).__name__ for module in model.modules()}
