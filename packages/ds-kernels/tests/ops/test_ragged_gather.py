"""Ragged embedding and last rows: backends against float64, hostile indices."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ds_kernels import KernelArgumentError, native_status
from ds_kernels.ops import ragged_gather as module
from ds_kernels.ops.ragged_gather import last_rows, ragged_embedding
from ds_kernels.registry import Backend
from ds_kernels.testing import Case, Suite, backends, check_compiled, check_forward

needs_native = pytest.mark.skipif(
    not native_status().available, reason=native_status().reason or "native module present"
)


def _embedding(
    name: str, tokens: int, width: int, *, places: bool, dtype: torch.dtype = torch.float32
) -> Case:
    def make(generator: torch.Generator) -> tuple[Any, ...]:
        table, learned = (torch.randn(n, width, generator=generator).to(dtype) for n in (50, 20))
        ids = torch.randint(0, 50, (tokens,), generator=generator)
        at = torch.randint(0, 20, (tokens,), generator=generator)
        return (table, ids, learned, at) if places else (table, ids, None, None)

    return Case(name, make)


def _last(name: str, sizes: list[int], width: int, dtype: torch.dtype = torch.float32) -> Case:
    def make(generator: torch.Generator) -> tuple[Any, ...]:
        hidden = torch.randn(sum(sizes), width, generator=generator).to(dtype)
        return hidden, torch.tensor([0, *sizes]).cumsum(0).to(torch.int32)

    return Case(name, make)


EMBEDDING = Suite(
    module._EMBEDDING.op,
    (
        _embedding("plain", 30, 33, places=False),
        _embedding("positions", 30, 33, places=True),
        _embedding("wide", 7, 2100, places=True),
        _embedding("bf16", 30, 33, places=True, dtype=torch.bfloat16),
        _embedding("fp16", 30, 33, places=False, dtype=torch.float16),
        _embedding("no-tokens", 0, 8, places=True),
        _embedding("no-width", 5, 0, places=False),
    ),
    call=lambda *a: torch.ops.ds_kernels.ragged_embedding(*a),
)
LAST = Suite(
    module._LAST.op,
    (
        _last("ragged", [3, 1, 0, 7], 33),
        _last("bf16", [3, 1, 0, 7], 33, torch.bfloat16),
        _last("all-empty", [0, 0], 4),
        _last("no-sequences", [], 4),
    ),
    call=last_rows,
)


@pytest.mark.parametrize("backend", backends(module._EMBEDDING.op))
@pytest.mark.parametrize(
    ("suite", "case"),
    [(suite, case) for suite in (EMBEDDING, LAST) for case in suite.cases],
    ids=lambda value: value.name if isinstance(value, Case) else value.op.name,
)
def test_forward(suite: Suite, case: Case, backend: Backend) -> None:
    check_forward(suite, case, backend)


@pytest.mark.parametrize("suite", [EMBEDDING, LAST], ids=lambda suite: suite.op.name)
def test_compiles(suite: Suite) -> None:
    check_compiled(suite, suite.cases[1])


def test_opcheck() -> None:
    ops = torch.ops.ds_kernels
    torch.library.opcheck(ops.ragged_embedding, EMBEDDING.cases[1].arguments())
    torch.library.opcheck(ops.last_rows, LAST.cases[0].arguments())


def test_equals_torch_embedding() -> None:
    table, tokens, *_ = EMBEDDING.cases[0].arguments()
    expected = torch.nn.functional.embedding(tokens, table)
    assert torch.equal(ragged_embedding(table, tokens), expected)


@needs_native
@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        (0, lambda t: t.long(), "table"),
        (0, lambda t: t.T, "table"),
        (1, lambda t: t + 50, "tokens: holds"),
        (1, lambda t: t - 50, "tokens: holds"),
        (1, lambda t: t.int(), "tokens"),
        (2, lambda t: t.half(), "position_table"),
        (2, lambda t: t[:, :5], "position_table"),
        (3, lambda t: t + 20, "positions: holds"),
        (3, lambda t: t[:-1], "positions"),
        (3, lambda t: None, "positions: is missing"),
    ],
)
def test_bad_embedding_arguments_are_named(index: int, change: Any, message: str) -> None:
    arguments = list(EMBEDDING.cases[1].arguments())
    arguments[index] = change(arguments[index])
    with pytest.raises(KernelArgumentError, match=message):
        module._EMBEDDING.op.on("cpu")(*arguments)


@needs_native
@pytest.mark.parametrize(
    ("hidden", "start", "message"),
    [
        (torch.zeros(4, 2), torch.tensor([0, 5], dtype=torch.int32), "query_start"),
        (torch.zeros(4, 2), torch.tensor([1, 4], dtype=torch.int32), "query_start"),
        (torch.zeros(4, 2), torch.tensor([0, 3, 1, 4], dtype=torch.int32), "query_start"),
        (torch.zeros(4, 2), torch.tensor([0, 4]), "query_start"),
        (torch.zeros(4, 2), torch.tensor([], dtype=torch.int32), "query_start"),
        (torch.zeros(4), torch.tensor([0, 4], dtype=torch.int32), "hidden"),
    ],
)
def test_bad_starts_are_named(hidden: Any, start: Any, message: str) -> None:
    with pytest.raises(KernelArgumentError, match=message):
        last_rows(hidden, start)
