"""Block-wise quantisation to 8, 6 and 4 bits and back.

Codes: symmetric and asymmetric integers; FP8 (Micikevicius et al. 2022, arXiv:2209.05433), FP6 and
FP4 (OCP Microscaling formats, version 1.0); the dynamic code of 8-bit optimisers (Dettmers et al.
2021, arXiv:2110.02861, section 1.3, but with signed scales: [Note: dynamic code] in
csrc/math/blockwise.h).

Rounding is to nearest, ties to even, or stochastic: the random bits are a function of the seed and
of the position alone, so every backend and number of threads gives the same codes.

A block that holds NaN or infinity (or, asymmetric, a range beyond float32) gets scale NaN, and all
of it dequantises to NaN. Dequantising a code of FP8 that stands for NaN or infinity gives that.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from ds_kernels.blockwise import Code, Quantized, code_index
from ds_kernels.errors import KernelArgumentError
from ds_kernels.functional import Mutating
from ds_kernels.reference import quantize as reference
from ds_kernels.registry import Op

__all__ = [
    "dequantize_blockwise",
    "quantize",
    "quantize_blockwise",
    "quantize_dynamic8",
    "quantize_swizzled",
]

_QUANTIZE_OP: Op[..., None] = Op(
    "quantize_", reference.quantize_, native=lambda m: m.quantize_, source="quantize", cuda=True
)
_DEQUANTIZE_OP: Op[..., None] = Op(
    "dequantize_",
    reference.dequantize_,
    native=lambda m: m.dequantize_,
    source="quantize",
    cuda=True,
)
_QUANTIZE = Mutating(
    _QUANTIZE_OP,
    "(Tensor(a!) values, Tensor(b!) scales, Tensor(c!)? zero_points, Tensor x, Tensor(d!)? error, "
    "int code, int cols, int block_size, int outer, int middle, bool power_of_two, int? seed, "
    "float error_decay)",
)
_DEQUANTIZE = Mutating(
    _DEQUANTIZE_OP,
    "(Tensor(a!) out, Tensor values, Tensor scales, Tensor? zero_points, int code, int cols, "
    "int block_size)",
)


def quantize(
    x: Tensor,
    *,
    code: Code = "int8",
    block_size: int = 256,
    rows: int = 1,
    power_of_two: bool = False,
    seed: int | None = None,
    error: Tensor | None = None,
    error_decay: float = 0.0,
    out: Quantized | None = None,
) -> Quantized:
    """Quantise a tensor block by block, without autograd.

    Args:
        x: float32, bfloat16 or float16, any shape; copied first if not contiguous.
        code: What the codes mean.
        block_size: Elements that share a scale, at least 1; a multiple of 2 for 4-bit and of 4 for
            6-bit codes unless a row is no longer than that.
        rows: Read the tensor as so many equal rows that blocks do not cross.
        power_of_two: Round scales up to powers of two (then scaling is exact); not for asymmetric
            and dynamic codes.
        seed: Round stochastically, with these random bits (0 to 2^63 - 1); not for dynamic codes.
            None rounds to nearest.
        error: Error feedback, float32, bfloat16 or float16, as many elements as ``x``. It is added
            to ``x`` first and then replaced by ``error_decay * error + (1 - error_decay) * (what
            the codes leave out)`` (LoCo, Xie et al. 2024, arXiv:2407.04480, keeps such an average);
            by 0 in blocks that are not finite.
        error_decay: In [0, 1).
        out: Write here (see :meth:`Quantized.empty`); decides code, block size and rows.

    Returns:
        ``out``, or a new one.

    Raises:
        KernelArgumentError: Wrong dtype, device, size or layout, overlap, or a value out of range.
    """
    if out is None:
        out = Quantized.empty(x.shape, code=code, block_size=block_size, rows=rows, device=x.device)
    _run(x, out, 1, 1, power_of_two, seed, error, error_decay)
    return out


def quantize_blockwise(
    x: Tensor,
    bits: Literal[4, 8] = 8,
    block_size: int = 256,
    symmetric: bool = True,
    *,
    seed: int | None = None,
    out: Quantized | None = None,
) -> Quantized:
    """Quantise to integers: ``int8`` or ``int4``, asymmetric ``uint8`` or ``uint4``.

    Args:
        x: See :func:`quantize`.
        bits: 4 or 8.
        block_size: See :func:`quantize`.
        symmetric: Without zero points.
        seed: See :func:`quantize`.
        out: See :func:`quantize`.

    Raises:
        KernelArgumentError: As :func:`quantize`, or ``bits`` is neither.
    """
    codes: dict[int, tuple[Code, Code]] = {8: ("uint8", "int8"), 4: ("uint4", "int4")}
    if bits not in codes:
        raise KernelArgumentError(f"bits: is {bits}, allowed are 4 and 8")
    return quantize(x, code=codes[bits][symmetric], block_size=block_size, seed=seed, out=out)


def quantize_dynamic8(
    x: Tensor, *, signed: bool = True, block_size: int = 256, out: Quantized | None = None
) -> Quantized:
    """Quantise to the non-linear 8-bit code of 8-bit optimisers.

    The code covers seven decades below a block's largest element with a relative error that is
    small near the top. Tensors of zero bytes and zero scales stand for zeros.

    Args:
        x: See :func:`quantize`.
        signed: Else negative elements become 0.
        block_size: See :func:`quantize`.
        out: See :func:`quantize`.
    """
    code: Code = "dynamic8" if signed else "dynamic8_unsigned"
    return quantize(x, code=code, block_size=block_size, out=out)


def quantize_swizzled(
    x: Tensor,
    *,
    num_nodes: int,
    ranks_per_node: int,
    num_stages: int = 1,
    code: Code = "int4",
    block_size: int = 256,
    seed: int | None = None,
    error: Tensor | None = None,
    error_decay: float = 0.0,
    out: Quantized | None = None,
) -> Quantized:
    """Quantise a gradient for a two-level all-to-all, chunks in the order of the first level.

    ``x`` holds a chunk for each rank, ``rank = node * ranks_per_node + local``. The first
    all-to-all, within nodes, sends to each local rank what any rank of that number gets on any
    node. So that the second one, between nodes, ends with every rank's own chunk, chunks are
    written in the order [local rank, node] (Wang et al. 2023, ZeRO++, arXiv:2306.10209, section
    3.3). With stages each chunk is cut into that many parts and the order is [stage, local rank,
    node], so that a stage is sent while the next one is quantised.

    Args:
        x: See :func:`quantize`; a whole number of ``num_nodes * ranks_per_node * num_stages`` rows.
        num_nodes: Nodes.
        ranks_per_node: Ranks of each.
        num_stages: Parts of each chunk.
        code: See :func:`quantize`.
        block_size: See :func:`quantize`; blocks do not cross rows.
        seed: See :func:`quantize`.
        error: See :func:`quantize`; in the order of ``x``.
        error_decay: See :func:`quantize`.
        out: See :func:`quantize`, with as many rows.

    Returns:
        ``num_stages * ranks_per_node * num_nodes`` rows in that order; its ``shape`` is
        ``(num_stages, ranks_per_node, num_nodes, elements of a row)``.

    Raises:
        KernelArgumentError: As :func:`quantize`, or ``x`` cannot be cut so.
    """
    for name, count in (
        ("num_nodes", num_nodes),
        ("ranks_per_node", ranks_per_node),
        ("num_stages", num_stages),
    ):
        if count < 1:
            raise KernelArgumentError(f"{name}: is {count}, it must be at least 1")
    rows = num_nodes * ranks_per_node * num_stages
    if out is None:
        out = Quantized.empty(x.shape, code=code, block_size=block_size, rows=rows, device=x.device)
    elif out.rows != rows:
        raise KernelArgumentError(f"out: has {out.rows} rows, expected {rows}")
    shape = (num_stages, ranks_per_node, num_nodes, x.numel() // rows)
    _run(x, out, num_nodes, ranks_per_node, False, seed, error, error_decay)
    return replace(out, shape=shape)


def dequantize_blockwise(
    q: Quantized, *, out: Tensor | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The tensor that a quantised one stands for.

    Args:
        q: Any code.
        out: Write here: float32, bfloat16 or float16, contiguous, as many elements.
        dtype: Of the result where there is no ``out``.

    Returns:
        ``out``, or a new tensor of shape ``q.shape``.

    Raises:
        KernelArgumentError: Wrong dtype, device, size or layout, or overlap.
    """
    if out is None:
        out = torch.empty(q.shape, dtype=dtype, device=q.values.device)
    elif out.numel() != q.rows * q.cols:
        raise KernelArgumentError(
            f"out: has {out.numel()} elements, expected {q.rows * q.cols} (shape {list(q.shape)})"
        )
    _DEQUANTIZE(
        out, q.values, q.scales, q.zero_points, code_index(q.code), max(q.cols, 1), q.block_size
    )
    return out


def _run(
    x: Tensor,
    out: Quantized,
    outer: int,
    middle: int,
    power_of_two: bool,
    seed: int | None,
    error: Tensor | None,
    error_decay: float,
) -> None:
    check_rounding(out.code, power_of_two, seed)
    cols = x.numel() // max(out.rows, 1)
    _QUANTIZE(
        out.values, out.scales, out.zero_points, x.detach().contiguous(), error,
        code_index(out.code), max(cols, 1), out.block_size, outer, middle, power_of_two, seed,
        error_decay,
    )  # fmt: skip


def check_rounding(code: str, power_of_two: bool, seed: int | None) -> None:
    """Refuse what a code cannot do.

    Raises:
        KernelArgumentError: Power-of-two scales or random bits do not go with the code, or the seed
            is out of range.
    """
    if power_of_two and code in ("uint8", "uint4", "dynamic8", "dynamic8_unsigned"):
        raise KernelArgumentError(f"power_of_two: is not possible for the code {code}")
    if seed is None:
        return
    if code.startswith("dynamic8"):
        raise KernelArgumentError("seed: is given, but dynamic codes round to nearest only")
    if not 0 <= seed < 2**63:
        raise KernelArgumentError(f"seed: is {seed}, allowed is 0 to 2^63 - 1")
