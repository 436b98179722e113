"""Routing ops against eager torch."""

from __future__ import annotations

import torch
from harness import Result, compare, main
from torch import Tensor

from ds_kernels.ops.moe_routing import expert_rows, moe_combine, moe_scatter, top_k_gating


def _gate(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    weights, experts = logits.float().softmax(-1).topk(k)
    return weights / weights.sum(-1, keepdim=True), experts


def measure() -> list[Result]:
    """4096 tokens, 64 experts, two choices, width 1024."""
    tokens, count, k, width = 4096, 64, 2, 1024
    logits = torch.randn(tokens, count)
    weights, experts = top_k_gating(logits, k)
    rows, _ = expert_rows(experts, count)
    results = [
        compare(
            "gating",
            {"top_k_gating": lambda: top_k_gating(logits, k), "eager": lambda: _gate(logits, k)},
            bars={"eager": 1.0},
        ),
        compare(
            "sorting",
            {
                "expert_rows": lambda: expert_rows(experts, count),
                "eager": lambda: (
                    torch.sort(experts.flatten(), stable=True),
                    torch.bincount(experts.flatten(), minlength=count).cumsum(0),
                ),
            },
            bars={"eager": 1.0},
        ),
    ]
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(tokens, width).to(dtype)
        order = rows.flatten().argsort() // k
        y = moe_scatter(x, rows, tokens * k)
        name = str(dtype).removeprefix("torch.")
        results += [
            compare(
                f"scatter {name}",
                {
                    "moe_scatter": lambda x=x: moe_scatter(x, rows, tokens * k),
                    "eager": lambda x=x, order=order: x[order],
                },
                bars={"eager": 1.05},
            ),
            compare(
                f"combine {name}",
                {
                    "moe_combine": lambda y=y: moe_combine(y, rows, weights),
                    "eager": lambda y=y: (y[rows] * weights[..., None].to(y.dtype)).sum(1),
                },
                bars={"eager": 1.0},
            ),
        ]
    return results


if __name__ == "__main__":
    main("moe_routing", measure)
