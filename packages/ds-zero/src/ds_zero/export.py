"""Full weights out of and into a sharded model."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ds_comm.collectives import broadcast_object
from ds_comm.errors import CheckpointError
from ds_zero.core import ZeroCore
from ds_zero.held import held_tensors

__all__ = ["full_state_dict", "load_state_dict", "save_weights"]


def full_tensors(core: ZeroCore, *, exclude_frozen: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter by its first name, unit by unit.  Collective; exhaust it.

    The tensor is valid until the next one is asked for.

    Args:
        core: The sharded model.
        exclude_frozen: Leave out what is not trained.
    """
    for unit in core.units:
        core.residency.ensure(unit)
        for run in unit.runs:
            if run.layout.trainable or not exclude_frozen:
                values = core.full_values(run)
                for slot, value in zip(run.layout.slots, values, strict=True):
                    yield slot.spec.name, value.detach()
        core.residency.release(unit)


def persistent_buffers(core: ZeroCore) -> dict[str, Tensor]:
    """The buffers that a state dict holds, by full name."""
    found: dict[str, Tensor] = {}
    for prefix, module in core.model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found


def full_state_dict(core: ZeroCore, *, exclude_frozen: bool) -> dict[str, Tensor]:
    """Copy all parameters and buffers, tied ones under each of their names.  Collective.

    Args:
        core: The sharded model.
        exclude_frozen: Leave out parameters that are not trained.
    """
    state = {n: t.clone() for n, t in full_tensors(core, exclude_frozen=exclude_frozen)}
    state.update({alias: state[name] for alias, name in core.aliases.items() if name in state})
    state.update({name: buffer.clone() for name, buffer in persistent_buffers(core).items()})
    if not exclude_frozen:
        held = held_tensors(core.model)
        state.update({name: kept.full().clone() for name, kept in held.items()})
    return state


def load_state_dict(core: ZeroCore, state: Mapping[str, Tensor], *, strict: bool) -> None:
    """Set parameters and buffers by name; all ranks pass the same values.

    Args:
        core: The sharded model.
        state: Full tensors under any of a parameter's names.
        strict: Refuse missing and unknown names.

    Raises:
        CheckpointError: Names or shapes do not fit.
    """
    values = {core.aliases.get(name, name): value for name, value in state.items()}
    buffers = persistent_buffers(core)
    held = held_tensors(core.model)
    known = core.params.keys() | buffers.keys() | held.keys()
    missing, unknown = sorted(known - values.keys()), sorted(values.keys() - known)
    if strict and (missing or unknown):
        raise CheckpointError(
            f"the state dict does not fit the model: missing {missing}, unknown {unknown}; "
            "pass strict=False to load what fits"
        )
    wrong = [
        f"{name}: {tuple(values[name].shape)} instead of {tuple(target.shape)}"
        for name, target in {**core.params, **buffers}.items()
        if name in values and values[name].shape != target.shape
    ]
    wrong += [
        f"{name}: {tuple(values[name].shape)} instead of {kept.tensor.shape}"
        for name, kept in held.items()
        if name in values and values[name].shape != kept.tensor.shape
    ]
    if wrong:
        raise CheckpointError(f"the state dict has tensors of other shapes: {'; '.join(wrong)}")
    core.load_values({n: v for n, v in values.items() if n in core.params})
    for name, buffer in buffers.items():
        if name in values:
            buffer.copy_(values[name])
    for name, kept in held.items():
        if name in values:
            kept.replace_from(values[name])


def save_weights(
    core: ZeroCore, folder: str | os.PathLike[str], filename: str, *, exclude_frozen: bool
) -> None:
    """Write full weights in their compute dtype from the group's first rank.  Collective.

    Args:
        core: The sharded model.
        folder: Made if missing.
        filename: ``*.safetensors`` (tied weights once), or ``*.bin`` / ``*.pt`` for a torch pickle.
        exclude_frozen: Leave out parameters that are not trained.

    Raises:
        CheckpointError: The first rank could not write; raised on every rank.
    """
    path = Path(folder) / filename
    if path.suffix not in (".safetensors", ".bin", ".pt"):
        raise CheckpointError(f"{filename!r}: the name must end in .safetensors, .bin or .pt")
    first = core.collectives.group.rank == 0
    state: dict[str, Tensor] = {}
    for name, tensor in full_tensors(core, exclude_frozen=exclude_frozen):
        if first:
            state[name] = tensor.cpu().clone()
    for name, held in held_tensors(core.model).items() if not exclude_frozen else ():
        whole = held.full()
        if first:
            state[name] = whole.cpu().clone()
    problem = None
    if first:
        state.update({n: b.cpu().clone() for n, b in persistent_buffers(core).items()})
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix == ".safetensors":
                save_file(state, path, metadata={"format": "pt"})
            else:
                torch.save(state, path)
        except (OSError, RuntimeError, SafetensorError) as error:
            problem = f"cannot write {path}: {error}"
    problem = broadcast_object(problem, core.collectives.group)
    if problem is not None:
        raise CheckpointError(problem)
