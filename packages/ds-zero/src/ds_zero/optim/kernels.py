"""Whether an op of ds-kernels has more than its reference for a tensor."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from ds_kernels.ops import chosen_backend

__all__ = ["kernel_serves"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def kernel_serves(module: str, op: str, param: Tensor) -> bool:
    """Whether a kernel runs for ``param``: it is built, proven on the device, and has the dtype.

    Args:
        module: Name of the module in ``ds_kernels.ops``.
        op: Name of the op.
        param: What would be updated.
    """
    return param.dtype in _DTYPES and _built(module, op, param.device.type)


@cache
def _built(module: str, op: str, device_type: str) -> bool:
    return chosen_backend(module, op, device_type) != "reference"
