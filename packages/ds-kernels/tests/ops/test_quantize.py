"""Block-wise quantisation: codes against their formats' definitions, every backend bit by bit.

The definitions are enumerated here in exact fractions; nothing is shared with the reference.
"""

from __future__ import annotations

import bisect
import itertools
import math
from fractions import Fraction
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_kernels import KernelArgumentError, native_status
from ds_kernels.blockwise import CODES, Code, Quantized, code_index
from ds_kernels.native import cpu_level, load_native
from ds_kernels.ops import quantize as module
from ds_kernels.ops.quantize import (
    dequantize_blockwise,
    quantize,
    quantize_blockwise,
    quantize_dynamic8,
    quantize_swizzled,
)
from ds_kernels.registry import Backend
from ds_kernels.testing import Case, Suite, backends, check_compiled, check_forward, device_of

needs_native = pytest.mark.skipif(
    not native_status().available, reason=native_status().reason or "native module present"
)
BACKENDS = backends(module._QUANTIZE_OP)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SYMMETRIC = tuple(code for code in CODES if code not in ("uint8", "uint4"))
LINEAR = tuple(code for code in CODES if not code.startswith("dynamic8"))
SMALL_FLOATS: dict[Code, tuple[int, int]] = {
    "e4m3": (4, 3), "e5m2": (5, 2), "e3m2": (3, 2), "e2m3": (2, 3), "e2m1": (2, 1),
}  # fmt: skip
MAXIMA = {"e4m3": 448.0, "e5m2": 57344.0, "e3m2": 28.0, "e2m3": 7.5, "e2m1": 6.0}
FLT_MAX = torch.finfo(torch.float32).max


@cache
def definition(code: Code) -> list[Fraction | None]:
    """What every code stands for at scale 1; None for NaN and infinity."""
    if code == "int8":
        return [Fraction(i if i < 128 else i - 256) for i in range(256)]
    if code == "int4":
        return [Fraction(i - 8) for i in range(16)]
    if code in ("uint8", "uint4"):
        return [Fraction(i) for i in range(256 if code == "uint8" else 16)]
    if code in SMALL_FLOATS:
        exponent_bits, mantissa_bits = SMALL_FLOATS[code]
        bias = 2 ** (exponent_bits - 1) - 1
        values: list[Fraction | None] = []
        for sign in (1, -1):
            for e, m in itertools.product(range(2**exponent_bits), range(2**mantissa_bits)):
                part = Fraction(m, 2**mantissa_bits) + (e > 0)
                value = sign * part * Fraction(2) ** (max(e, 1) - bias)
                values.append(value if abs(value) <= MAXIMA[code] else None)
        return values
    signed = code == "dynamic8"
    positive = []
    for decade in range(7):
        count = 2**decade if signed else 2 ** (decade + 1)
        for cell in range(count):
            low, high = (Fraction(1, 10) + Fraction(9, 10) * Fraction(k, count)
                         for k in (cell, cell + 1))  # fmt: skip
            positive.append((low + high) / 2 / 10 ** (6 - decade))
    negative = [-value for value in reversed(positive)] if signed else []
    return [*negative, Fraction(0), *positive, Fraction(1)]


def run(backend: Backend, x: Tensor, **how: Any) -> tuple[Quantized, Tensor]:
    """The quantised tensor and what it stands for, both by one backend, on the CPU."""
    device = device_of(backend)
    with module._QUANTIZE_OP.forced(backend), module._DEQUANTIZE_OP.forced(backend):
        q = quantize(x.to(device), **how)
        back = dequantize_blockwise(q)
    zero_points = None if q.zero_points is None else q.zero_points.cpu()
    on_cpu = Quantized(q.values.cpu(), q.scales.cpu(), zero_points, q.shape, q.code, q.block_size)
    return on_cpu, back.cpu()


def bytes_of(q: Quantized) -> Tensor:
    return q.values.view(torch.uint8)


def assert_same(left: Quantized, right: Quantized) -> None:
    assert torch.equal(bytes_of(left), bytes_of(right))
    torch.testing.assert_close(left.scales, right.scales, rtol=0, atol=0, equal_nan=True)
    if left.zero_points is not None:
        torch.testing.assert_close(left.zero_points, right.zero_points, rtol=0, atol=0)


def unpacked(q: Quantized) -> list[int]:
    """The codes of a single row, bit by bit."""
    bits = {"int4": 4, "uint4": 4, "e2m1": 4, "e3m2": 6, "e2m3": 6}.get(q.code, 8)
    stream = "".join(f"{byte:08b}"[::-1] for byte in bytes_of(q).flatten().tolist())
    return [int(stream[bits * i : bits * (i + 1)][::-1], 2) for i in range(math.prod(q.shape))]


# ---- formats -----------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("code", CODES)
def test_every_code_stands_for_its_definition(code: Code, backend: Backend) -> None:
    """Integers and small floats exactly; decimal fractions to 2e-6, their cells are 3e-3 wide."""
    values = definition(code)
    q = Quantized.empty((len(values),), code=code, block_size=len(values))
    bits = (len(values) - 1).bit_length()
    stream = sum(i << (bits * i) for i in range(len(values)))
    packed = stream.to_bytes(q.values.numel(), "little")
    bytes_of(q).copy_(torch.tensor(list(packed), dtype=torch.uint8).view_as(q.values))
    q.scales.fill_(1)
    if q.zero_points is not None:
        q.zero_points.fill_(0)
    device = device_of(backend)
    zero_points = None if q.zero_points is None else q.zero_points.to(device)
    moved = Quantized(
        q.values.to(device), q.scales.to(device), zero_points, q.shape, code, q.block_size
    )
    with module._DEQUANTIZE_OP.forced(backend):
        found = dequantize_blockwise(moved).cpu()
    tolerance = 2e-6 if code.startswith("dynamic8") else 0.0
    for index, (value, got) in enumerate(zip(values, found.tolist(), strict=True)):
        if value is None:
            assert not math.isfinite(got), (index, got)
        else:
            assert abs(got - value) <= tolerance * abs(value), (index, got, value)
    if code == "e5m2":
        assert found[0x7C] == math.inf and found[0xFC] == -math.inf
        assert found[0x7D:0x80].isnan().all() and found[0xFD:].isnan().all()
    if code in ("e4m3", "e5m2"):
        dtype = torch.float8_e4m3fn if code == "e4m3" else torch.float8_e5m2
        torch.testing.assert_close(
            found, q.values.view(dtype).flatten().float(), rtol=0, atol=0, equal_nan=True
        )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("code", list(SMALL_FLOATS))
def test_rounding_to_nearest_even(code: Code, backend: Backend) -> None:
    """All values, the middles between neighbours and the floats beside them, at scale 1."""
    table = [(value, index) for index, value in enumerate(definition(code)) if value is not None]
    codes = {value: index for value, index in table}
    numbers = sorted(codes)
    points = [float(value) for value in numbers]
    for low, high in itertools.pairwise(numbers):
        middle = torch.tensor(float((low + high) / 2))
        points += [
            float(middle),
            float(torch.nextafter(middle, torch.tensor(math.inf))),
            float(torch.nextafter(middle, torch.tensor(-math.inf))),
        ]
    x = torch.tensor([*points, MAXIMA[code]])
    q, _ = run(backend, x, code=code, block_size=x.numel() + 3)
    assert q.scales.item() == 1.0
    for point, got in zip(x.tolist(), unpacked(q), strict=True):
        exact = Fraction(point)
        place = bisect.bisect(numbers, exact)
        beside = numbers[max(place - 1, 0) : place + 1]
        best = min(abs(value - exact) for value in beside)
        near = [codes[value] for value in beside if abs(value - exact) == best]
        expected = near[0] if len(near) == 1 else next(c for c in near if c % 2 == 0)
        if expected & (2 ** sum(SMALL_FLOATS[code]) - 1) == 0:
            assert got & (2 ** sum(SMALL_FLOATS[code]) - 1) == 0, point  # either zero
        else:
            assert got == expected, point


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("signed", [False, True])
def test_dynamic_code_is_the_nearest(signed: bool, backend: Backend) -> None:
    """No other code is nearer by more than 1e-6 of the distance to it."""
    code: Code = "dynamic8" if signed else "dynamic8_unsigned"
    values = torch.tensor([float(v or 0) for v in definition(code)]).double()
    generator = torch.Generator().manual_seed(1)
    x = 10 ** (-8 * torch.rand(4000, generator=generator))
    if signed:
        x = x * (torch.randint(0, 2, x.shape, generator=generator) * 2 - 1)
    x[:4] = torch.tensor([1.0, 0.0, 0.9965, 0.9963])
    _, back = run(backend, x, code=code, block_size=x.numel())
    assert back[0] == 1 and back[1] == 0
    best = (values - x.double().unsqueeze(1)).abs().amin(1)
    assert ((back.double() - x.double()).abs() <= best * (1 + 1e-6) + 2e-6 * x.double().abs()).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_dynamic_scale_has_the_sign_of_the_largest(backend: Backend) -> None:
    x = torch.tensor([0.5, -2.0, 1.0, -0.001])
    q, back = run(backend, x, code="dynamic8")
    assert q.scales.item() == -2.0 and back[1] == -2.0
    q, back = run(backend, -x, code="dynamic8_unsigned")
    assert q.scales.item() == 2.0 and back.tolist()[0] == 0.0 and back[1] == 2.0


# ---- every backend, bit by bit -----------------------------------------------------------------


def _case(
    code: Code,
    numel: int,
    block: int,
    dtype: torch.dtype = torch.float32,
    rows: int = 1,
    seed: int | None = None,
    power_of_two: bool = False,
    error: torch.dtype | None = None,
) -> Case:
    def make(generator: torch.Generator) -> tuple[Any, ...]:
        spread = torch.exp(2 * torch.randn(numel, generator=generator))
        x = (torch.randn(numel, generator=generator) * spread).to(dtype)
        left = None if error is None else (x.float() * 0.01).to(error)
        q = Quantized.empty((numel,), code=code, block_size=block, rows=rows)
        values = torch.zeros_like(bytes_of(q))
        zero_points = None if q.zero_points is None else torch.zeros_like(q.zero_points)
        return (
            values, torch.zeros_like(q.scales), zero_points, x, left, code_index(code),
            max(numel // rows, 1), block, 1, 1, power_of_two, seed, 0.25,
        )  # fmt: skip

    kinds = f"{str(dtype).removeprefix('torch.')}-{seed}-{power_of_two}-{error}"
    return Case(f"{code}-{numel}-{block}-{rows}-{kinds}", make)


CASES = (
    *(_case(code, 5003, 256, dtype) for code in CODES for dtype in FLOATS),
    *(_case(code, 5003, 256, seed=3) for code in LINEAR),
    *(_case(code, 3 * 1021, 64, rows=3, error=torch.float32) for code in CODES),
    *(_case(code, 2500, 2048, torch.bfloat16, seed=9, error=torch.bfloat16) for code in LINEAR),
    *(_case(code, 1000, 32, power_of_two=True) for code in ("int8", "int4", *SMALL_FLOATS)),
    *(_case(code, n, b) for code in CODES for n, b in ((1, 4), (7, 64), (67, 32), (0, 32))),
    *(_case(code, 70_000, 128) for code in ("int8", "uint4", "e3m2", "dynamic8")),
    _case("int4", 12_000, 1_000_000),
    _case("int8", 100, 3),
)
SUITE = Suite(module._QUANTIZE_OP, CASES, mutates=(0, 1, 2, 4))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_forward(case: Case, backend: Backend) -> None:
    check_forward(SUITE, case, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bits_of_the_reference(case: Case, backend: Backend) -> None:
    """Codes, scales, zero points, errors and dequantised values: equal in every bit."""
    found = []
    for which in (backend, "reference"):
        arguments = [t.to(device_of(which)) if isinstance(t, Tensor) else t
                     for t in case.arguments()]  # fmt: skip
        module._QUANTIZE_OP.on(which)(*arguments)
        values, scales, zero_points, x, error, code, cols, block = arguments[:8]
        outs = [torch.empty_like(x, dtype=dtype) for dtype in FLOATS]
        for out in outs:
            module._DEQUANTIZE_OP.on(which)(out, values, scales, zero_points, code, cols, block)
        found.append([t.cpu() for t in (values, scales, zero_points, error, *outs)
                      if t is not None])  # fmt: skip
    for left, right in zip(*found, strict=True):
        assert torch.equal(left, right)


@needs_native
@pytest.mark.parametrize("code", CODES)
def test_levels_and_threads_give_the_same_bits(code: Code) -> None:
    native = load_native()
    x = torch.randn(200_003, generator=torch.Generator().manual_seed(2))
    seed = None if code.startswith("dynamic8") else 12
    results, before, threads = [], native.cpu_level_in_use(), torch.get_num_threads()
    levels = ["baseline", "avx2", "avx512"]
    try:
        for level in levels[: levels.index(cpu_level()) + 1]:
            for count in (1, 3):
                native.set_cpu_level(level)
                torch.set_num_threads(count)
                results.append(run("cpu", x, code=code, block_size=160, seed=seed))
    finally:
        native.set_cpu_level(before)
        torch.set_num_threads(threads)
    assert len(results) >= 2
    for q, back in results[1:]:
        assert_same(q, results[0][0])
        assert torch.equal(back, results[0][1])


# ---- properties --------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("code", ["int8", "int4", "uint8", "uint4"])
@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_round_trip_is_within_half_a_step(code: Code, offset: float, backend: Backend) -> None:
    """Integers in float32; rounding of the arithmetic adds at most 1e-4 of a step and 1e-6 of x."""
    x = torch.randn(40, 96, generator=torch.Generator().manual_seed(5)) + offset
    q, back = run(backend, x, code=code, block_size=96)
    step = q.scales.view(40, 1)
    assert ((back - x).abs() <= 0.5001 * step + 1e-6 * x.abs()).all()
    extent = x.abs().amax(1) if code in ("int8", "int4") else x.amax(1) - x.amin(1)
    levels = {"int8": 127, "int4": 7, "uint8": 255, "uint4": 15}[code]
    torch.testing.assert_close(q.scales.view(40), extent / levels, rtol=1e-6, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("code", list(SMALL_FLOATS))
def test_round_trip_of_small_floats(code: Code, backend: Backend) -> None:
    """Half a unit in the last place of a normal number, half the smallest step below."""
    x = torch.randn(30, 64, generator=torch.Generator().manual_seed(6))
    q, back = run(backend, x, code=code, block_size=64)
    exponent_bits, mantissa_bits = SMALL_FLOATS[code]
    least = 2.0 ** (2 - 2 ** (exponent_bits - 1))
    scaled = (x / q.scales.view(30, 1)).abs().clamp(min=least)
    step = 2.0 ** (scaled.log2().floor() - mantissa_bits) * q.scales.view(30, 1)
    assert ((back - x).abs() <= 0.5001 * step).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("code", CODES)
def test_quantising_again_changes_nothing(code: Code, backend: Backend) -> None:
    """float32 in between; both the signs of the largest elements and tiny blocks are met."""
    x = torch.randn(50 * 96, generator=torch.Generator().manual_seed(8))
    x[:96] *= 1e-38
    x[96:192] = 0
    if code == "dynamic8_unsigned":
        x = x.abs()
    first, back = run(backend, x, code=code, block_size=96)
    again, back_again = run(backend, back, code=code, block_size=96)
    codes = [unpacked(q) for q in (first, again)]
    if code in SMALL_FLOATS:  # -0 may become +0 in a block of scale 2^-126
        sign = 2 ** sum(SMALL_FLOATS[code])
        codes = [[0 if c == sign else c for c in one] for one in codes]
    assert codes[0] == codes[1]
    torch.testing.assert_close(back_again, back, rtol=3e-7, atol=1e-45)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("code", LINEAR)
@pytest.mark.parametrize("scale", [1.0, 2.0**-100, 2.0**90, 3.0])
def test_what_a_code_holds_is_exact(code: Code, scale: float, backend: Backend) -> None:
    """Each finite value of the format times a scale comes back in every bit."""
    values = [float(v) for v in definition(code) if v is not None]
    if code in ("int8", "int4"):
        values = (
            values[: values.index(-8.0 if code == "int4" else -128.0)]
            + values[values.index(-8.0 if code == "int4" else -128.0) + 1 :]
        )
    x = torch.tensor(values) * scale
    q, back = run(backend, x, code=code, block_size=x.numel() + x.numel() % 4)
    assert q.scales.item() == scale
    assert torch.equal(back, x)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("code", ["int8", "int4", *SMALL_FLOATS])
def test_power_of_two_scales(code: Code, backend: Backend) -> None:
    """The smallest power of two that holds the block, so scaling loses nothing."""
    x = torch.randn(64 * 32, generator=torch.Generator().manual_seed(10))
    q, back = run(backend, x, code=code, block_size=32, power_of_two=True)
    fraction, _ = torch.frexp(q.scales)
    assert (fraction == 0.5).all()
    top = {**MAXIMA, "int8": 127.0, "int4": 7.0}[code]
    largest = x.view(64, 32).abs().amax(1)
    scales = q.scales.view(64)
    assert (scales * top >= largest * (1 - 1e-6)).all()
    assert (scales / 2 * top < largest * (1 + 1e-6)).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_block_that_is_not_finite_is_nan(
    code: Code, bad: float, dtype: torch.dtype, backend: Backend
) -> None:
    x = torch.ones(4 * 32, dtype=dtype)
    x[70] = bad
    error = torch.full((128,), 0.5)
    q, back = run(backend, x, code=code, block_size=32, error=error.to(device_of(backend)))
    assert back[64:96].isnan().all()
    assert back[:64].isfinite().all() and back[96:].isfinite().all()
    assert q.scales.flatten().isnan().tolist() == [False, False, True, False]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_error_of_a_block_that_is_not_finite_is_reset(backend: Backend) -> None:
    x = torch.ones(64)
    x[3] = math.inf
    error = torch.full((64,), 0.3, device=device_of(backend))
    run(backend, x, code="int4", block_size=32, error=error)
    assert (error[:32] == 0).all() and error.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("code", CODES)
def test_extremes_of_float32(code: Code, backend: Backend) -> None:
    """The largest number stays finite, subnormal ones keep to half a step of 2^-126 or less."""
    top = torch.tensor([FLT_MAX, 0.0, FLT_MAX / 3, FLT_MAX / 2])
    _, back = run(backend, top, code=code, block_size=4)
    assert back.isfinite().all() and (back[0] - FLT_MAX).abs() <= 1e-6 * FLT_MAX
    tiny = torch.tensor([3e-39, 1e-40, 1e-45, 0.0])
    _, back = run(backend, tiny, code=code, block_size=4)
    step = 0.5 if code in SMALL_FLOATS else 1.0
    assert ((back - tiny).abs() <= 0.5 * step * 2.0**-126).all()
    _, back = run(backend, torch.zeros(9), code=code, block_size=4)
    assert (back == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_asymmetric_range_beyond_float32_is_nan(backend: Backend) -> None:
    x = torch.tensor([FLT_MAX, -FLT_MAX, 1.0, 2.0])
    _, back = run(backend, x, code="uint8", block_size=2)
    assert back[:2].isnan().all() and back[2:].tolist() == [1.0, 2.0]


# ---- stochastic rounding -----------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("code", LINEAR)
def test_stochastic_rounding_is_unbiased(code: Code, backend: Backend) -> None:
    """The mean of n roundings is within five standard errors of x, with variance p (1 - p)."""
    count, block = 4000, 32
    x = torch.linspace(-1, 1, block)
    x[:4] = torch.tensor([0.1, -0.1, 0.013, -0.4567])
    _, back = run(backend, x.repeat(count), code=code, block_size=block, seed=77)
    found = back.view(count, block).double()
    _, nearest = run(backend, x, code=code, block_size=block)
    values = found.unique(dim=0)
    assert len(values) > 1
    low, high = found.amin(0), found.amax(0)
    inside = (low <= x + 1e-6) & (x - 1e-6 <= high)
    assert inside.all()
    share = ((x.double() - low) / (high - low).clamp(min=1e-9)).clamp(0, 1)
    deviation = (share * (1 - share)).sqrt() * (high - low)
    bound = 5 * deviation / math.sqrt(count) + 2.0**-14 * (high - low) + 1e-6
    assert ((found.mean(0) - x).abs() <= bound).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_stochastic_rounding_takes_only_neighbours_and_keeps_exact_values(
    backend: Backend,
) -> None:
    x = torch.linspace(-127, 127, 509)
    x[0], x[-1] = -127.0, 127.0
    for seed in range(5):
        _, back = run(backend, x, code="int8", block_size=509, seed=seed)
        assert ((back == x.floor()) | (back == x.ceil())).all()
        whole = x == x.round()
        assert torch.equal(back[whole], x[whole])


@pytest.mark.parametrize("backend", BACKENDS)
def test_random_bits_depend_on_seed_and_position_alone(backend: Backend) -> None:
    """Different seeds, blocks and neighbours are uncorrelated: below 5 / sqrt(n)."""
    n = 64 * 256
    x = torch.full((n,), 0.5 / 127)
    x[::256] = 1.0
    ups = {}
    for seed in (0, 1, 2**63 - 1):
        _, back = run(backend, x, code="int8", block_size=256, seed=seed)
        _, again = run(backend, x, code="int8", block_size=256, seed=seed)
        assert torch.equal(back, again)
        ups[seed] = (back.view(64, 256)[:, 1:] > 0).double() * 2 - 1
    bound = 5 / math.sqrt(64 * 254)
    for one, other in itertools.combinations(ups.values(), 2):
        assert abs(float((one * other).mean())) < bound
    for up in ups.values():
        assert abs(float(up.mean())) < bound
        assert abs(float((up[:, 1:] * up[:, :-1]).mean())) < bound
        assert abs(float((up[1:] * up[:-1]).mean())) < bound


# ---- error feedback, rows, swizzle -------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_error_feedback_loses_nothing_over_time(dtype: torch.dtype, backend: Backend) -> None:
    """Sum of what was sent + last error = sum of inputs; to 1e-4 with float32, 0.1 with bf16."""
    generator = torch.Generator().manual_seed(4)
    error = torch.zeros(300, dtype=dtype, device=device_of(backend))
    sent, given = torch.zeros(300), torch.zeros(300)
    for _ in range(20):
        x = torch.randn(300, generator=generator)
        _, back = run(backend, x, code="int4", block_size=64, error=error)
        sent, given = sent + back, given + x
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(sent + error.cpu().float(), given, rtol=0, atol=tolerance)
    assert (sent - given).abs().max() > 10 * 1e-4


@pytest.mark.parametrize("backend", BACKENDS)
def test_decaying_error_is_an_average(backend: Backend) -> None:
    x = torch.randn(128, generator=torch.Generator().manual_seed(3))
    old = torch.full((128,), 0.02, device=device_of(backend))
    error = old.clone()
    _, back = run(backend, x, code="int4", block_size=64, error=error, error_decay=0.8)
    expected = 0.8 * old.cpu() + 0.2 * (x + 0.02 - back)
    torch.testing.assert_close(error.cpu(), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("code", CODES)
def test_rows_are_quantised_alone(code: Code) -> None:
    x = torch.randn(6, 37, generator=torch.Generator().manual_seed(9))
    q = quantize(x, code=code, block_size=16, rows=6)
    assert q.scales.shape == (6, 3) and q.cols == 37
    for row in range(6):
        alone = quantize(x[row], code=code, block_size=16)
        assert torch.equal(bytes_of(q)[row], bytes_of(alone)[0])
        assert torch.equal(q.scales[row], alone.scales[0])
    assert dequantize_blockwise(q).shape == (6, 37)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("code", ["int4", "int8", "uint4"])
@pytest.mark.parametrize(("nodes", "ranks", "stages"), [(1, 1, 1), (2, 4, 1), (3, 2, 2), (2, 1, 3)])
def test_swizzle_is_a_permutation_of_rows(
    code: Code, nodes: int, ranks: int, stages: int, backend: Backend
) -> None:
    cols = 27
    x = torch.randn(nodes * ranks * stages * cols, generator=torch.Generator().manual_seed(1))
    with module._QUANTIZE_OP.forced(backend), module._DEQUANTIZE_OP.forced(backend):
        q = quantize_swizzled(
            x.to(device_of(backend)), num_nodes=nodes, ranks_per_node=ranks, num_stages=stages,
            code=code, block_size=8,
        )  # fmt: skip
        back = dequantize_blockwise(q).cpu()
        plain = dequantize_blockwise(
            quantize(x.to(device_of(backend)), code=code, block_size=8, rows=nodes * ranks * stages)
        ).cpu()
    assert q.shape == (stages, ranks, nodes, cols)
    assert torch.equal(back, plain.view(nodes, ranks, stages, cols).permute(2, 1, 0, 3))


def test_two_level_exchange_ends_with_the_own_chunk() -> None:
    """Both all-to-alls of ZeRO++ on 2 nodes of 3 ranks: rank r ends with chunk r of everyone."""
    nodes, ranks, cols = 2, 3, 16
    world = nodes * ranks
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(world, cols, generator=generator) for _ in range(world)]
    sent = [
        dequantize_blockwise(
            quantize_swizzled(g, num_nodes=nodes, ranks_per_node=ranks, code="int8", block_size=16)
        )[0]
        for g in grads
    ]  # [local, node, cols] of every rank
    for node, local in itertools.product(range(nodes), range(ranks)):
        # within a node: my local number's slice from each local rank, reduced
        reduced = [
            torch.stack([sent[n * ranks + peer][local] for peer in range(ranks)]).sum(0)
            for n in range(nodes)
        ]
        # between nodes: my node's slice from the rank of my number on each node
        mine = torch.stack([part[node] for part in reduced]).sum(0)
        expected = torch.stack([g[node * ranks + local] for g in grads]).sum(0)
        torch.testing.assert_close(mine, expected, rtol=0, atol=0.1)


# ---- public functions --------------------------------------------------------------------------


def test_named_functions_choose_the_code() -> None:
    x = torch.randn(3, 50)
    assert quantize_blockwise(x).code == "int8" and quantize_blockwise(x).values.dtype == torch.int8
    assert quantize_blockwise(x, 4, 64).code == "int4"
    assert quantize_blockwise(x, 8, 64, False).zero_points is not None
    assert quantize_blockwise(x, 4, 64, False).values.shape == (1, 75)
    assert quantize_dynamic8(x).code == "dynamic8"
    assert quantize_dynamic8(x, signed=False).code == "dynamic8_unsigned"
    assert quantize(x, code="e4m3").values.dtype == torch.float8_e4m3fn
    assert quantize(x, code="e3m2").num_bytes == (150 * 6 + 7) // 8 + 4
    with pytest.raises(KernelArgumentError, match="^bits: is 2, allowed are 4 and 8"):
        quantize_blockwise(x, 2)  # type: ignore[arg-type]


def test_out_is_reused_and_may_lie_in_a_larger_buffer() -> None:
    x = torch.randn(4, 64)
    buffer = torch.zeros(4 * 32 + 4 * 4 + 100, dtype=torch.uint8)
    q = Quantized(
        buffer[: 4 * 32].view(4, 32), buffer[128 : 128 + 16].view(torch.float32).view(4, 1), None,
        (4, 64), "int4", 64,
    )  # fmt: skip
    assert quantize(x, out=q) is q
    expected = quantize(x, code="int4", block_size=64, rows=4)
    assert_same(q, expected)
    out = torch.empty(256, dtype=torch.bfloat16)
    assert dequantize_blockwise(q, out=out) is out
    assert torch.equal(out.view(4, 64), dequantize_blockwise(expected, dtype=torch.bfloat16))


@pytest.mark.parametrize("code", ["int8", "uint4", "e3m2"])
def test_non_contiguous_and_differentiated_input(code: Code) -> None:
    x = torch.randn(20, 30, requires_grad=True)
    q = quantize(x.t(), code=code, block_size=20)
    assert_same(q, quantize(x.detach().t().contiguous(), code=code, block_size=20))
    assert not dequantize_blockwise(q).requires_grad
    expanded = quantize(torch.ones(1).expand(64), code=code, block_size=64)
    assert (dequantize_blockwise(expanded) == 1).all()


@pytest.mark.parametrize("code", CODES)
def test_empty_tensors(code: Code) -> None:
    q = quantize(torch.empty(0, 5), code=code)
    assert q.values.numel() == 0 and q.scales.numel() == 0
    assert dequantize_blockwise(q).shape == (0, 5)


def test_compiles_without_a_graph_break() -> None:
    def call(x: Tensor, seed: int) -> tuple[Tensor, ...]:
        q = quantize(x * 2, code="int4", block_size=32, seed=seed)
        return q.values, q.scales, dequantize_blockwise(q, dtype=torch.bfloat16)

    def make(generator: torch.Generator) -> tuple[Any, ...]:
        return torch.randn(7, 20, generator=generator), 5

    suite = Suite(module._QUANTIZE_OP, (), call=call, others=(module._DEQUANTIZE_OP,))
    check_compiled(suite, Case("compiled", make), BACKENDS[0])


@pytest.mark.parametrize("code", ["int8", "uint4"])
def test_registered_ops_are_well_formed(code: Code) -> None:
    arguments = _case(code, 100, 32, error=torch.float32).arguments()
    torch.library.opcheck(torch.ops.ds_kernels.quantize_, arguments)
    values, scales, zero_points = arguments[:3]
    torch.library.opcheck(
        torch.ops.ds_kernels.dequantize_,
        (torch.empty(100), values, scales, zero_points, code_index(code), 100, 32),
    )


@needs_native
@pytest.mark.slow
def test_more_than_two_to_the_31_elements() -> None:
    """bfloat16 from pages that were never touched; only the last block is not zero."""
    numel = 2**31 + 640
    available = next(
        int(line.split()[1]) * 1024
        for line in open("/proc/meminfo", encoding="ascii")
        if line.startswith("MemAvailable")
    )
    if available < 14 * 2**30:
        pytest.skip(f"needs 14 GiB of memory, {available / 2**30:.1f} are available")
    x = torch.zeros(numel, dtype=torch.bfloat16)
    x[-5:] = torch.tensor([1.0, -6.0, 3.0, 0.5, 6.0])
    q = quantize(x, code="e2m1", block_size=512)
    assert q.scales[0, -1] == 1.0 and (q.scales[0, -5:-1] < 1e-37).all()
    back = dequantize_blockwise(q, out=x)
    assert back[-6:].tolist() == [0.0, 1.0, -6.0, 3.0, 0.5, 6.0]


# ---- bad arguments -----------------------------------------------------------------------------


def _bad() -> list[tuple[str, str, dict[str, Any]]]:
    x = torch.ones(64)
    raw = torch.zeros(300, dtype=torch.uint8)
    inside = Quantized(raw[:64].view(1, 64), raw[32:36].view(torch.float32).view(1, 1), None,
                       (64,), "e2m3", 64)  # fmt: skip
    small = Quantized.empty((60,), code="int8", block_size=64)
    q = Quantized.empty((64,), code="uint8", block_size=64)
    without = Quantized(q.values, q.scales, None, (64,), "uint8", 64)
    double = Quantized(q.values, q.scales.double(), q.zero_points, (64,), "uint8", 64)
    wide = Quantized(q.values.float(), q.scales, q.zero_points, (64,), "uint8", 64)
    return [
        ("code", "is 'int3', allowed are int8", {"code": "int3"}),
        ("block_size", "is 0", {"block_size": 0}),
        ("block_size", "multiple of 2", {"code": "int4", "block_size": 33}),
        ("block_size", "multiple of 4", {"code": "e3m2", "block_size": 34}),
        ("rows", "is 3, it must divide 64", {"rows": 3}),
        ("rows", "is 0", {"rows": 0}),
        ("x", "is float64", {"x": x.double()}),
        ("x", "is int64", {"x": x.long()}),
        ("power_of_two", "not possible", {"code": "uint8", "power_of_two": True}),
        ("seed", "nearest only", {"code": "dynamic8", "seed": 1}),
        ("seed", "is -1", {"seed": -1}),
        ("error", "has 63 elements", {"error": torch.zeros(63)}),
        ("error", "is float64", {"error": x.double()}),
        ("error", "shares memory", {"error": x, "x": x}),
        ("error", "not contiguous", {"error": torch.zeros(1).expand(64)}),
        ("error_decay", "is 1.0", {"error_decay": 1.0}),
        ("values", "has 60 elements, expected 64", {"out": small}),
        ("values", "has 64 elements, expected 48", {"out": inside}),
        ("zero_points", "is None", {"out": without}),
        ("scales", "is float64", {"out": double}),
        ("values", "is float32, expected a dtype of one byte", {"out": wide}),
    ]


@needs_native
@pytest.mark.parametrize(("name", "text", "change"), _bad(), ids=lambda value: str(value)[:24])
def test_bad_arguments_are_named(name: str, text: str, change: dict[str, Any]) -> None:
    arguments = {"x": torch.ones(64), "block_size": 32, **change}
    with pytest.raises(KernelArgumentError, match=rf"^{name}: .*{text}"):
        quantize(**arguments)


@needs_native
def test_overlap_of_what_is_written_is_refused() -> None:
    raw = torch.zeros(300, dtype=torch.uint8)
    q = Quantized(
        raw[:64].view(1, 64), raw[32:36].view(torch.float32).view(1, 1), None, (64,), "int8", 64
    )
    with pytest.raises(KernelArgumentError, match="^values: shares memory with scales"):
        quantize(torch.ones(64), out=q)


@needs_native
def test_bad_arguments_of_dequantising_are_named() -> None:
    q = quantize(torch.ones(64), block_size=32)
    with pytest.raises(KernelArgumentError, match="^out: is float64"):
        dequantize_blockwise(q, dtype=torch.float64)
    with pytest.raises(KernelArgumentError, match="^out: has 63 elements, expected 64"):
        dequantize_blockwise(q, out=torch.empty(63))
    with pytest.raises(KernelArgumentError, match="^out: .*not contiguous"):
        dequantize_blockwise(q, out=torch.empty(128)[::2])


@pytest.mark.parametrize("name", ["num_nodes", "ranks_per_node", "num_stages"])
def test_bad_grids_of_a_swizzle_are_named(name: str) -> None:
    good: dict[str, Any] = {"num_nodes": 2, "ranks_per_node": 2, "num_stages": 1}
    with pytest.raises(KernelArgumentError, match=f"^{name}: is 0"):
        quantize_swizzled(torch.ones(64), **{**good, name: 0})
    with pytest.raises(KernelArgumentError, match="^rows: is 12"):
        quantize_swizzled(torch.ones(64), **{**good, "num_stages": 3})
