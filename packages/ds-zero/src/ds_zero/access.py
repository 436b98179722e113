"""Reads of a released parameter by somebody else's module.

[Note: foreign reads]
``F.linear(x, self.wte.weight)`` in the model's own forward reads a parameter whose owner never
runs.  While a forward or backward is under way, looking a parameter up in its owner gathers its
unit; outside of one the placeholder is returned, because a gather needs every rank.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from ds_comm.errors import EngineError
from ds_zero.flat import Unit
from ds_zero.presence import Presence, Present

__all__ = ["ParameterTable", "watch_reads"]

OnRead = Callable[[Any], None]


class ParameterTable(dict[str, nn.Parameter | None]):
    """The parameters of one module; a lookup reports the unit that it belongs to."""

    def __init__(
        self,
        params: Mapping[str, nn.Parameter | None],
        units: Mapping[int, Present],
        report: OnRead,
    ) -> None:
        """Take over ``params``; call ``report`` with the unit of each parameter that is read."""
        super().__init__(params)
        self._units = units
        self._report = report
        self.inside = False
        """Whether the unit's own module is running, so that nothing needs to be reported: set
        around compiled blocks, whose graphs would otherwise depend on the unit."""

    def __getitem__(self, name: str) -> nn.Parameter | None:
        """Return the parameter, gathered if the model is running."""
        param = super().__getitem__(name)
        if not self.inside:
            unit = self._units.get(id(param))
            if unit is not None:
                self._report(unit)
        return param

    def __deepcopy__(self, memo: dict[int, object]) -> dict[str, nn.Parameter | None]:
        """Copy to a plain dictionary: a copied module has no engine.

        Raises:
            EngineError: A parameter is released, so the copy would hold NaN.
        """
        self._refuse_released()
        return {name: copy.deepcopy(param, memo) for name, param in self.items()}

    def __reduce__(self) -> tuple[type, tuple[dict[str, nn.Parameter | None]]]:
        """Pickle as a plain dictionary: a stored module has no engine.

        Raises:
            EngineError: A parameter is released, so the pickle would hold NaN.
        """
        self._refuse_released()
        return (dict, (dict(self.items()),))

    def _refuse_released(self) -> None:
        for name, param in self.items():
            unit = self._units.get(id(param))
            if unit is not None and unit.presence is not Presence.PRESENT:
                raise EngineError(
                    f"cannot copy {name!r}: it is sharded over the ranks. Copy the model inside "
                    "`with ds_zero.GatheredParameters(model.parameters()):`."
                )


def watch_reads(model: nn.Module, units: Mapping[int, Unit], report: OnRead) -> Callable[[], None]:
    """Report reads of parameters of ``units`` by attribute, from any module.

    Args:
        model: The module tree.
        units: The releasable units, by ``id`` of each of their parameters.
        report: Called with the unit before the parameter is returned.

    Returns:
        A function that ends the watch.
    """
    watched: list[nn.Module] = []
    for module in model.modules():
        if any(id(param) in units for param in module.parameters(recurse=False)):
            module._parameters = ParameterTable(module._parameters, units, report)
            watched.append(module)

    def stop() -> None:
        for module in watched:
            module._parameters = dict(module._parameters.items())

    return stop
