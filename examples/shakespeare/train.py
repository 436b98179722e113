"""Trains the language model under ZeRO; every rank runs this, started by ``ds run``.

    ds run --num-ranks 2 examples/shakespeare/train.py --config CONFIG.json --text FILE --out DIR

With ``--resume`` it continues the checkpoint in DIR, whatever stage and number of ranks saved it.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from corpus import Corpus, Windows
from journal import Journal
from model import LanguageModel, ModelConfig

import ds_zero
from ds_comm.config import load_document

VALID_EVERY = 20
VALID_WINDOWS = 64


def main() -> int:
    """Train from the command line's settings and save a checkpoint."""
    options = _options()
    torch.manual_seed(options.seed)
    corpus = Corpus.read(options.text)
    model = LanguageModel(ModelConfig(num_symbols=len(corpus.alphabet)))
    context = model.config.context
    engine, _, loader, _ = ds_zero.initialize(
        model=model,
        training_data=Windows(corpus.train, context),
        config=_config(options.config, options.total_steps),
    )
    assert loader is not None
    if options.resume:
        # Weights, optimizer state, schedule, step count and position in the data.
        engine.load_checkpoint(options.out / "checkpoints")
    valid = corpus.validation_batch(context, VALID_WINDOWS)
    batches = ds_zero.RepeatingLoader(loader)
    with Journal(engine, options.out, options.steps, context, append=options.resume) as journal:
        while engine.global_steps < options.steps:
            loss = torch.zeros(())
            for _ in range(engine.gradient_accumulation_steps()):
                inputs, targets = next(batches)
                loss = engine(inputs, targets)
                engine.backward(loss)
                engine.step()
            last = engine.global_steps == options.steps
            if last or engine.global_steps % VALID_EVERY == 0:
                journal.validated(validate(engine, valid))
            journal.stepped(loss.item(), loader.position)
    engine.save_checkpoint(options.out / "checkpoints")
    if engine.global_rank == 0:
        described = {"alphabet": corpus.alphabet, "model": model.config.as_dict()}
        (options.out / "model.json").write_text(json.dumps(described, indent=2))
    return 0


@torch.no_grad()
def validate(engine: ds_zero.Engine, batch: tuple[torch.Tensor, torch.Tensor]) -> float:
    """Return the loss on text that is not trained on; every rank must call it.

    All ranks compute the same batch, so there is nothing to average.
    """
    loss: torch.Tensor = engine(*batch)
    return loss.item()


def _config(path: Path, total_steps: int) -> dict[str, Any]:
    """Read the ds_config and give its schedule the length of this run.

    The warm-up stays as it is, but takes a fifth of a very short run at most.
    """
    config = load_document(path)
    schedule = config["scheduler"]["params"]
    schedule["total_num_steps"] = total_steps
    schedule["warmup_num_steps"] = min(schedule["warmup_num_steps"], total_steps // 5)
    return config


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, required=True, help="ds_config in JSON")
    parser.add_argument("--text", type=Path, required=True, help="text to learn, in UTF-8")
    parser.add_argument("--out", type=Path, required=True, help="folder for all that is written")
    parser.add_argument("--steps", type=int, default=252, help="optimizer step to stop at")
    parser.add_argument("--total-steps", type=int, default=360, help="length of the LR schedule")
    parser.add_argument("--resume", action="store_true", help="continue OUT/checkpoints")
    parser.add_argument("--seed", type=int, default=0, help="of the first weights")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    return options


if __name__ == "__main__":
    sys.exit(main())
