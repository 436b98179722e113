"""Block-wise quantisation in plain torch, operation by operation what the kernels do.

float64 tensors are computed in float64; else everything is float32 and equal to the kernels in
every bit.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from ds_kernels.blockwise import CODES, packed_bytes

__all__ = ["decode_rows", "dequantize_", "encode_rows", "quantize_", "random_bits", "value_table"]

_SMALLEST_SCALE = 2.0**-126
_LARGEST = torch.finfo(torch.float32).max
_FORMATS = {"e4m3": (4, 3), "e5m2": (5, 2), "e3m2": (3, 2), "e2m3": (2, 3), "e2m1": (2, 1)}
_TOPS = {"e4m3": 448.0, "e5m2": 57344.0, "e3m2": 28.0, "e2m3": 7.5, "e2m1": 6.0,
         "int8": 127.0, "int4": 7.0, "uint8": 255.0, "uint4": 15.0}  # fmt: skip


@torch.no_grad()
def quantize_(
    values: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    x: Tensor,
    error: Tensor | None,
    code_number: int,
    cols: int,
    block_size: int,
    outer: int,
    middle: int,
    power_of_two: bool,
    seed: int | None,
    error_decay: float,
    /,
) -> None:
    """See :func:`ds_kernels.ops.quantize.quantize`."""
    if x.numel() == 0:
        return
    work = torch.float64 if x.dtype == torch.float64 else torch.float32
    rows = x.to(work).reshape(-1, cols)
    if error is not None:
        rows = rows + error.to(work).view_as(rows)
    code = CODES[code_number]
    packed, scale, zero = encode_rows(rows, code, block_size, power_of_two, seed)
    if error is not None:
        left = rows - decode_rows(packed, scale, zero, code, cols, block_size)
        kept = error_decay * error.to(work).view_as(rows)
        updated = kept + (work_rest(error_decay, work)) * left
        error.copy_(torch.where(updated.isfinite(), updated, 0).view_as(error))
    inner = rows.shape[0] // (outer * middle)

    def write(to: Tensor, given: Tensor) -> None:
        ordered = given.view(outer, middle, inner, -1).permute(2, 1, 0, 3)
        to.copy_(ordered.reshape(to.shape))

    write(values.view(torch.uint8), packed)
    write(scales, scale)
    if zero_points is not None:
        write(zero_points, zero)


@torch.no_grad()
def dequantize_(
    out: Tensor,
    values: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    code_number: int,
    cols: int,
    block_size: int,
    /,
) -> None:
    """See :func:`ds_kernels.ops.quantize.dequantize_blockwise`."""
    if out.numel() == 0:
        return
    code = CODES[code_number]
    rows = out.numel() // cols
    packed = values.view(torch.uint8).reshape(rows, -1)
    zero = None if zero_points is None else zero_points.view(rows, -1)
    found = decode_rows(packed, scales.view(rows, -1), zero, code, cols, block_size)
    out.copy_(found.view_as(out))


def work_rest(decay: float, dtype: torch.dtype) -> float:
    """1 - decay with the rounding of the working dtype."""
    return float(1 - torch.tensor(decay, dtype=dtype))


def encode_rows(
    rows: Tensor, code: str, block_size: int, power_of_two: bool, seed: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise float32 or float64 [rows, cols].

    Returns:
        Packed uint8 [rows, bytes]; scales and zero points [rows, blocks], the latter 0 for codes
        that have none.
    """
    count, cols = rows.shape
    blocks = _cut(rows, block_size)
    scale, inverse, zero = _scales(blocks, code, power_of_two)
    random = None
    if seed is not None:
        random = random_bits(seed, count * blocks.shape[1], blocks.shape[2], rows.device)
        random = (random >> 17).view_as(blocks)
    codes = _encode(blocks, inverse.unsqueeze(-1), zero.unsqueeze(-1), code, random)
    codes = torch.where(scale.isfinite().unsqueeze(-1), codes, 0)
    return _pack(codes.view(count, -1)[:, :cols].to(torch.uint8), code), scale, zero


def decode_rows(
    packed: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    code: str,
    cols: int,
    block_size: int,
) -> Tensor:
    """The [rows, cols] that packed codes stand for, in the dtype of ``scales``."""
    codes = _cut(_unpack(packed, code, cols).to(torch.int64), block_size)
    values = value_table(code).to(packed.device, scales.dtype)[codes] * scales.unsqueeze(-1)
    if code in ("uint8", "uint4"):
        assert zero_points is not None
        values = values + zero_points.unsqueeze(-1)
    return values.view(len(packed), -1)[:, :cols].contiguous()


def _cut(rows: Tensor, block_size: int) -> Tensor:
    """[rows, cols] as [rows, blocks, block_size], the last block filled with its last element."""
    count, cols = rows.shape
    block = min(block_size, cols)
    missing = -cols % block
    if missing:
        rows = torch.cat([rows, rows[:, -1:].expand(count, missing)], dim=1)
    return rows.reshape(count, -1, block)


# ---- scales ------------------------------------------------------------------------------------


def _scales(blocks: Tensor, code: str, power_of_two: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Scale, inverse and zero point of each block; [Note: block scales] in math/blockwise.h."""
    if code.startswith("dynamic8"):
        return _dynamic_scales(blocks, signed=code == "dynamic8")
    zero = torch.zeros_like(blocks[..., 0])
    if code in ("uint8", "uint4"):
        zero = blocks.amin(-1)
        extent = blocks.amax(-1) - zero
    else:
        extent = blocks.abs().amax(-1)
    finite = extent <= _LARGEST
    top = _TOPS[code]
    scale = extent / top
    if power_of_two:
        fraction, exponent = torch.frexp(scale)
        scale = torch.where(fraction == 0.5, scale, torch.ldexp(torch.ones_like(scale), exponent))
    scale = scale.clamp(min=_SMALLEST_SCALE)
    if not power_of_two:
        for _ in range(2):
            too_large = ~(top * scale + zero <= _LARGEST)
            scale = torch.where(too_large, torch.nextafter(scale, torch.zeros_like(scale)), scale)
    nan = torch.full_like(scale, torch.nan)
    return torch.where(finite, scale, nan), 1 / scale, torch.where(finite, zero, 0)


def _dynamic_scales(blocks: Tensor, signed: bool) -> tuple[Tensor, Tensor, Tensor]:
    low, high = blocks.amin(-1), blocks.amax(-1)
    finite = (high <= _LARGEST) & (low >= -_LARGEST)
    negative = (-low > high) & signed
    largest = torch.where(negative, -low, high)
    scale = largest.clamp(min=_SMALLEST_SCALE) * torch.where(negative, -1.0, 1.0)
    scale = torch.where(largest > 0, scale, 0)
    inverse = torch.where(largest > 0, 1 / scale, 0)
    nan = torch.full_like(scale, torch.nan)
    return torch.where(finite, scale, nan), inverse, torch.zeros_like(scale)


# ---- codes -------------------------------------------------------------------------------------


def _encode(x: Tensor, inverse: Tensor, zero: Tensor, code: str, random: Tensor | None) -> Tensor:
    """int64 codes, one an element."""
    if code.startswith("dynamic8"):
        return _encode_dynamic(x * inverse, signed=code == "dynamic8")
    if code in _FORMATS:
        return _encode_float(x * inverse, *_FORMATS[code], _TOPS[code], random)
    top = int(_TOPS[code])
    if code in ("uint8", "uint4"):
        return _rounded((x - zero) * inverse, random).clamp(0, top)
    number = _rounded(x * inverse, random).clamp(-top, top)
    return number & 0xFF if code == "int8" else number + 8


def _rounded(x: Tensor, random: Tensor | None) -> Tensor:
    """To integers: ties to even, or up with the probability of the fraction in 15 bits."""
    x = torch.nan_to_num(x, nan=0.0)
    if random is None:
        return x.round().long()
    return ((x * 2.0**15).round().long() + random) >> 15


def _encode_float(
    y: Tensor, exponent_bits: int, mantissa_bits: int, top: float, random: Tensor | None
) -> Tensor:
    bias = 2 ** (exponent_bits - 1) - 1
    magnitude = torch.nan_to_num(y.abs(), nan=0.0)
    _, exponent = torch.frexp(magnitude)
    least = torch.full_like(exponent, 1 - bias)
    exponent = torch.where(magnitude == 0, least, torch.maximum(exponent - 1, least))
    steps = torch.ldexp(magnitude, mantissa_bits - exponent)
    code = _rounded(steps, random) + ((exponent - least).long() << mantissa_bits)
    bits = 1 + exponent_bits + mantissa_bits
    return code.clamp(max=_top_code(top, bias, mantissa_bits)) | (
        torch.signbit(y).long() << (bits - 1)
    )


def _top_code(top: float, bias: int, mantissa_bits: int) -> int:
    """The largest code without sign: E4M3 and E5M2 leave out those of NaN and infinity."""
    exponent = math.frexp(top)[1] - 1
    mantissa = int(top / 2.0**exponent * (1 << mantissa_bits)) - (1 << mantissa_bits)
    return (exponent + bias << mantissa_bits) | mantissa


@cache
def _dynamic_constants(signed: bool) -> tuple[list[float], list[float], list[float], float]:
    """Cells, gains and thresholds of the decades and the middle below 1, rounded to float32."""
    first = 1 if signed else 2
    units = [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0]

    def cell(decade: int, number: int) -> float:
        return units[decade] * (0.9 * (number + 0.5) / (first << decade) - 0.8)

    below = [0.0] + [cell(i - 1, (first << i) - 1) for i in range(1, 7)]
    thresholds = [(cell(i, first << i) + below[i]) / 2 for i in range(7)]
    gains = [(first << i) / (0.9 * units[i]) for i in range(7)]
    near_one = (cell(6, (first << 7) - 1) + 1.0) / 2
    return (
        [float(first << i) for i in range(7)],
        _to32(gains),
        _to32(thresholds),
        _to32([near_one])[0],
    )


def _to32(numbers: list[float]) -> list[float]:
    return [float(number) for number in torch.tensor(numbers, dtype=torch.float64).float()]


def _encode_dynamic(y: Tensor, signed: bool) -> Tensor:
    cells_of, gains, thresholds, near_one = _dynamic_constants(signed)
    magnitude = torch.nan_to_num(y.abs(), nan=0.0)
    decade = sum((magnitude >= threshold).long() for threshold in thresholds[1:])
    cells = torch.tensor(cells_of, dtype=y.dtype, device=y.device)[decade]
    gain = torch.tensor(gains, dtype=y.dtype, device=y.device)[decade]
    place = magnitude * gain + cells * _to32([8.0 / 9.0])[0]
    number = torch.minimum(torch.maximum(place, cells), cells + cells - 1).long()
    number = torch.where(magnitude < thresholds[0], int(cells_of[0]) - 1, number)
    one = int(cells_of[0]) << 7
    if signed:
        number = torch.where(y >= near_one, one, number)
        return 127 + torch.where(y < 0, -number, number)
    number = torch.where(magnitude >= near_one, one, number)
    return torch.where(y > 0, number - 1, 0)


@cache
def value_table(code: str) -> Tensor:
    """float32 value of every code at scale 1, zero points aside."""
    if code in ("uint8", "uint4"):
        return torch.arange(256 if code == "uint8" else 16, dtype=torch.float32)
    if code == "int8":
        return torch.arange(256).to(torch.uint8).view(torch.int8).float()
    if code == "int4":
        return torch.arange(-8, 8, dtype=torch.float32)
    if code.startswith("dynamic8"):
        return _dynamic_table(signed=code == "dynamic8")
    return _float_table(code)


def _float_table(code: str) -> Tensor:
    exponent_bits, mantissa_bits = _FORMATS[code]
    bias = 2 ** (exponent_bits - 1) - 1
    rest = torch.arange(2 ** (exponent_bits + mantissa_bits))
    exponent, mantissa = rest >> mantissa_bits, (rest & (2**mantissa_bits - 1)).float()
    fraction = mantissa / 2**mantissa_bits + (exponent > 0)
    positive = torch.ldexp(fraction, exponent.clamp(min=1) - bias)
    if code == "e5m2":
        positive[0x7C], positive[0x7D:] = torch.inf, torch.nan
    elif code == "e4m3":
        positive[0x7F] = torch.nan
    return torch.cat([positive, -positive])


def _dynamic_table(signed: bool) -> Tensor:
    first = 1 if signed else 2
    number = torch.arange(first << 7)
    fraction, exponent = torch.frexp(number + 0.5)
    decade = exponent - (1 if signed else 2)
    units = torch.tensor(_to32([1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0]))
    values = units[decade.clamp(min=0)] * ((fraction * 2) * 0.9 - 0.8)
    values[:first] = 0
    if signed:
        return torch.cat([-values[1:].flip(0), values, torch.ones(1)])
    return torch.cat([values[1:], torch.ones(1)])


# ---- packing -----------------------------------------------------------------------------------


def _pack(codes: Tensor, code: str) -> Tensor:
    """uint8 codes [rows, cols] as the bytes of [Note: blocks]."""
    count, cols = codes.shape
    if code in ("int4", "uint4", "e2m1"):
        low, high = torch.nn.functional.pad(codes, (0, cols % 2)).view(count, -1, 2).unbind(2)
        return low | high << 4
    if code in ("e3m2", "e2m3"):
        a, b, c, d = torch.nn.functional.pad(codes, (0, -cols % 4)).view(count, -1, 4).unbind(2)
        found = torch.stack([a | b << 6, b >> 2 | c << 4, c >> 4 | d << 2], dim=2)
        return found.view(count, -1)[:, : packed_bytes(code, cols)]
    return codes


def _unpack(packed: Tensor, code: str, cols: int) -> Tensor:
    """The uint8 codes [rows, cols] of packed bytes."""
    count, size = packed.shape
    if code in ("int4", "uint4", "e2m1"):
        packed = torch.stack([packed & 15, packed >> 4], dim=2).view(count, -1)
    elif code in ("e3m2", "e2m3"):
        x, y, z = torch.nn.functional.pad(packed, (0, -size % 3)).view(count, -1, 3).unbind(2)
        parts = [x & 63, (x >> 6 | y << 2) & 63, (y >> 4 | z << 4) & 63, z >> 2]
        packed = torch.stack(parts, dim=2).view(count, -1)
    return packed[:, :cols]


# ---- random bits -------------------------------------------------------------------------------


def random_bits(seed: int, blocks: int, block_size: int, device: torch.device) -> Tensor:
    """32 random bits an element as int64 [blocks, block_size]; [Note: random bits]."""
    block = torch.arange(1, blocks + 1, device=device)
    z = block * _signed(0x9E3779B97F4A7C15) + _signed(seed)
    z = (z ^ _shift(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift(z, 27)) * _signed(0x94D049BB133111EB)
    z = (z ^ _shift(z, 31)).unsqueeze(1)
    low = 0xFFFFFFFF
    h = (torch.arange(block_size, device=device) + (z & low)) & low
    h = ((h ^ h >> 16) * 0x21F0AAAD) & low
    return ((h ^ h >> 15 ^ _shift(z, 32)) * 0x735A2D97) & low


def _signed(number: int) -> int:
    """The same 64 bits as a signed number."""
    number &= 0xFFFFFFFFFFFFFFFF
    return number - 2**64 if number >= 2**63 else number


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical shift to the right."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
