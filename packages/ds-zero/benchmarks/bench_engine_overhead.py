"""What the engine itself costs in a training step, against layers and parameters, as a plot.

Two CPU ranks train stacks of equal blocks under stages 0 to 3.  Every step is profiled; a moment
belongs to

* *model*: forward, backward and loss;
* *collectives*: anything below ``ds_comm``;
* *optimiser*: anything below ``ds_zero.optim``;
* *engine*: the rest of ``ds_zero``, its calls into torch included (the copy of every gradient into
  its flat buffer, the norm, giving pages back).

Parts are in CPU time of the rank's main thread, so that waiting for a peer is nobody's and a busy
machine matters less.  The profiler makes Python calls dearer and waiting is left out of the whole,
so the engine's share is an upper bound.

Examples:
    python packages/ds-zero/benchmarks/bench_engine_overhead.py
    python packages/ds-zero/benchmarks/bench_engine_overhead.py --layers 10,100 --steps 3
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, multiprocessing, nn

import ds_comm
import ds_zero

PARTS = ("model", "collectives", "optimiser", "engine")
ZERO = str(Path(ds_zero.__file__).parent)
COMM = str(Path(ds_comm.__file__).parent)


class Block(nn.Module):
    """A pre-norm feed-forward block of eight times width squared parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[rows, width]`` to the same shape."""
        out: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return out


def part_of(function: tuple[str, int, str]) -> str | None:
    """The part that a Python function opens; None where it stays in that of its caller."""
    path = function[0]
    if path.startswith(COMM):
        return "collectives"
    if path.startswith(f"{ZERO}{os.sep}optim"):
        return "optimiser"
    return "engine" if path.startswith(ZERO) else None


def shares(stats: pstats.Stats) -> dict[str, float]:
    """Seconds of each part: a function's own time goes to its part, or to its callers' parts."""
    table: dict[Any, Any] = stats.stats  # type: ignore[attr-defined]
    known: dict[Any, dict[str, float]] = {}

    def parts(function: Any, trail: frozenset[Any]) -> dict[str, float]:
        """How the time of ``function`` is divided among the parts, by who called it."""
        own = part_of(function)
        if own is not None:
            return {own: 1.0}
        if function in known:
            return known[function]
        callers = {c: v for c, v in table[function][4].items() if c not in trail and c != function}
        total = sum(value[2] for value in callers.values())
        result: dict[str, float] = {}
        if is_compute(function) or total <= 0:
            result = {"model": 1.0}
        else:
            for caller, value in callers.items():
                for part, share in parts(caller, trail | {function}).items():
                    result[part] = result.get(part, 0.0) + share * value[2] / total
        known[function] = result
        return result

    seconds = dict.fromkeys(PARTS, 0.0)
    for function, (_, _, own_s, _, _) in table.items():
        for part, share in parts(function, frozenset()).items():
            seconds[part] += own_s * share
    return seconds


def is_compute(function: tuple[str, int, str]) -> bool:
    """Whether this is autograd's run of the backward graph, called by the engine for the model."""
    return "run_backward" in function[2]


def measure(rank: int, meeting: str, layers: int, options: argparse.Namespace, out: str) -> None:
    """One rank: train a stack under every stage and write a row for each."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=2
    )
    rows = []
    for stage in range(4):
        torch.manual_seed(0)
        blocks = nn.Sequential(*(Block(options.width) for _ in range(layers)))
        engine = ds_zero.initialize(
            model=blocks,
            config={
                "train_micro_batch_size_per_gpu": 1,
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
                "zero_optimization": {"stage": stage},
            },
        ).engine
        x = torch.randn(options.rows, options.width)

        def step(engine: ds_zero.Engine = engine, x: Tensor = x) -> None:
            engine.backward(engine(x).square().mean())
            engine.step()

        for _ in range(2):
            step()
        times, found = [], []
        for _ in range(options.steps):
            begin_s = time.perf_counter()
            step()
            times.append(time.perf_counter() - begin_s)
            profile = cProfile.Profile(time.thread_time)
            profile.runcall(step)
            found.append(shares(pstats.Stats(profile)))
        parts = {part: statistics.median(each[part] for each in found) for part in PARTS}
        rows.append(
            {
                "stage": stage,
                "layers": layers,
                "units": len(engine.core.units),
                "params": sum(param.numel() for param in blocks.parameters()),
                "step_ms": 1e3 * statistics.median(times),
                **{f"{part}_ms": 1e3 * seconds for part, seconds in parts.items()},
                "engine_share": parts["engine"] / sum(parts.values()),
            }
        )
        engine.destroy()
    if rank == 0:
        Path(out).write_text(json.dumps(rows))
    torch.distributed.destroy_process_group()


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Engine share and milliseconds per unit against units; step time against parameters."""
    figure = Figure(figsize=(13, 4), dpi=110, layout="constrained")
    share, cost, step = figure.subplots(1, 3)
    for stage in range(4):
        own = [row for row in rows if row["stage"] == stage]
        units = [row["units"] for row in own]
        share.plot(units, [100 * r["engine_share"] for r in own], "o-", label=f"ZeRO-{stage}")
        cost.plot(units, [1e3 * r["engine_ms"] / r["units"] for r in own], "o-")
        step.plot([r["params"] / 1e6 for r in own], [r["step_ms"] for r in own], "o-")
    share.axhline(3, color="grey", ls="--", lw=1, label="bar: 3 %")
    share.set(xlabel="units", ylabel="engine's share of a step, %", ylim=(0, None))
    cost.set(xlabel="units", ylabel="engine, µs per unit and step", ylim=(0, None))
    step.set(xlabel="parameters, millions", ylabel="step, ms", ylim=(0, None))
    for axes in (share, cost, step):
        axes.grid(alpha=0.3)
    share.legend()
    figure.savefig(path)


def main() -> None:
    """Measure, print a table, write JSON and the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", default="10,30,100", help="numbers of blocks")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rows", type=int, default=256, help="rows of a micro-batch")
    parser.add_argument("--steps", type=int, default=5, help="profiled steps; medians are shown")
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.png")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print(f"load average {os.getloadavg()[0]:.2f}, width {options.width}, {options.rows} rows")
    print("stage  layers  units  params M   step ms  " + "  ".join(f"{p:>11}" for p in PARTS))
    for layers in map(int, options.layers.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            out = str(Path(folder) / "rows.json")
            arguments = (str(Path(folder) / "meet"), layers, options, out)
            multiprocessing.spawn(measure, arguments, nprocs=2)  # type: ignore[no-untyped-call]
            found = json.loads(Path(out).read_text())
        rows += found
        for row in found:
            total = sum(row[f"{part}_ms"] for part in PARTS)
            print(
                f"{row['stage']:5}  {layers:6}  {row['units']:5}  {row['params'] / 1e6:8.1f}  "
                f"{row['step_ms']:8.1f}  "
                + "  ".join(f"{100 * row[f'{part}_ms'] / total:9.2f} %" for part in PARTS)
            )
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
        draw(rows, options.out.with_suffix(".png"))
        print(f"written to {options.out.with_suffix('.json')} and .png")


if __name__ == "__main__":
    main()
