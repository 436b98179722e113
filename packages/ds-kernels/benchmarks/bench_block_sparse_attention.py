"""Block-sparse attention against scaled_dot_product_attention with the expanded mask."""

from __future__ import annotations

import torch
from harness import Result, compare, main
from torch import Tensor

from ds_kernels.ops.block_sparse_attention import block_sparse_attention
from ds_kernels.sparsity import BigBirdSparsity, FixedSparsity, LocalSparsity, Sparsity

HEADS, LENGTH, DIM, BLOCK = 8, 1024, 64, 64


def _pair(sparsity: Sparsity, dtype: torch.dtype, backward: bool) -> Result:
    layout = sparsity.make_layout(LENGTH)
    mask = layout.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)[None]
    tensors = [torch.randn(1, HEADS, LENGTH, DIM).to(dtype) for _ in range(3)]
    leaves = [tensor.requires_grad_(backward) for tensor in tensors]

    def run(out: Tensor) -> None:
        if backward:
            out.backward(torch.ones_like(out))

    return compare(
        f"{type(sparsity).__name__} {layout.float().mean():.2f} visible, "
        f"{str(dtype).removeprefix('torch.')}, {'forward and backward' if backward else 'forward'}",
        {
            "block_sparse_attention": lambda: run(block_sparse_attention(*leaves, layout, BLOCK)),
            "sdpa with mask": lambda: run(
                torch.nn.functional.scaled_dot_product_attention(*leaves, attn_mask=mask)
            ),
        },
        rounds=7,
        bars={"sdpa with mask": 1.0},
    )


def measure() -> list[Result]:
    """Three layouts, forward and with gradients."""
    shape = {"num_heads": HEADS, "block": BLOCK}
    return [
        _pair(sparsity, dtype, backward)
        for sparsity in (LocalSparsity(**shape), BigBirdSparsity(**shape), FixedSparsity(**shape))
        for dtype in (torch.float32, torch.bfloat16)
        for backward in (False, True)
    ]


if __name__ == "__main__":
    main("block_sparse_attention", measure)
