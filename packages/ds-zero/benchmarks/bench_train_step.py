r"""Time one training step beside DDP, FSDP2 and DeepSpeed in one run, and keep the ratios.

Two CPU ranks train the same GPT under every engine, engines alternating step by step; the figure
is the median over rounds.  The measuring script is ``../shared/bench/train_step.py`` beside the
repository; this one runs it, prints ratios and writes JSON.

Examples:
    python packages/ds-zero/benchmarks/bench_train_step.py
    python packages/ds-zero/benchmarks/bench_train_step.py --dtype bf16 --rounds 9
    python packages/ds-zero/benchmarks/bench_train_step.py --python peers/bin/python \
        --engines limit,ddp,ours:1,ours:3,deepspeed:1,deepspeed:3 --out result.json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT.parent / "shared" / "bench" / "train_step.py"
BASELINES = ("limit", "ddp", "fsdp2")


def main() -> int:
    """Run the benchmark; 0 also when the measuring script is not there."""
    options = _options()
    if not SCRIPT.is_file():
        print(f"skipped: {SCRIPT.relative_to(ROOT.parent)} is not beside the repository")
        return 0
    results = []
    for dtype in options.dtype.split(","):
        before = os.getloadavg()[0]
        rows = measure(options, dtype)
        print(f"\n{dtype}; load average before the run {before:.2f}")
        print(table(rows))
        results.append({"dtype": dtype, "load_before": before, "rows": rows})
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps({"argv": sys.argv[1:], "runs": results}, indent=2) + "\n")
        print(f"written to {options.out}")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--engines",
        default="limit,ddp,fsdp2,ours:0,ours:1,ours:2,ours:3",
        help="comma-separated; deepspeed:STAGE where that package is installed",
    )
    parser.add_argument("--dtype", default="fp32,bf16", help="fp32, bf16 or both")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--python", default=sys.executable, help="interpreter of the ranks")
    parser.add_argument("--out", type=Path, help="where to write the JSON result")
    return parser.parse_args()


def measure(options: argparse.Namespace, dtype: str) -> list[dict[str, Any]]:
    """Run the measuring script on two ranks; one row an engine."""
    command = [
        options.python,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--master-port=29517",
        str(SCRIPT),
        "--engines",
        options.engines,
        "--dtype",
        dtype,
        "--rounds",
        str(options.rounds),
        "--layers",
        str(options.layers),
        "--width",
        str(options.width),
    ]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if run.returncode:
        sys.stderr.write(run.stderr[-4000:])
        raise SystemExit(f"the measuring script failed with status {run.returncode}")
    lines = [line for line in run.stdout.splitlines() if line.startswith("{")]
    return [row for row in map(json.loads, lines) if "engine" in row]


def table(rows: list[dict[str, Any]]) -> str:
    """Medians, and each engine's ratio to every baseline of the same run."""
    medians = {row["engine"]: row["median_ms"] for row in rows}
    bases = [name for name in BASELINES if name in medians]
    peers = [name for name in medians if name.startswith("deepspeed")]
    lines = [
        "engine         median ms  "
        + "  ".join(f"/ {base:8}" for base in bases)
        + "  / same stage of DeepSpeed"
    ]
    for name, median in medians.items():
        ratios = "  ".join(f"{median / medians[base]:10.3f}" for base in bases)
        peer = f"deepspeed:{name.partition(':')[2]}"
        same = f"{median / medians[peer]:10.3f}" if peer in peers and peer != name else ""
        lines.append(f"{name:14} {median:9.1f}  {ratios}  {same}")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
