"""Registered ops that are called like functions: functional ones with gradients, mutating ones.

[Note: functional ops]
`Functional` joins an op, its schema and its backward.  A call on plain tensors that needs no
gradient runs the implementation; one that needs a gradient goes through an ``autograd.Function``
over the implementation; everything else (``torch.compile``, tensor subclasses) goes through the
registered op, which has the same ``save`` and ``backward``.  A backward is an op of its own, so a
compiled graph holds it as one node.  It has no backward: differentiating twice is an error, never a
silently missing term.  An implementation gives None for an output that was not asked for; torch has
no optional outputs, so the registered op gives an empty tensor there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ds_kernels import library
from ds_kernels.registry import Op

__all__ = ["Functional", "Mutating", "column_partials", "contiguous", "gradients_of"]


class Functional:
    """A registered op that is called like a function; see [Note: functional ops]."""

    def __init__(
        self,
        op: Op[..., Any],
        schema: str,
        fake: Callable[..., Any],
        *,
        save: Callable[[Any, tuple[Any, ...], Any], None] | None = None,
        backward: Callable[..., Any] | None = None,
    ) -> None:
        """Register the op.

        Args:
            op: Its implementations; the first argument is a tensor and decides the device.
            schema: The signature, such as ``"(Tensor x, float by) -> Tensor"``.
            fake: Allocates the results on tensors without data.
            save: ``save(ctx, inputs, output)`` keeps what the backward needs.
            backward: ``backward(ctx, *grads)`` gives a gradient or None for each argument. Without
                one, asking for a gradient is an error.
        """
        keep = save or _keep_nothing
        differentiate = backward or _refuse(op.name)

        def implementation(*arguments: Any) -> Any:  # noqa: ANN401
            first = arguments[0]
            output = op.for_device(first.device.type)(*arguments)
            if isinstance(output, tuple):
                return tuple(first.new_empty(0) if item is None else item for item in output)
            return output

        library.define(f"{op.name}{schema}", implementation, fake)
        self.op = op
        self._registered = torch.ops.ds_kernels.__getattr__(op.name)
        library.define_autograd(op.name, differentiate, keep)
        self._apply = _function(op, keep, differentiate)

    def __call__(self, *arguments: Any) -> Any:  # noqa: ANN401
        """Run the op by the cheapest route that is right for these arguments."""
        if torch.compiler.is_compiling():
            return self._registered(*arguments)
        differentiable = False
        for argument in arguments:
            if isinstance(argument, Tensor):
                if type(argument) not in library.PLAIN:
                    return self._registered(*arguments)
                differentiable = differentiable or argument.requires_grad
        if differentiable and torch.is_grad_enabled():
            return self._apply(*arguments)
        return self.op.for_device(arguments[0].device.type)(*arguments)


class Mutating:
    """A registered op that writes into its arguments and returns nothing; it has no gradient."""

    def __init__(self, op: Op[..., None], schema: str) -> None:
        """Register the op.

        Args:
            op: Its implementations; the first argument is a tensor and decides the device; where it
                is None, the second does.
            schema: The signature without result, such as ``"(Tensor(a!) out, Tensor x)"``.
        """

        def implementation(*arguments: Any) -> None:
            op.for_device(_first(arguments).device.type)(*arguments)

        library.define(f"{op.name}{schema} -> ()", implementation, _nothing)
        self.op = op
        self._registered = torch.ops.ds_kernels.__getattr__(op.name)

    def __call__(self, *arguments: Any) -> None:
        """Run the op; eager calls on plain tensors skip the dispatcher."""
        if library.is_plain(*arguments):
            self.op.for_device(_first(arguments).device.type)(*arguments)
        else:
            self._registered(*arguments)


def _first(arguments: tuple[Any, ...]) -> Tensor:
    first: Tensor = arguments[0] if arguments[0] is not None else arguments[1]
    return first


def _nothing(*arguments: Any) -> None:
    return None


def _keep_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ANN401
    return None


def _refuse(name: str) -> Callable[..., Any]:
    def backward(ctx: Any, *grads: Any) -> Any:  # noqa: ANN401
        raise RuntimeError(
            f"{name} cannot be differentiated; for second derivatives compose torch's own functions"
        )

    return backward


def _function(
    op: Op[..., Any],
    save: Callable[[Any, tuple[Any, ...], Any], None],
    backward: Callable[..., Any],
) -> Callable[..., Any]:
    """The ``apply`` of an autograd function over the implementation of an op."""

    class _Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> Any:  # noqa: ANN401
            output = op.for_device(arguments[0].device.type)(*arguments)
            save(ctx, arguments, output)
            return output

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:  # noqa: ANN401
            return backward(ctx, *grads)

    _Function.__name__ = _Function.__qualname__ = op.name
    apply: Callable[..., Any] = _Function.apply
    return apply


def gradients_of(
    function: Callable[..., Tensor],
    tensors: Sequence[Tensor | None],
    grad: Tensor,
    wanted: Sequence[bool],
) -> list[Tensor | None]:
    """Gradients by autograd: what reference backwards are made of.

    Args:
        function: Takes the tensors, gives one tensor.
        tensors: Its arguments; None is passed through.
        grad: The gradient of the result.
        wanted: For each tensor whether its gradient is wanted.

    Returns:
        A gradient for each wanted tensor in order, None for each other.
    """
    with torch.enable_grad():
        leaves = [
            None if tensor is None else tensor.detach().requires_grad_(want)
            for tensor, want in zip(tensors, wanted, strict=True)
        ]
        result = function(*leaves)
        needed = [
            leaf for leaf, want in zip(leaves, wanted, strict=True) if leaf is not None and want
        ]
        found = iter(torch.autograd.grad(result, needed, grad))
    return [
        next(found) if want and leaf is not None else None
        for leaf, want in zip(leaves, wanted, strict=True)
    ]


def column_partials(x: Tensor, rows: int, per_part: int) -> Tensor | None:
    """Room for the sums over rows of a CUDA backward; CPU kernels need none.

    Args:
        x: Decides the device.
        rows: How many rows are summed.
        per_part: Floats that one part of the rows is summed into.

    Returns:
        float32 [parts, per_part], or None on the CPU.
    """
    if not x.is_cuda:
        return None
    parts = min(max((rows + 15) // 16, 1), 512)
    return torch.empty(parts, per_part, dtype=torch.float32, device=x.device)


def contiguous(tensor: Tensor | None) -> Tensor | None:
    """The tensor itself if it is contiguous, else a copy; None for None."""
    return None if tensor is None else tensor.contiguous()
