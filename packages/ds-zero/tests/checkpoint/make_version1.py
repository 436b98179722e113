"""Wrote data/version1 once; kept to tell what the folder holds. Do not run it again."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import torch

from ds_zero.checkpoint import Chunk, Manifest, TensorInfo, rank_files, save_checkpoint

sys.path.insert(0, str(Path(__file__).parent))

from conftest import ThreadCoordinator  # noqa: E402

rank_files.FIRST_HEADER_BYTES = 1024
weight = torch.arange(21.0)
frozen = torch.tensor([1.0, -2.0, 0.5], dtype=torch.bfloat16)
manifest = Manifest(
    parameters=(
        TensorInfo("weight", (3, 7), "bfloat16", True, 0),
        TensorInfo("frozen", (3,), "bfloat16", False, -1),
    ),
    buffers=(TensorInfo("steps", (), "int64", False, -1),),
    aliases={"tied": "weight"},
    mesh={"world": 2, "shard": 2},
    counters={"global_steps": 3},
    scalars={"weight": {"step": 3.0}},
    schedule={"last_batch_iteration": 2},
    data={"epoch": 0, "position": 24},
    optimizer={"type": "AdamW", "param_groups": [{"betas": (0.9, 0.95)}]},
)
parts = [
    [
        Chunk("param", "frozen", 0, frozen),
        Chunk("param", "weight", 0, weight[:10]),
        Chunk("exp_avg", "weight", 0, weight[:10] / 2),
    ],
    [
        Chunk("param", "weight", 10, weight[10:]),
        Chunk("exp_avg", "weight", 10, weight[10:] / 2),
        Chunk("buffer", "steps", 0, torch.tensor([3])),
    ],
]
client = {"seen": torch.tensor([1, 2]), "note": ("a", float("inf"))}
barrier, slots = threading.Barrier(2), [None, None]
threads = [
    threading.Thread(
        target=save_checkpoint,
        args=(
            Path(__file__).parent / "data" / "version1",
            "step3",
            manifest,
            parts[rank],
            client,
            ThreadCoordinator(rank, 2, barrier, slots),
        ),
    )
    for rank in range(2)
]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
