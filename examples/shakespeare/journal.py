"""What a training run shows while it works, and the record of its losses."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

import ds_zero
from ds_comm.device import memory

__all__ = ["Journal"]


class Journal:
    """Rank 0's progress bar and its record of losses; on other ranks it does nothing.

    Losses are of rank 0's micro-batches, in nats per symbol.

    Args:
        engine: what is trained.
        out: folder of ``losses.jsonl``.
        steps: optimizer step to stop at.
        context: symbols per sample.
        append: whether an earlier run is continued.
    """

    def __init__(
        self, engine: ds_zero.Engine, out: Path, steps: int, context: int, *, append: bool
    ) -> None:
        self._engine = engine
        self._shows = engine.global_rank == 0
        self._tokens = engine.train_batch_size() * context
        self._valid: float | None = None
        self._fresh = False
        self._smooth: float | None = None
        self._file = None
        if self._shows:
            self._file = (out / "losses.jsonl").open("a" if append else "w")
        stage, ranks = engine.zero_optimization_stage(), engine.dp_world_size
        self._label = {"stage": stage, "ranks": ranks}
        self._bar = tqdm(
            total=steps,
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
