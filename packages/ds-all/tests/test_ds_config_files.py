"""Every configuration file collected from public repositories loads, or is refused by name.

The expectations were written by hand after reading each file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import pytest

from ds_all.config import DSConfig
from ds_comm.config import ConfigReportError, ProblemKind

FOLDER = Path(__file__).resolve().parents[4] / "shared" / "configs"
NUM_FILES = 40

COMPRESS = "compression_training"
TRAINER_AUTO = {
    "optimizer.params.lr",
    "optimizer.params.weight_decay",
    "scheduler.params.warmup_min_lr",
    "scheduler.params.warmup_max_lr",
    "scheduler.params.warmup_num_steps",
    "scheduler.params.total_num_steps",
    "gradient_clipping",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
}
MICRO_AUTO = {"train_micro_batch_size_per_gpu"}
QUANTISED = {
    f"{COMPRESS}.weight_quantization.shared_parameters.enabled",
    f"{COMPRESS}.activation_quantization.shared_parameters.enabled",
}


class Loads(NamedTuple):
    """The file loads on `ranks` data-parallel ranks with these batch sizes."""

    ranks: int
    batch: tuple[int, int, int]


class Refused(NamedTuple):
    """The file is refused for exactly these keys."""

    unavailable: frozenset[str] = frozenset()
    auto: frozenset[str] = frozenset()
    contradiction: frozenset[str] = frozenset()


def refused(
    unavailable: set[str] = frozenset(),  # type: ignore[assignment]
    auto: set[str] = frozenset(),  # type: ignore[assignment]
    contradiction: set[str] = frozenset(),  # type: ignore[assignment]
) -> Refused:
    return Refused(frozenset(unavailable), frozenset(auto), frozenset(contradiction))


NO_BATCH = refused(contradiction={"train_batch_size"})

EXPECTED: dict[str, Loads | Refused] = {
    "000": Loads(1, (64, 64, 1)),
    "001": refused({f"{COMPRESS}.layer_reduction.enabled"}),
    "002": refused({"autotuning.enabled"}, auto=MICRO_AUTO),
    "003": Loads(4, (32, 8, 1)),
    "004": NO_BATCH,
    "005": refused(auto=TRAINER_AUTO),
    "006": refused(auto=MICRO_AUTO),
    "007": refused({"data_efficiency.enabled"}),
    "008": refused(QUANTISED),
    "009": Loads(2, (8, 4, 1)),
    "010": refused(auto=MICRO_AUTO),
    "011": refused({"optimizer.type"}),
    "012": refused({"data_efficiency.enabled"}),
    "013": Loads(2, (8, 4, 1)),
    "014": refused(QUANTISED),
    "015": Loads(2, (8, 4, 1)),
    "016": refused(
        {"zero_optimization.offload_param.device"}, auto={"fp16.enabled", "bf16.enabled"}
    ),
    "017": Loads(4, (32, 4, 2)),
    "018": refused(
        {"aio", "zero_optimization.offload_param.device"},
        auto={
            "zero_optimization.stage3_max_live_parameters",
            "zero_optimization.offload_param.buffer_size",
        },
    ),
    "019": NO_BATCH,
    "020": Loads(2, (8, 4, 1)),
    "021": refused(
        {"aio", "zero_optimization.offload_param.device"},
        auto={
            "zero_optimization.stage3_max_live_parameters",
            "zero_optimization.offload_param.buffer_size",
        },
    ),
    "022": Loads(1, (32, 32, 1)),
    "023": Loads(4, (24, 3, 2)),
    "024": refused({"zero_optimization.offload_optimizer.device"}, auto=TRAINER_AUTO),
    "025": refused({"optimizer.type"}),
    "026": Loads(2, (8, 4, 1)),
    "027": refused({"optimizer.type"}),
    "028": NO_BATCH,
    "029": refused({"autotuning.enabled"}, auto=MICRO_AUTO),
    "030": refused(auto=TRAINER_AUTO),
    "031": refused({"optimizer.type"}),
    "032": Loads(4, (16, 4, 1)),
    "033": Loads(2, (32, 1, 16)),
    "034": refused(QUANTISED),
    "035": refused(auto=MICRO_AUTO),
    "036": refused({"progressive_layer_drop.enabled"}),
    "037": refused({"optimizer.type"}),
    "038": refused({"data_efficiency.enabled"}),
    "039": refused(auto=MICRO_AUTO),
}


def test_there_is_an_expectation_for_every_file() -> None:
    assert sorted(EXPECTED) == [f"{number:03d}" for number in range(NUM_FILES)]


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_collected_file(name: str) -> None:
    path = FOLDER / f"{name}.json"
    if not path.is_file():
        pytest.skip(f"the collection of configurations is not at {FOLDER}")
    expected = EXPECTED[name]
    if isinstance(expected, Loads):
        config = DSConfig.load(path, data_parallel_size=expected.ranks)
        assert config.batch == expected.batch
        document = json.loads(path.read_text())
        stage = document.get("zero_optimization", {}).get("stage", 0)
        assert config.zero_optimization.stage == stage
        return
    with pytest.raises(ConfigReportError) as caught:
        DSConfig.load(path, data_parallel_size=1)
    problems = caught.value.problems
    assert len({problem.path for problem in problems}) == len(problems)
    by_kind = {
        kind: frozenset(problem.path for problem in problems if problem.kind is kind)
        for kind in ProblemKind
    }
    found = Refused(
        by_kind.pop(ProblemKind.UNAVAILABLE),
        by_kind.pop(ProblemKind.AUTO),
        by_kind.pop(ProblemKind.CONTRADICTION),
    )
    assert found == expected
    assert not any(by_kind.values())
    assert str(path) in str(caught.value)
