"""Models built and loaded inside of ``linear.Init``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ds_comm.errors import ConfigError
from ds_zero import linear
from ds_zero.linear import LoRAConfig, LoRAOptimizedLinear, QuantizationConfig, QuantizedParameter


class Block(nn.Module):
    """Layers that adapters want and one that they do not; a subclass of ``nn.Linear``."""

    class Own(nn.Linear):
        pass

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(8, 8)
        self.gate = nn.Linear(8, 8, bias=False)
        self.down_proj = Block.Own(8, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.down_proj(self.gate(self.q_proj(x))))


def test_adapters_after_init_lora() -> None:
    """Named layers get adapters, all else is frozen; outputs are the same before and after."""
    torch.manual_seed(0)
    plain = Block()
    torch.manual_seed(0)
    with linear.Init(lora_config=LoRAConfig(lora_r=2)):
        model = Block()
    assert isinstance(model.q_proj, LoRAOptimizedLinear) and not model.q_proj.initialized
    assert type(model.down_proj) is Block.Own
    x = torch.randn(2, 8)
    assert torch.equal(model(x), plain(x))
    assert linear.init_lora(model) == ["q_proj"]
    assert torch.equal(model(x), plain(x))
    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    assert trained == {"q_proj.lora_weight_1.weight", "q_proj.lora_weight_2.weight"}
    assert linear.init_lora(model) == ["q_proj"]
    assert type(nn.Linear(2, 2)) is nn.Linear


def test_quantisation_alone_at_the_end_of_the_context() -> None:
    """Every plain linear layer; an error inside leaves them alone."""
    with linear.Init(quant_config=QuantizationConfig(group_size=8)):
        model = Block()
        assert not isinstance(model.q_proj.weight, QuantizedParameter)
    assert isinstance(model.q_proj.weight, QuantizedParameter)
    assert isinstance(model.gate.weight, QuantizedParameter)
    assert not isinstance(model.down_proj.weight, QuantizedParameter)
    assert model(torch.randn(2, 8)).isfinite().all()
    with pytest.raises(ZeroDivisionError):
        with linear.Init(quant_config=QuantizationConfig()):
            broken = Block()
            raise ZeroDivisionError
    assert not isinstance(broken.q_proj.weight, QuantizedParameter)
    assert type(nn.Linear(2, 2)) is nn.Linear


def test_what_is_refused() -> None:
    """No configuration, nesting, and targets that nothing matches."""
    with pytest.raises(ConfigError, match="lora_config"):
        linear.Init()
    with linear.Init(lora_config=LoRAConfig(target_mods=["query"])):
        with pytest.raises(ConfigError, match="nest"):
            with linear.Init(lora_config=LoRAConfig()):
                pass
        model = Block()
    with pytest.raises(ConfigError, match=r"gate.*q_proj"):
        linear.init_lora(model)


@pytest.mark.parametrize("quantized", [False, True])
def test_from_pretrained(tmp_path: Path, quantized: bool) -> None:
    """A Llama of two layers from a folder: its logits, within the format's error."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    torch.manual_seed(3)
    original: Any = transformers.LlamaForCausalLM(config).eval()
    original.save_pretrained(tmp_path)
    lora = LoRAConfig(lora_r=2)
    quant = QuantizationConfig(group_size=16) if quantized else None
    with linear.Init(lora_config=lora, quant_config=quant):
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    names = linear.init_lora(model)
    assert len(names) == 2 * 7 and "model.layers.1.mlp.down_proj" in names
    ids = torch.arange(12).view(2, 6)
    found, wanted = model(ids).logits, original(ids).logits
    tolerance = 0.05 if quantized else 1e-6
    assert (found - wanted).abs().max() <= tolerance * wanted.abs().max()
    assert torch.equal(found, wanted) or quantized
