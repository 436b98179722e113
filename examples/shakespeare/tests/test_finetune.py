"""Fine-tuning a pretrained model, exporting it and loading it in transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from smollm2 import WHEEL
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

HERE = Path(__file__).resolve().parent.parent
CACHE = HERE.parent.parent / "runs" / "cache"
SONNET = "Rough winds do shake the darling buds of May,\n"


def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=550, check=False)


@pytest.fixture
def pretrained(tmp_path: Path) -> Path:
    """A tiny Llama with tied embeddings and a tokenizer of bytes, saved by transformers."""
    torch.manual_seed(0)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    folder = tmp_path / "pretrained"
    PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token=alphabet[0]).save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(alphabet),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_the_export_of_a_finetuned_model_speaks_in_transformers(
    tmp_path: Path, pretrained: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(SONNET * 200)
    out = tmp_path / "out"
    script, config = HERE / "finetune.py", HERE / "ds_config_smollm2.json"
    words = ["-m", "ds_launch", "run", "--num-ranks", "2", script, "--config", config]
    done = run(*words, "--weights", pretrained, "--text", text, "--out", out, "--steps", "6")
    assert done.returncode == 0, done.stdout + done.stderr
    done = run("-m", "ds_zero.zero_to_fp32", out / "checkpoints", out / "weights")
    assert done.returncode == 0, done.stdout + done.stderr
    done = run(HERE / "speak.py", "--out", out, "--length", "4")
    assert done.returncode == 0, done.stdout + done.stderr

    losses = [json.loads(line)["loss"] for line in (out / "losses.jsonl").open()]
    assert len(losses) == 6 and losses[-1] < losses[0]
    before = AutoModelForCausalLM.from_pretrained(pretrained)
    after = AutoModelForCausalLM.from_pretrained(out / "weights")
    assert after.config.tie_word_embeddings
    moved = [
        (a - b).abs().max().item()
        for a, b in zip(after.parameters(), before.parameters(), strict=True)
    ]
    # AdamW moves by at most the learning rate of 1e-4 a step (and decay), and not by nothing.
    assert all(1e-6 < move < 1e-3 for move in moved), moved

    # Weights that are not the trained ones are noticed.
    known = load_file(out / "logits.safetensors")
    known["logits"] = known["logits"] + 0.01
    save_file(known, out / "logits.safetensors")
    done = run(HERE / "speak.py", "--out", out, "--length", "4")
    assert done.returncode == 1
    assert "other logits" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(
    not (CACHE / WHEEL.file_name).is_file(),
    reason="the weights of SmolLM2 are not in runs/cache: dev.py demo --model smollm2 fetches them",
)
def test_smollm2_learns_and_is_exported(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(SONNET * 200)
    words = ["--model", "smollm2", "--steps", "3", "--text", text, "--out", tmp_path / "out"]
    done = run(HERE / "demo.py", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [json.loads(line)["loss"] for line in (tmp_path / "out" / "losses.jsonl").open()]
    assert losses[-1] < losses[0]
    assert "largest difference of a logit" in done.stdout
