"""Block-sparse attention: backends and gradients against float64, sdpa, hostile input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ds_kernels import KernelArgumentError, native_status
from ds_kernels.ops import block_sparse_attention as module
from ds_kernels.ops.block_sparse_attention import block_sparse_attention
from ds_kernels.registry import Backend
from ds_kernels.sparsity import BigBirdSparsity, FixedSparsity, LocalSparsity
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
    *,
    batch: int = 2,
    heads: int = 2,
    length: int = 96,
    dim: int = 16,
    block: int = 16,
    causal: bool = False,
    bias: bool = False,
    layout: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    speed: bool = False,
) -> Case:
    def make(generator: torch.Generator) -> tuple[Any, ...]:
        shape = (batch, heads, length, dim)
        tensors = [torch.randn(shape, generator=generator).to(dtype) for _ in range(3)]
        count = length // block
        drawn = torch.rand(heads, count, count, generator=generator) < 0.6
        key_bias = torch.randn(batch, length, generator=generator) if bias else None
        if key_bias is not None:
            key_bias[:, -length // 4 :] = float("-inf")
        given = drawn if layout is None else layout
        return (*tensors, given, block, dim**-0.5, causal, key_bias)

    return Case(name, make, speed)


CASES = (
    _case("random"),
    _case("causal", causal=True),
    _case("bias-and-padding", bias=True),
    _case("causal-bias", causal=True, bias=True),
    _case("bf16", dtype=torch.bfloat16),
    _case("fp16", dtype=torch.float16, causal=True),
    _case("odd-dim", dim=13),
    _case("dim-1", dim=1),
    _case("dim-256", dim=256, batch=1),
    _case("block-1", block=1, length=50),
    _case("block-of-all", block=96),
    _case("odd-block", block=7, length=91),
    _case("long", length=256, block=32, speed=True),
    _case("nothing-visible", layout=torch.zeros(2, 6, 6, dtype=torch.bool)),
    _case("bigbird", layout=BigBirdSparsity(num_heads=2).make_layout(96)),
    _case("fixed", layout=FixedSparsity(num_heads=2, attention="unidirectional").make_layout(96)),
    _case("local-uint8", layout=LocalSparsity(num_heads=2).make_layout(96).to(torch.uint8)),
    _case("empty-batch", batch=0),
    _case("empty-length", length=0),
)
SUITE = Suite(
    module._FORWARD.op,
    CASES,
    call=lambda *a: block_sparse_attention(*a[:5], scale=a[5], causal=a[6], key_bias=a[7]),
    differentiable=(0, 1, 2),
    others=(module._BACKWARD.op,),
)


@pytest.mark.parametrize("backend", backends(module._FORWARD.op))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_forward(case: Case, backend: Backend) -> None:
    check_forward(SUITE, case, backend)


@pytest.mark.parametrize("backend", backends(module._FORWARD.op))
@pytest.mark.parametrize(
    "case",
    [case for case in CASES if not case.name.startswith(("nothing", "empty"))],
    ids=lambda case: case.name,
)
def test_gradient(case: Case, backend: Backend) -> None:
    check_gradient(SUITE, case, backend)


@pytest.mark.parametrize("backend", backends(module._FORWARD.op))
def test_zero_stride_gradient(backend: Backend) -> None:
    check_zero_stride_gradient(SUITE, CASES[0], backend)


def test_compiles() -> None:
    check_compiled(SUITE, CASES[3])


def test_opcheck() -> None:
    arguments = CASES[3].arguments()
    for index in range(3):
        arguments[index].requires_grad_()
    torch.library.opcheck(torch.ops.ds_kernels.block_sparse_attention, arguments)


def test_equals_sdpa_with_the_expanded_mask() -> None:
    """fp32, 1e-5, values and gradients."""
    query, key, value, layout, block, *_ = CASES[0].arguments()
    mask = layout.repeat_interleave(block, 1).repeat_interleave(block, 2)[None]
    layout[:, :, 0] = True
    mask = layout.repeat_interleave(block, 1).repeat_interleave(block, 2)[None]
    found = []
    for run in (
        lambda *t: block_sparse_attention(*t, layout, block),
        lambda *t: torch.nn.functional.scaled_dot_product_attention(*t, attn_mask=mask),
    ):
        leaves = [t.clone().requires_grad_() for t in (query, key, value)]
        out = run(*leaves)
        out.square().sum().backward()
        found.append([out, *(leaf.grad for leaf in leaves)])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", backends(module._FORWARD.op))
def test_queries_that_see_nothing_give_zeros(backend: Backend) -> None:
    arguments = CASES[13].arguments()
    leaves = [t.requires_grad_() for t in arguments[:3]]
    with module._FORWARD.op.forced(backend), module._BACKWARD.op.forced(backend):
        out = block_sparse_attention(*arguments[:5])
        out.sum().backward()
    assert not out.any()
    assert not any(leaf.grad.any() for leaf in leaves)  # type: ignore[union-attr]


def test_nan_stays_with_those_who_see_it() -> None:
    layout = torch.eye(3, dtype=torch.bool)[None]
    query, key, value = (torch.randn(1, 1, 12, 4) for _ in range(3))
    clean = block_sparse_attention(query, key, value, layout, 4)
    key[0, 0, 5, 0] = float("nan")
    got = block_sparse_attention(query, key, value, layout, 4)
    assert got[0, 0, 4:8].isnan().all()
    assert torch.equal(got[0, 0, :4], clean[0, 0, :4])
    assert torch.equal(got[0, 0, 8:], clean[0, 0, 8:])


@needs_native
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: lambda t: t.double()}, "query"),
        ({1: lambda t: t.half()}, "key"),
        ({2: lambda t: t[:, :, :-1]}, "value"),
        ({0: lambda t: t.mT.contiguous().mT}, "query"),
        ({3: lambda t: t[:, :-1]}, "layout"),
        ({3: lambda t: t.float()}, "layout"),
        ({4: lambda n: 5}, "block"),
        ({4: lambda n: 0}, "block"),
        ({7: lambda b: torch.zeros(3)}, "key_bias"),
    ],
)
def test_bad_arguments_are_named(change: dict[int, Any], message: str) -> None:
    arguments = list(CASES[0].arguments())
    for index, function in change.items():
        arguments[index] = function(arguments[index])
    with pytest.raises(KernelArgumentError, match=message):
        module._FORWARD.op.on("cpu")(*arguments)
