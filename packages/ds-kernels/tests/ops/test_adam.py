"""Adam: backends against float64, cuts of a segment, copy-out, rollback, hostile input."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_kernels import KernelArgumentError, forced_cpu_level, native_status
from ds_kernels.ops import adam
from ds_kernels.registry import Backend
from ds_kernels.testing import Case, Suite, backends, check_compiled, check_forward

needs_native = pytest.mark.skipif(
    not native_status().available, reason=native_status().reason or "native module present"
)

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
HYPER: dict[str, Any] = {
    "lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1
}  # fmt: skip


def _tensors(
    generator: torch.Generator,
    numel: int,
    param: torch.dtype = torch.float32,
    grad: torch.dtype = torch.float32,
    state: torch.dtype = torch.float32,
) -> list[Tensor]:
    p, g, m = (torch.randn(numel, generator=generator) for _ in range(3))
    v = torch.rand(numel, generator=generator)
    return [p.to(param), g.to(grad), (0.1 * m).to(state), (0.01 * v).to(state)]


def _case(
    numel: int,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype] = (torch.float32,) * 3,
    *,
    step: int = 3,
    adamw: bool = True,
    correction: bool = True,
    scale: float = 1.0,
    out: torch.dtype | None = None,
    speed: bool = False,
) -> Case:
    def make(generator: torch.Generator) -> tuple[Any, ...]:
        copy = None if out is None else torch.zeros(numel, dtype=out)
        tensors = _tensors(generator, numel, *dtypes)
        return (
            *tensors, step, 1e-2, 0.9, 0.999, 1e-8, 0.1, adamw, correction, scale, copy, None
        )  # fmt: skip

    kinds = "-".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    name = f"{numel}-{kinds}-step{step}-{'adamw' if adamw else 'l2'}-{scale}-{out}-{correction}"
    return Case(name, make, speed)


CASES = (
    *(
        _case(1037, dtypes, out=torch.bfloat16)
        for dtypes in itertools.product(FLOATS, FLOATS, (torch.float32, torch.bfloat16))
    ),
    *(_case(numel) for numel in (0, 1, 7, 1024, 1025, 100_003)),
    _case(1000, adamw=False),
    _case(1000, step=1),
    _case(1000, step=1_000_000),
    _case(1000, correction=False),
    _case(1000, scale=1 / 1024, out=torch.float16),
    _case(1000, (torch.bfloat16, torch.float16, torch.float32), adamw=False, scale=0.5),
    _case(1000, out=torch.float32),
)
SUITE = Suite(adam._ADAM, CASES, mutates=(0, 2, 3, 13))


@pytest.mark.parametrize("backend", backends(adam._ADAM))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_forward(case: Case, backend: Backend) -> None:
    check_forward(SUITE, case, backend)


def test_three_steps_equal_torch_adamw() -> None:
    """fp32, 2e-7: torch rounds in another order."""
    torch.manual_seed(0)
    param = torch.randn(1000)
    theirs = torch.nn.Parameter(param.clone())
    optimizer = torch.optim.AdamW([theirs], lr=1e-2, weight_decay=0.1)
    exp_avg, exp_avg_sq = torch.zeros(1000), torch.zeros(1000)
    for step in range(1, 4):
        grad = torch.randn(1000)
        theirs.grad = grad.clone()
        optimizer.step()
        adam.adam_(param, grad, exp_avg, exp_avg_sq, step=step, **HYPER)
    torch.testing.assert_close(param, theirs.detach(), rtol=2e-7, atol=2e-7)


@needs_native
@pytest.mark.parametrize("param", FLOATS)
@pytest.mark.parametrize("cut", [1, 3, 8, 17, 1000, 1023, 1024, 1531])
def test_a_cut_segment_gives_the_same_bits(param: torch.dtype, cut: int) -> None:
    whole = _tensors(torch.Generator().manual_seed(1), 2100, param, param, torch.float32)
    parts = [tensor.clone() for tensor in whole]
    adam.adam_(*whole, step=2, **HYPER)
    for piece in (slice(0, cut), slice(cut, None)):
        adam.adam_(*(tensor[piece] for tensor in parts), step=2, **HYPER)
    for left, right in zip(parts, whole, strict=True):
        assert torch.equal(left, right)


@needs_native
def test_threads_and_levels_give_the_same_bits() -> None:
    start = _tensors(torch.Generator().manual_seed(2), 200_001, torch.float32, torch.bfloat16)
    results = []
    levels = ("baseline", "avx2", "avx512")
    threads_before = torch.get_num_threads()
    for level, threads in itertools.product(levels, (1, 2, 3)):
        tensors = [tensor.clone() for tensor in start]
        try:
            with forced_cpu_level(level):
                torch.set_num_threads(threads)
                adam.adam_(*tensors, step=2, **HYPER)
        except ValueError:  # this CPU does not run the level
            continue
        finally:
            torch.set_num_threads(threads_before)
        results.append(tensors)
    assert len(results) >= 3
    for tensors in results[1:]:
        for left, right in zip(tensors, results[0], strict=True):
            assert torch.equal(left, right)


@pytest.mark.parametrize("backend", backends(adam._LIST))
def test_list_equals_single_calls(backend: Backend) -> None:
    sizes = [0, 1, 33, 70_000, 5, 1024] * 12
    generator = torch.Generator().manual_seed(3)
    device = "cuda" if backend == "cuda" else "cpu"
    rows = [
        [tensor.to(device) for tensor in _tensors(generator, n, torch.float32, torch.bfloat16)]
        for n in sizes
    ]
    single = [[tensor.clone() for tensor in row] for row in rows]
    outs = [torch.zeros(n, dtype=torch.bfloat16, device=device) for n in sizes]
    with adam._LIST.forced(backend), adam._ADAM.forced(backend):
        params, grads, exp_avgs, exp_avg_sqs = (list(column) for column in zip(*rows, strict=True))
        adam.adam_list_(params, grads, exp_avgs, exp_avg_sqs, step=4, outs=outs, **HYPER)
        for row in single:
            adam.adam_(*row, step=4, **HYPER)
    for row, other, out in zip(rows, single, outs, strict=True):
        for left, right in zip(row, other, strict=True):
            assert torch.equal(left, right)
        assert torch.equal(out, row[0].bfloat16())


@pytest.mark.parametrize("backend", backends(adam._ADAM))
@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16])
def test_rollback_restores_every_bit(backend: Backend, state: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(4)
    start = _tensors(generator, 5001, torch.bfloat16, torch.float32, state)
    start[1][:3] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    device = "cuda" if backend == "cuda" else "cpu"
    tensors = [tensor.to(device) for tensor in start]
    undo = torch.empty(3, 5001, device=device)
    out = torch.zeros(5001, dtype=torch.float16, device=device)
    with adam._ADAM.forced(backend):
        adam.adam_(*tensors, step=9, undo=undo, out=out, **HYPER)
    assert not torch.equal(tensors[0].cpu(), start[0])
    adam.adam_rollback_(tensors[0], tensors[2], tensors[3], undo=undo, out=out)
    for index in (0, 2, 3):
        assert torch.equal(tensors[index].cpu(), start[index])
    assert torch.equal(out.cpu(), start[0].half())


def test_compiles_without_a_graph_break() -> None:
    def call(*arguments: Any) -> None:
        names = (
            "step", "lr", "beta1", "beta2", "eps", "weight_decay", "adamw", "bias_correction",
            "grad_scale", "out", "undo",
        )  # fmt: skip
        adam.adam_(*arguments[:4], **dict(zip(names, arguments[4:], strict=True)))

    suite = Suite(adam._ADAM, CASES, mutates=(0, 2, 3, 13), call=call)
    check_compiled(suite, _case(100, out=torch.bfloat16), backends(adam._ADAM)[0])


def test_registered_op_is_well_formed() -> None:
    arguments = _case(64, out=torch.bfloat16).arguments()
    torch.library.opcheck(torch.ops.ds_kernels.adam_, arguments)


def _bad() -> list[tuple[str, str, dict[str, Any]]]:
    good = torch.ones(8)
    return [
        ("grad", "is float64", {"grad": good.double()}),
        ("param", "is int64", {"param": good.long()}),
        ("exp_avg", "is float16", {"exp_avg": good.half(), "exp_avg_sq": good.half()}),
        ("exp_avg_sq", "they must agree", {"exp_avg_sq": good.bfloat16()}),
        ("grad", "has 7 elements", {"grad": torch.ones(7)}),
        ("param", "not contiguous", {"param": torch.ones(16)[::2]}),
        ("grad", "not contiguous", {"grad": torch.ones(1).expand(8)}),
        ("exp_avg", "shares memory", {"exp_avg": good, "exp_avg_sq": good}),
        ("grad", "expected a torch.Tensor", {"grad": [1.0] * 8}),
        ("out", "shares memory", {"out": good, "grad": good}),
        ("undo", "has 8 elements, expected 24", {"undo": good}),
        ("grad", "not aligned", {}),
        ("step", "counts from 1", {"step": 0}),
        ("lr", "is nan", {"lr": float("nan")}),
        ("beta1", "is 1.0", {"beta1": 1.0}),
        ("eps", "is -1.0", {"eps": -1.0}),
    ]


@needs_native
@pytest.mark.parametrize(("name", "text", "change"), _bad(), ids=lambda value: str(value)[:24])
def test_bad_arguments_are_named(name: str, text: str, change: dict[str, Any]) -> None:
    if "aligned" in text:
        raw = torch.zeros(33, dtype=torch.uint8)
        change = {
            "grad": torch.frombuffer(raw.numpy().data, dtype=torch.float32, count=8, offset=1)
        }
    arguments: dict[str, Any] = {
        "param": torch.ones(8), "grad": torch.ones(8), "exp_avg": torch.zeros(8),
        "exp_avg_sq": torch.zeros(8), "step": 1, **HYPER, **change,
    }  # fmt: skip
    with pytest.raises(KernelArgumentError, match=rf"^{name}: .*{text}"):
        adam.adam_(**arguments)


@needs_native
def test_lists_of_different_lengths_are_refused() -> None:
    tensors = [torch.ones(4)]
    with pytest.raises(KernelArgumentError, match="^grads: holds 0 tensors, expected 1"):
        adam.adam_list_(tensors, [], tensors, tensors, step=1, **HYPER)


def test_empty_list_is_nothing_to_do() -> None:
    adam.adam_list_([], [], [], [], step=1, **HYPER)


@pytest.mark.parametrize("backend", backends(adam._ADAM))
def test_nan_and_inf_stay_where_they_are(backend: Backend) -> None:
    def make(generator: torch.Generator) -> tuple[Any, ...]:
        tensors = _tensors(generator, 40)
        tensors[1][3], tensors[1][20] = float("nan"), float("inf")
        return (*tensors, 2, 1e-2, 0.9, 0.999, 1e-8, 0.1, True, True, 1.0, None, None)

    check_forward(SUITE, Case("nan", make), backend)
