"""What became of a fine-tuned model: transformers loads the exported weights and speaks.

    python examples/shakespeare/speak.py --out DIR

It first compares the logits of the loaded model with those that the engine computed after
training, and fails if they differ: then the export would not be the model that was trained.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from report import draw_curve
from safetensors.torch import load_file

__all__ = ["main"]

TOLERANCE = 1e-4
"""Largest difference of two logits: fp32 sums in another order."""


def main() -> int:
    """Compare logits, print a sample and write the picture; return 1 if logits differ."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the run")
    parser.add_argument("--prompt", default="ROMEO:\n", help="what the sample begins with")
    parser.add_argument("--length", type=int, default=80, help="tokens to generate")
    parser.add_argument("--temperature", type=float, default=0.7, help="of the draws")
    parser.add_argument("--seed", type=int, default=1, help="of the draws")
    options = parser.parse_args()
    entries = [json.loads(line) for line in (options.out / "losses.jsonl").open()]
    draw_curve(entries, options.out / "loss.png", symbol="token")
    return speak(options)


def speak(options: argparse.Namespace) -> int:
    """Load the exported weights, compare and generate."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    weights = options.out / "weights"
    model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(weights)
    known = load_file(options.out / "logits.safetensors")
    torch.set_num_threads(1)
    with torch.no_grad():
        difference = (model(input_ids=known["input_ids"]).logits - known["logits"]).abs().max()
    print(f"largest difference of a logit to the engine's: {difference:.2e}")
    if not difference <= TOLERANCE:
        print(f"speak: the exported weights give other logits (> {TOLERANCE})", file=sys.stderr)
        return 1
    torch.manual_seed(options.seed)
    prompt = tokenizer(options.prompt, return_tensors="pt")
    written = model.generate(
        **prompt,
        max_new_tokens=options.length,
        do_sample=True,
        temperature=options.temperature,
        pad_token_id=tokenizer.eos_token_id,
    )
    print(tokenizer.decode(written[0], skip_special_tokens=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
