"""Adam against torch's fused AdamW and the bound of a loop with the same reads and writes."""

from __future__ import annotations

import torch
from harness import Result, compare, main
from torch import Tensor
from torch.optim.adamw import adamw

from ds_kernels.native import load_native
from ds_kernels.ops.adam import adam_

_VALUES = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}


def _tensors(numel: int) -> list[Tensor]:
    return [torch.rand(numel) for _ in range(4)]


def _torch_fused(tensors: list[Tensor]) -> None:
    param, grad, exp_avg, exp_avg_sq = ([tensor] for tensor in tensors)
    adamw(
        param, grad, exp_avg, exp_avg_sq, [], [torch.tensor(3.0)],
        fused=True, amsgrad=False, maximize=False, **_VALUES,
    )  # fmt: skip


def _measure_size(numel: int, repeat: int) -> list[Result]:
    native = load_native()
    ours, theirs, plain = _tensors(numel), _tensors(numel), _tensors(numel)
    low = torch.empty(numel, dtype=torch.bfloat16)

    def torch_and_copy() -> None:
        _torch_fused(theirs)
        low.copy_(theirs[0])

    cached = numel < 4_000_000
    label = f"{numel / 1e6:g} M fp32"
    return [
        compare(
            label,
            {
                "adam_": lambda: adam_(*ours, step=3, **_VALUES),
                "byte bound": lambda: native.adam_bound_(*plain),
                "torch fused": lambda: _torch_fused(theirs),
            },
            repeat=repeat,
            bars={"torch fused": 0.5} if cached else {"byte bound": 1 / 0.95, "torch fused": 1.0},
        ),
        compare(
            f"{label} with bf16 copy-out",
            {
                "adam_": lambda: adam_(*ours, step=3, out=low, **_VALUES),
                "torch fused + copy": torch_and_copy,
            },
            repeat=repeat,
            bars={"torch fused + copy": 1 / 1.25},
        ),
    ]


def measure() -> list[Result]:
    """Sizes out of cache and in it."""
    results = _measure_size(100_000_000, 1)
    for numel in (1 << 20, 1 << 18, 1 << 14):
        results += _measure_size(numel, (1 << 22) // numel)
    return results


if __name__ == "__main__":
    main("adam", measure)
