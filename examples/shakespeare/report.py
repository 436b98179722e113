"""What came out of a run: a sample of generated text and the loss curve as a picture.

    python examples/shakespeare/report.py --out DIR

Reads the plain weights that ``python -m ds_zero.zero_to_fp32`` exported; plain torch from here on.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from model import LanguageModel, ModelConfig, generate
from safetensors.torch import load_file

__all__ = ["draw_curve", "load_model", "main", "sample"]


def main() -> int:
    """Print the sample and write the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the run")
    parser.add_argument("--length", type=int, default=500, help="characters to generate")
    parser.add_argument("--temperature", type=float, default=0.6, help="of the draws")
    parser.add_argument("--seed", type=int, default=1, help="of the draws")
    options = parser.parse_args()
    entries = [json.loads(line) for line in (options.out / "losses.jsonl").open()]
    draw_curve(entries, options.out / "loss.png")
    model, alphabet = load_model(options.out)
    print(sample(model, alphabet, options.length, options.temperature, options.seed))
    return 0


def load_model(out: Path) -> tuple[LanguageModel, str]:
    """Return the trained model, in fp32 and plain torch, and its alphabet.

    Args:
        out: folder with ``model.json`` and ``weights/model.safetensors``.
    """
    described = json.loads((out / "model.json").read_text())
    model = LanguageModel(ModelConfig(**described["model"]))
    model.load_state_dict(load_file(out / "weights" / "model.safetensors"), strict=True)
    return model.eval(), described["alphabet"]


def sample(model: LanguageModel, alphabet: str, length: int, temperature: float, seed: int) -> str:
    """Return ``length`` generated characters, beginning after an empty line."""
    prompt = [alphabet.index(character) for character in "\n\n" if character in alphabet] or [0]
    torch.set_num_threads(1)
    symbols = generate(model, prompt, length, temperature=temperature, seed=seed)
    return "".join(alphabet[symbol] for symbol in symbols).strip()


def draw_curve(entries: list[dict[str, Any]], path: Path, *, symbol: str = "character") -> None:
    """Draw training and validation loss over steps, with a line where the run was resumed.

    Args:
        entries: lines of ``losses.jsonl``.
        path: picture to write.
        symbol: what losses are counted per.
    """
    # A bare figure draws into files: no window, no display is needed.
    figure = Figure(figsize=(9, 5), dpi=120, layout="constrained")
    axes = figure.subplots()
    phases: dict[str, list[dict[str, Any]]] = {}
    for entry in entries:
        ranks = entry["ranks"]
        label = f"ZeRO-{entry['stage']}, {ranks} rank{'s' if ranks > 1 else ''}"
        phases.setdefault(label, []).append(entry)
    for label, phase in phases.items():
        axes.plot([e["step"] for e in phase], [e["loss"] for e in phase], label=label, lw=1.2)
    for phase in list(phases.values())[1:]:
        axes.axvline(phase[0]["step"] - 0.5, color="grey", ls="--", lw=1, label="resumed")
    checked = [entry for entry in entries if "valid" in entry]
    axes.plot(
        [e["step"] for e in checked],
        [e["valid"] for e in checked],
        "o-",
        ms=4,
        lw=1,
        color="black",
        label="validation",
    )
    axes.set(xlabel="step", ylabel=f"loss, nats per {symbol}", title="Learning Shakespeare")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)


if __name__ == "__main__":
    sys.exit(main())
