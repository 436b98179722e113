"""muP's learning rates per width (Yang et al. 2022, arXiv:2203.03466, table 8).

The package ``mup`` notes on every parameter how its dimensions grow (``infshape``, set by
``mup.set_base_shapes``).  From that alone parameters are divided into groups with scaled rates;
the optimisers are the ordinary ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from ds_comm.errors import ConfigError

__all__ = ["mup_groups"]


class InfShape(Protocol):
    """What ``mup`` knows of a parameter's shape."""

    def ninf(self) -> int:
        """Number of dimensions that grow with the width."""
        ...

    def width_mult(self) -> float:
        """Width over the base model's, of the last dimension that grows."""
        ...

    def fanin_fanout_mult_ratio(self) -> float:
        """Growth of the input dimension over that of the output dimension."""
        ...


def mup_groups(groups: Any, params: Mapping[str, Any], *, adam: bool) -> list[dict[str, Any]]:
    """Divide parameters by how their learning rate scales with the width.

    Args:
        groups: Parameters, or group dictionaries.
        params: ``lr`` and ``weight_decay`` where a group has none; ``decoupled_wd``.
        adam: Scale for Adam; otherwise for SGD.

    Returns:
        Groups with ``lr`` and, unless ``decoupled_wd``, ``weight_decay`` of their own; the product
        of the two is that of the base model.

    Raises:
        ConfigError: A parameter has no ``infshape``, or too many dimensions that grow.
    """
    items = list(groups)
    if not items or not isinstance(items[0], dict):
        items = [{"params": items}]
    found: list[dict[str, Any]] = []
    for group in items:
        by_factor: dict[float, list[Tensor]] = {}
        for param in group["params"]:
            by_factor.setdefault(_factor(param, adam=adam), []).append(param)
        rest = {key: value for key, value in group.items() if key != "params"}
        lr = float(rest.get("lr", params.get("lr", 1e-3)))
        decay = float(rest.get("weight_decay", params.get("weight_decay", 0.0)))
        for factor, members in by_factor.items():
            scaled = decay if params.get("decoupled_wd") else decay / factor
            found.append({**rest, "params": members, "lr": lr * factor, "weight_decay": scaled})
    return found


def _factor(param: Tensor, *, adam: bool) -> float:
    """By what the base model's learning rate is multiplied."""
    shape: InfShape | None = vars(param).get("infshape")
    if shape is None:
        raise ConfigError(
            "muP's optimisers need mup.set_base_shapes(model, base) before initialize(): a "
            f"parameter of shape {tuple(param.shape)} has no infshape (pip install mup)"
        )
    growing = shape.ninf()
    if growing > 2:
        raise ConfigError(
            f"a parameter of shape {tuple(param.shape)} has {growing} dimensions that grow with "
            "the width; muP has rules for two"
        )
    if growing == 2:
        return 1 / (shape.width_mult() if adam else shape.fanin_fanout_mult_ratio())
    return shape.width_mult() if growing == 1 and not adam else 1.0
