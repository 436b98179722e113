"""The layout's arithmetic, against tilings worked out element by element."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_zero.layout import ModelLayout, ParamSpec, Run, UnitSpec

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8)

shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple) | st.just((301,))
specs = st.lists(
    st.tuples(shapes, st.sampled_from(DTYPES), st.booleans(), st.integers(0, 3)), max_size=9
)


def _unit(name: str, rows: list[tuple[tuple[int, ...], torch.dtype, bool, int]]) -> UnitSpec:
    members = tuple(
        ParamSpec(f"{name}.p{index}", shape, dtype, trainable, group)
        for index, (shape, dtype, trainable, group) in enumerate(rows)
    )
    return UnitSpec(name, members)


def _owners(run: Run) -> list[str | None]:
    """For every element of the run the parameter that it belongs to."""
    owners: list[str | None] = [None] * run.numel
    for slot in run.slots:
        for place in range(slot.start, slot.stop):
            assert owners[place] is None, "slots overlap"
            owners[place] = slot.spec.name
    return owners


@settings(max_examples=60, deadline=None)
@given(st.lists(specs, min_size=1, max_size=3), st.integers(1, 5))
def test_every_element_has_one_place(
    units: list[list[tuple[tuple[int, ...], torch.dtype, bool, int]]], num_shards: int
) -> None:
    """Slots are disjoint and aligned; with the gaps they tile the run; pieces tile parameters."""
    wanted = [_unit(f"u{index}", rows) for index, rows in enumerate(units)]
    layout = ModelLayout.build(wanted, num_shards)
    assert layout.num_shards == num_shards
    assert sorted(s.name for s in layout.params) == sorted(
        s.name for unit in wanted for s in unit.params
    )
    names = [run.name for run in layout.runs()]
    assert len(set(names)) == len(names)
    for unit in layout.units:
        assert unit.numel == sum(run.numel for run in unit.runs)
        kinds = [(run.dtype, run.trainable) for run in unit.runs]
        assert len(set(kinds)) == len(kinds)
        for run in unit.runs:
            _check_run(run, num_shards)


def _check_run(run: Run, num_shards: int) -> None:
    owners = _owners(run)
    for slot in run.slots:
        assert (slot.start * run.dtype.itemsize) % 64 == 0
        assert (slot.spec.dtype, slot.spec.trainable) == (run.dtype, run.trainable)
        assert slot.spec.numel == math.prod(slot.spec.shape)
    groups = [slot.spec.group for slot in run.slots]
    assert groups == sorted(groups)
    for low, high in run.gaps:
        assert low < high
        assert all(owner is None for owner in owners[low:high])
    assert sum(high - low for low, high in run.gaps) == owners.count(None)
    assert run.numel == num_shards * run.shard_numel
    assert (run.shard_numel * run.dtype.itemsize) % 64 == 0
    found: dict[str, list[int]] = {slot.spec.name: [] for slot in run.slots}
    starts = {slot.spec.name: slot.start for slot in run.slots}
    for shard in range(num_shards):
        begin, end = run.shard_range(shard)
        assert (begin, end) == (shard * run.shard_numel, (shard + 1) * run.shard_numel)
        for piece in run.pieces(shard):
            assert piece.numel > 0
            assert 0 <= piece.shard_start <= run.shard_numel - piece.numel
            assert (
                begin + piece.shard_start == starts[piece.spec.name] + piece.param_start
            )  # the same element, counted from both sides
            found[piece.spec.name] += range(piece.param_start, piece.param_start + piece.numel)
    for slot in run.slots:
        assert found[slot.spec.name] == list(range(slot.spec.numel))


@given(st.lists(shapes, min_size=1, max_size=8), st.integers(1, 5), st.integers(1, 5))
def test_slots_do_not_depend_on_the_number_of_shards(
    sizes: list[tuple[int, ...]], one: int, other: int
) -> None:
    """Only the padding at the end does: checkpoints and bit equality rest on it."""
    rows = [(shape, torch.float32, True, 0) for shape in sizes]
    first, second = (
        next(ModelLayout.build([_unit("u", rows)], count).runs()) for count in (one, other)
    )
    assert first.slots == second.slots


def test_a_layout_by_hand() -> None:
    """fp32: 16 elements are 64 bytes.  Group 1 comes after group 0, whatever the order given."""
    rows = [
        ((3, 5), torch.float32, True, 1),
        ((17,), torch.float32, True, 0),
        ((), torch.float32, True, 0),
        ((0, 4), torch.float32, True, 0),
        ((2, 2), torch.float32, True, 1),
    ]
    (run,) = ModelLayout.build([_unit("u", rows)], 3).runs()
    assert [(slot.spec.name, slot.start, slot.stop) for slot in run.slots] == [
        ("u.p1", 0, 17),
        ("u.p2", 32, 33),
        ("u.p3", 48, 48),
        ("u.p0", 48, 63),
        ("u.p4", 64, 68),
    ]
    # 80 elements, rounded up to three shards of a multiple of 16.
    assert (run.name, run.numel, run.shard_numel) == ("u", 96, 32)
    assert run.gaps == ((17, 32), (33, 48), (63, 64), (68, 96))
    pieces = [
        [(p.spec.name, p.param_start, p.shard_start, p.numel) for p in run.pieces(shard)]
        for shard in range(3)
    ]
    assert pieces == [
        [("u.p1", 0, 0, 17)],
        [("u.p2", 0, 0, 1), ("u.p0", 0, 16, 15)],
        [("u.p4", 0, 0, 4)],
    ]


def test_a_parameter_over_several_shards() -> None:
    """100 elements over 4 shards of 32: 32 + 32 + 32 + 4."""
    (run,) = ModelLayout.build([_unit("u", [((100,), torch.float32, True, 0)])], 4).runs()
    assert run.shard_numel == 32
    assert [[(p.param_start, p.numel) for p in run.pieces(s)] for s in range(4)] == [
        [(0, 32)],
        [(32, 32)],
        [(64, 32)],
        [(96, 4)],
    ]


def test_runs_by_dtype_and_trainability() -> None:
    """Names of a unit's runs say what is in them where there are several."""
    rows = [
        ((4,), torch.bfloat16, True, 0),
        ((4,), torch.bfloat16, False, 0),
        ((4,), torch.float32, True, 0),
        ((5,), torch.bfloat16, True, 0),
    ]
    unit = ModelLayout.build([_unit("block", rows)], 2).units[0]
    assert [(run.name, len(run.slots)) for run in unit.runs] == [
        ("block[bfloat16]", 2),
        ("block[bfloat16, frozen]", 1),
        ("block[float32]", 1),
    ]
    # bf16: 32 elements are 64 bytes.
    assert [slot.start for slot in unit.runs[0].slots] == [0, 32]


def test_nothing_at_all() -> None:
    """No units, a unit without parameters, and one whose parameters are all empty."""
    assert ModelLayout.build([], 4).params == ()
    assert ModelLayout.build([UnitSpec("u", ())], 4).units[0].numel == 0
    (run,) = ModelLayout.build([_unit("u", [((0,), torch.float32, True, 0)])], 4).runs()
    assert run.numel == 0 and run.gaps == ()
    assert [run.pieces(shard) for shard in range(4)] == [()] * 4
