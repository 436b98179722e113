"""A weight as bytes: codes and scales one after the other, or just its own bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ds_zero.linear.config import QuantizationConfig

__all__ = ["PackedFormat"]

_ALIGNMENT = 16


@dataclass(frozen=True)
class PackedFormat:
    """How a weight is laid out in bytes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    """Of the weight when it is used."""
    quantization: QuantizationConfig | None = None
    """None keeps the weight's own bytes."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Number of bytes."""
        if self.quantization is None:
            return self.numel * self.dtype.itemsize
        return self._scales_at + 4 * self._num_groups

    @property
    def stored_dtype(self) -> torch.dtype:
        """Dtype of what is stored: bytes, or without quantisation the weight's own."""
        return self.dtype if self.quantization is None else torch.uint8

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of what is stored."""
        return self.shape if self.quantization is None else (self.num_bytes,)

    @property
    def _num_groups(self) -> int:
        assert self.quantization is not None
        return -(-self.numel // self.quantization.group_size)

    @property
    def _scales_at(self) -> int:
        """First byte of the scales: after the codes of whole groups, aligned."""
        assert self.quantization is not None
        bits = self._num_groups * self.quantization.group_size * self.quantization.q_bits
        return -(-bits // (8 * _ALIGNMENT)) * _ALIGNMENT

    def pack(self, weight: Tensor) -> Tensor:
        """Return ``weight`` (of this shape, any float dtype) as ``[num_bytes]`` uint8."""
        if self.quantization is None:
            values = weight.detach().to(self.dtype).contiguous().view(-1)
            return values.view(torch.uint8).clone()
        group = self.quantization.group_size
        flat = weight.detach().reshape(-1).float()
        flat = torch.nn.functional.pad(flat, (0, self._num_groups * group - self.numel))
        groups = flat.view(self._num_groups, group)
        scales = groups.abs().amax(dim=1) / _largest(self.quantization)
        safe = torch.where(scales > 0, scales, torch.ones_like(scales))
        codes = _encode(groups / safe.unsqueeze(1), self.quantization)
        packed = torch.zeros(self.num_bytes, dtype=torch.uint8, device=weight.device)
        packed[: codes.numel()] = codes
        packed[self._scales_at :] = scales.view(torch.uint8)
        return packed

    def unpack(self, packed: Tensor) -> Tensor:
        """Return the weight from its ``[num_bytes]`` bytes, which begin at a multiple of 16.

        Without quantisation the result shares memory with ``packed``.
        """
        if self.quantization is None:
            return packed.view(self.dtype).view(self.shape)
        group = self.quantization.group_size
        num_codes = self._num_groups * group
        scales = packed[self._scales_at :].view(torch.float32)
        values = _decode(packed[: num_codes * self.quantization.q_bits // 8], self.quantization)
        found = values.view(self._num_groups, group) * scales.unsqueeze(1)
        return found.view(-1)[: self.numel].view(self.shape).to(self.dtype)


# ---- codes: positions in a table of all values, except for fp8, which torch casts --------------


def _fp8(config: QuantizationConfig) -> torch.dtype | None:
    dtypes = {3: torch.float8_e4m3fn, 2: torch.float8_e5m2}
    return dtypes.get(config.mantissa_bits) if config.q_bits == 8 else None


def _largest(config: QuantizationConfig) -> float:
    """Largest value of a format."""
    fp8 = _fp8(config)
    return torch.finfo(fp8).max if fp8 else float(_table(config)[-1])


@cache
def _table(config: QuantizationConfig) -> Tensor:
    """All values of a format in ascending order, fp32; 2^bits of them at most."""
    bits, mantissa = config.q_bits, config.mantissa_bits
    if mantissa == 0:
        top = 2 ** (bits - 1) - 1
        return torch.arange(-top, top + 1, dtype=torch.float32)
    exponent_bits = bits - 1 - mantissa
    bias = 2 ** (exponent_bits - 1) - 1
    positive = [
        (1 + m / 2**mantissa) * 2.0 ** (e - bias) if e else m / 2**mantissa * 2.0 ** (1 - bias)
        for e in range(2**exponent_bits)
        for m in range(2**mantissa)
    ]
    return torch.tensor([-value for value in reversed(positive[1:])] + positive)


def _encode(values: Tensor, config: QuantizationConfig) -> Tensor:
    """Codes of values within the format's range, packed into uint8, 1-D."""
    fp8 = _fp8(config)
    if fp8 is not None:
        return values.to(fp8).view(torch.uint8).flatten()
    table = _table(config).to(values.device)
    codes = torch.bucketize(values.flatten(), (table[1:] + table[:-1]) / 2).to(torch.uint8)
    if config.q_bits == 4:
        return codes[::2] | codes[1::2] << 4
    if config.q_bits == 6:
        a, b, c, d = codes.view(-1, 4).unbind(1)
        return torch.stack([a | b << 6, b >> 2 | c << 4, c >> 4 | d << 2], dim=1).flatten()
    return codes


def _decode(packed: Tensor, config: QuantizationConfig) -> Tensor:
    """The fp32 values of packed codes, 1-D."""
    fp8 = _fp8(config)
    if fp8 is not None:
        return packed.view(fp8).float()
    codes = packed
    if config.q_bits == 4:
        codes = torch.stack([packed & 15, packed >> 4], dim=1).flatten()
    elif config.q_bits == 6:
        x, y, z = packed.view(-1, 3).unbind(1)
        parts = [x & 63, (x >> 6 | y << 2) & 63, (y >> 4 | z << 4) & 63, z >> 2]
        codes = torch.stack(parts, dim=1).flatten()
    return _table(config).to(packed.device)[codes.int()]
