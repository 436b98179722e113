"""Random layer-token drop: backends against torch's indexing, gradients, hostile indices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ds_kernels import KernelArgumentError, native_status
from ds_kernels.ops import random_ltd as module
from ds_kernels.ops.random_ltd import token_gather, token_scatter, token_sort
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


def _sampled(batch: int, length: int, kept: int, generator: torch.Generator) -> Tensor:
    rows = [torch.randperm(length, generator=generator)[:kept] for _ in range(batch)]
    return torch.stack(rows) if rows else torch.zeros(0, kept, dtype=torch.int64)


SHAPES = {
    "plain": (3, 12, 5, 17),
    "one-token": (2, 9, 1, 4),
    "all-tokens": (2, 6, 6, 3),
    "no-tokens": (2, 6, 0, 3),
    "no-batch": (0, 6, 2, 3),
    "no-width": (2, 6, 2, 0),
    "long": (2, 700, 300, 65),
}


def _gather_case(name: str, dtype: torch.dtype = torch.float32) -> Case:
    batch, length, kept, width = SHAPES[name]

    def make(generator: torch.Generator) -> tuple[Any, ...]:
        x = torch.randn(batch, length, width, generator=generator).to(dtype)
        return x, _sampled(batch, length, kept, generator).sort(-1).values

    return Case(f"{name}-{str(dtype)[6:]}", make, speed=name == "long")


def _scatter_case(name: str, dtype: torch.dtype = torch.float32) -> Case:
    batch, length, kept, width = SHAPES[name]

    def make(generator: torch.Generator) -> tuple[Any, ...]:
        x, rows = (
            torch.randn(batch, n, width, generator=generator).to(dtype) for n in (length, kept)
        )
        return _sampled(batch, length, kept, generator).sort(-1).values, x, rows, length

    return Case(f"{name}-{str(dtype)[6:]}", make)


_NARROW = (torch.bfloat16, torch.float16)
GATHER = Suite(
    module._GATHER.op,
    (*map(_gather_case, SHAPES), *(_gather_case("plain", dtype) for dtype in _NARROW)),
    call=token_gather,
    differentiable=(0,),
    others=(module._SPREAD.op,),
)
SCATTER = Suite(
    module._SPREAD.op,
    (*map(_scatter_case, SHAPES), *(_scatter_case("plain", dtype) for dtype in _NARROW)),
    call=lambda indices, x, rows, length: token_scatter(x, rows, indices),
    differentiable=(1, 2),
    others=(module._GATHER.op,),
)
BOTH = [(suite, case) for suite in (GATHER, SCATTER) for case in suite.cases]


def _name(value: object) -> str:
    return value.name if isinstance(value, Case) else getattr(value, "op", value).name


@pytest.mark.parametrize("backend", backends(module._GATHER.op))
@pytest.mark.parametrize(("suite", "case"), BOTH, ids=_name)
def test_forward(suite: Suite, case: Case, backend: Backend) -> None:
    check_forward(suite, case, backend)


@pytest.mark.parametrize("backend", backends(module._GATHER.op))
@pytest.mark.parametrize(
    ("suite", "case"),
    [pair for pair in BOTH if pair[1].name.startswith(("pl", "on", "al"))],
    ids=_name,
)
def test_gradient(suite: Suite, case: Case, backend: Backend) -> None:
    check_gradient(suite, case, backend)


@pytest.mark.parametrize("backend", backends(module._GATHER.op))
@pytest.mark.parametrize("suite", [GATHER, SCATTER], ids=_name)
def test_zero_stride_gradient(suite: Suite, backend: Backend) -> None:
    check_zero_stride_gradient(suite, suite.cases[0], backend)


@pytest.mark.parametrize("suite", [GATHER, SCATTER], ids=_name)
def test_compiles(suite: Suite) -> None:
    check_compiled(suite, suite.cases[0])


def test_opcheck() -> None:
    ops = torch.ops.ds_kernels
    x, indices = GATHER.cases[0].arguments()
    torch.library.opcheck(ops.token_gather, (x.requires_grad_(), indices))
    where, x, rows, length = SCATTER.cases[0].arguments()
    torch.library.opcheck(
        ops.token_spread, (where, x.requires_grad_(), rows.requires_grad_(), length)
    )
    torch.library.opcheck(ops.token_sort, (indices, 12))


@pytest.mark.parametrize("backend", backends(module._SORT.op))
@pytest.mark.parametrize(
    ("rows", "length", "kept"), [(1, 1, 1), (5, 1000, 300), (3, 7, 0), (0, 4, 2)]
)
def test_sort(rows: int, length: int, kept: int, backend: Backend) -> None:
    indices = _sampled(rows, length, kept, torch.Generator().manual_seed(3))
    got = module._SORT.op.on(backend)(indices, length)
    assert torch.equal(got, indices.sort(-1).values)


@pytest.mark.parametrize("backend", backends(module._SORT.op))
def test_sort_keeps_equal_indices(backend: Backend) -> None:
    indices = torch.tensor([[4, 1, 4, 0, 1]])
    assert module._SORT.op.on(backend)(indices, 5).tolist() == [[0, 1, 1, 4, 4]]


def test_tokens_that_were_left_out_pass_unchanged() -> None:
    """A layer on the kept tokens alone, and its gradient, against indexing in plain torch."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(2, 10, 4, generator=generator)
    indices = token_sort(_sampled(2, 10, 6, generator), 10)
    results = []
    for ours in (True, False):
        leaf = x.clone().requires_grad_()
        if ours:
            out = token_scatter(leaf, token_gather(leaf, indices).tanh(), indices)
        else:
            out = leaf.clone()
            for b in range(2):
                out[b, indices[b]] = leaf[b, indices[b]].tanh()
        (out.square().sum()).backward()
        results.append((out.detach(), leaf.grad))
    (out, grad), (wanted, wanted_grad) = results
    assert torch.equal(out, wanted)
    assert torch.equal(grad, wanted_grad)


def test_nan_is_only_moved() -> None:
    x = torch.zeros(1, 3, 2)
    x[0, 1] = float("nan")
    assert token_gather(x, torch.tensor([[0, 2]])).isfinite().all()
    out = token_scatter(x, torch.ones(1, 1, 2), torch.tensor([[1]]))
    assert torch.equal(out, torch.tensor([[[0.0, 0], [1, 1], [0, 0]]]))


def test_non_contiguous_inputs() -> None:
    x = torch.randn(12, 3, 17).transpose(0, 1)
    indices = torch.tensor([[0, 3], [1, 2], [4, 11]])
    assert torch.equal(token_gather(x, indices), token_gather(x.contiguous(), indices))


@needs_native
@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        (0, lambda t: t.double(), "x"),
        (0, lambda t: t[0], "x"),
        (0, lambda t: t[:2], "indices"),
        (1, lambda t: t.int(), "indices"),
        (1, lambda t: t.flip(-1), "indices: must rise"),
        (1, lambda t: t[:, :1].expand(-1, 2).contiguous(), "indices: must rise"),
        (1, lambda t: t + 12, "indices: holds"),
        (1, lambda t: t - 12, "indices: holds"),
        (1, lambda t: t.T, "indices"),
        (1, lambda t: t[0], "indices"),
    ],
)
def test_bad_gather_arguments_are_named(index: int, change: Any, message: str) -> None:
    arguments = list(GATHER.cases[0].arguments())
    arguments[index] = change(arguments[index])
    with pytest.raises(KernelArgumentError, match=message):
        module._GATHER.op.on("cpu")(*arguments)


@needs_native
@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        (1, lambda t: t.double(), "out"),
        (1, lambda t: t[0], "out"),
        (2, lambda t: t.half(), "rows"),
        (2, lambda t: t[:, :2], "rows"),
        (2, lambda t: t[..., :2], "rows"),
        (0, lambda t: t + 12, "indices: holds"),
        (0, lambda t: t.flip(-1), "indices: must rise"),
    ],
)
def test_bad_scatter_arguments_are_named(index: int, change: Any, message: str) -> None:
    arguments = list(SCATTER.cases[0].arguments())
    arguments[index] = change(arguments[index])
    with pytest.raises(KernelArgumentError, match=message):
        module._SPREAD.op.on("cpu")(*arguments)


@needs_native
def test_sort_refuses_what_is_out_of_range() -> None:
    with pytest.raises(KernelArgumentError, match="indices: holds 5 at place 1"):
        token_sort(torch.tensor([[0, 5]]), 5)
    with pytest.raises(KernelArgumentError, match="indices"):
        token_sort(torch.tensor([[0.0, 5.0]]), 5)
