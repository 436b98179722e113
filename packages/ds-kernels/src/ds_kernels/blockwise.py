"""Block-wise quantised tensors: their codes and what is stored of them.

[Note: blocks]
A tensor is read row by row; every row is cut into blocks of ``block_size`` elements, the last one
shorter.  A block shares a float32 scale and, for asymmetric codes, a zero point: the value of code
0.  Codes of 4 and 6 bits are packed: code ``i`` of a row lies in bits ``bits * i`` and up of the
row's bytes, the lowest first.  A flat tensor is one row; collectives use a row per rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from ds_kernels.errors import KernelArgumentError

__all__ = ["CODES", "Code", "Quantized", "code_dtype", "code_index", "packed_bytes"]

Code = Literal[
    "int8", "int4", "uint8", "uint4", "e4m3", "e5m2", "e3m2", "e2m3", "e2m1", "dynamic8",
    "dynamic8_unsigned",
]  # fmt: skip
"""What a code stands for: ``int8`` and ``int4`` are symmetric integers, ``uint8`` and ``uint4``
integers above a zero point, ``e4m3`` and ``e5m2`` FP8, ``e3m2`` and ``e2m3`` FP6, ``e2m1`` FP4,
``dynamic8`` the non-linear code of 8-bit optimisers."""

CODES: tuple[Code, ...] = get_args(Code)
"""All codes in the order of the native enum."""

_INDEX: dict[str, int] = {code: index for index, code in enumerate(CODES)}
_BITS: dict[str, int] = {"int4": 4, "uint4": 4, "e2m1": 4, "e3m2": 6, "e2m3": 6}
_DTYPES: dict[str, torch.dtype] = {
    "int8": torch.int8,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}


def code_index(code: str) -> int:
    """The number of a code in the native enum.

    Raises:
        KernelArgumentError: There is no such code.
    """
    try:
        return _INDEX[code]
    except KeyError:
        raise KernelArgumentError(f"code: is {code!r}, allowed are {', '.join(CODES)}") from None


def code_dtype(code: str) -> torch.dtype:
    """Dtype of the values of a code."""
    return _DTYPES.get(code, torch.uint8)


def packed_bytes(code: str, numel: int) -> int:
    """Bytes of ``numel`` packed codes."""
    return (numel * _BITS.get(code, 8) + 7) // 8


@dataclass(frozen=True)
class Quantized:
    """A quantised tensor; see [Note: blocks].

    The tensors may be views into a larger buffer, such as one that a collective sends; the ops that
    take a ``Quantized`` check their sizes.

    Attributes:
        values: [rows, bytes of a row]; ``int8``, ``e4m3`` and ``e5m2`` in torch's dtype of that
            name, the other codes as uint8.
        scales: float32 [rows, blocks of a row].
        zero_points: The same for ``uint8`` and ``uint4``, else None.
        shape: Of the tensor that was quantised.
        code: What the values mean.
        block_size: Elements that share a scale.
    """

    values: Tensor
    scales: Tensor
    zero_points: Tensor | None
    shape: tuple[int, ...]
    code: Code
    block_size: int

    @property
    def rows(self) -> int:
        """Rows that blocks do not cross."""
        return self.scales.shape[0]

    @property
    def cols(self) -> int:
        """Elements of a row."""
        return math.prod(self.shape) // max(self.rows, 1)

    @property
    def num_bytes(self) -> int:
        """Bytes of values, scales and zero points."""
        tensors = (self.values, self.scales, self.zero_points)
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)

    @staticmethod
    def empty(
        shape: Sequence[int],
        *,
        code: Code = "int8",
        block_size: int = 256,
        rows: int = 1,
        device: torch.device | str | None = None,
    ) -> Quantized:
        """Room for a quantised tensor, to be written by an op's ``out``.

        Args:
            shape: Of the tensor to be quantised.
            code: See `Code`.
            block_size: Elements that share a scale, at least 1; a multiple of 2 for 4-bit and of 4
                for 6-bit codes unless a row has no more elements than that.
            rows: The tensor is read as so many equal rows.
            device: Where.

        Raises:
            KernelArgumentError: The code does not exist, ``block_size`` is below 1 or ``rows`` does
                not divide the number of elements.
        """
        code_index(code)
        numel = math.prod(shape)
        if rows < 1 or numel % rows != 0:
            raise KernelArgumentError(f"rows: is {rows}, it must divide {numel} elements")
        if block_size < 1:
            raise KernelArgumentError(f"block_size: is {block_size}, it must be at least 1")
        cols = numel // rows
        blocks = (cols + block_size - 1) // block_size
        num_bytes = packed_bytes(code, cols)
        values = torch.empty(rows, num_bytes, dtype=code_dtype(code), device=device)
        scales = torch.empty(rows, blocks, dtype=torch.float32, device=device)
        zero_points = torch.empty_like(scales) if code in ("uint8", "uint4") else None
        return Quantized(values, scales, zero_points, tuple(shape), code, block_size)
