"""Writing into the key-value cache: backends against float64, closed forms, hostile indices."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_kernels import KernelArgumentError, native_status
from ds_kernels.ops import kv_cache as module
from ds_kernels.ops.kv_cache import kv_cache_update_
from ds_kernels.registry import Backend
from ds_kernels.testing import Case, Suite, backends, check_compiled, check_forward

needs_native = pytest.mark.skipif(
    not native_status().available, reason=native_status().reason or "native module present"
)


def _angles(positions: int, rotary: int) -> tuple[Tensor, Tensor]:
    steps = 10000.0 ** -(torch.arange(rotary // 2).float() * 2 / rotary)
    angle = torch.arange(positions).float()[:, None] * steps
    return angle.cos(), angle.sin()


def _case(
    name: str,
    tokens: int = 9,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 16,
    rotary: int | None = 16,
    interleaved: bool = False,
    query: bool = True,
    skipped: bool = False,
    dtype: torch.dtype = torch.float32,
    cache: torch.dtype | None = None,
    speed: bool = False,
) -> Case:
    def make(generator: torch.Generator) -> tuple[Any, ...]:
        queries = torch.randn(tokens, heads, dim, generator=generator).to(dtype)
        key, value = (
            torch.randn(tokens, kv_heads, dim, generator=generator).to(dtype) for _ in range(2)
        )
        blocks = tokens // 4 + 2
        caches = [torch.zeros(blocks, 4, kv_heads, dim, dtype=cache or dtype) for _ in range(2)]
        slots = torch.randperm(blocks * 4, generator=generator)[:tokens]
        if skipped:
            slots[::2] = -1
        turn: tuple[Any, ...] = (None, None, None)
        if rotary is not None:
            positions = torch.randint(0, 50, (tokens,), generator=generator)
            turn = (positions, *_angles(50, rotary))
        return queries if query else None, key, value, *caches, slots, *turn, interleaved

    return Case(name, make, speed)


CASES = (
    _case("halves"),
    _case("neighbours", interleaved=True),
    _case("partial", rotary=6),
    _case("partial-neighbours", rotary=6, interleaved=True),
    _case("no-rotation", rotary=None),
    _case("no-query", query=False),
    _case("skipped", skipped=True),
    _case("bf16", dtype=torch.bfloat16),
    _case("fp16-into-bf16", dtype=torch.float16, cache=torch.bfloat16),
    _case("fp32-into-bf16", cache=torch.bfloat16),
    _case("odd-dim", dim=13, rotary=4),
    _case("nothing-turned", rotary=0),
    _case("many", 200, dim=128, rotary=128, speed=True),
    _case("no-tokens", 0),
)
SUITE = Suite(
    module._UPDATE.op,
    CASES,
    mutates=(0, 3, 4),
    call=lambda *a: torch.ops.ds_kernels.kv_cache_update_(*a),
)


@pytest.mark.parametrize("backend", backends(module._UPDATE.op))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_forward(case: Case, backend: Backend) -> None:
    check_forward(SUITE, case, backend)


def test_compiles() -> None:
    check_compiled(SUITE, CASES[0])


def test_opcheck() -> None:
    torch.library.opcheck(torch.ops.ds_kernels.kv_cache_update_, CASES[0].arguments())


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_of_a_quarter_turn(interleaved: bool) -> None:
    """(a, b) becomes (-b, a); values stay as they are; other slots stay untouched."""
    x = torch.arange(1.0, 9.0).view(1, 1, 8)
    caches = [torch.full((1, 3, 1, 8), 7.0) for _ in range(2)]
    quarter = torch.full((1, 4), math.pi / 2)
    query = x.clone()
    kv_cache_update_(
        query, x, x, *caches, torch.tensor([1]), positions=torch.tensor([0]),
        cosine=quarter.cos().round(), sine=quarter.sin(), interleaved=interleaved,
    )  # fmt: skip
    turned = [-2, 1, -4, 3, -6, 5, -8, 7] if interleaved else [-5, -6, -7, -8, 1, 2, 3, 4]
    assert caches[0][0, 1, 0].tolist() == turned
    assert query.flatten().tolist() == turned
    assert caches[1][0, 1, 0].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    for cache in caches:
        assert (cache[0, [0, 2]] == 7).all()


@needs_native
@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        (0, lambda t: t.half(), "query"),
        (0, lambda t: t[:-1], "query"),
        (1, lambda t: t.double(), "key"),
        (1, lambda t: t[..., :8], "value"),
        (2, lambda t: t[:, :1], "value"),
        (3, lambda t: t[..., :8], "value_cache"),
        (4, lambda t: t.bfloat16(), "value_cache"),
        (5, lambda t: t.int(), "slots"),
        (5, lambda t: t + 1000, "slots"),
        (6, lambda t: t - 100, "positions"),
        (6, lambda t: t + 100, "positions"),
        (7, lambda t: None, "cosine"),
        (7, lambda t: t.repeat(1, 2), "sine"),
        (8, lambda t: t.double(), "sine"),
    ],
)
def test_bad_arguments_are_named(index: int, change: Any, message: str) -> None:
    arguments = list(CASES[0].arguments())
    arguments[index] = change(arguments[index])
    with pytest.raises(KernelArgumentError, match=message):
        module._UPDATE.op.on("cpu")(*arguments)


@needs_native
def test_overlap_is_named() -> None:
    arguments = list(CASES[0].arguments())
    arguments[4] = arguments[3]
    with pytest.raises(KernelArgumentError, match="key_cache"):
        module._UPDATE.op.on("cpu")(*arguments)
