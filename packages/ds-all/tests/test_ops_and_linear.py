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


def test_zero_and_utils() -> None:
    """A script that builds under ``zero.Init`` and looks at single parameters."""
    with deepspeed.zero.Init(config_dict_or_path={"train_batch_size": 1}):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    deepspeed.utils.set_z3_leaf_modules(model, [nn.Linear])
    engine = deepspeed.initialize(
        model=model,
        config={
            "train_batch_size": 1,
            "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
            "zero_optimization": {"stage": 3},
        },
    )[0]
    weight = engine.module[0].weight
    before = deepspeed.utils.safe_get_full_fp32_param(weight)
    engine.backward(engine(torch.ones(1, 4)).sum())
    # d sum / d weight: the column sums of the second weight, against inputs of one.
    second = deepspeed.utils.safe_get_full_fp32_param(engine.module[1].weight)
    wanted = second.sum(0)[:, None].expand(4, 4)
    torch.testing.assert_close(
        deepspeed.utils.safe_get_full_grad(weight), wanted, rtol=1e-6, atol=1e-6
    )
    engine.step()
    assert not torch.equal(deepspeed.utils.safe_get_full_fp32_param(weight), before)
    with deepspeed.zero.unwrap_model_for_generation(engine) as inner:
        assert inner(torch.ones(1, 4)).shape == (1, 2)
    with deepspeed.OnDevice(dtype=torch.bfloat16, device="meta"):
        assert nn.Linear(2, 2).weight.is_meta
    engine.destroy()
