"""What the layout has to know of every parameter, and the dtypes that they and buffers get."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ds_comm.errors import EngineError
from ds_zero.layout import ParamSpec
from ds_zero.options import CoreOptions
from ds_zero.precision import lowered_params

__all__ = ["cast_buffers", "describe_params"]


def describe_params(
    model: nn.Module,
    params: Mapping[str, nn.Parameter],
    groups: Sequence[Sequence[nn.Parameter]],
    options: CoreOptions,
) -> dict[int, ParamSpec]:
    """Describe every parameter, by its id.

    Args:
        model: The module tree.
        params: Its parameters, by name.
        groups: Parameters by optimiser group.
        options: What decides their dtypes.

    Raises:
        EngineError: A parameter cannot be put in a flat buffer.
    """
    wide = {id(p) for m in _batch_norms(model) for p in m.parameters(recurse=False)}
    compute_dtype = options.compute_dtype
    # See [Note: autocast]; frozen parameters have no fp32 master to come back to.
    autocast = options.autocast
    safe = lowered_params(model, autocast.safe_classes) if autocast is not None else set()
    if options.stage < 3:
        safe = set()
    sparse = _embeddings(model) if options.sparse_gradients else frozenset()
    group_of = {id(p): index for index, group in enumerate(groups) for p in group}
    specs: dict[int, ParamSpec] = {}
    for name, param in params.items():
        if param.is_complex() or param.layout is not torch.strided:
            raise EngineError(
                f"parameter {name!r} is {param.dtype} with layout {param.layout}; only real dense "
                "parameters can be sharded. Hold it as a real tensor (torch.view_as_real)."
            )
        trainable = param.requires_grad and id(param) in group_of
        dtype = param.dtype
        if compute_dtype is not None and param.is_floating_point() and id(param) not in wide:
            dtype = compute_dtype
        elif autocast is not None and trainable and dtype == torch.float32 and id(param) in safe:
            dtype = autocast.dtype
        specs[id(param)] = ParamSpec(
            name,
            tuple(param.shape),
            dtype,
            trainable,
            group_of.get(id(param), 0),
            sparse=trainable and id(param) in sparse,
        )
    return specs


def _embeddings(model: nn.Module) -> frozenset[int]:
    """Ids of the weights that only embeddings own, so that few of their rows have a gradient."""
    inside: set[int] = set()
    outside: set[int] = set()
    for module in model.modules():
        own = {id(param) for param in module.parameters(recurse=False)}
        (inside if isinstance(module, nn.Embedding | nn.EmbeddingBag) else outside).update(own)
    return frozenset(inside - outside)


def cast_buffers(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast floating-point buffers, except the statistics of batch norm."""
    wide = {id(b) for m in _batch_norms(model) for b in m.buffers(recurse=False)}
    for buffer in model.buffers():
        if buffer.is_floating_point() and id(buffer) not in wide:
            buffer.data = buffer.data.to(dtype)


def _batch_norms(model: nn.Module) -> Iterator[nn.Module]:
    """The modules that compute in fp32 with running statistics, which stay as they are."""
    return (module for module in model.modules() if isinstance(module, _BatchNorm))
