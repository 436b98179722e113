"""Names of dtypes in the index (torch's) and in safetensors headers, and raw byte views."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ds_comm.errors import CheckpointError

__all__ = ["as_bytes", "dtype_from_name", "dtype_name", "safetensors_code"]

_CODES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.bool: "BOOL",
}


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype without its prefix, such as ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


_BY_NAME: Mapping[str, torch.dtype] = {dtype_name(dtype): dtype for dtype in _CODES}


def dtype_from_name(name: str) -> torch.dtype:
    """Return the dtype called ``name``.

    Raises:
        CheckpointError: No storable dtype has that name.
    """
    if name not in _BY_NAME:
        raise CheckpointError(f"unknown dtype {name!r}; known: {', '.join(sorted(_BY_NAME))}")
    return _BY_NAME[name]


def safetensors_code(dtype: torch.dtype) -> str:
    """Return the dtype's code in a safetensors header, such as ``BF16``.

    Raises:
        CheckpointError: The format has no such dtype.
    """
    if dtype not in _CODES:
        raise CheckpointError(
            f"tensors of dtype {dtype_name(dtype)} cannot be stored; "
            f"storable: {', '.join(sorted(_BY_NAME))}"
        )
    return _CODES[dtype]


def as_bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a 1-D contiguous CPU tensor as writable bytes, without a copy."""
    if tensor.dtype.is_complex:
        tensor = torch.view_as_real(tensor).reshape(-1)
    return tensor.detach().view(torch.uint8).numpy().data
