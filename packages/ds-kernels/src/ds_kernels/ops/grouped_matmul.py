"""Products of groups of rows with a weight each: the experts of a mixture as one op.

Rows lie sorted by group (Gale et al. 2023, MegaBlocks, section 4, without padding): no group is
padded to another's size, an empty one costs nothing.  Sums are float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ds_kernels import library
from ds_kernels.reference import grouped_matmul as reference
from ds_kernels.registry import Op

if TYPE_CHECKING:
    from ds_kernels._native import Native

__all__ = ["grouped_matmul"]


def _forward_native(module: Native) -> Callable[[Tensor, Tensor, Tensor, bool], Tensor]:
    run = module.grouped_matmul

    def call(x: Tensor, weight: Tensor, bounds: Tensor, transposed: bool) -> Tensor:
        out = x.new_empty(x.shape[0], weight.shape[1 if transposed else -1])
        run(out, x, weight, bounds, transposed)
        return out

    return call


def _weight_native(module: Native) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    run = module.grouped_matmul_weight_grad

    def call(x: Tensor, grad: Tensor, bounds: Tensor) -> Tensor:
        out = x.new_empty(bounds.shape[0] - 1, x.shape[1], grad.shape[1])
        run(out, x, grad, bounds)
        return out

    return call


_FORWARD = Op("grouped_matmul", reference.grouped_matmul, native=_forward_native, cuda=True)
_WEIGHT = Op(
    "grouped_matmul_weight_grad",
    reference.grouped_matmul_weight_grad,
    native=_weight_native,
    source="grouped_matmul",
    cuda=True,
)


def grouped_matmul(
    x: Tensor, weight: Tensor, bounds: Tensor, *, transposed: bool = False
) -> Tensor:
    """Multiply each group of rows with its weight; differentiable in ``x`` and ``weight``.

    Args:
        x: ``[rows, depth]``, the rows of all groups one after another; float32, bfloat16 or
            float16, contiguous.
        weight: ``[groups, depth, columns]``, or ``[groups, columns, depth]`` as
            ``nn.Linear`` keeps it, in the dtype of ``x``.
        bounds: int64 ``[groups + 1]`` on the device of ``x``: where each group's rows begin and
            end, from 0 to ``rows``.
        transposed: The weight is of the second form.

    Returns:
        ``[rows, columns]``.

    Raises:
        KernelArgumentError: A wrong dtype, shape, device or layout in memory; on the CPU also
            bounds that do not rise from 0 to ``rows``.  On a GPU the bounds are trusted.
    """
    if not library.is_plain(x, weight):
        out: Tensor = torch.ops.ds_kernels.grouped_matmul(x, weight, bounds, transposed)
        return out
    if library.wants_grad(x, weight):
        out = _GroupedMatmul.apply(x, weight, bounds, transposed)  # type: ignore[no-untyped-call]
        return out
    return _FORWARD.for_device(x.device.type)(x, weight, bounds, transposed)


class _GroupedMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bounds: Tensor, transposed: bool) -> Tensor:
        ctx.save_for_backward(x, weight, bounds)
        ctx.transposed = transposed
        return _FORWARD.for_device(x.device.type)(x, weight, bounds, transposed)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        device = grads[0].device.type
        return _gradients(ctx, grads[0], _FORWARD.for_device(device), _WEIGHT.for_device(device))


def _gradients(
    ctx: Any, grad: Tensor, forward: Callable[..., Tensor], weight_grad: Callable[..., Tensor]
) -> tuple[Tensor | None, Tensor | None, None, None]:
    x, weight, bounds = ctx.saved_tensors
    grad = grad.contiguous()
    along_x = along_weight = None
    if ctx.needs_input_grad[0]:
        along_x = forward(grad, weight, bounds, not ctx.transposed)
    if ctx.needs_input_grad[1]:
        pair = (grad, x) if ctx.transposed else (x, grad)
        along_weight = weight_grad(*pair, bounds)
    return along_x, along_weight, None, None


def _registered(x: Tensor, *rest: Any) -> Tensor:
    return _FORWARD.for_device(x.device.type)(x, *rest)


def _registered_weight(x: Tensor, *rest: Any) -> Tensor:
    return _WEIGHT.for_device(x.device.type)(x, *rest)


def _fake(x: Tensor, weight: Tensor, bounds: Tensor, transposed: bool) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1 if transposed else -1])


def _fake_weight(x: Tensor, grad: Tensor, bounds: Tensor) -> Tensor:
    return x.new_empty(bounds.shape[0] - 1, x.shape[1], grad.shape[1])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bounds, ctx.transposed = inputs
    ctx.save_for_backward(x, weight, bounds)


def _backward(ctx: Any, grad: Tensor) -> Any:
    ops = torch.ops.ds_kernels
    return _gradients(ctx, grad, ops.grouped_matmul, ops.grouped_matmul_weight_grad)


library.define(
    "grouped_matmul(Tensor x, Tensor weight, Tensor bounds, bool transposed) -> Tensor",
    _registered,
    _fake,
)
library.define(
    "grouped_matmul_weight_grad(Tensor x, Tensor grad, Tensor bounds) -> Tensor",
    _registered_weight,
    _fake_weight,
)
library.define_autograd("grouped_matmul", _backward, _setup_context)
