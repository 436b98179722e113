"""Routing: backends against float64, a dense mixture, ties, NaN, hostile indices."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ds_kernels import KernelArgumentError, native_status
from ds_kernels.ops import moe_routing as module
from ds_kernels.ops.grouped_matmul import grouped_matmul
from ds_kernels.ops.moe_routing import expert_rows, moe_combine, moe_scatter, top_k_gating
from ds_kernels.registry import Backend
from ds_kernels.testing import Case, Suite, backends, check_compiled, check_forward

needs_native = pytest.mark.skipif(
    not native_status().available, reason=native_status().reason or "native module present"
)


def _logits(
    name: str, tokens: int, count: int, k: int, normalize: bool = True, **kind: Any
) -> Case:
    def make(generator: torch.Generator) -> tuple[Any, ...]:
        return torch.randn(tokens, count, generator=generator).to(**kind), k, normalize

    return Case(name, make)


def _experts(name: str, tokens: int, count: int, k: int, dropped: bool = False) -> Case:
    def make(generator: torch.Generator) -> tuple[Any, ...]:
        experts = torch.rand(tokens, count, generator=generator).topk(k).indices
        if dropped:
            experts[torch.rand(tokens, k, generator=generator) < 0.4] = -1
        return experts, count

    return Case(name, make)


def _moves(dtype: torch.dtype, width: int, dropped: bool) -> list[Any]:
    generator = torch.Generator().manual_seed(5)
    experts, count = _experts("", 30, 6, 2, dropped).make(generator)
    rows, bounds = module.reference.expert_rows(experts, count)
    x = torch.randn(30, width, generator=generator).to(dtype)
    return [x, rows, int(bounds[-1]), torch.rand(30, 2, generator=generator)]


GATING = Suite(
    module._GATING.op,
    (
        _logits("top-2", 50, 8, 2),
        _logits("top-1", 50, 8, 1, False),
        _logits("all", 20, 5, 5),
        _logits("many-experts", 20, 256, 8, False),
        _logits("bf16", 50, 8, 2, dtype=torch.bfloat16),
        _logits("one-expert", 3, 1, 1),
        _logits("no-tokens", 0, 4, 2),
    ),
    call=lambda *a: torch.ops.ds_kernels.top_k_gating(*a),
)
ROWS = Suite(
    module._ROWS.op,
    (
        _experts("plain", 40, 8, 2),
        _experts("dropped", 40, 8, 2, True),
        _experts("more-experts-than-tokens", 3, 64, 2),
        _experts("no-tokens", 0, 4, 2),
    ),
    call=expert_rows,
)
MOVES = [
    (dtype, width, dropped)
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
    for width in (1, 33, 1100)
    for dropped in (False, True)
]


@pytest.mark.parametrize("backend", backends(module._GATING.op))
@pytest.mark.parametrize("case", GATING.cases, ids=lambda case: case.name)
def test_gating(case: Case, backend: Backend) -> None:
    """bf16 ties are broken alike, so experts are equal everywhere."""
    check_forward(GATING, case, backend)


@pytest.mark.parametrize("backend", backends(module._ROWS.op))
@pytest.mark.parametrize("case", ROWS.cases, ids=lambda case: case.name)
def test_rows(case: Case, backend: Backend) -> None:
    check_forward(ROWS, case, backend)


@pytest.mark.parametrize("backend", backends(module._SCATTER.op))
@pytest.mark.parametrize(("dtype", "width", "dropped"), MOVES)
def test_scatter_and_combine(
    dtype: torch.dtype, width: int, dropped: bool, backend: Backend
) -> None:
    x, rows, total, weights = _moves(dtype, width, dropped)
    scatter = Suite(module._SCATTER.op, (), call=moe_scatter)
    check_forward(scatter, Case("scatter", lambda _: (x, rows, total)), backend)
    sorted_x = module.reference.moe_scatter(x, rows, total)
    combine = Suite(module._COMBINE.op, (), call=moe_combine)
    check_forward(combine, Case("combine", lambda _: (sorted_x, rows, weights)), backend)


@pytest.mark.parametrize("suite", [GATING, ROWS], ids=lambda suite: suite.op.name)
def test_compiles(suite: Suite) -> None:
    check_compiled(suite, suite.cases[0])


def test_moves_compile() -> None:
    x, rows, total, weights = _moves(torch.float32, 33, True)
    check_compiled(
        Suite(module._SCATTER.op, (), call=moe_scatter), Case("", lambda _: (x, rows, total))
    )
    out = moe_scatter(x, rows, total)
    check_compiled(
        Suite(module._COMBINE.op, (), call=moe_combine), Case("", lambda _: (out, rows, weights))
    )


def test_opcheck() -> None:
    x, rows, total, weights = _moves(torch.float32, 33, False)
    ops = torch.ops.ds_kernels
    torch.library.opcheck(ops.top_k_gating, GATING.cases[0].arguments())
    torch.library.opcheck(ops.expert_rows, ROWS.cases[0].arguments())
    torch.library.opcheck(ops.moe_scatter, (x, rows, total))
    torch.library.opcheck(ops.moe_combine, (moe_scatter(x, rows, total), rows, weights))


def test_the_ops_together_are_a_dense_mixture() -> None:
    """Every expert on every token, weighted by the gates: the same in fp32 to 1e-5."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(40, 16, generator=generator)
    weight = torch.randn(6, 16, 12, generator=generator)
    logits = torch.randn(40, 6, generator=generator)
    gates, experts = top_k_gating(logits, 2)
    rows, bounds = expert_rows(experts, 6)
    out = moe_combine(grouped_matmul(moe_scatter(x, rows, 80), weight, bounds), rows, gates)
    dense = torch.zeros(40, 6).scatter(1, experts, gates)
    expected = torch.einsum("te,teo->to", dense, torch.einsum("ti,eio->teo", x, weight))
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", backends(module._GATING.op))
def test_ties_nan_and_infinity(backend: Backend) -> None:
    run = module._GATING.op.on(backend)
    logits = torch.tensor([[1.0, 2, 2, 0], [0, 0, 0, 0], [0, float("inf"), 0, 0]])
    logits[2, 1] = 1e30
    weights, experts = run(logits, 2, True)
    assert experts.tolist() == [[1, 2], [0, 1], [1, 0]]
    torch.testing.assert_close(weights, torch.tensor([[0.5, 0.5], [0.5, 0.5], [1.0, 0.0]]))
    weights, experts = run(torch.tensor([[0.0, float("nan"), 1.0]]), 2, True)
    assert experts[0, 0] == 1 and weights.isnan().all()


@pytest.mark.parametrize("backend", backends(module._COMBINE.op))
def test_rows_that_nobody_names_do_not_matter(backend: Backend) -> None:
    x = torch.full((2, 3), float("nan"))
    x[1] = 1
    rows = torch.tensor([[1, -1]])
    out = module._COMBINE.op.on(backend)(x, rows, torch.tensor([[2.0, 5.0]]))
    assert out.tolist() == [[2, 2, 2]]


def _bad(run: Any, arguments: list[Any], index: int, value: Any, message: str) -> None:
    arguments[index] = value
    with pytest.raises(KernelArgumentError, match=message):
        run(*arguments)


@needs_native
def test_bad_arguments_are_named() -> None:
    def moves() -> list[Any]:
        return _moves(torch.float32, 8, False)

    x, rows, total, weights = moves()
    logits = torch.randn(4, 3)
    _bad(top_k_gating, [logits, 2], 0, logits.double(), "logits")
    _bad(top_k_gating, [logits, 2], 0, logits.T, "logits")
    _bad(top_k_gating, [logits, 2], 1, 4, "k: is 4, there are 3 experts")
    _bad(expert_rows, [rows, 99], 0, rows.int(), "experts")
    _bad(expert_rows, [rows, 99], 1, 3, "experts: names expert")
    _bad(moe_scatter, [x, rows, total], 0, x.long(), "x")
    _bad(moe_scatter, [x, rows, total], 1, rows[:-1], "rows")
    _bad(moe_scatter, [x, rows, total], 2, 5, "rows: names row")
    y = moe_scatter(x, rows, total)
    _bad(moe_combine, [y, rows, weights], 0, y[:4], "rows: names row")
    _bad(moe_combine, [y, rows, weights], 2, weights.double(), "weights")
    _bad(moe_combine, [y, rows, weights], 2, weights[:-1], "weights")
