"""Bias and activation: every backend against float64, gradients, compilation, hostile input."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from ds_kernels import KernelArgumentError, native_status
from ds_kernels.ops import bias_activation as module
from ds_kernels.ops.bias_activation import ACTIVATIONS, bias_activation
from ds_kernels.registry import Backend
from ds_kernels.testing import (
    Case,
    Suite,
    backends,
    check_compiled,
    check_forward,
    check_gradient,
    check_zero_stride_gradient,
)

needs_native = pytest.mark.skipif(
    not native_status().available, reason=native_status().reason or "native module present"
)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def _case(
    shape: tuple[int, ...],
    activation: str,
    dtype: torch.dtype = torch.float32,
    bias: torch.dtype | None = None,
    scale: float = 2.0,
    speed: bool = False,
) -> Case:
    def make(generator: torch.Generator) -> tuple[Any, ...]:
        x = (scale * torch.randn(shape, generator=generator)).to(dtype)
        vector = torch.randn(shape[-1], generator=generator).to(bias) if bias else None
        return x, vector, activation

    kinds = f"{str(dtype).removeprefix('torch.')}-{str(bias).removeprefix('torch.')}"
    return Case(f"{'x'.join(map(str, shape))}-{activation}-{kinds}-{scale}", make, speed)


CASES = (
    *(
        _case((5, 333), activation, dtype, bias)
        for activation, dtype in itertools.product(ACTIVATIONS, FLOATS)
        for bias in (None, dtype)
    ),
    *(_case((7, 65), activation, torch.float16, torch.float32) for activation in ACTIVATIONS),
    *(
        _case(shape, "gelu", torch.float32, torch.float32)
        for shape in ((0, 5), (5, 0), (3000, 1), (300, 7), (2, 3, 512), (3, 2501))
    ),
    _case((150, 513), "silu", torch.bfloat16, torch.bfloat16),
    _case((0,), "silu"),
    _case((70_000,), "gelu_tanh"),
    *(_case((40, 100), activation, scale=12.0) for activation in ACTIVATIONS),
)
SUITE = Suite(
    module._FORWARD_OP,
    CASES,
    call=lambda x, bias, activation: bias_activation(x, bias, activation=activation),
    differentiable=(0,),
    others=(module._BACKWARD_OP,),
)
WITH_BIAS = Suite(
    SUITE.op, CASES, call=SUITE.call, differentiable=(0, 1), others=(module._BACKWARD_OP,)
)


@pytest.mark.parametrize("backend", backends(SUITE.op))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_forward(case: Case, backend: Backend) -> None:
    check_forward(SUITE, case, backend)


@pytest.mark.parametrize("backend", backends(SUITE.op))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gradient(case: Case, backend: Backend) -> None:
    suite = SUITE if case.arguments()[1] is None else WITH_BIAS
    check_gradient(suite, case, backend)


@pytest.mark.parametrize("backend", backends(SUITE.op))
def test_zero_stride_gradient(backend: Backend) -> None:
    check_zero_stride_gradient(WITH_BIAS, _case((9, 40), "gelu", bias=torch.float32), backend)


def test_compiles_without_a_graph_break() -> None:
    for bias in (None, torch.float32):
        check_compiled(SUITE, _case((9, 40), "silu", bias=bias), backends(SUITE.op)[0])


def test_compiled_gradient_equals_eager() -> None:
    x, bias, _ = _case((9, 40), "gelu", bias=torch.float32).arguments()
    grads = []
    for function in (
        bias_activation,
        torch.compile(bias_activation, fullgraph=True, backend="aot_eager"),
    ):
        leaves = x.clone().requires_grad_(), bias.clone().requires_grad_()
        function(*leaves, activation="gelu").square().sum().backward()
        grads.append([leaf.grad for leaf in leaves])
    for left, right in zip(*grads, strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("with_bias", [False, True])
def test_registered_ops_are_well_formed(with_bias: bool) -> None:
    x = torch.randn(4, 6, requires_grad=True)
    bias = torch.randn(6, requires_grad=True) if with_bias else None
    torch.library.opcheck(torch.ops.ds_kernels.bias_activation, (x, bias, "gelu"))
    torch.library.opcheck(
        torch.ops.ds_kernels.bias_activation_backward,
        (torch.randn(4, 6), x.detach(), None if bias is None else bias.detach(), "gelu", with_bias),
    )


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_nan_infinities_and_far_values(activation: str, dtype: torch.dtype) -> None:
    """Far out the activation is x or 0 and its slope 1 or 0, exactly; NaN stays where it is."""
    x = torch.tensor([0.0, float("nan"), 60000.0, -60000.0, float("inf")]).to(dtype)
    x.requires_grad_()
    y = bias_activation(x, activation=activation)
    (slope,) = torch.autograd.grad(y, x, torch.ones_like(y))
    y = y.detach()
    assert y.isnan().tolist() == [False, True, False, False, False]
    assert y[[0, 2, 3, 4]].tolist() == [0.0, x[2].item(), 0.0, float("inf")]
    assert slope[2:4].tolist() == [1.0, 0.0]


def test_non_contiguous_and_expanded_input() -> None:
    x = torch.randn(12, 20).t()
    bias = torch.randn(1).expand(12)
    exact = torch.nn.functional.silu(x.double() + bias.double())
    torch.testing.assert_close(
        bias_activation(x, bias, activation="silu").double(), exact, rtol=1e-6, atol=1e-6
    )
    rows = torch.randn(1, 12).expand(5, 12)
    torch.testing.assert_close(
        bias_activation(rows, activation="silu"),
        torch.nn.functional.silu(rows),
        rtol=1e-6,
        atol=1e-6,
    )


@pytest.mark.parametrize("shape", [(1,), (1, 1), (1, 9), (9, 1), (2, 1025)])
def test_few_elements(shape: tuple[int, ...]) -> None:
    """fp32, 1e-6, both directions, against torch in float64."""
    x, bias = torch.randn(shape, requires_grad=True), torch.randn(shape[-1], requires_grad=True)
    y = bias_activation(x, bias)
    exact = torch.nn.functional.gelu(x.double() + bias.double())
    torch.testing.assert_close(y.double(), exact, rtol=1e-6, atol=1e-6)
    found = torch.autograd.grad(y, (x, bias), torch.ones_like(y))
    expected = torch.autograd.grad(exact, (x, bias), torch.ones_like(exact))
    for left, right in zip(found, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-6, atol=2e-6)


@needs_native
def test_threads_give_the_same_bits() -> None:
    x = torch.randn(400, 513)
    bias, grad = torch.randn(513), torch.randn(400, 513)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            leaves = x.clone().requires_grad_(), bias.clone().requires_grad_()
            y = bias_activation(*leaves)
            found.append((y.detach(), *torch.autograd.grad(y, leaves, grad)))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        for left, right in zip(other, found[0], strict=True):
            assert torch.equal(left, right)


def test_second_derivative_is_refused() -> None:
    x = torch.randn(3, requires_grad=True)
    (grad,) = torch.autograd.grad(bias_activation(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="bias_activation_backward cannot be differentiated"):
        grad.sum().backward()


@needs_native
@pytest.mark.parametrize(
    ("text", "x", "bias"),
    [
        ("x: is float64", torch.ones(3).double(), None),
        ("x: is int64", torch.ones(3).long(), None),
        ("bias: has shape .4., expected .3.", torch.ones(2, 3), torch.ones(4)),
        ("bias: has shape .1, 3.", torch.ones(2, 3), torch.ones(1, 3)),
        ("bias: is float16", torch.ones(2, 3), torch.ones(3).half()),
        ("x: has no dimension", torch.tensor(1.0), torch.ones(1)),
    ],
)
def test_bad_tensors_are_named(text: str, x: torch.Tensor, bias: torch.Tensor | None) -> None:
    with pytest.raises(KernelArgumentError, match=f"^{text}"), SUITE.op.forced("cpu"):
        bias_activation(x, bias)


def test_unknown_activation_is_named() -> None:
    with pytest.raises(KernelArgumentError, match="^activation: is 'swish', allowed are gelu"):
        bias_activation(torch.ones(3), activation="swish")  # type: ignore[arg-type]
