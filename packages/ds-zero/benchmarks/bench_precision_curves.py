"""Loss curves of the same training in fp32, bf16, fp16 and under autocast, overlaid.

Two CPU ranks train a small transformer on sequences of a random second-order Markov chain, once in
every precision, from the same weights and on the same batches.  The chain's entropy is known, so
the plot has a floor.  What is printed and written: the mean loss of the last tenth of the steps,
the largest distance of the smoothed curve from that of fp32, skipped steps, the last loss scale,
and the time of a step.  fp16 is slow on CPUs, which convert every product to fp32 and back.

Examples:
    python packages/ds-zero/benchmarks/bench_precision_curves.py
    python packages/ds-zero/benchmarks/bench_precision_curves.py --stage 1 --steps 60
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, multiprocessing, nn

import ds_zero

# Begins with overflows and meets more of them on the way, so that skipped steps are in the curve.
_SCALING = {"initial_scale_power": 20, "loss_scale_window": 50, "hysteresis": 1}
MODES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, **_SCALING}},
    "autocast bf16": {"torch_autocast": {"enabled": True, "dtype": "bf16"}},
    "autocast fp16": {
        "torch_autocast": {"enabled": True, "dtype": "fp16"},
        "fp16": _SCALING,
    },
    "bf16 masters": {
        "bf16": {
            "enabled": True,
            "bf16_master_weights_and_grads": True,
            "bf16_optimizer_states": True,
        }
    },
}
VOCABULARY = 24
SMOOTH = 10
"""Steps over which a curve is averaged before curves are compared."""


class Block(nn.Module):
    """A pre-norm transformer block with causal attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Map ``[batch, tokens, width]`` to the same shape."""
        batch, tokens, width = x_BTD.shape
        parts = self.qkv(self.first(x_BTD)).view(batch, tokens, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        out: Tensor = x_BTD + self.down(nn.functional.gelu(self.up(self.second(x_BTD))))
        return out


class Decoder(nn.Module):
    """A small causal language model with the head tied to the embedding."""

    def __init__(self, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.place = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=width**-0.5)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Map ``[batch, tokens]`` to logits ``[batch, tokens, vocabulary]``."""
        places = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTD = self.embed(tokens_BT) + self.place(places)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        out: Tensor = self.head(self.norm(x_BTD))
        return out


class Chain:
    """A second-order Markov chain over the vocabulary."""

    def __init__(self) -> None:
        seed = torch.Generator().manual_seed(1)
        far, near = 2 * torch.randn(2, VOCABULARY, VOCABULARY, generator=seed)
        self.next = (far[:, None] + near).softmax(dim=-1)

    def sample(self, rows: int, length: int, seed: int) -> Tensor:
        """Sequences ``[rows, length]``, the same for the same seed."""
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(0, VOCABULARY, (rows, 2), generator=generator)
        while tokens.shape[1] < length:
            chances = self.next[tokens[:, -2], tokens[:, -1]]
            tokens = torch.cat([tokens, torch.multinomial(chances, 1, generator=generator)], dim=1)
        return tokens

    def entropy(self) -> float:
        """Mean entropy of the next token in nats, over sampled pairs."""
        tokens = self.sample(64, 512, seed=0)
        chances = self.next[tokens[:, :-1], tokens[:, 1:]]
        return float(-(chances * chances.log()).sum(dim=-1).mean())


def train(rank: int, mode: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train in one precision; the losses are the mean over ranks."""
    torch.manual_seed(0)
    engine = ds_zero.initialize(
        model=Decoder(options.width, options.layers, options.length),
        config={
            "train_micro_batch_size_per_gpu": options.rows,
            "optimizer": {"type": "AdamW", "params": {"lr": options.lr}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 20}},
            "zero_optimization": {
                "stage": options.stage,
                "stage3_param_persistence_threshold": 1000,
            },
            **MODES[mode],
        },
    ).engine
    chain, losses, scales = Chain(), [], []
    begin_s = time.perf_counter()
    for step in range(options.steps):
        tokens = chain.sample(options.rows, options.length + 1, seed=2 * step + rank)
        logits = engine(tokens[:, :-1]).float()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        torch.distributed.all_reduce(mean)
        losses.append(float(mean) / 2)
        scales.append(engine.loss_scale)
    result = {
        "mode": mode,
        "losses": losses,
        "scales": scales,
        "skipped": engine.skipped_steps,
        "step_ms": 1e3 * (time.perf_counter() - begin_s) / options.steps,
    }
    engine.destroy()
    return result


def run_rank(rank: int, meeting: str, options: argparse.Namespace, out: str) -> None:
    """One rank: train in every precision; rank 0 writes what came of it."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=2
    )
    results = [train(rank, mode, options) for mode in options.modes]
    if rank == 0:
        Path(out).write_text(json.dumps(results))
    torch.distributed.destroy_process_group()


def smoothed(losses: list[float]) -> list[float]:
    """Running means over ``SMOOTH`` steps."""
    return [
        sum(losses[max(0, end - SMOOTH) : end]) / min(SMOOTH, end)
        for end in range(1, len(losses) + 1)
    ]


def draw(results: list[dict[str, Any]], floor: float, path: Path) -> None:
    """Curves over each other, and their distances from the first."""
    figure = Figure(figsize=(11, 4), dpi=100, layout="constrained")
    curves, gaps = figure.subplots(1, 2, width_ratios=(3, 2))
    base = smoothed(results[0]["losses"])
    for index, result in enumerate(results):
        curve = smoothed(result["losses"])
        style = {"lw": 1.2, "color": f"C{index}"}
        curves.plot(curve, label=result["mode"], **style)
        gaps.plot([a - b for a, b in zip(curve, base, strict=True)], **style)
    curves.axhline(floor, color="grey", ls="--", lw=1, label="entropy of the data")
    curves.set(xlabel="step", ylabel="loss, nats a token")
    gaps.set(xlabel="step", ylabel=f"distance from {results[0]['mode']}, nats")
    for axes in (curves, gaps):
        axes.grid(alpha=0.3)
    curves.legend(fontsize=8)
    figure.savefig(path)


def main() -> None:
    """Train in every precision, print a table, write JSON and the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--modes", default=list(MODES), nargs="+", choices=list(MODES))
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--rows", type=int, default=8, help="sequences of a micro-batch")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.png")
    options = parser.parse_args()
    floor = Chain().entropy()
    print(f"load average {os.getloadavg()[0]:.2f}; entropy of the data {floor:.4f} nats")
    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder) / "results.json")
        arguments = (str(Path(folder) / "meet"), options, out)
        multiprocessing.spawn(run_rank, arguments, nprocs=2)  # type: ignore[no-untyped-call]
        results = json.loads(Path(out).read_text())
    base = smoothed(results[0]["losses"])
    print("precision        last tenth  largest gap  skipped  last scale   step ms")
    for result in results:
        last = result["losses"][-max(1, options.steps // 10) :]
        curve = smoothed(result["losses"])
        result["last_tenth"] = sum(last) / len(last)
        result["largest_gap"] = max(abs(a - b) for a, b in zip(curve, base, strict=True))
        print(
            f"{result['mode']:15}  {result['last_tenth']:10.4f}  {result['largest_gap']:11.4f}  "
            f"{result['skipped']:7}  {result['scales'][-1]:10g}  {result['step_ms']:8.1f}"
        )
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        for result in results:
            result["losses"] = [round(loss, 4) for loss in result["losses"]]
            del result["scales"]
        document = {"stage": options.stage, "entropy": floor, "results": results}
        options.out.with_suffix(".json").write_text(json.dumps(document) + "\n")
        draw(results, floor, options.out.with_suffix(".png"))
        print(f"written to {options.out.with_suffix('.json')} and .png")


if __name__ == "__main__":
    main()
