"""RMS norm: every backend against float64, gradients, compilation, hostile input."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ds_kernels import KernelArgumentError, native_status
from ds_kernels.ops import rms_norm as module
from ds_kernels.ops.rms_norm import add_rms_norm, rms_norm
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
    dtype: torch.dtype = torch.float32,
    weight: torch.dtype | None = torch.float32,
    *,
    residual: bool = False,
    mean: float = 0.3,
) -> Case:
    def make(generator: torch.Generator) -> tuple[Any, ...]:
        def normal(*sizes: int) -> Tensor:
            return torch.randn(*sizes, generator=generator)

        x = (normal(*shape) + mean).to(dtype)
        other = normal(*shape).to(dtype) if residual else None
        return x, other, None if weight is None else normal(shape[-1]).to(weight), 1e-6

    kinds = f"{str(dtype).removeprefix('torch.')}-{str(weight).removeprefix('torch.')}"
    name = f"{'x'.join(map(str, shape))}-{kinds}-{'residual' if residual else 'alone'}-{mean}"
    return Case(name, make)


CASES = (
    *(
        _case((37, 123), dtype, weight, residual=residual)
        for dtype, residual in itertools.product(FLOATS, (False, True))
        for weight in {None, torch.float32, dtype}
    ),
    *(
        _case(shape, dtype)
        for shape in ((4, 3, 64), (300, 8), (64, 7), (24, 4096), (12, 9001), (70, 1024), (129, 128))
        for dtype in (torch.float32, torch.bfloat16)
    ),
    *(_case(shape) for shape in ((0, 5), (200,))),
    *(_case((50, 1000), mean=mean) for mean in (100.0, -10_000.0)),
)


def _call(x: Tensor, residual: Tensor | None, weight: Any, eps: float) -> Any:  # noqa: ANN401
    if residual is None:
        return rms_norm(x, weight, eps=eps)
    return add_rms_norm(x, residual, weight, eps=eps)


SUITE = Suite(
    module._FORWARD_OP,
    CASES,
    call=_call,
    differentiable=(0, 1, 2),
    others=(module._BACKWARD_OP,),
    statistics=(-1,),
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
@pytest.mark.parametrize("residual", [False, True])
def test_zero_stride_gradient(backend: Backend, residual: bool) -> None:
    check_zero_stride_gradient(SUITE, _case((9, 40), residual=residual), backend)


@pytest.mark.parametrize("residual", [False, True])
def test_compiles_without_a_graph_break(residual: bool) -> None:
    check_compiled(SUITE, _case((9, 40), residual=residual), BACKENDS[0])


@pytest.mark.parametrize("residual", [False, True])
def test_compiled_gradient_equals_eager(residual: bool) -> None:
    arguments = _case((9, 40), residual=residual).arguments()

    def loss(*tensors: Any) -> Tensor:  # noqa: ANN401
        outputs = _call(*tensors)
        return sum(out.square().sum() for out in (outputs if residual else (outputs,)))

    grads = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        given = [a.clone().requires_grad_() if isinstance(a, Tensor) else a for a in arguments]
        function(*given).backward()
        grads.append([a.grad for a in given if isinstance(a, Tensor)])
    for left, right in zip(*grads, strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("residual", [False, True])
def test_registered_ops_are_well_formed(residual: bool) -> None:
    given = [
        a.requires_grad_() if isinstance(a, Tensor) else a
        for a in _case((4, 6), residual=residual).arguments()
    ]
    torch.library.opcheck(torch.ops.ds_kernels.rms_norm, tuple(given))
    s, rstd = torch.randn(4, 6), torch.ones(4)
    weight = torch.randn(6)
    other = torch.randn(4, 6) if residual else None
    torch.library.opcheck(
        torch.ops.ds_kernels.rms_norm_backward,
        (torch.randn(4, 6), other, s, weight, rstd, residual),
    )


def test_only_the_sum_gets_a_gradient() -> None:
    x, residual = torch.randn(3, 8, requires_grad=True), torch.randn(3, 8, requires_grad=True)
    add_rms_norm(x, residual)[1].mul(2).sum().backward()
    assert torch.equal(x.grad, torch.full((3, 8), 2.0))
    assert torch.equal(residual.grad, torch.full((3, 8), 2.0))


def test_equals_torch() -> None:
    """fp32, 2e-6."""
    x, weight = torch.randn(33, 200), torch.randn(200)
    torch.testing.assert_close(
        rms_norm(x, weight, eps=1e-5), F.rms_norm(x, (200,), weight, 1e-5), rtol=2e-6, atol=2e-6
    )


def test_one_column_gives_the_sign() -> None:
    x = torch.tensor([[3.0], [-0.5], [0.0]])
    assert torch.equal(rms_norm(x, eps=0.0)[:2], torch.tensor([[1.0], [-1.0]]))
    assert torch.equal(rms_norm(x)[2], torch.tensor([0.0]))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_bad_value_spoils_its_row_only(bad: float, dtype: torch.dtype) -> None:
    x = torch.randn(5, 67).to(dtype)
    clean = rms_norm(x)
    x[2, 13] = bad
    out = rms_norm(x)
    assert out[2, 13].isnan()
    assert bad == float("inf") or out[2].isnan().all()  # an infinite row length gives zeros
    keep = [0, 1, 3, 4]
    assert torch.equal(out[keep], clean[keep])


def test_no_columns() -> None:
    x, weight = torch.zeros(5, 0, requires_grad=True), torch.zeros(0, requires_grad=True)
    out = rms_norm(x, weight)
    out.sum().backward()
    assert out.shape == x.grad.shape == (5, 0)
    assert weight.grad.shape == (0,)


def test_non_contiguous_input_and_gradient() -> None:
    """fp32, 2e-6, against torch."""
    base = torch.randn(12, 20)
    for x in (base.t(), base[:, ::2], base[:1].expand(7, 20)):
        leaf, other = x.clone().requires_grad_(), x.clone().requires_grad_()
        grad = torch.randn(x.shape[1], x.shape[0]).t()
        view = leaf.t().contiguous().t()
        out = rms_norm(view)
        out.backward(grad)
        expected = F.rms_norm(other, other.shape[-1:], eps=1e-6)
        expected.backward(grad)
        torch.testing.assert_close(out, expected, rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(leaf.grad, other.grad, rtol=2e-6, atol=2e-6)


@needs_native
def test_threads_give_the_same_bits() -> None:
    arguments = _case((400, 257), residual=True).arguments()
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            given = [a.clone().requires_grad_() if isinstance(a, Tensor) else a for a in arguments]
            out, total = _call(*given)
            (out.square().sum() + total.sum()).backward()
            found.append([out, total, *(a.grad for a in given if isinstance(a, Tensor))])
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        for left, right in zip(other, found[0], strict=True):
            assert torch.equal(left, right)


@needs_native
@pytest.mark.parametrize(
    ("text", "change"),
    [
        ("x: is float64", {"x": torch.ones(2, 3).double()}),
        ("x: has no dimension", {"x": torch.tensor(1.0), "residual": None}),
        ("weight: has shape .4., expected .3.", {"weight": torch.ones(4)}),
        ("weight: has shape .2, 3.", {"weight": torch.ones(2, 3)}),
        ("weight: is float16", {"weight": torch.ones(3).half()}),
        ("residual: has shape .3, 2.", {"residual": torch.ones(3, 2)}),
        ("residual: is bfloat16 but x is float32", {"residual": torch.ones(2, 3).bfloat16()}),
        ("eps: is -1.0", {"eps": -1.0}),
        ("eps: is nan", {"eps": float("nan")}),
    ],
)
def test_bad_arguments_are_named(text: str, change: dict[str, Any]) -> None:
    given: dict[str, Any] = {
        "x": torch.ones(2, 3), "residual": torch.ones(2, 3), "weight": torch.ones(3),
        "eps": 1e-5, **change,
    }  # fmt: skip
    with pytest.raises(KernelArgumentError, match=f"^{text}"), SUITE.op.forced("cpu"):
        _call(*given.values())
