"""DeepSpeed's quick start, with one import changed."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import ds_all as deepspeed
from ds_comm.errors import ConfigError
from ds_comm.testing.plugin import Ranks


def _dataset() -> TensorDataset:
    x = torch.randn(32, 6, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.sum(1, keepdim=True))


def quick_start(folder: str, config: str) -> list[float]:
    """What a DeepSpeed script does, with ``args.deepspeed_config``."""
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", config])
    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    engine, optimizer, loader, _ = deepspeed.initialize(
        args=args, model=model, model_parameters=model.parameters(), training_data=_dataset()
    )
    assert optimizer is engine.optimizer and loader is not None
    losses = []
    for epoch in range(6):
        loader.set_epoch(epoch)
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(engine(inputs.to(engine.device)), targets)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    engine.save_checkpoint(folder, client_state={"epoch": 6})
    _, client = engine.load_checkpoint(folder)
    assert client == {"epoch": 6}
    with deepspeed.zero.GatheredParameters(model[0].weight):
        assert not model[0].weight.isnan().any()
    assert engine.global_steps == 24 and engine.get_batch_info() == (8, 4, 1)
    return losses


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_quick_start(ranks: Ranks, tmp_path: Path, stage: int) -> None:
    """The loss falls, and a checkpoint comes back."""
    config = tmp_path / "ds_config.json"
    config.write_text(
        "{\n"
        '  "train_batch_size": 8,  // over two ranks\n'
        '  "optimizer": {"type": "Adam", "params": {"lr": 0.03, "betas": [0.8, 0.99]}},\n'
        f'  "zero_optimization": {{"stage": {stage}, "reduce_bucket_size": 5e8}},\n'
        '  "fp16": {"enabled": false}, "flops_profiler": {"enabled": false},\n'
        "}\n"
    )
    for losses in ranks(2, quick_start, str(tmp_path / "out"), str(config)):
        assert losses[-1] < 0.2 * losses[0]


def _refuse(config: dict[str, Any]) -> None:
    deepspeed.initialize(model=nn.Linear(2, 2), config=config, dist_init_required=False)


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"train_batch_size": 4, "zero_optimization": {"zenflow": {}}}, "zenflow"),
        ({"train_batch_size": 4, "tensorboard": {"enabled": True}}, "tensorboard"),
        ({"train_batch_size": 4, "gradient_clipp1ng": 1.0}, "gradient_clipping"),
    ],
)
def test_what_is_not_there_is_refused_by_name(config: dict[str, Any], match: str) -> None:
    """Never ignored."""
    with pytest.raises(ConfigError, match=match):
        _refuse(config)


def test_one_configuration() -> None:
    """Two places or none are errors."""
    args = argparse.Namespace(deepspeed_config="somewhere.json")
    with pytest.raises(ConfigError, match="exactly one"):
        deepspeed.initialize(args=args, model=nn.Linear(2, 2), config={"train_batch_size": 1})
    with pytest.raises(ConfigError, match="none"):
        deepspeed.initialize(model=nn.Linear(2, 2))
