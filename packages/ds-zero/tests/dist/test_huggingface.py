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


CHECKPOINTED = ("llama", "gpt2")
KINDS = (*CHECKPOINTED, "bert", "t5", "mixtral", "vit")
DECODER = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
ENCODER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def _model(kind: str) -> nn.Module:
    torch.manual_seed(5)
    if kind == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER))
    if kind == "mixtral":
        config = transformers.MixtralConfig(
            **DECODER, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True
        )
        return transformers.MixtralForCausalLM(config)
    if kind == "bert":
        config = transformers.BertConfig(**ENCODER, vocab_size=64, max_position_embeddings=32)
        return transformers.BertForMaskedLM(config)
    if kind == "vit":
        config = transformers.ViTConfig(
            **ENCODER, image_size=8, patch_size=4, num_channels=1, num_labels=5
        )
        return transformers.ViTForImageClassification(config)
    if kind == "t5":
        config = transformers.T5Config(
            vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4,
            dropout_rate=0.0, decoder_start_token_id=0,
        )  # fmt: skip
        return transformers.T5ForConditionalGeneration(config)
    config = transformers.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=3, n_head=4, n_positions=32, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def _inputs(kind: str, step: int, rank: int) -> dict[str, Tensor]:
    """One rank's micro-batch."""
    ids = _batch(step)[rank]
    if kind == "vit":
        generator = torch.Generator().manual_seed(10 * step + rank)
        return {
            "pixel_values": torch.randn(2, 1, 8, 8, generator=generator),
            "labels": torch.randint(5, (2,), generator=generator),
        }
    return {"input_ids": ids, "labels": ids.flip(1) if kind in ("bert", "t5") else ids}


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
        loss = engine(**_inputs(kind, step, torch.distributed.get_rank())).loss
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
        for rank in range(2):
            (model(**_inputs(kind, step, rank)).loss / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach() for param in model.parameters()]


@pytest.mark.parametrize(
    ("kind", "checkpointing"),
    [(kind, "none") for kind in KINDS]
    + [(kind, way) for kind in CHECKPOINTED for way in ("reentrant", "non-reentrant")],
)
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
