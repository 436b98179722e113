"""What would store or load placeholders instead of weights, and is stopped.

``state_dict`` of a module with released parameters would be a dictionary of NaN, and a dictionary
made while they were gathered would read as zeros after the release.  So the first raises, and the
second gets copies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ds_comm.errors import EngineError
from ds_zero.presence import Presence, Present

__all__ = ["any_released", "for_this_one", "guard_state_dict", "guard_state_dicts"]


OwnUnits = Callable[[], Mapping[str, Present]]
"""What the parameters that a module itself owns belong to at present, by attribute name."""


def guard_state_dicts(model: nn.Module, units: Mapping[int, Present]) -> list[RemovableHandle]:
    """Install the guards on every module that owns a releasable parameter.

    Args:
        model: The module tree.
        units: The releasable units, by ``id`` of each of their parameters.

    Returns:
        Handles that remove them.
    """
    handles: list[RemovableHandle] = []
    for name, module in model.named_modules():
        own = {key: units[id(p)] for key, p in module._parameters.items() if id(p) in units}
        if own:
            handles += guard_state_dict(module, name or type(module).__name__, partial(dict, own))
    return handles


def guard_state_dict(module: nn.Module, name: str, own: OwnUnits) -> list[RemovableHandle]:
    """Install the guards on one module.

    Args:
        module: Owns releasable parameters.
        name: What messages call it.
        own: Called whenever the module is stored or loaded.

    Returns:
        Handles that remove them.
    """
    pairs: tuple[tuple[Callable[..., RemovableHandle], Callable[..., None]], ...] = (
        (module.register_state_dict_pre_hook, _before_save(name, own)),
        (module.register_state_dict_post_hook, _after_save(own)),
        (module.register_load_state_dict_pre_hook, _before_load(name, own)),
    )
    return [register(for_this_one(module, hook)) for register, hook in pairs]


def for_this_one(owner: nn.Module, hook: Callable[..., None]) -> Callable[..., None]:
    """Keep a hook from acting on copies of its module, which share it."""

    def call(module: nn.Module, *args: Any) -> None:
        if module is owner:
            hook(module, *args)

    return call


def any_released(units: Mapping[str, Present]) -> bool:
    """Whether one of ``units`` is not readable."""
    return any(unit.presence is not Presence.PRESENT for unit in units.values())


def _before_save(name: str, own: OwnUnits) -> Callable[..., None]:
    def check(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if any_released(own()):
            raise EngineError(
                f"state_dict() of {name!r}: its parameters are sharded over the ranks. Call "
                "engine.module_state_dict() or engine.save_16bit_model() on every rank, or call "
                "state_dict() inside `with ds_zero.GatheredParameters(model.parameters()):`."
            )

    return check


def _after_save(own: OwnUnits) -> Callable[..., None]:
    def copy(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for key in own():
            value = state.get(prefix + key)
            if isinstance(value, Tensor):
                state[prefix + key] = value.detach().clone()

    return copy


def _before_load(name: str, own: OwnUnits) -> Callable[..., None]:
    def check(module: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
        if any(prefix + key in state for key in own()) and any_released(own()):
            raise EngineError(
                f"load_state_dict() of {name!r}: its parameters are sharded over the ranks. Call "
                "engine.load_module_state_dict(state_dict) on every rank."
            )

    return check
