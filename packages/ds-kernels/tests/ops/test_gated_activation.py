"""Gated activations: every backend against float64, gradients, compilation, hostile input."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ds_kernels import KernelArgumentError, native_status
from ds_kernels.ops import gated_activation as module
from ds_kernels.ops.bias_activation import ACTIVATIONS
from ds_kernels.ops.gated_activation import gated_activation
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
    activation: str = "silu",
    dtype: torch.dtype = torch.float32,
    *,
    together: bool = False,
    scale: float = 2.0,
) -> Case:
    def make(generator: torch.Generator) -> tuple[Any, ...]:
        gate, up = ((scale * torch.randn(shape, generator=generator)).to(dtype) for _ in range(2))
        return (torch.cat([gate, up], -1), None, activation) if together else (gate, up, activation)

    kind = f"{str(dtype).removeprefix('torch.')}-{'one' if together else 'two'}-{scale}"
    return Case(f"{'x'.join(map(str, shape))}-{activation}-{kind}", make)


CASES = (
    *(
        _case((5, 333), activation, dtype, together=together)
        for activation, dtype in itertools.product(ACTIVATIONS, FLOATS)
        for together in (False, True)
    ),
    *(
        _case(shape, together=together)
        for shape in ((0, 6), (6, 0), (900, 1), (2, 3, 512), (3, 2501), (1,))
        for together in (False, True)
    ),
    _case((70_001,), "gelu_tanh", torch.bfloat16),
    *(_case((40, 100), activation, scale=12.0) for activation in ACTIVATIONS),
)
SUITE = Suite(
    module._FORWARD_OP,
    CASES,
    call=lambda gate, up, activation: gated_activation(gate, up, activation=activation),
    differentiable=(0, 1),
    others=(module._BACKWARD_OP,),
)
BACKENDS = backends(SUITE.op)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_forward(case: Case, backend: Backend) -> None:
    check_forward(SUITE, case, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gradient(case: Case, backend: Backend) -> None:
    check_gradient(SUITE, case, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("together", [False, True])
def test_zero_stride_gradient(backend: Backend, together: bool) -> None:
    check_zero_stride_gradient(SUITE, _case((9, 40), together=together), backend)


@pytest.mark.parametrize("together", [False, True])
def test_compiles_without_a_graph_break(together: bool) -> None:
    check_compiled(SUITE, _case((9, 40), together=together), BACKENDS[0])


@pytest.mark.parametrize("together", [False, True])
def test_registered_ops_are_well_formed(together: bool) -> None:
    gate, up, kind = _case((4, 6), together=together).arguments()
    leaf = gate.clone().requires_grad_()
    torch.library.opcheck(torch.ops.ds_kernels.gated_activation, (leaf, up, kind))
    torch.library.opcheck(
        torch.ops.ds_kernels.gated_activation_backward, (torch.randn(4, 6), gate, up, kind)
    )


def test_only_one_side_gets_a_gradient() -> None:
    """fp32, 1e-6: the gradient of ``up`` is the activation of ``gate``."""
    gate, up = torch.randn(4, 5), torch.randn(4, 5, requires_grad=True)
    gated_activation(gate, up).sum().backward()
    torch.testing.assert_close(up.grad, F.silu(gate), rtol=1e-6, atol=1e-6)
    gate.requires_grad_()
    gated_activation(gate, up.detach(), activation="relu").sum().backward()
    assert torch.equal(gate.grad, up.detach() * (gate > 0))


def test_non_contiguous_input() -> None:
    """fp32, 1e-6."""
    base = torch.randn(12, 20)
    for x in (base.t(), base[:, ::2], base[:1].expand(7, 20), base[1:, 2:]):
        left, right = x.chunk(2, -1)
        expected = F.silu(left) * right
        for found in (gated_activation(x), gated_activation(left, right)):
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", FLOATS)
def test_nan_and_infinity_stay_where_they_are(dtype: torch.dtype) -> None:
    gate = torch.tensor([1.0, float("nan"), 2.0, 60000.0, 1.0]).to(dtype)
    up = torch.tensor([1.0, 2.0, float("inf"), 2.0, float("nan")]).to(dtype)
    out = gated_activation(gate, up)
    assert out.isnan().tolist() == [False, True, False, False, True]
    assert out[2] == float("inf")
    assert out[0] == F.silu(gate[:1].float()).to(dtype)[0]


@needs_native
def test_threads_give_the_same_bits() -> None:
    given = torch.randn(301, 514)
    grad = torch.randn(301, 257)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            x = given.clone().requires_grad_()
            out = gated_activation(x, activation="gelu")
            out.backward(grad)
            found.append((out.detach(), x.grad))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, found[0], strict=True))


@needs_native
@pytest.mark.parametrize(
    ("text", "gate", "up"),
    [
        ("gate: is float64", torch.ones(4).double(), None),
        ("gate: has shape .2, 3., its last dimension must be even", torch.ones(2, 3), None),
        ("gate: has shape ..", torch.tensor(1.0), None),
        ("up: has shape .3, 2.", torch.ones(2, 3), torch.ones(3, 2)),
        ("up: is float16 but gate is float32", torch.ones(2), torch.ones(2).half()),
    ],
)
def test_bad_tensors_are_named(text: str, gate: Tensor, up: Tensor | None) -> None:
    with pytest.raises(KernelArgumentError, match=f"^{text}"), SUITE.op.forced("cpu"):
        gated_activation(gate, up)


def test_unknown_activation_is_named() -> None:
    with pytest.raises(KernelArgumentError, match="^activation: is 'swish'"):
        gated_activation(torch.ones(4), activation="swish")  # type: ignore[arg-type]
