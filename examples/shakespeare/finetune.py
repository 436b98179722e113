"""Fine-tunes SmolLM2-135M on a text under ZeRO; every rank runs this, started by ``ds run``.

    ds run --num-ranks 2 examples/shakespeare/finetune.py --config CONFIG.json \
        --weights FILE.gguf --text FILE --out DIR

``--weights`` also takes a folder that transformers' ``save_pretrained`` wrote.

Beside the checkpoint it leaves the model's configuration, the tokenizer and the logits of one
piece of unseen text, so that ``speak.py`` can show that the exported weights are the trained ones.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from corpus import Windows
from journal import Journal
from safetensors.torch import save_file
from smollm2 import load_model, load_tokenizer
from torch import Tensor

import ds_zero

CONTEXT = 64
VALID_WINDOWS = 8
VALID_EVERY = 8
CHARACTERS = 400_000
"""How much of the text is read: far more than a short run sees."""


def main() -> int:
    """Fine-tune from the command line's settings and save a checkpoint."""
    options = _options()
    torch.manual_seed(options.seed)
    tokenizer = load_tokenizer(options.weights)
    train, valid = _tokens(tokenizer, options.text)
    model = load_model(options.weights)
    engine, _, loader, _ = ds_zero.initialize(
        model=model, training_data=Windows(train, CONTEXT), config=options.config
    )
    assert loader is not None
    if engine.global_rank == 0:
        model.config.save_pretrained(options.out / "weights")
        tokenizer.save_pretrained(options.out / "weights")
    batches = ds_zero.RepeatingLoader(loader)
    with Journal(engine, options.out, options.steps, CONTEXT, append=False) as journal:
        journal.validated(validate(engine, valid))
        while engine.global_steps < options.steps:
            inputs, targets = next(batches)
            loss = loss_of(engine, inputs, targets)
            engine.backward(loss)
            engine.step()
            if engine.global_steps % VALID_EVERY == 0 or engine.global_steps == options.steps:
                journal.validated(validate(engine, valid))
            journal.stepped(loss.item(), loader.position)
    with torch.no_grad():
        logits = engine(input_ids=valid[0][:1]).logits
    if engine.global_rank == 0:
        save_file({"input_ids": valid[0][:1], "logits": logits}, options.out / "logits.safetensors")
    engine.save_checkpoint(options.out / "checkpoints")
    return 0


def loss_of(engine: ds_zero.Engine, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats per token; inputs and targets are int64 of (windows, context)."""
    logits = engine(input_ids=inputs).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@torch.no_grad()
def validate(engine: ds_zero.Engine, batch: tuple[Tensor, Tensor]) -> float:
    """Return the loss on text that is not trained on; every rank must call it."""
    return loss_of(engine, *batch).item()


def _tokens(tokenizer: object, path: Path) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return the tokens to train on, int64 of (length,), and a batch of unseen windows."""
    text = path.read_text(encoding="utf-8")[:CHARACTERS]
    ids = torch.tensor(tokenizer(text, verbose=False).input_ids)  # type: ignore[operator]
    kept = VALID_WINDOWS * CONTEXT + 1
    if ids.numel() < 2 * kept:
        raise ValueError(f"{path}: {ids.numel()} tokens, at least {2 * kept} are needed")
    unseen = ids[-kept:]
    valid = unseen[:-1].view(VALID_WINDOWS, CONTEXT), unseen[1:].view(VALID_WINDOWS, CONTEXT)
    return ids[:-kept], valid


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, required=True, help="ds_config in JSON")
    parser.add_argument(
        "--weights", type=Path, required=True, help="GGUF file or saved folder of the model"
    )
    parser.add_argument("--text", type=Path, required=True, help="text to learn, in UTF-8")
    parser.add_argument("--out", type=Path, required=True, help="folder for all that is written")
    parser.add_argument("--steps", type=int, default=24, help="optimizer steps")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the data")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    return options


if __name__ == "__main__":
    sys.exit(main())
