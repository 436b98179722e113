"""Grouped matmul: backends and gradients against float64, a loop of products, hostile bounds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ds_kernels import KernelArgumentError, native_status
from ds_kernels.ops import grouped_matmul as module
from ds_kernels.ops.grouped_matmul import grouped_matmul
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


def _case(
    name: str,
    sizes: list[int],
    depth: int = 24,
    columns: int = 40,
    *,
    transposed: bool = False,
    dtype: torch.dtype = torch.float32,
    speed: bool = False,
) -> Case:
    def make(generator: torch.Generator) -> tuple[Any, ...]:
        shape = (len(sizes), columns, depth) if transposed else (len(sizes), depth, columns)
        x = torch.randn(sum(sizes), depth, generator=generator).to(dtype)
        weight = torch.randn(shape, generator=generator).to(dtype)
        return x, weight, torch.tensor([0, *sizes]).cumsum(0), transposed

    return Case(name, make, speed)


CASES = (
    _case("uneven", [5, 0, 130, 1, 7]),
    _case("uneven-transposed", [5, 0, 130, 1, 7], transposed=True),
    _case("odd", [3, 101], 13, 67),
    _case("odd-transposed", [3, 101], 13, 67, transposed=True),
    _case("deep", [40, 100], 600, 70, speed=True),
    _case("deep-transposed", [40, 100], 600, 70, transposed=True, speed=True),
    _case("bf16", [5, 60], 300, 40, dtype=torch.bfloat16),
    _case("bf16-transposed", [5, 60], 300, 40, dtype=torch.bfloat16, transposed=True),
    _case("fp16", [5, 60], dtype=torch.float16),
    _case("one-by-one", [1], 1, 1),
    _case("all-empty", [0, 0, 0]),
    _case("no-groups", []),
    _case("no-columns", [3, 2], 4, 0),
    _case("no-depth", [3, 2], 0, 4),
)
SUITE = Suite(
    module._FORWARD.op,
    CASES,
    call=lambda x, w, b, t: grouped_matmul(x, w, b, transposed=t),
    differentiable=(0, 1),
    others=(module._WEIGHT.op,),
)


@pytest.mark.parametrize("backend", backends(module._FORWARD.op))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_forward(case: Case, backend: Backend) -> None:
    check_forward(SUITE, case, backend)


@pytest.mark.parametrize("backend", backends(module._FORWARD.op))
@pytest.mark.parametrize(
    "case", [c for c in CASES if c.name != "no-groups"], ids=lambda case: case.name
)
def test_gradient(case: Case, backend: Backend) -> None:
    check_gradient(SUITE, case, backend)


@pytest.mark.parametrize("backend", backends(module._FORWARD.op))
@pytest.mark.parametrize("case", CASES[:2], ids=lambda case: case.name)
def test_zero_stride_gradient(case: Case, backend: Backend) -> None:
    check_zero_stride_gradient(SUITE, case, backend)


def test_compiles() -> None:
    check_compiled(SUITE, CASES[0])


@pytest.mark.parametrize("case", CASES[:2], ids=lambda case: case.name)
def test_opcheck(case: Case) -> None:
    x, weight, *rest = case.arguments()
    arguments = (x.requires_grad_(), weight.requires_grad_(), *rest)
    torch.library.opcheck(torch.ops.ds_kernels.grouped_matmul, arguments)


@pytest.mark.parametrize("wanted", [(True, False), (False, True)])
def test_only_the_wanted_gradient(wanted: tuple[bool, bool]) -> None:
    x, weight, bounds, _ = CASES[0].arguments()
    x.requires_grad_(wanted[0])
    weight.requires_grad_(wanted[1])
    grouped_matmul(x, weight, bounds).sum().backward()
    assert (x.grad is not None, weight.grad is not None) == wanted


def test_nan_stays_in_its_group() -> None:
    x, weight, bounds, _ = CASES[0].arguments()
    clean = grouped_matmul(x, weight, bounds)
    weight[0, 3, 5] = float("nan")
    got = grouped_matmul(x, weight, bounds)
    assert got[:5, 5].isnan().all()
    assert torch.equal(got[5:], clean[5:])


@needs_native
@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        (0, lambda t: t.double(), "x"),
        (0, lambda t: t[:, :8], "x"),
        (0, lambda t: t[:-1], "bounds: must rise from 0 to the number of rows"),
        (1, lambda t: t.half(), "weight"),
        (1, lambda t: t[:-1], "weight"),
        (1, lambda t: t.mT, "weight"),
        (1, lambda t: t[0], "weight"),
        (2, lambda t: t.int(), "bounds"),
        (2, lambda t: t.flip(0), "bounds"),
        (2, lambda t: t - 1, "bounds"),
        (2, lambda t: t[:0], "bounds"),
    ],
)
def test_bad_arguments_are_named(index: int, change: Any, message: str) -> None:
    arguments = list(CASES[0].arguments())
    arguments[index] = change(arguments[index])
    with pytest.raises(KernelArgumentError, match=message):
        module._FORWARD.op.on("cpu")(*arguments)
