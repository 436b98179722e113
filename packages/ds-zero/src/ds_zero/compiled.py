"""``torch.compile`` for the blocks of a model under ZeRO.

[Note: compiled blocks]
What is compiled is the ``forward`` of each block, not its call: the hooks that gather, release
and reduce stay outside of the graphs, so no graph breaks at a collective and nothing that a
stage does is traced.  Equal blocks share one graph, because a block does not report reads of its
own parameters (``access``); what it reads of other units is gathered as ever.  Without blocks, the
``forward`` of the modules that have hooks is compiled, or of the model where none has.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch._dynamo.utils
from torch import nn

from ds_comm.errors import ConfigError
from ds_comm.logging import get_logger
from ds_zero.access import ParameterTable
from ds_zero.core import ZeroCore
from ds_zero.units import model_blocks

__all__ = ["CompiledBlocks"]

logger = get_logger(__name__)


class CompiledBlocks:
    """The blocks of one model with compiled ``forward``, until :meth:`restore`."""

    def __init__(
        self,
        core: ZeroCore,
        backend: str | Callable[..., Any] = "inductor",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Wrap the blocks; they are compiled when they first run.

        Args:
            core: The model and its units.
            backend: As in ``torch.compile``.
            options: More keyword arguments of ``torch.compile``.

        Raises:
            ConfigError: ``backend`` is given twice, or torch does not know it.
        """
        options = dict(options or {})
        _check(backend, options)
        self._started_s = _spent_s()
        self.forwards: list[_CompiledForward] = []
        hooked = {id(module) for unit in core.units for module in unit.modules}
        for name, block in _blocks(core):
            nested = [n for n, m in block.named_modules() if m is not block and id(m) in hooked]
            if nested:
                logger.warning(
                    "block %r is not compiled: %s in it shares parameters with another unit, whose "
                    "hooks would become part of the graph",
                    name,
                    nested,
                )
            else:
                self.forwards.append(_CompiledForward(block, backend, options))

    def restore(self) -> None:
        """Give every block its own ``forward`` back."""
        for forward in self.forwards:
            forward.remove()
        self.forwards.clear()

    def seconds(self) -> float:
        """Time that this process has compiled since the blocks were wrapped."""
        return _spent_s() - self._started_s


class _CompiledForward:
    """Stands in for the ``forward`` of one module; a copy of the module gets the plain one."""

    def __init__(
        self, module: nn.Module, backend: str | Callable[..., Any], options: Mapping[str, Any]
    ) -> None:
        self._module = module
        self._own = module.__dict__.get("forward")
        tables = (child._parameters for child in module.modules())
        self._tables = [table for table in tables if isinstance(table, ParameterTable)]
        forward = module.forward
        self._compiled = torch.compile(forward, backend=backend, **options)
        functools.update_wrapper(self, forward)
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for table in self._tables:
            table.inside = True
        try:
            return self._compiled(*args, **kwargs)
        finally:
            for table in self._tables:
                table.inside = False

    def remove(self) -> None:
        """Undo what the constructor did to the module."""
        if self._module.__dict__.get("forward") is not self:
            return
        del self._module.forward
        if self._own is not None:
            self._module.forward = self._own

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = memo[id(self._module)]
        return type(twin).forward.__get__(twin)


def _check(backend: str | Callable[..., Any], options: Mapping[str, Any]) -> None:
    if "backend" in options:
        raise ConfigError(
            f"compile() was given the backend twice: backend={backend!r} and "
            f"compile_kwargs={options}"
        )
    known = torch._dynamo.list_backends(None)
    if isinstance(backend, str) and backend not in known:
        raise ConfigError(f"torch has no compiler backend {backend!r}; it has {known}")


def _blocks(core: ZeroCore) -> list[tuple[str, nn.Module]]:
    """What is compiled; see [Note: compiled blocks]."""
    blocks = model_blocks(core.model, core.options.rules)
    if blocks:
        return blocks
    hooked = {id(module) for unit in core.units for module in unit.modules}
    inner = [
        (name, module)
        for name, module in core.model.named_modules()
        if id(module) in hooked
        and not any(id(child) in hooked for child in module.modules() if child is not module)
    ]
    return inner or [("", core.model)]


def _spent_s() -> float:
    return torch._dynamo.utils.calculate_time_spent()["total_wall_time"]
