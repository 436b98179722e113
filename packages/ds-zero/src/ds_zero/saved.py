"""What autograd saves for backward: hooks that leave others' hooks in force.

[Note: layered saved-tensor hooks]
torch calls only the innermost pair of saved-tensor hooks.  Whoever adds a pair inside somebody
else's would switch that one off: a checkpoint would keep all its activations, ``save_on_cpu``
would keep them on the device.  So a pair of ours takes the tensors that it is there for and
passes every other one to the pair that was in force before.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor

__all__ = ["Kept", "checkpoint_saves", "keep", "kept_tensor", "layered_saved_hooks"]

Pack = Callable[[Tensor], Any]
Unpack = Callable[[Any], Tensor]


Kept = tuple[Tensor, int]
"""A tensor that is kept as it is, and its version then."""


def keep(tensor: Tensor) -> Kept:
    """Keep ``tensor`` for backward as torch does without hooks."""
    # Detached: a saved output that kept its graph would keep itself alive.
    return tensor.detach(), tensor._version


def kept_tensor(kept: Kept) -> Tensor:
    """Return what :func:`keep` kept, after the check that hooks switch off.

    Raises:
        RuntimeError: It was modified in place, with torch's words.
    """
    tensor, version = kept
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an "
            f"inplace operation: a {tensor.dtype} tensor of shape {tuple(tensor.shape)} is at "
            f"version {tensor._version}; expected version {version} instead"
        )
    return tensor


def layered_saved_hooks(
    take: Callable[[Tensor], Any | None], give: Unpack
) -> AbstractContextManager[None]:
    """Return a context in which ``take`` sees every tensor that autograd saves.

    See [Note: layered saved-tensor hooks].

    Args:
        take: Returns what is kept instead of the tensor, or None to leave it alone.
        give: Turns that back into the tensor.
    """
    below = _top()

    def pack(tensor: Tensor) -> tuple[Unpack, Any]:
        taken = take(tensor)
        if taken is not None:
            return give, taken
        if below is not None:
            return below[1], below[0](tensor)
        return kept_tensor, keep(tensor)

    def unpack(packed: tuple[Unpack, Any]) -> Tensor:
        return packed[0](packed[1])

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def checkpoint_saves() -> bool:
    """Whether ``torch.utils.checkpoint`` decides what is saved at this point of a forward."""
    top = _top()
    return top is not None and top[0].__module__ == torch.utils.checkpoint.__name__


def _top() -> tuple[Pack, Unpack] | None:
    hooks: tuple[Pack, Unpack] | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks
