"""Which optimiser a name or an object stands for, and whether it may be sharded."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from ds_comm.collectives import Collectives
from ds_comm.errors import ConfigError
from ds_zero.optim.adagrad import FlatAdagrad
from ds_zero.optim.adam import FlatAdam
from ds_zero.optim.adam8bit import Adam8bit
from ds_zero.optim.adapter import OwnerAdapter, TorchAdapter
from ds_zero.optim.base import OptimizedRun, ShardOptimizer
from ds_zero.optim.flat import FlatOptimizer
from ds_zero.optim.lamb import FlatLamb
from ds_zero.optim.lion import FlatLion
from ds_zero.optim.muon import FlatMuon, muon_groups
from ds_zero.optim.mup import mup_groups
from ds_zero.optim.sgd import FlatSGD

__all__ = ["attach_optimizer", "optimizer_from_config"]

ELEMENT_WISE = frozenset(
    "ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD".split()
)
"""``torch.optim`` classes that update every element by itself."""

WHOLE = frozenset({"Adafactor", "Muon"})
"""``torch.optim`` classes that need whole parameters, and treat each by itself."""

IMPOSSIBLE = {
    "LBFGS": "evaluates the model several times in a step",
    "SparseAdam": "needs sparse gradients, and the engine reduces dense ones; use AdamW",
}
"""``torch.optim`` classes that no stage supports, with the reason."""

NOT_YET = {"onebitadam": "AdamW", "zerooneadam": "AdamW", "onebitlamb": "Lamb"}
"""Names that come with ds-compress, with the nearest one that is here."""

FLAT: dict[str, type[FlatOptimizer]] = {
    "adam": FlatAdam,
    "adamw": FlatAdam,
    "adam8bit": Adam8bit,
    "adamw8bit": Adam8bit,
    "sgd": FlatSGD,
    "adagrad": FlatAdagrad,
    "lion": FlatLion,
    "lamb": FlatLamb,
    "muadam": FlatAdam,
    "muadamw": FlatAdam,
    "musgd": FlatSGD,
}
"""Optimisers on flat segments by the configuration's name."""

_MUP = ("muadam", "muadamw", "musgd")

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "torch_adam": (False, True),
    "set_grad_none": (False, True),
    "amsgrad": (False,),
    "eps_inside_sqrt": (False,),
    "foreach": (None, False, True),
    "fused": (None, False, True),
}
"""Arguments of predecessors that change no result, with the values that may be given."""


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


def optimizer_from_config(
    choice: OptimizerChoice, groups: Any, model: nn.Module | None = None
) -> torch.optim.Optimizer:
    """Build the optimiser that a configuration names.

    Args:
        choice: Its ``type`` (case does not matter) and ``params``.
        groups: Parameters or group dictionaries of the model.
        model: Whose parameters they are; Muon chooses its own by name and owner.

    Raises:
        ConfigError: The name is unknown or not available, or a parameter does not fit.
    """
    name = choice.type.lower()
    params = dict(choice.params)
    if name in NOT_YET:
        raise ConfigError(
            f"optimizer.type {choice.type!r} will come with ds-compress; use {NOT_YET[name]!r}, or "
            "pass your own optimiser to initialize()"
        )
    _check_values(params)
    if isinstance(params.get("betas"), list):
        params["betas"] = tuple(params["betas"])
    if name == "muon":
        names, embeddings = _roles(model)
        return FlatMuon(muon_groups(groups, names, embeddings, params))
    if name in FLAT and not (name in ("adam", "adamw") and params.get("amsgrad")):
        return _build_flat(choice.type, groups, params)
    found = choice.type
    if name in ("adam", "adamw"):
        params.pop("torch_adam", None)
        found = "AdamW" if params.pop("adam_w_mode", True) or name == "adamw" else "Adam"
    return _built(choice.type, _torch_class(found), groups, params)


def _build_flat(given: str, groups: Any, params: dict[str, Any]) -> torch.optim.Optimizer:
    """Build one of :data:`FLAT`."""
    name = given.lower()
    for key, values in _NEUTRAL.items():
        if params.get(key) in values:
            params.pop(key, None)
    fp32_states = params.pop("fp32_optimizer_states", True)
    factory = FLAT[name]
    if issubclass(factory, FlatAdam):
        decoupled = params.pop("adam_w_mode", name != "muadam")
        params["adam_w_mode"] = decoupled or "adamw" in name
    if name in _MUP:
        groups = mup_groups(groups, params, adam=issubclass(factory, FlatAdam))
        params.pop("decoupled_wd", None)
    built = _built(given, factory, groups, params)
    assert isinstance(built, FlatOptimizer)
    built.fp32_optimizer_states = fp32_states
    return built


def _check_values(params: dict[str, Any]) -> None:
    """Refuse what is no finite number where one is needed."""
    for key in ("lr", "eps", "weight_decay", "momentum"):
        value = params.get(key)
        if key in params and (isinstance(value, bool | str) or value is None):
            # Adafactor has a pair of eps, one of which may be missing.
            raise ConfigError(f"optimizer.params.{key} must be a number, got {value!r}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"optimizer.params.{key} must be finite, got {value}")


def _built(
    given: str, factory: Callable[..., torch.optim.Optimizer], groups: Any, params: dict[str, Any]
) -> torch.optim.Optimizer:
    """Call ``factory`` after checking the names of ``params``."""
    known = set(inspect.signature(factory).parameters) - {"params", "self"}
    unknown = sorted(set(params) - known)
    if unknown:
        hints = [difflib.get_close_matches(key, known, n=1) for key in unknown]
        text = ", ".join(
            f"{key!r}" + (f" (did you mean {hint[0]!r}?)" if hint else "")
            for key, hint in zip(unknown, hints, strict=True)
        )
        raise ConfigError(
            f"optimizer.params of {given!r} has unknown keys: {text}; known: {sorted(known)}"
        )
    try:
        return factory(groups, **params)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optimizer.params of {given!r}: {error}") from error


def _roles(model: nn.Module | None) -> tuple[dict[int, str], set[int]]:
    """Names of all parameters by ``id``, and which ones belong to an embedding."""
    if model is None:
        return {}, set()
    names = {id(param): name for name, param in model.named_parameters()}
    embeddings = {
        id(param)
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        for param in module.parameters(recurse=False)
    }
    return names, embeddings


def _torch_class(name: str) -> Callable[..., torch.optim.Optimizer]:
    classes = {
        key.lower(): value
        for key, value in vars(torch.optim).items()
        if inspect.isclass(value) and issubclass(value, torch.optim.Optimizer)
    }
    found = classes.get(name.lower())
    if found is None or found is torch.optim.Optimizer:
        known = sorted({"Adam8bit", "Lamb", "Lion", "Muon"} | ELEMENT_WISE | WHOLE)
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
    state_dtype: torch.dtype | None = None,
) -> ShardOptimizer:
    """Let ``optimizer`` update ``runs``.

    Args:
        optimizer: Built on parameters of the model.
        runs: The masters of this rank.
        collectives: Of the ranks that hold the other shards.
        sharded: Whether a master may hold a part of a parameter (stages 1 to 3).
        allow_untested: ``zero_allow_untested_optimizer``: trust unknown classes.
        state_dtype: Dtype of the states; by default the optimiser's choice.

    Raises:
        ConfigError: No stage supports the optimiser, it is unknown, or it cannot have states of
            ``state_dtype``.
    """
    if isinstance(optimizer, FlatOptimizer):
        optimizer.attach(runs, collectives, state_dtype)
        return optimizer
    kind = type(optimizer)
    if state_dtype is not None and any(run.master.dtype != state_dtype for run in runs):
        raise ConfigError(
            f"bf16.bf16_optimizer_states: {kind.__name__} keeps states in the dtype of the master "
            "weights. Set bf16.bf16_master_weights_and_grads too, or name an optimiser of ds_zero "
            "(Adam, AdamW, SGD, Lion, Adagrad) in the configuration."
        )
    if any(run.master.dtype == torch.float16 for run in runs):
        raise ConfigError(
            f"fp16.fp16_master_weights_and_grads: {kind.__name__} would compute in fp16, where "
            "gradients without the loss scale vanish. Set it to false, or name an optimiser of "
            "ds_zero (Adam, AdamW, SGD, Lion, Adagrad) in the configuration."
        )
    from_torch = kind.__module__.startswith("torch.optim")
    if from_torch and kind.__name__ in IMPOSSIBLE:
        raise ConfigError(f"{kind.__name__} {IMPOSSIBLE[kind.__name__]}: no stage supports it")
    if from_torch and kind.__name__ in ELEMENT_WISE:
        return TorchAdapter(optimizer, runs)
    if from_torch and kind.__name__ in WHOLE:
        return OwnerAdapter(optimizer, runs, collectives)
    if not sharded:
        return TorchAdapter(optimizer, runs)
    if not allow_untested:
        raise ConfigError(
            f"{kind.__module__}.{kind.__qualname__} is not known to work on shards of parameters. "
            "If it treats every parameter by itself, set zero_allow_untested_optimizer to true: "
            "each parameter is then updated whole, by one rank."
        )
    return OwnerAdapter(optimizer, runs, collectives)
