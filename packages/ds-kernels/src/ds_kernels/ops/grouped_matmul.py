"""Products of groups of rows with a weight each: the experts of a mixture as one op.

Rows lie sorted by group (Gale et al. 2023, MegaBlocks, section 4, without padding): no group is
padded to another's size, an empty one costs nothing.  Sums are float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ds_kernels.functional import Functional
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


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bounds, ctx.transposed = inputs
    ctx.save_for_backward(x, weight, bounds)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
    x, weight, bounds = ctx.saved_tensors
    grad = grad.contiguous()
    along_x = along_weight = None
    if ctx.needs_input_grad[0]:
        along_x = _FORWARD(grad, weight, bounds, not ctx.transposed)
    if ctx.needs_input_grad[1]:
        pair = (grad, x) if ctx.transposed else (x, grad)
        along_weight = _WEIGHT(*pair, bounds)
    return along_x, along_weight, None, None


_FORWARD = Functional(
    Op(
        "grouped_matmul",
        reference.grouped_matmul,
        native=_forward_native,
        cuda=True,
        triton="ds_kernels.triton.grouped_matmul:grouped_matmul",
    ),
    "(Tensor x, Tensor weight, Tensor bounds, bool transposed) -> Tensor",
    lambda x, weight, bounds, transposed: x.new_empty(
        x.shape[0], weight.shape[1 if transposed else -1]
    ),
    save=_save,
    backward=_backward,
)
_WEIGHT = Functional(
    Op(
        "grouped_matmul_weight_grad",
        reference.grouped_matmul_weight_grad,
        native=_weight_native,
        source="grouped_matmul",
        cuda=True,
        triton="ds_kernels.triton.grouped_matmul:grouped_matmul_weight_grad",
    ),
    "(Tensor x, Tensor grad, Tensor bounds) -> Tensor",
    lambda x, grad, bounds: x.new_empty(bounds.shape[0] - 1, x.shape[1], grad.shape[1]),
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
    out: Tensor = _FORWARD(x, weight, bounds, transposed)
    return out
