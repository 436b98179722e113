"""The whole demo in few steps on a small text, without network."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from report import load_model

DEMO = Path(__file__).resolve().parent.parent / "demo.py"
SONNET = """\
Shall I compare thee to a summer's day?
Thou art more lovely and more temperate:
Rough winds do shake the darling buds of May,
And summer's lease hath all too short a date:
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(DEMO), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)


@pytest.mark.slow
def test_demo_trains_resumes_on_other_ranks_and_exports(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(SONNET * 150, encoding="utf-8")
    out = tmp_path / "out"
    done = run("--steps", "6", "--text", str(text), "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr

    entries = [json.loads(line) for line in (out / "losses.jsonl").open()]
    assert [entry["step"] for entry in entries] == [1, 2, 3, 4, 5, 6]
    assert [(e["stage"], e["ranks"]) for e in entries] == [(2, 2)] * 4 + [(3, 3)] * 2
    # 48 samples a step on any number of ranks: the position goes on, so does the schedule.
    assert [entry["position"] for entry in entries] == [48, 96, 144, 192, 240, 288]
    # One step of warm-up at 0.05 of the peak, then half a cosine over four steps down to 0.05.
    cosine = [0.95 * (1 + math.cos(math.pi * step / 4)) / 2 + 0.05 for step in range(5)]
    want = [0.005 * share for share in [0.05, *cosine]]
    assert [entry["lr"] for entry in entries] == pytest.approx(want)
    assert entries[-1]["loss"] < entries[0]["loss"]
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    model, alphabet = load_model(out)
    assert alphabet == "".join(sorted(set(SONNET)))
    assert model.config.num_symbols == len(alphabet)
    for word in ("Plan:", "== export", "loss curve", "checkpoints", "weights"):
        assert word in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "1"], "at least 2"),
        (["--ranks", "5"], "do not divide"),
        (["--ranks", "two"], "whole number"),
    ],
)
def test_bad_options_are_explained(arguments: list[str], message: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert message in done.stderr


def test_a_missing_text_is_an_error_without_a_traceback(tmp_path: Path) -> None:
    done = run("--text", str(tmp_path / "none.txt"), "--out", str(tmp_path / "out"))
    assert done.returncode == 1
    assert "there is no such file" in done.stderr
    assert "Traceback" not in done.stderr
