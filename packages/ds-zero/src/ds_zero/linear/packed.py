"""A weight as bytes: codes and scales one after the other, or just its own bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_kernels.blockwise import Quantized, code_dtype, packed_bytes
from ds_kernels.ops.quantize import dequantize_blockwise, quantize
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
        """First byte of the scales: after the codes, aligned."""
        assert self.quantization is not None
        num_bytes = packed_bytes(self.quantization.code, self.numel)
        return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT

    def _quantized(self, packed: Tensor, quantization: QuantizationConfig) -> Quantized:
        """Codes and scales as views of the bytes."""
        code = quantization.code
        values = packed[: packed_bytes(code, self.numel)].view(1, -1)
        return Quantized(
            values=values.view(code_dtype(code)),
            scales=packed[self._scales_at :].view(torch.float32).view(1, -1),
            zero_points=None,
            shape=self.shape,
            code=code,
            block_size=quantization.group_size,
        )

    def pack(self, weight: Tensor) -> Tensor:
        """Return ``weight`` (of this shape, any float dtype) as ``[num_bytes]`` uint8."""
        values = weight.detach().to(self.dtype).contiguous()
        if self.quantization is None:
            return values.view(-1).view(torch.uint8).clone()
        packed = torch.zeros(self.num_bytes, dtype=torch.uint8, device=weight.device)
        narrow = values.float() if values.dtype == torch.float64 else values
        quantize(narrow, out=self._quantized(packed, self.quantization))
        return packed

    def unpack(self, packed: Tensor) -> Tensor:
        """Return the weight from its ``[num_bytes]`` bytes, which begin at a multiple of 16.

        Without quantisation the result shares memory with ``packed``.
        """
        if self.quantization is None:
            return packed.view(self.dtype).view(self.shape)
        found = self._quantized(packed, self.quantization)
        dtype = torch.float32 if self.dtype == torch.float64 else self.dtype
        return dequantize_blockwise(found, dtype=dtype).to(self.dtype)
