"""Which optimiser a name or an object stands for, and whether it may be sharded."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from ds_comm.collectives import Collectives
from ds_comm.errors import ConfigError
from ds_zero.optim.adam import FlatAdam
from ds_zero.optim.adapter import TorchAdapter
from ds_zero.optim.base import OptimizedRun, ShardOptimizer
from ds_zero.optim.flat import FlatOptimizer
from ds_zero.optim.sgd import FlatSGD

__all__ = ["attach_optimizer", "optimizer_from_config"]

ELEMENT_WISE = frozenset(
    "ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD".split()
)
"""``torch.optim`` classes that update every element by itself."""

NOT_YET = {
    "lamb": "AdamW",
    "lion": "AdamW",
    "muon": "AdamW",
    "muadam": "Adam",
    "muadamw": "AdamW",
    "musgd": "SGD",
    "onebitadam": "AdamW",
    "zerooneadam": "AdamW",
    "onebitlamb": "AdamW",
}
"""Names of the configuration that have no implementation yet, with the nearest one that has."""


class OptimizerChoice(Protocol):
    """The ``optimizer`` section of a configuration."""

    @property
    def type(self) -> str:
        """Name of the optimiser."""
        ...

    @property
    def params(self) -> dict[str, Any]:
        """Keyword arguments of the optimiser."""
        ...


def optimizer_from_config(choice: OptimizerChoice, groups: Any) -> torch.optim.Optimizer:
    """Build the optimiser that a configuration names.

    Args:
        choice: Its ``type`` (case does not matter) and ``params``.
        groups: Parameters or group dictionaries of the model.

    Raises:
        ConfigError: The name is unknown or not available, or a parameter does not fit.
    """
    name = choice.type.lower()
    params = dict(choice.params)
    if name in NOT_YET:
        raise ConfigError(
            f"optimizer.type {choice.type!r} is not available yet in this version; use "
            f"{NOT_YET[name]!r}, or pass your own optimiser to initialize()"
        )
    factory: Callable[..., torch.optim.Optimizer]
    if name in ("adam", "adamw"):
        params.pop("torch_adam", None)
        decoupled = params.pop("adam_w_mode", True)
        params["adam_w_mode"] = True if name == "adamw" else decoupled
        factory = FlatAdam
    elif name == "sgd":
        factory = FlatSGD
    else:
        factory = _torch_class(choice.type)
    if isinstance(params.get("betas"), list):
        params["betas"] = tuple(params["betas"])
    for key in ("lr", "eps", "weight_decay", "momentum"):
        if key in params and (isinstance(params[key], bool | str) or params[key] is None):
            raise ConfigError(f"optimizer.params.{key} must be a number, got {params[key]!r}")
        if isinstance(params.get(key), float) and not math.isfinite(params[key]):
            raise ConfigError(f"optimizer.params.{key} must be finite, got {params[key]}")
    known = set(inspect.signature(factory).parameters) - {"params", "self"}
    unknown = sorted(set(params) - known)
    if unknown:
        hints = [difflib.get_close_matches(key, known, n=1) for key in unknown]
        text = ", ".join(
            f"{key!r}" + (f" (did you mean {hint[0]!r}?)" if hint else "")
            for key, hint in zip(unknown, hints, strict=True)
        )
        raise ConfigError(
            f"optimizer.params of {choice.type!r} has unknown keys: {text}; known: {sorted(known)}"
        )
    try:
        return factory(groups, **params)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optimizer.params of {choice.type!r}: {error}") from error


def _torch_class(name: str) -> Callable[..., torch.optim.Optimizer]:
    classes = {
        key.lower(): value
        for key, value in vars(torch.optim).items()
        if inspect.isclass(value) and issubclass(value, torch.optim.Optimizer)
    }
    found = classes.get(name.lower())
    if found is None or found is torch.optim.Optimizer:
        known = sorted({"Adam", "AdamW", "SGD"} | ELEMENT_WISE)
        hint = difflib.get_close_matches(name, known, n=1)
        raise ConfigError(
            f"optimizer.type {name!r} is unknown"
            + (f"; did you mean {hint[0]!r}?" if hint else "")
            + f" Known: {known}"
        )
    return found


def attach_optimizer(
    optimizer: torch.optim.Optimizer,
    runs: Sequence[OptimizedRun],
    collectives: Collectives,
    *,
    sharded: bool,
    allow_untested: bool,
) -> ShardOptimizer:
    """Let ``optimizer`` update ``runs``.

    Args:
        optimizer: Built on parameters of the model.
        runs: The masters of this rank.
        collectives: Of the ranks that hold the other shards.
        sharded: Whether a master may hold a part of a parameter (stages 1 to 3).
        allow_untested: ``zero_allow_untested_optimizer``: trust unknown classes.

    Raises:
        ConfigError: The optimiser needs whole parameters, or is unknown.
    """
    if isinstance(optimizer, FlatOptimizer):
        optimizer.attach(runs, collectives)
        return optimizer
    kind = type(optimizer)
    tested = kind.__module__.startswith("torch.optim") and kind.__name__ in ELEMENT_WISE
    from_torch = kind.__module__.startswith("torch.optim")
    if kind.__name__ == "LBFGS":
        raise ConfigError("LBFGS evaluates the model several times in a step: no stage supports it")
    if sharded and from_torch and not tested:
        raise ConfigError(
            f"{kind.__name__} needs whole parameters, but stages 1 to 3 shard them. Use stage 0, "
            f"or one of {sorted(ELEMENT_WISE)}."
        )
    if sharded and not tested and not allow_untested:
        raise ConfigError(
            f"{kind.__module__}.{kind.__qualname__} is not known to work on shards of parameters. "
            "If it updates every element by itself, set zero_allow_untested_optimizer to true."
        )
    return TorchAdapter(optimizer, runs)
