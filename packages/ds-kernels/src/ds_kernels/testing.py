"""Checks that every op's tests share: one list of cases, run on every backend.

[Note: error rule]
The reference in float64 gives the exact value.  "Plain" is what a user would write in torch, in the
dtypes of the case; unless said otherwise the reference itself.  An output may be off by at most
twice plain's largest error plus half a unit in the last place, and in the root mean square by twice
plain's.  Where plain is not finite the result must be the same: NaN for NaN, infinity for infinity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_kernels.registry import BACKENDS, Backend, Op, triton_interprets

__all__ = [
    "Case",
    "Suite",
    "assert_accurate",
    "backends",
    "check_compiled",
    "check_forward",
    "check_gradient",
    "check_zero_stride_gradient",
    "device_of",
    "forced",
]

Arguments = tuple[Any, ...]
"""Positional arguments of an implementation: tensors, lists of tensors, numbers, None."""


@dataclass(frozen=True)
class Case:
    """One input of an op.

    Attributes:
        name: Shown by pytest.
        make: Builds the arguments on the CPU with a seeded generator.
        speed: The case is also timed by the op's benchmark.
    """

    name: str
    make: Callable[[torch.Generator], Arguments]
    speed: bool = False

    def arguments(self) -> Arguments:
        """The arguments, the same at every call."""
        return self.make(torch.Generator().manual_seed(7))


@dataclass(frozen=True)
class Suite:
    """An op and the cases that every backend of it must pass.

    Attributes:
        op: The op.
        cases: Its inputs.
        mutates: Indices of the arguments that the op writes; they count as outputs.
        plain: What the error is compared with, in the case's dtypes; the reference if None.
        call: The public function with positional arguments, for gradients and compilation.
        differentiable: Indices of the arguments that get a gradient.
        others: Further ops that ``call`` uses, such as the backward one.
        statistics: Indices from the end (-1 is the last) of outputs that only feed the backward,
            such as a row's mean. They are few, so plain torch may be exact by luck: 4 ULP of
            the largest value are let pass.
    """

    op: Op[Any, Any]
    cases: tuple[Case, ...]
    mutates: tuple[int, ...] = ()
    plain: Callable[..., Any] | None = None
    call: Callable[..., Any] | None = None
    differentiable: tuple[int, ...] = ()
    others: tuple[Op[Any, Any], ...] = ()
    statistics: tuple[int, ...] = ()

    @property
    def baseline(self) -> Callable[..., Any]:
        """What the error is compared with."""
        return self.plain or self.op.reference


def backends(op: Op[Any, Any]) -> tuple[Backend, ...]:
    """The backends of an op that can run here.

    CUDA needs a GPU, Triton a GPU or its interpreter.
    """
    runs: dict[Backend, bool] = {"cuda": torch.cuda.is_available()}
    runs["triton"] = runs["cuda"] or triton_interprets()
    return tuple(
        backend
        for backend in BACKENDS
        if not op.missing_reason(backend) and runs.get(backend, True)
    )


def device_of(backend: Backend) -> torch.device:
    """The device that a backend is tested on."""
    gpu = backend == "cuda" or (backend == "triton" and not triton_interprets())
    return torch.device("cuda" if gpu else "cpu")


def forced(suite: Suite, backend: Backend) -> ExitStack:
    """Force a backend for every op of a suite; use as a context manager."""
    stack = ExitStack()
    for op in (suite.op, *suite.others):
        stack.enter_context(op.forced(backend))
    return stack


def check_forward(suite: Suite, case: Case, backend: Backend) -> None:
    """Run one case on one backend and hold its outputs to the error rule.

    Raises:
        AssertionError: An output is too far off.
    """
    arguments = case.arguments()
    exact = _outputs(suite, suite.op.reference, _mapped(arguments, _to_float64))
    plain = _outputs(suite, suite.baseline, _mapped(arguments, torch.clone))
    device = device_of(backend)
    given = _mapped(arguments, lambda tensor: tensor.clone().to(device))
    actual = _outputs(suite, suite.op.on(backend), given)
    for index, outputs in enumerate(zip(actual, plain, exact, strict=True)):
        what = f"{suite.op.name}[{case.name}] output {index} on {backend}"
        assert_accurate(
            *outputs, what=what, slack_ulp=4 if index - len(actual) in suite.statistics else 0
        )


def check_gradient(suite: Suite, case: Case, backend: Backend) -> None:
    """Compare the gradients of the public function with autograd through the reference.

    Raises:
        AssertionError: A gradient is too far off.
    """
    assert suite.call is not None
    arguments = case.arguments()
    exact = _gradients(suite, suite.op.reference, _mapped(arguments, _to_float64))
    plain = _gradients(suite, suite.baseline, _mapped(arguments, torch.clone))
    device = device_of(backend)
    given = _mapped(arguments, lambda tensor: tensor.clone().to(device))
    with forced(suite, backend):
        actual = _gradients(suite, suite.call, given)
    for index, values in enumerate(zip(actual, plain, exact, strict=True)):
        what = f"{suite.op.name}[{case.name}] gradient {index} on {backend}"
        assert_accurate(*values, what=what)


def check_zero_stride_gradient(suite: Suite, case: Case, backend: Backend) -> None:
    """The gradient of ``.sum()`` arrives expanded with stride 0: same result as a real one.

    Raises:
        AssertionError: The gradients differ.
    """
    assert suite.call is not None
    found = []
    for weighted in (False, True):
        given = _mapped(case.arguments(), lambda tensor: tensor.to(device_of(backend)))
        leaves = _leaves(suite, given)
        with forced(suite, backend):
            out = _tensors(suite.call(*given))[0]
            out.sum().backward() if not weighted else out.backward(torch.ones_like(out))
        found.append([leaf.grad for leaf in leaves])
    for summed, expected in zip(*found, strict=True):
        assert torch.equal(summed, expected)


def check_compiled(suite: Suite, case: Case, backend: Backend = "cpu") -> None:
    """The public function compiles without a graph break and gives the same bits.

    Raises:
        AssertionError: The outputs differ.
    """
    assert suite.call is not None
    torch._dynamo.reset()
    compiled = torch.compile(suite.call, fullgraph=True, backend="aot_eager")
    device = device_of(backend)
    with forced(suite, backend):
        expected = _outputs(suite, suite.call, _mapped(case.arguments(), lambda t: t.to(device)))
        actual = _outputs(suite, compiled, _mapped(case.arguments(), lambda t: t.to(device)))
    for left, right in zip(actual, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=0, equal_nan=True)


def assert_accurate(
    actual: Tensor, plain: Tensor, exact: Tensor, *, what: str, slack_ulp: float = 0
) -> None:
    """Hold one output to the error rule; see [Note: error rule].

    Args:
        actual: What a backend gave, on any device.
        plain: What plain torch gave in the same dtypes; shape and dtype of ``actual``.
        exact: The float64 value.
        what: Begins the message.
        slack_ulp: Allowed on top, in units of the last place of the largest value.

    Raises:
        AssertionError: The rule is broken.
    """
    actual = actual.detach().cpu()
    assert actual.shape == plain.shape, f"{what}: shape {actual.shape}, expected {plain.shape}"
    assert actual.dtype == plain.dtype, f"{what}: {actual.dtype}, expected {plain.dtype}"
    if not plain.dtype.is_floating_point:
        assert torch.equal(actual, plain), f"{what}: differs from plain torch"
        return
    got, base, truth = actual.double(), plain.detach().double(), exact.detach().double()
    finite = base.isfinite() & truth.isfinite()
    odd = ~(finite | (got == base) | (got.isnan() & base.isnan()))
    assert not odd.any(), f"{what}: {int(odd.sum())} values differ where plain torch is not finite"
    got, base, truth = got[finite], base[finite], truth[finite]
    if truth.numel() == 0:
        return
    error, allowed = (got - truth).abs(), (base - truth).abs()
    eps = torch.finfo(plain.dtype).eps
    half_ulp = 0.5 * eps * truth.abs() + _smallest(plain.dtype)
    half_ulp = half_ulp + slack_ulp * eps * truth.abs().max()
    worst = (error - 2 * allowed.max() - half_ulp).max()
    assert worst <= 0, (
        f"{what}: error {error.max():.3e}, plain torch {allowed.max():.3e}, "
        f"largest value {truth.abs().max():.3e}"
    )
    rms, allowed_rms = error.square().mean().sqrt(), allowed.square().mean().sqrt()
    assert rms <= 2 * allowed_rms + half_ulp.square().mean().sqrt(), (
        f"{what}: rms error {rms:.3e}, plain torch {allowed_rms:.3e}"
    )


def _smallest(dtype: torch.dtype) -> float:
    """The smallest subnormal of a dtype."""
    info = torch.finfo(dtype)
    return float(info.tiny) * float(info.eps)


def _to_float64(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.dtype.is_floating_point else tensor.clone()


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply a function to the tensors in nested tuples and lists."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple | list):
        return type(value)(_mapped(item, change) for item in value)
    return value


def _flat(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _flat(item)


def _tensors(value: Any) -> list[Tensor]:
    return list(_flat(value))


def _outputs(suite: Suite, function: Callable[..., Any], arguments: Arguments) -> list[Tensor]:
    result = function(*arguments)
    return _tensors(result) + _tensors([arguments[index] for index in suite.mutates])


def _leaves(suite: Suite, arguments: Sequence[Any]) -> list[Tensor]:
    return [
        tensor.requires_grad_()
        for index in suite.differentiable
        for tensor in _flat(arguments[index])
    ]


def _gradients(suite: Suite, function: Callable[..., Any], arguments: Arguments) -> list[Tensor]:
    leaves = _leaves(suite, arguments)
    outputs = [out for out in _tensors(function(*arguments)) if out.requires_grad]
    generator = torch.Generator().manual_seed(11)
    weights = [
        torch.randn(out.shape, generator=generator, dtype=torch.float32).to(torch.bfloat16)
        for out in outputs
    ]
    upstream = [w.to(out.device, out.dtype) for w, out in zip(weights, outputs, strict=True)]
    return list(torch.autograd.grad(outputs, leaves, upstream))
