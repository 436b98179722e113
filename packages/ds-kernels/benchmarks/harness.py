"""Medians of alternating rounds, printed as ratios and written as JSON.

Alternating means: every contender runs once per round, so a change of the machine's load meets all
of them; the ratio is the median over the rounds of ratios within a round.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

import ds_kernels


@dataclass(frozen=True)
class Result:
    """One comparison.

    Attributes:
        name: What was measured.
        seconds: Median seconds of each contender.
        ratio: Median over rounds of contender time / time of the first contender.
        bars: The largest ratio of first / contender that the project accepts, where it has one.
    """

    name: str
    seconds: dict[str, float]
    ratio: dict[str, float]
    bars: dict[str, float]


def compare(
    name: str,
    contenders: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 15,
    repeat: int = 1,
    bars: Mapping[str, float] | None = None,
) -> Result:
    """Time contenders in alternating rounds and print their ratios to the first.

    Args:
        name: What is measured.
        contenders: By name; the first is ours.
        rounds: Rounds after one warm-up.
        repeat: Calls per contender and round.
        bars: For a contender the largest accepted (our time) / (its time).
    """
    times: dict[str, list[float]] = {key: [] for key in contenders}
    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    for index in range(rounds + 1):
        for key, function in contenders.items():
            synchronize()
            start = _clock()
            for _ in range(repeat):
                function()
            synchronize()
            if index:
                times[key].append((_clock() - start) / repeat)
    first = next(iter(contenders))
    ratio = {
        key: statistics.median(a / b for a, b in zip(values, times[first], strict=True))
        for key, values in times.items()
    }
    result = Result(
        name,
        {key: statistics.median(values) for key, values in times.items()},
        ratio,
        dict(bars or {}),
    )
    _show(result, first)
    return result


def _clock() -> float:
    """Seconds of wall time, or with ``--cpu-time`` of this process's work."""
    return time.process_time() if "--cpu-time" in sys.argv else time.perf_counter()


DTYPES = (torch.float32, torch.bfloat16)
"""What the transformer ops are measured in."""

SHAPES = ((256, 1024), (4096, 4096))
"""Rows and columns: in cache and out of it."""

Outputs = Tensor | tuple[Tensor, ...]
"""What a compared function returns."""


def compare_both_ways(
    name: str,
    inputs: Sequence[Tensor],
    grad: Tensor,
    *,
    ours: Callable[..., Outputs],
    theirs: Mapping[str, tuple[Callable[..., Outputs], float]],
    rounds: int = 15,
) -> list[Result]:
    """Compare a differentiable function forward, and forward with backward.

    Args:
        name: What is measured.
        inputs: Its arguments; every floating-point one gets a gradient.
        grad: The gradient of the result, or of each result.
        ours: Our function.
        theirs: By name another function and the largest accepted (our time) / (its time).
        rounds: See :func:`compare`.
    """
    functions = {"ours": ours, **{key: function for key, (function, _) in theirs.items()}}
    bars = {key: bar for key, (_, bar) in theirs.items()}
    repeat = max(1, (1 << 20) // max(inputs[0].numel(), 1))
    leaves = [x.detach().clone().requires_grad_(x.dtype.is_floating_point) for x in inputs]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]

    def forward(function: Callable[..., Outputs]) -> Callable[[], object]:
        return lambda: function(*inputs)

    def both(function: Callable[..., Outputs]) -> Callable[[], object]:
        def run() -> object:
            result = function(*leaves)
            outputs = (result,) if isinstance(result, Tensor) else result
            return torch.autograd.grad(outputs, wanted, [grad] * len(outputs))

        return run

    return [
        compare(
            f"{name} {kind}",
            {key: make(function) for key, function in functions.items()},
            rounds=rounds,
            repeat=repeat,
            bars=bars,
        )
        for kind, make in (("forward", forward), ("forward + backward", both))
    ]


def pin_malloc() -> None:
    """Keep freed blocks in the process, or page faults of large results hide the kernels."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        assert libc.mallopt(_M_MMAP_MAX, 0) == 1
        assert libc.mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1) == 1


_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def _show(result: Result, first: str) -> None:
    print(f"{result.name}: {first} {result.seconds[first] * 1e3:.3f} ms")
    for key, value in result.ratio.items():
        if key == first:
            continue
        verdict = ""
        if key in result.bars:
            reached = 1 / value <= result.bars[key]
            verdict = (
                f"  bar: ours <= {result.bars[key]:.2f} of it: {'ok' if reached else 'MISSED'}"
            )
        print(f"  {key}: {value:.2f} x our time, ours / it = {1 / value:.3f}{verdict}")


def main(name: str, measure: Callable[[], list[Result]]) -> None:
    """Command line of a benchmark file: run it, print, and with ``--json`` write the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, help="file to write the results to")
    parser.add_argument(
        "--cpu-time", action="store_true", help="CPU time instead of wall time, on a busy machine"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    pin_malloc()
    load = os.getloadavg()[0]
    print(
        f"{name}: torch {torch.__version__}, {arguments.threads} threads, load {load:.1f}, "
        f"cpu level {ds_kernels.cpu_level()}"
    )
    results = measure()
    if arguments.json:
        document = {
            "benchmark": name,
            "torch": torch.__version__,
            "threads": arguments.threads,
            "cpu_time": arguments.cpu_time,
            "load": load,
            "cpu_level": ds_kernels.cpu_level(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
            "results": [asdict(result) for result in results],
        }
        arguments.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
