"""Evoformer attention: backends and gradients against float64, sdpa, hostile input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ds_kernels import KernelArgumentError, native_status
from ds_kernels.ops import evoformer_attention as module
from ds_kernels.ops.evoformer_attention import evoformer_attention
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
    shape: tuple[int, int, int, int, int] = (2, 3, 40, 2, 16),
    *,
    mask: torch.dtype | None = torch.float32,
    pair: torch.dtype | None = torch.float32,
    dtype: torch.dtype = torch.float32,
    speed: bool = False,
) -> Case:
    def make(generator: torch.Generator) -> tuple[Any, ...]:
        batch, rows, length, heads, dim = shape
        tensors = [torch.randn(shape, generator=generator).to(dtype) for _ in range(3)]
        masks = pairs = None
        if mask is not None:
            masks = torch.randn((batch, rows, 1, 1, length), generator=generator).to(mask)
        if pair is not None:
            pairs = torch.randn((batch, 1, heads, length, length), generator=generator).to(pair)
        return (*tensors, masks, pairs, dim**-0.5)

    return Case(name, make, speed)


CASES = (
    _case("both"),
    _case("no-bias", mask=None, pair=None),
    _case("bf16", dtype=torch.bfloat16, mask=torch.bfloat16, pair=torch.bfloat16),
    _case("fp16-with-fp32-biases", dtype=torch.float16),
    _case("odd", (1, 2, 67, 3, 13)),
    _case("one", (1, 1, 1, 1, 1)),
    _case("tiles", (1, 2, 130, 2, 32), speed=True),
    _case("dim-256", (1, 1, 20, 1, 256)),
    _case("no-rows", (2, 0, 5, 2, 4)),
    _case("no-length", (2, 3, 0, 2, 4)),
)
WITHOUT_MASK = (_case("pair-only", mask=None),)
WITHOUT_PAIR = (_case("mask-only", pair=None),)
OTHERS = (module._BACKWARD.op,)


def _eager(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask_bias: Tensor | None,
    pair_bias: Tensor | None,
    scale: float,
) -> Tensor:
    """What a user writes in torch, rounding scores and weights to the dtype of the tensors."""
    left, right, values = (tensor.transpose(2, 3) for tensor in (query, key, value))
    scores = left @ right.transpose(-1, -2) * scale
    for bias in (mask_bias, pair_bias):
        scores = scores if bias is None else scores + bias
    return (scores.softmax(-1).to(query.dtype) @ values).transpose(2, 3)


def _suite(*differentiable: int, plain: Any = None) -> Suite:
    return Suite(
        module._FORWARD.op,
        CASES,
        plain=plain,
        call=lambda *a: evoformer_attention(*a[:5], scale=a[5]),
        differentiable=differentiable,
        others=OTHERS,
    )


@pytest.mark.parametrize("backend", backends(module._FORWARD.op))
@pytest.mark.parametrize("case", (*CASES, *WITHOUT_MASK, *WITHOUT_PAIR), ids=lambda case: case.name)
def test_forward(case: Case, backend: Backend) -> None:
    check_forward(_suite(), case, backend)


@pytest.mark.parametrize("backend", backends(module._FORWARD.op))
@pytest.mark.parametrize(
    ("case", "differentiable"),
    [
        *((case, (0, 1, 2, 3, 4)) for case in CASES if case.name not in ("no-bias",)),
        (CASES[1], (0, 1, 2)),
        (CASES[0], (0, 4)),
        (CASES[0], (3,)),
        (WITHOUT_MASK[0], (0, 1, 2, 4)),
        (WITHOUT_PAIR[0], (0, 1, 2, 3)),
    ],
    ids=lambda value: value.name if isinstance(value, Case) else "".join(map(str, value)),
)
def test_gradient(
    case: Case,
    differentiable: tuple[int, ...],
    backend: Backend,
) -> None:
    # In fp32 the reference is the stricter measure.
    low = case.arguments()[0].dtype != torch.float32
    suite = _suite(*differentiable, plain=_eager if low else None)
    check_gradient(suite, case, backend)


@pytest.mark.parametrize("backend", backends(module._FORWARD.op))
def test_zero_stride_gradient(backend: Backend) -> None:
    check_zero_stride_gradient(_suite(0, 1, 2, 3, 4), CASES[0], backend)


def test_compiles() -> None:
    check_compiled(_suite(), CASES[0])


def test_opcheck() -> None:
    arguments = CASES[0].arguments()
    for tensor in arguments[:5]:
        tensor.requires_grad_()
    torch.library.opcheck(torch.ops.ds_kernels.evoformer_attention, arguments)


def test_equals_sdpa() -> None:
    """fp32, 1e-5, values and all gradients."""
    found = []
    for fused in (False, True):
        *tensors, scale = CASES[0].arguments()
        leaves = [tensor.requires_grad_() for tensor in tensors]
        if fused:
            query, key, value = (tensor.transpose(2, 3) for tensor in leaves[:3])
            bias = leaves[3] + leaves[4]
            out = torch.nn.functional.scaled_dot_product_attention(
                query, key, value, attn_mask=bias, scale=scale
            ).transpose(2, 3)
        else:
            out = evoformer_attention(*leaves)
        out.square().sum().backward()
        found.append([out, *(leaf.grad for leaf in leaves)])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_a_masked_key_is_not_seen() -> None:
    *tensors, _ = CASES[0].arguments()
    tensors[3][..., 5] = float("-inf")
    clean = evoformer_attention(*tensors)
    tensors[2][:, :, 5] = 1e6
    assert torch.equal(evoformer_attention(*tensors), clean)


@pytest.mark.parametrize("backend", backends(module._FORWARD.op))
def test_rows_that_see_nothing_give_zeros(backend: Backend) -> None:
    *tensors, scale = CASES[0].arguments()
    tensors[3][0, 1] = float("-inf")
    with module._FORWARD.op.forced(backend), module._BACKWARD.op.forced(backend):
        leaves = [tensor.requires_grad_() for tensor in tensors[:3]]
        out = evoformer_attention(*leaves, *tensors[3:])
        out.sum().backward()
    assert not out[0, 1].any() and out[0, 0].any()
    assert all(leaf.grad.isfinite().all() for leaf in leaves)  # type: ignore[union-attr]


@needs_native
@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        (0, lambda t: t.double(), "query"),
        (0, lambda t: t[0], "query"),
        (1, lambda t: t.half(), "key"),
        (2, lambda t: t[:, :1], "value"),
        (3, lambda t: t[..., 0], "mask_bias"),
        (3, lambda t: t.long(), "mask_bias"),
        (4, lambda t: t.transpose(-1, -2), "pair_bias"),
        (4, lambda t: t.expand(-1, 3, -1, -1, -1), "pair_bias"),
    ],
)
def test_bad_arguments_are_named(index: int, change: Any, message: str) -> None:
    arguments = list(CASES[0].arguments())
    arguments[index] = change(arguments[index])
    with pytest.raises(KernelArgumentError, match=message):
        module._FORWARD.op.on("cpu")(*arguments)
