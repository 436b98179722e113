"""Modules that are gathered as one, marked before the engine is built.

[Note: leaf modules]
A marked module is never cut into smaller units: all inside it is gathered before it runs, whatever
path its ``forward`` takes (Mixture-of-Experts blocks, data-dependent control flow).  It is a unit
of its own, or lies within the unit of a larger block.  Marks are notes on the side, read once by
``initialize``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

__all__ = [
    "get_z3_leaf_modules",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix",
    "unset_z3_leaf_modules",
    "unset_z3_leaf_modules_by_name",
    "unset_z3_leaf_modules_by_suffix",
    "z3_leaf_module",
    "z3_leaf_parameter",
]

_MARKED: WeakIdKeyDictionary = WeakIdKeyDictionary()


def set_z3_leaf_module(module: nn.Module, flag: bool) -> None:
    """Mark a module as one unit, or take the mark off; before ``initialize``."""
    if flag:
        _MARKED[module] = True
    else:
        _MARKED.pop(module, None)


def z3_leaf_module(module: nn.Module) -> bool:
    """Whether a module is marked."""
    return module in _MARKED


def z3_leaf_parameter(param: nn.Parameter) -> bool:
    """Whether a parameter lies within a marked module."""
    return any(param is p for module in list(_MARKED) for p in module.parameters())


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The marked modules of a model, in the order of the tree."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_modules(
    model: nn.Module,
    leaf_module_classes: Sequence[type[nn.Module] | str],
    raise_if_not_found: bool = True,
) -> list[nn.Module]:
    """Mark every module of some classes.

    Args:
        model: The module tree.
        leaf_module_classes: Classes, or names of classes with or without their module's name.
        raise_if_not_found: Whether it is an error if none of them occurs.

    Returns:
        The modules that were marked.

    Raises:
        ValueError: Nothing was found.
    """
    return _apply(
        model, _of_class(leaf_module_classes), True, leaf_module_classes, raise_if_not_found
    )


def unset_z3_leaf_modules(
    model: nn.Module,
    leaf_module_classes: Sequence[type[nn.Module] | str],
    raise_if_not_found: bool = True,
) -> list[nn.Module]:
    """Take the mark off every module of some classes; see :func:`set_z3_leaf_modules`."""
    return _apply(
        model, _of_class(leaf_module_classes), False, leaf_module_classes, raise_if_not_found
    )


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark modules by their full names; see :func:`set_z3_leaf_modules`."""
    return _apply(model, _named(module_names), True, module_names, raise_if_not_found)


def unset_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Take the mark off modules by their full names; see :func:`set_z3_leaf_modules`."""
    return _apply(model, _named(module_names), False, module_names, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_suffixes: Sequence[str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark modules whose full names end in one of some words; see :func:`set_z3_leaf_modules`."""
    return _apply(model, _ending(module_suffixes), True, module_suffixes, raise_if_not_found)


def unset_z3_leaf_modules_by_suffix(
    model: nn.Module, module_suffixes: Sequence[str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Take the mark off modules by the endings of names; see :func:`set_z3_leaf_modules`."""
    return _apply(model, _ending(module_suffixes), False, module_suffixes, raise_if_not_found)


_Chooses = Callable[[str, nn.Module], bool]


def _of_class(classes: Sequence[type[nn.Module] | str]) -> _Chooses:
    kinds = tuple(item for item in classes if isinstance(item, type))
    names = {item for item in classes if isinstance(item, str)}

    def chosen(_: str, module: nn.Module) -> bool:
        kind = type(module)
        known = {kind.__name__, f"{kind.__module__}.{kind.__qualname__}"}
        return isinstance(module, kinds) or not known.isdisjoint(names)

    return chosen


def _named(names: Sequence[str]) -> _Chooses:
    return lambda name, _: name in names


def _ending(suffixes: Sequence[str]) -> _Chooses:
    return lambda name, _: bool(name) and name.endswith(tuple(suffixes))


def _apply(
    model: nn.Module,
    chosen: _Chooses,
    flag: bool,
    wanted: Iterable[object],
    raise_if_not_found: bool,
) -> list[nn.Module]:
    found = [module for name, module in model.named_modules() if chosen(name, module)]
    if not found and raise_if_not_found:
        classes = sorted({type(module).__name__ for module in model.modules()})
        raise ValueError(
            f"no module of {type(model).__name__} matches {list(wanted)}; its classes are {classes}"
        )
    for module in found:
        set_z3_leaf_module(module, flag)
    return found
