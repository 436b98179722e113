"""Rotary embedding: every backend against float64, gradients, complex numbers, hostile input."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_kernels import KernelArgumentError, native_status
from ds_kernels.ops import rotary as module
from ds_kernels.ops.rotary import rotary, rotary_, rotary_angles
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
    shape: tuple[int, ...] = (2, 7, 3, 20),
    turned: int | None = None,
    dtype: torch.dtype = torch.float32,
    *,
    interleaved: bool = False,
    inverse: bool = False,
    positions: str = "none",
    kv_heads: int | None = 2,
) -> Case:
    def make(generator: torch.Generator) -> tuple[Any, ...]:
        *batch, heads, dim = shape
        query = torch.randn(*batch, heads, dim, generator=generator).to(dtype)
        key = None
        if kv_heads is not None:
            key = torch.randn(*batch, kv_heads, dim, generator=generator).to(dtype)
        cosine, sine = rotary_angles(50, dim if turned is None else turned)
        sizes = {"none": None, "each": batch, "sequence": batch[-1:]}[positions]
        at = None if sizes is None else torch.randint(0, 50, tuple(sizes), generator=generator)
        return query, key, cosine, sine, at, interleaved, inverse

    kind = f"{str(dtype).removeprefix('torch.')}-{positions}-{kv_heads}"
    flags = ("neighbours" if interleaved else "halves") + ("-inverse" if inverse else "")
    return Case(f"{'x'.join(map(str, shape))}-{turned}-{kind}-{flags}", make)


CASES = (
    *(
        _case(turned=turned, dtype=dtype, interleaved=interleaved, positions=positions)
        for dtype, interleaved, (turned, positions) in itertools.product(
            FLOATS, (False, True), ((None, "none"), (6, "each"), (18, "sequence"))
        )
    ),
    *(
        _case(shape, interleaved=interleaved, inverse=inverse)
        for shape in ((1, 40, 4, 128), (3, 5, 34), (0, 4, 2, 8), (2, 0, 2, 8), (2, 3, 0, 8))
        for interleaved, inverse in ((False, True), (True, True))
    ),
    _case((2, 5, 3, 33), 32, torch.bfloat16, interleaved=True),
    _case((2, 5, 3, 12), 0),
    _case(kv_heads=None),
    _case((4, 3, 16), positions="each", kv_heads=None, interleaved=True),
)
SUITE = Suite(
    module._ROTARY_OP,
    CASES,
    call=lambda *arguments: module._ROTARY(*arguments),
    differentiable=(0, 1),
)
ALONE = Suite(SUITE.op, CASES, call=SUITE.call, differentiable=(0,))
BACKENDS = backends(SUITE.op)


def _suite(case: Case) -> Suite:
    return ALONE if case.arguments()[1] is None else SUITE


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_forward(case: Case, backend: Backend) -> None:
    check_forward(SUITE, case, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gradient(case: Case, backend: Backend) -> None:
    check_gradient(_suite(case), case, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_zero_stride_gradient(backend: Backend) -> None:
    check_zero_stride_gradient(ALONE, _case(kv_heads=None), backend)


def test_compiles_without_a_graph_break() -> None:
    check_compiled(SUITE, _case(positions="each"), BACKENDS[0])


def test_registered_ops_are_well_formed() -> None:
    for positions, kv_heads in (("each", 2), ("none", None)):
        arguments = _case(positions=positions, kv_heads=kv_heads).arguments()
        leaf = arguments[0].clone().requires_grad_()
        torch.library.opcheck(torch.ops.ds_kernels.rotary, (leaf, *arguments[1:]))
        torch.library.opcheck(torch.ops.ds_kernels.rotary_, arguments[:-1])


@pytest.mark.parametrize("interleaved", [False, True])
def test_is_a_product_of_complex_numbers(interleaved: bool) -> None:
    """fp32, 1e-5, against e^(i angle) in complex128, worked out from the definition."""
    query = torch.randn(2, 9, 3, 16)
    cosine, sine = rotary_angles(9, 16)
    parts = query.double()
    pairs = parts.unflatten(-1, (8, 2)) if interleaved else parts.unflatten(-1, (2, 8)).mT
    angle = torch.arange(9.0).double()[:, None] * 10_000.0 ** -(torch.arange(8).double() / 8)
    turned = torch.view_as_complex(pairs.contiguous()) * torch.polar(
        torch.ones_like(angle), angle
    ).unsqueeze(1)
    expected = torch.view_as_real(turned)
    expected = expected.flatten(-2) if interleaved else expected.mT.flatten(-2)
    found, none = rotary(query, None, cosine, sine, interleaved=interleaved)
    assert none is None
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("interleaved", [False, True])
def test_in_place_equals_the_copy(backend: Backend, interleaved: bool) -> None:
    for dtype in FLOATS:
        query, key, cosine, sine, at, *_ = _case(
            turned=10, dtype=dtype, positions="each"
        ).arguments()
        expected = rotary(query, key, cosine, sine, at, interleaved=interleaved)
        with module._ROTARY_IN_PLACE.op.forced(backend):
            rotary_(query, key, cosine, sine, at, interleaved=interleaved)
        tolerance = 0 if backend != "reference" else torch.finfo(dtype).eps
        for left, right in zip((query, key), expected, strict=True):
            torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance)


def test_scores_depend_on_the_distance_only() -> None:
    """What the embedding is for (Su et al. 2021, section 3.1); fp32, 1e-4."""
    query, key = torch.randn(1, 1, 32).expand(40, 1, 32), torch.randn(1, 1, 32).expand(40, 1, 32)
    q, k = rotary(query, key, *rotary_angles(40, 32))
    scores = q[:, 0] @ k[:, 0].T
    torch.testing.assert_close(scores[1:, 1:], scores[:-1, :-1], rtol=1e-4, atol=1e-4)


def test_second_derivative() -> None:
    """A rotation is linear: the derivative of its gradient is the rotation itself; fp32, 1e-6."""
    query = torch.randn(5, 2, 8, requires_grad=True)
    angles = rotary_angles(5, 8)
    grad = torch.randn(5, 2, 8, requires_grad=True)
    (first,) = torch.autograd.grad(rotary(query, None, *angles)[0], query, grad, create_graph=True)
    weight = torch.randn(5, 2, 8)
    (second,) = torch.autograd.grad(first, grad, weight)
    torch.testing.assert_close(second, rotary(weight, None, *angles)[0], rtol=1e-6, atol=1e-6)


def test_only_the_key_is_used() -> None:
    query, key = torch.randn(4, 2, 8, requires_grad=True), torch.randn(4, 1, 8, requires_grad=True)
    rotary(query, key, *rotary_angles(4, 8))[1].sum().backward()
    ones = torch.ones(4, 1, 8)
    cosine, sine = rotary_angles(4, 8)
    assert torch.equal(key.grad, rotary(ones, None, cosine, -sine)[0])
    assert query.grad is None or not query.grad.any()


def test_non_contiguous_input() -> None:
    base = torch.randn(2, 3, 9, 16).transpose(1, 2)  # heads and tokens the other way round
    angles = rotary_angles(9, 16)
    expected = rotary(base.contiguous(), None, *angles)[0]
    assert torch.equal(rotary(base, None, *angles)[0], expected)


@needs_native
def test_non_contiguous_in_place_is_refused() -> None:
    base = torch.randn(2, 3, 9, 16).transpose(1, 2)
    with pytest.raises(KernelArgumentError, match="^query: is not contiguous"):
        rotary_(base, None, *rotary_angles(9, 16))


@needs_native
@pytest.mark.parametrize(
    ("text", "change"),
    [
        ("query: is float64", {"query": torch.ones(4, 2, 8).double()}),
        ("query: has shape .4, 8.", {"query": torch.ones(4, 8), "key": None}),
        ("key: has shape .4, 1, 6.", {"key": torch.ones(4, 1, 6)}),
        ("key: is float16", {"key": torch.ones(4, 1, 8).half()}),
        ("cosine: turns 10 elements", {"cosine": torch.ones(4, 5), "sine": torch.ones(4, 5)}),
        ("cosine: has 3 rows", {"cosine": torch.ones(3, 4), "sine": torch.ones(3, 4)}),
        ("sine: has shape", {"sine": torch.ones(5, 4)}),
        ("sine: is float16", {"sine": torch.ones(4, 4).half()}),
        ("positions: holds 4 at place 1", {"positions": torch.tensor([0, 4, 0, 0])}),
        ("positions: holds -1", {"positions": torch.tensor([0, 0, 0, -1])}),
        ("positions: has shape .3.", {"positions": torch.zeros(3, dtype=torch.int64)}),
        ("positions: is int32", {"positions": torch.zeros(4, dtype=torch.int32)}),
    ],
)
def test_bad_arguments_are_named(text: str, change: dict[str, Tensor | None]) -> None:
    given: dict[str, Any] = {
        "query": torch.ones(4, 2, 8), "key": torch.ones(4, 1, 8), "cosine": torch.ones(4, 4),
        "sine": torch.ones(4, 4), "positions": None, **change,
    }  # fmt: skip
    with pytest.raises(KernelArgumentError, match=f"^{text}"), SUITE.op.forced("cpu"):
        rotary(**given)
