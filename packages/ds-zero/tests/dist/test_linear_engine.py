"""Frozen, quantised and shared base weights with adapters, trained by the engine at every stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ds_zero
from ds_comm.testing.plugin import Ranks
from ds_zero.linear import LoRAConfig, LoRAOptimizedLinear, OptimizedLinear, QuantizationConfig

WIDTH, VOCAB, RANK = 16, 23, 3
QUANT = QuantizationConfig(q_bits=6, mantissa_bits=2, group_size=32)

KINDS: dict[str, tuple[bool, bool, bool]] = {
    # quantised, cut over the ranks, partly in host memory
    "plain": (False, False, False),
    "quantised": (True, False, False),
    "cut": (False, True, False),
    "quantised and cut": (True, True, False),
    "quantised, cut and hosted": (True, True, True),
    "hosted": (False, False, True),
}


class Block(nn.Module):
    """Two layers with adapters around a frozen norm."""

    def __init__(self, lora: LoRAConfig, quant: QuantizationConfig | None) -> None:
        super().__init__()
        self.up = OptimizedLinear(WIDTH, 2 * WIDTH, lora, quant, dtype=torch.float32)
        self.down = OptimizedLinear(2 * WIDTH, WIDTH, lora, quant, bias=True, dtype=torch.float32)
        self.norm = nn.LayerNorm(WIDTH).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """Frozen embedding, blocks, a quantised frozen layer, a trained head."""

    def __init__(self, kind: str, world: int) -> None:
        super().__init__()
        quantised, cut, hosted = KINDS[kind]
        lora = LoRAConfig(
            lora_r=RANK,
            lora_alpha=6.0,
            base_weight_sharding=world if cut else 1,
            offload=hosted,
            offload_ratio=0.4 if hosted else 0.0,
        )
        quant = QUANT if quantised else None
        torch.manual_seed(4)
        self.embed = nn.Embedding(VOCAB, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList(Block(lora, quant) for _ in range(2))
        self.mix = OptimizedLinear(WIDTH, WIDTH, None, QUANT, dtype=torch.float32)
        self.head = nn.Linear(WIDTH, VOCAB)
        for module in self.modules():
            if isinstance(module, LoRAOptimizedLinear):
                assert module.lora_weight_2 is not None
                nn.init.normal_(module.lora_weight_2.weight, std=0.1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.mix(x)).flatten(0, 1), ids.roll(-1, 1).flatten())


def _batch(step: int) -> Tensor:
    return torch.randint(VOCAB, (6, 5), generator=torch.Generator().manual_seed(step))


def _engine(kind: str, stage: int) -> ds_zero.Engine:
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    config: dict[str, Any] = {
        "train_batch_size": 6,
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-2}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 20},
    }
    return ds_zero.initialize(model=Model(kind, world), config=config).engine


def _run(engine: ds_zero.Engine, first: int, last: int) -> list[float]:
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    losses = []
    for step in range(first, last):
        loss = engine(_batch(step).chunk(world)[rank])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def train(kind: str, stage: int, copies: int) -> dict[str, Tensor]:
    """Trained parameters, and the full base weights as floats.

    ``copies`` of the model are trained, one after the other, in one process.
    """
    for _ in range(copies):
        engine = _engine(kind, stage)
        _run(engine, 0, 4)
        state = engine.module_state_dict()
        engine.destroy()
        for name, module in engine.module.named_modules():
            if isinstance(module, LoRAOptimizedLinear):
                state[f"{name}.weight"] = module.full_weight().clone()
        state.pop("mix.weight")
    return state


def reference(kind: str) -> dict[str, Tensor]:
    """The same by plain torch: the base weights as fixed tensors."""
    model = Model("quantised" if KINDS[kind][0] else "plain", 1)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    fixed = {
        name: module.full_weight().detach()
        for name, module in model.named_modules()
        if isinstance(module, LoRAOptimizedLinear)
    }
    mix = model.mix.dequantized_weight()

    def layer(name: str, x: Tensor, bias: Tensor | None) -> Tensor:
        a, b = trained[f"{name}.lora_weight_1.weight"], trained[f"{name}.lora_weight_2.weight"]
        return F.linear(x, fixed[name] + 2.0 * b @ a, bias)

    optimizer = torch.optim.AdamW(trained.values(), lr=2e-2, weight_decay=0.0)
    for step in range(4):
        x = model.embed(_batch(step))
        for k in range(2):
            block = model.blocks[k]
            up = torch.tanh(layer(f"blocks.{k}.up", block.norm(x), None))
            x = x + layer(f"blocks.{k}.down", up, block.down.bias)
        logits = F.linear(F.linear(x, mix), trained["head.weight"], trained["head.bias"])
        loss = F.cross_entropy(logits.flatten(0, 1), _batch(step).roll(-1, 1).flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(trained.values(), 1.0)
        optimizer.step()
    state = {name: value.detach() for name, value in trained.items()}
    return {**state, **{f"{name}.weight": value for name, value in fixed.items()}}


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_every_stage_equals_plain_torch(ranks: Ranks, kind: str, world: int) -> None:
    """fp32, 1e-5; the base weights are those that were quantised."""
    wanted = reference(kind)
    first: dict[str, Tensor] | None = None
    for stage in range(4):
        for found in ranks(world, train, kind, stage, 2 if stage == 3 else 1):
            first = first or found
            for name, value in wanted.items():
                torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5, msg=name)
                assert torch.equal(found[name], first[name]), (stage, name)


def _held_bytes(kind: str) -> list[int]:
    """Bytes of base weights that this rank keeps, and of all parameters."""
    model = Model(kind, torch.distributed.get_world_size())
    held = sum(
        tensor.data.numel()
        for module in model.modules()
        if isinstance(module, LoRAOptimizedLinear)
        for tensor in module.held_tensors().values()
    )
    return [held, sum(p.numel() * p.element_size() for p in model.blocks.parameters())]


def test_a_cut_base_weight_is_not_kept_whole(ranks: Ranks) -> None:
    """4 weights of 512 elements: 6 bits each and a scale of 4 bytes per 32, half on each rank."""
    base_bytes = 4 * (512 * 6 // 8 + 512 // 32 * 4)
    found = ranks(2, _held_bytes, "quantised and cut")
    assert sum(held for held, _ in found) == base_bytes
    assert max(held for held, _ in found) == base_bytes // 2
    (whole,) = ranks(1, _held_bytes, "quantised")
    assert whole[1] - found[0][1] == base_bytes


def save(kind: str, folder: str) -> list[float]:
    """Train, save, go on: the losses afterwards."""
    engine = _engine(kind, 2)
    _run(engine, 0, 2)
    engine.save_checkpoint(folder)
    return _run(engine, 2, 5)


def resume(kind: str, stage: int, folder: str) -> list[float]:
    """Load into a model whose held base weights are zero, and go on."""
    engine = _engine(kind, stage)
    for module in engine.module.modules():
        if isinstance(module, LoRAOptimizedLinear):
            for name, tensor in module.held_tensors().items():
                module.set_held_tensor(name, torch.zeros_like(tensor.data))
    engine.load_checkpoint(folder)
    losses = _run(engine, 2, 5)
    state = engine.module_state_dict()
    engine.load_module_state_dict(state)
    assert all(torch.equal(v, state[n]) for n, v in engine.module_state_dict().items())
    return losses


@pytest.mark.parametrize("kind", ["quantised", "cut", "quantised, cut and hosted", "hosted"])
def test_base_weights_are_in_checkpoints(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    """Saved by 2 ranks, loaded by 1, 2 and 3 whose bases were zeroed: the mean loss goes on."""
    wanted = ranks(2, save, kind, str(tmp_path))
    for world, stage in ((2, 3), (1, 0), (3, 1)):
        found = ranks(world, resume, kind, stage, str(tmp_path))
        for step in range(3):
            mean = sum(losses[step] for losses in found) / world
            assert mean == pytest.approx(sum(losses[step] for losses in wanted) / 2, rel=1e-5)


# ---- other people's frozen and quantised weights ------------------------------------------------


class Packed(nn.Module):
    """A weight as signed bytes in a frozen parameter, as quantised models have them."""

    def __init__(self) -> None:
        super().__init__()
        weight = torch.randn(2 * WIDTH, WIDTH, generator=torch.Generator().manual_seed(8))
        scale = weight.abs().max() / 127
        self.codes = nn.Parameter((weight / scale).round().to(torch.int8), requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.flags = nn.Parameter(torch.ones(3, dtype=torch.bool), requires_grad=False)
        self.head = nn.Linear(2 * WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(x @ (self.codes.float() * self.scale).T)).square().mean()


def _packed(stage: int) -> tuple[dict[str, Tensor], bool]:
    torch.manual_seed(1)
    model = Packed()
    codes = model.codes.detach().clone()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    engine = ds_zero.initialize(model=model, config=config).engine
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + torch.distributed.get_rank())
        engine.backward(engine(torch.randn(2, WIDTH, generator=generator)))
        engine.step()
    state = engine.module_state_dict()
    return state, torch.equal(model.codes, codes) and model.codes.dtype == torch.int8


def test_integer_parameters_of_ordinary_models(ranks: Ranks) -> None:
    """Bytes, flags and a scalar stay what they are; the rest trains alike at every stage."""
    first: dict[str, Tensor] | None = None
    for stage in range(4):
        for state, kept in ranks(2, _packed, stage):
            first = first or state
            assert kept and all(torch.equal(state[name], value) for name, value in first.items())


# ---- peft ----------------------------------------------------------------------------------------


def _peft(stage: int, bf16: bool) -> dict[str, Tensor]:
    import peft
    import transformers

    torch.manual_seed(6)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    base = transformers.LlamaForCausalLM(config)
    adapters = peft.LoraConfig(
        r=2, target_modules=["q_proj", "down_proj"], modules_to_save=["norm"], lora_dropout=0.0
    )
    model = peft.get_peft_model(base, adapters)
    engine = ds_zero.initialize(
        model=model,
        config={
            "train_batch_size": 6,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "bf16": {"enabled": bf16},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 10},
        },
    ).engine
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    for step in range(3):
        ids = _batch(step).chunk(world)[rank]
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    return engine.module_state_dict()


@pytest.mark.parametrize("bf16", [False, True])
def test_peft_adapters_at_every_stage(ranks: Ranks, bf16: bool) -> None:
    """The same bits at every stage and rank; the base is untouched, the adapters have moved."""
    pytest.importorskip("peft")
    pytest.importorskip("transformers")
    first: dict[str, Tensor] | None = None
    for stage in range(1 if bf16 else 0, 4):  # stage 0 sums bf16 gradients in bf16
        for state in ranks(2, _peft, stage, bf16):
            first = first or state
            assert all(torch.equal(state[name], value) for name, value in first.items()), stage
    assert first is not None
    moved = [value for name, value in first.items() if "lora_B" in name]
    assert len(moved) == 4 and all(value.any() for value in moved)
