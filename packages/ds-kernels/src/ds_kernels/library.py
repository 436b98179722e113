"""Registration of ops with torch, and when an eager call may skip it.

[Note: registration]
Every op is known to torch as ``torch.ops.ds_kernels.<name>``: schema, one implementation for every
device, a fake one for tracing, and for functional ops an autograd formula.  That is what
``torch.compile`` and tensor subclasses see.  An eager call on plain tensors goes to the
implementation itself, or through a hand-written ``torch.autograd.Function`` when a gradient is
wanted: that costs a third of the registered route.  `is_plain` tells the two cases apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["PLAIN", "define", "define_autograd", "is_plain"]

_LIBRARY = torch.library.Library("ds_kernels", "DEF")
PLAIN = (Tensor, torch.nn.Parameter)
"""The types of tensor that an implementation may be given directly."""


def define(schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Register an op.

    Args:
        schema: Name and signature, such as ``"scale_(Tensor(a!) x, float by) -> ()"``.
        implementation: Takes the arguments in the order of the schema; for every device.
        fake: The same on tensors without data: checks nothing, allocates the results.
    """
    name = _LIBRARY.define(schema, tags=(torch.Tag.needs_exact_strides,))
    _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"ds_kernels::{name}", fake, lib=_LIBRARY)


def define_autograd(
    name: str, backward: Callable[..., Any], setup_context: Callable[..., None]
) -> None:
    """Register the gradient of a functional op.

    Args:
        name: The op's name.
        backward: As of :func:`torch.library.register_autograd`.
        setup_context: The same.
    """
    torch.library.register_autograd(
        f"ds_kernels::{name}", backward, setup_context=setup_context, lib=_LIBRARY
    )


def is_plain(*tensors: Tensor | None) -> bool:
    """Whether an eager call on these tensors may skip the dispatcher; see [Note: registration]."""
    if torch.compiler.is_compiling():
        return False
    for tensor in tensors:
        if type(tensor) not in PLAIN and isinstance(tensor, Tensor):
            return False
    return True
