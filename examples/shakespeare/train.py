"""Trains the language model under ZeRO; every rank runs this, started by ``ds run``.

    ds run --num-ranks 2 examples/shakespeare/train.py --config CONFIG.json --text FILE --out DIR

With ``--resume`` it continues the checkpoint in DIR, whatever stage and number of ranks saved it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from corpus import Corpus, Windows
from model import LanguageModel, ModelConfig
from tqdm import tqdm

import ds_zero
from ds_comm.config import load_document
from ds_comm.device import memory

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
    with Journal(engine, options, context) as journal:
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


class Journal:
    """Rank 0's progress bar and its record of losses; on other ranks it does nothing.

    Losses are of rank 0's micro-batches, in nats per character.
    """

    def __init__(self, engine: ds_zero.Engine, options: argparse.Namespace, context: int) -> None:
        self._engine = engine
        self._shows = engine.global_rank == 0
        self._tokens = engine.train_batch_size() * context
        self._valid: float | None = None
        self._fresh = False
        self._smooth: float | None = None
        self._file = None
        if self._shows:
            self._file = (options.out / "losses.jsonl").open("a" if options.resume else "w")
        stage, ranks = engine.zero_optimization_stage(), engine.dp_world_size
        self._label = {"stage": stage, "ranks": ranks}
        self._bar = tqdm(
            total=options.steps,
            initial=engine.global_steps,
            desc=f"ZeRO-{stage} on {ranks} rank{'s' if ranks > 1 else ''}",
            disable=not self._shows,
            mininterval=0.2 if sys.stderr.isatty() else 5.0,
            dynamic_ncols=True,
        )
        self._begin = time.perf_counter()
        self._first_step = engine.global_steps

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
        if self._file is not None:
            self._file.close()

    def validated(self, loss: float) -> None:
        """Take note of a validation loss; it belongs to the step that is shown next."""
        self._valid = loss
        self._fresh = True

    def stepped(self, loss: float, position: int) -> None:
        """Write and show one optimizer step and the position in the data after it."""
        if self._file is None:
            return
        entry: dict[str, Any] = {"step": self._engine.global_steps, "loss": loss, **self._label}
        entry |= {"lr": self._engine.get_lr()[0], "position": position}
        self._smooth = loss if self._smooth is None else 0.9 * self._smooth + 0.1 * loss
        shown = {"loss": f"{self._smooth:.3f}"}
        if self._valid is not None:
            shown["valid"] = f"{self._valid:.3f}"
            if self._fresh:
                entry["valid"] = self._valid
        self._fresh = False
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()
        done = self._engine.global_steps - self._first_step
        rate = done * self._tokens / (time.perf_counter() - self._begin)
        shown |= {"tok/s": f"{rate:,.0f}", "mem": f"{memory().allocated_bytes / 2**20:,.0f}MiB"}
        self._bar.set_postfix(shown, refresh=False)
        self._bar.update()


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
