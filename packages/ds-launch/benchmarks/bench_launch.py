"""How long a launch of two local ranks takes, beside torchrun (and deepspeed where installed).

Measures whole commands on a script that imports nothing, in alternating rounds, and prints JSON
with medians and ratios. The bar: ``ds run`` at most 0.3 of torchrun, ``ds --help`` under 100 ms.

    python packages/ds-launch/benchmarks/bench_launch.py --rounds 9 --out launch.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

RANKS = 2
BAR_TORCHRUN = 0.3
BAR_HELP_S = 0.1


def commands(script: str) -> dict[str, list[str]]:
    """Return the commands to measure by name; peers that are not installed are left out."""
    python = sys.executable
    beside = os.pathsep.join([str(Path(python).parent), os.environ.get("PATH", os.defpath)])
    found = {
        "ds run": [python, "-m", "ds_launch", "run", "--num-ranks", str(RANKS), script],
        "ds --help": [python, "-m", "ds_launch", "--help"],
        "python script": [python, script],
    }
    if torchrun := shutil.which("torchrun", path=beside):
        found["torchrun"] = [torchrun, "--nproc-per-node", str(RANKS), script]
    if deepspeed := shutil.which("deepspeed", path=beside):
        found["deepspeed"] = [deepspeed, "--num_gpus", str(RANKS), script]
    return found


def wall_s(command: Sequence[str]) -> float:
    """Run a command that must succeed and return its wall time in seconds."""
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - start


def measure(rounds: int) -> dict[str, list[float]]:
    """Return the wall times of each command, one per round, after a round that is not counted."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "noop.py"
        script.write_text("pass\n")
        todo = commands(str(script))
        times: dict[str, list[float]] = {name: [] for name in todo}
        for number in range(rounds + 1):
            for name, command in todo.items():
                elapsed = wall_s(command)
                if number:
                    times[name].append(elapsed)
    return times


def installed(name: str) -> str:
    """Return the version of a distribution, or that it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def main() -> None:
    """Measure, print and store."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, help="write the JSON here as well")
    arguments = parser.parse_args()
    times = measure(arguments.rounds)
    medians = {name: statistics.median(values) for name, values in times.items()}
    result = {
        "benchmark": "launch",
        "ranks": RANKS,
        "rounds": arguments.rounds,
        "python": platform.python_version(),
        "torch": installed("torch"),
        "deepspeed": installed("deepspeed"),
        "cores": len(os.sched_getaffinity(0)),
        "load_1min": os.getloadavg()[0],
        "median_s": medians,
        "min_s": {name: min(values) for name, values in times.items()},
        "ratio_to_torchrun": (
            medians["ds run"] / medians["torchrun"] if "torchrun" in medians else None
        ),
        "ratio_to_deepspeed": (
            medians["ds run"] / medians["deepspeed"] if "deepspeed" in medians else None
        ),
        "bars": {"ratio_to_torchrun": BAR_TORCHRUN, "ds --help": BAR_HELP_S},
        "times_s": times,
    }
    text = json.dumps(result, indent=2) + "\n"
    sys.stdout.write(text)
    if arguments.out is not None:
        arguments.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
