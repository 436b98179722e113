"""Parameters that a module uses without owning them.

Reads by attribute (``self.other.weight``) are noticed by themselves.  What goes past attributes,
such as a parameter that a module keeps in a list or a closure, is not: registered, it is gathered
before that module's forward and backward as if the module owned it.
"""

from __future__ import annotations

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ds_comm.errors import EngineError
from ds_zero.registry import core_of

__all__ = ["external_users", "register_external_parameter", "unregister_external_parameter"]

_USED: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""For each module the parameters, in a weak dictionary, that it uses without owning them."""


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Gather ``parameter`` whenever ``module`` runs; before or after ``initialize``.

    Args:
        module: Whose ``forward`` uses the parameter.
        parameter: Of any module.

    Raises:
        TypeError: ``parameter`` is no parameter.
    """
    if not isinstance(parameter, nn.Parameter):
        raise TypeError(
            f"register_external_parameter: {type(parameter).__name__} given, expected a Parameter"
        )
    _USED.setdefault(module, WeakIdKeyDictionary())[parameter] = True
    core = core_of(parameter)
    if core is not None:
        core.tracker.add_user(parameter, module)


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Undo :func:`register_external_parameter`.

    Raises:
        EngineError: The parameter is not registered for this module.
    """
    if parameter not in _USED.get(module, ()):
        raise EngineError(
            f"unregister_external_parameter: the parameter is not registered for this "
            f"{type(module).__name__}"
        )
    del _USED[module][parameter]
    core = core_of(parameter)
    if core is not None:
        core.tracker.remove_user(parameter, module, list(_USED[module]))


def external_users(model: nn.Module) -> list[tuple[nn.Module, nn.Parameter]]:
    """Modules of a model with each of the parameters that are registered for them."""
    return [(module, param) for module in model.modules() for param in _USED.get(module, ())]
