"""Hugging Face models from a config, unchanged, at every stage, against plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ds_zero
from ds_comm.testing.plugin import Ranks

transformers = pytest.importorskip("transformers")

STEPS = 3


def _model(kind: str) -> nn.Module:
    torch.manual_seed(5)
    if kind == "llama":
        config = transformers.LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
        )
        return transformers.LlamaForCausalLM(config)
    config = transformers.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=3, n_head=4, n_positions=32, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def _prepare(model: Any, checkpointing: str) -> None:
    model.train()
    if checkpointing != "none":
        options = {"use_reentrant": checkpointing == "reentrant"}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


def _batch(step: int) -> Tensor:
    return torch.randint(64, (2, 2, 12), generator=torch.Generator().manual_seed(step))


def train(kind: str, checkpointing: str, stage: int) -> list[Tensor]:
    """Train on this rank; return the full parameters."""
    model = _model(kind)
    _prepare(model, checkpointing)
    engine = ds_zero.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "eps": 1e-4}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 100},
        },
    ).engine
    for step in range(STEPS):
        ids = _batch(step)[torch.distributed.get_rank()]
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
    state = engine.module_state_dict()
    return [state[name] for name, _ in model.named_parameters()]


def reference(kind: str, checkpointing: str) -> list[Tensor]:
    """The same in one plain torch process."""
    torch.set_num_threads(1)
    model = _model(kind)
    _prepare(model, checkpointing)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4, weight_decay=0.0)
    for step in range(STEPS):
        for ids in _batch(step):
            (model(input_ids=ids, labels=ids).loss / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach() for param in model.parameters()]


@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "non-reentrant"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_trains_like_plain_torch_at_every_stage(
    ranks: Ranks, kind: str, checkpointing: str
) -> None:
    """Parameters within 1e-5 of torch's, and the same bits at every stage (fp32)."""
    wanted = reference(kind, checkpointing)
    first: list[Tensor] | None = None
    for stage in range(4):
        found = ranks(2, train, kind, checkpointing, stage)[0]
        for got, want in zip(found, wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
        first = first or found
        assert all(torch.equal(a, b) for a, b in zip(found, first, strict=True)), stage


def generate(kind: str) -> list[list[int]]:
    """Greedy tokens at stage 3, in and out of the engine."""
    model: Any = _model(kind).eval()
    ids = _batch(0)[0]
    wanted = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
    engine = ds_zero.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        },
    ).engine
    found = engine.module.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert torch.equal(found, wanted)
    # Training goes on afterwards.
    model.train()
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
    return found.tolist()


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_generate_at_stage_3(ranks: Ranks, kind: str) -> None:
    """Greedy generation gives the tokens of the unsharded model."""
    ranks(2, generate, kind)
