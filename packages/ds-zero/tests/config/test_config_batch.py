"""The batch triangle (B01)."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ds_comm.errors import ConfigError
from ds_zero.config import BatchSizes, EngineConfig, resolve_batch_sizes

# Slow, busy machines must not fail a property.
RELAXED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

TRAIN, MICRO, STEPS = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)


# B01, world 2.
@pytest.mark.parametrize(
    ("train", "micro", "steps", "expected"),
    [
        (8, None, None, (8, 4, 1)),
        (None, 2, None, (4, 2, 1)),
        (16, 2, None, (16, 2, 4)),
        (16, None, 4, (16, 2, 4)),
        (None, 2, 3, (12, 2, 3)),
        (16, 2, 4, (16, 2, 4)),
    ],
)
def test_inferred_sizes(
    train: int | None, micro: int | None, steps: int | None, expected: tuple[int, int, int]
) -> None:
    assert resolve_batch_sizes(train, micro, steps, 2) == BatchSizes(*expected)
    document = {
        key: size
        for key, size in ((TRAIN, train), (MICRO, micro), (STEPS, steps))
        if size is not None
    }
    config = EngineConfig.load(document, data_parallel_size=2)
    assert config.batch == expected
    assert (
        config.train_batch_size,
        config.train_micro_batch_size_per_gpu,
        config.gradient_accumulation_steps,
    ) == expected


@pytest.mark.parametrize(
    "sizes",
    [
        {TRAIN: 7},
        {TRAIN: 10, MICRO: 4},
        {TRAIN: 8, MICRO: 2, STEPS: 1},
        {STEPS: 2},
        {},
        {TRAIN: 0},
        {MICRO: 0},
        {TRAIN: 8, STEPS: 0},
        {TRAIN: -8},
        {MICRO: -2},
        {MICRO: 2, STEPS: -1},
        {TRAIN: 2, MICRO: 4},
        {TRAIN: 4, STEPS: 4},
        {TRAIN: -16, MICRO: -8, STEPS: 1},
    ],
)
def test_sizes_that_do_not_fit(sizes: dict[str, int]) -> None:
    expected = [
        f"{key} = {sizes[key]} (given)" if key in sizes else f"{key} = not given"
        for key in (TRAIN, MICRO, STEPS)
    ]
    with pytest.raises(ConfigError) as direct:
        resolve_batch_sizes(sizes.get(TRAIN), sizes.get(MICRO), sizes.get(STEPS), 2)
    with pytest.raises(ConfigError) as loaded:
        EngineConfig.load(sizes, data_parallel_size=2)
    for text in (str(direct.value), str(loaded.value)):
        for part in (*expected, "data-parallel size 2"):
            assert part in text


def test_reasons() -> None:
    with pytest.raises(ConfigError, match=r"10 is not a multiple of .* 4 x 2 = 8"):
        resolve_batch_sizes(10, 4, None, 2)
    with pytest.raises(ConfigError, match=r"2 x 1 x 2 = 4, not 8"):
        resolve_batch_sizes(8, 2, 1, 2)
    with pytest.raises(ConfigError, match="7 samples cannot be split evenly"):
        resolve_batch_sizes(7, None, None, 2)
    with pytest.raises(ConfigError, match="give train_batch_size or"):
        resolve_batch_sizes(None, None, 2, 2)


@pytest.mark.parametrize("ranks", [0, -1])
def test_ranks_must_be_positive(ranks: int) -> None:
    with pytest.raises(ConfigError, match="data-parallel size must be at least 1"):
        resolve_batch_sizes(8, None, None, ranks)


def test_whole_floats_become_integers() -> None:
    config = EngineConfig.load({TRAIN: 8.0}, data_parallel_size=2)
    assert type(config.train_batch_size) is int
    assert config.batch == (8, 4, 1)
    with pytest.raises(ConfigError, match="a whole number is expected, given 8.5"):
        EngineConfig.load({TRAIN: 8.5}, data_parallel_size=2)
    with pytest.raises(ConfigError, match="a whole number is expected, given true"):
        EngineConfig.load({TRAIN: True}, data_parallel_size=1)


SIZES = st.integers(1, 200)


@RELAXED
@given(micro=SIZES, steps=SIZES, ranks=SIZES)
def test_any_two_sizes_give_the_third(micro: int, steps: int, ranks: int) -> None:
    train = micro * steps * ranks
    expected = BatchSizes(train, micro, steps)
    assert resolve_batch_sizes(train, micro, steps, ranks) == expected
    assert resolve_batch_sizes(None, micro, steps, ranks) == expected
    assert resolve_batch_sizes(train, micro, None, ranks) == expected
    assert resolve_batch_sizes(train, None, steps, ranks) == expected


GIVEN = st.one_of(st.none(), st.integers(-5, 100))


@RELAXED
@given(train=GIVEN, micro=GIVEN, steps=GIVEN, ranks=st.integers(1, 12))
def test_what_is_resolved_fits_and_keeps_what_was_given(
    train: int | None, micro: int | None, steps: int | None, ranks: int
) -> None:
    def fits() -> bool:
        """Whether sizes exist that keep the given ones; without accumulation it is 1."""
        if train is None and micro is None:
            return False
        steps_range = [steps] if steps is not None else range(1, 101)
        if steps is None and (train is None or micro is None):
            steps_range = [1]
        return any(
            (micro if micro is not None else m) * s * ranks == (train or m * s * ranks)
            for s in steps_range
            for m in ([micro] if micro is not None else range(1, 101))
        ) and all(size is None or size > 0 for size in (train, micro, steps))

    if not fits():
        with pytest.raises(ConfigError):
            resolve_batch_sizes(train, micro, steps, ranks)
        return
    sizes = resolve_batch_sizes(train, micro, steps, ranks)
    assert sizes.train == sizes.micro * sizes.accumulation * ranks
    assert min(sizes) >= 1
    for size, wanted in zip(sizes, (train, micro, steps), strict=True):
        assert wanted is None or size == wanted
