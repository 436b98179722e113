"""Names that scripts written for DeepSpeed import."""

from __future__ import annotations

import torch
from torch import nn

import ds_all as deepspeed
import ds_zero.linear
import ds_zero.optim


def test_optimizers_under_ops() -> None:
    """``deepspeed.ops.<kind>.<Class>`` are ds_zero's classes."""
    from ds_all.ops.adam import DeepSpeedCPUAdam, FusedAdam

    assert FusedAdam is ds_zero.optim.FusedAdam is deepspeed.ops.adam.FusedAdam
    assert DeepSpeedCPUAdam is ds_zero.optim.DeepSpeedCPUAdam
    assert deepspeed.ops.lamb.FusedLamb is ds_zero.optim.FusedLamb
    assert deepspeed.ops.lion.DeepSpeedCPULion is ds_zero.optim.DeepSpeedCPULion
    assert deepspeed.ops.adagrad.DeepSpeedCPUAdagrad is ds_zero.optim.DeepSpeedCPUAdagrad


def test_linear() -> None:
    """A layer made through the facade trains its adapters only."""
    layer = deepspeed.linear.OptimizedLinear(
        6, 6, deepspeed.linear.LoRAConfig(lora_r=2), dtype=torch.float32
    )
    assert isinstance(layer, nn.Linear) and isinstance(layer, ds_zero.linear.LoRAOptimizedLinear)
    trained = [param for param in layer.parameters() if param.requires_grad]
    optimizer = deepspeed.ops.adam.FusedAdam(trained, lr=0.1)
    losses = []
    for _ in range(4):
        loss = (layer(torch.ones(1, 6)) - 1).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
