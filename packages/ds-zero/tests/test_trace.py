"""The hash of a sequence of collectives, and where sequences part."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ds_zero.trace import Trace, first_difference

events = st.lists(st.tuples(st.sampled_from(["gather", "reduce"]), st.integers(0, 50)), max_size=30)


def _trace(items: list[tuple[str, int]]) -> Trace:
    trace = Trace()
    for kind, unit in items:
        trace.add(kind, unit)
    return trace


@given(events, events)
def test_equal_digests_mean_equal_sequences(
    a: list[tuple[str, int]], b: list[tuple[str, int]]
) -> None:
    """In both directions, and the digest fits a signed 64-bit integer."""
    one, other = _trace(a), _trace(b)
    assert (one.digest == other.digest) == (a == b)
    assert list(one.events) == a and 0 <= one.digest < 2**63


def test_order_kind_unit_and_length_count() -> None:
    """Each change of the sequence changes the digest; an event with code 0 would not."""
    base = [("gather", 0), ("reduce", 0), ("gather", 1)]
    variants = [
        base,
        base[:-1],
        [*base, ("gather", 0)],
        [base[1], base[0], base[2]],
        [("gather", 1), *base[1:]],
        [("reduce", 0), *base[1:]],
        [],
        [("gather", 0)],
        [("gather", 0), ("gather", 0)],
    ]
    assert len({_trace(items).digest for items in variants}) == len(variants)


def test_digest_by_hand() -> None:
    """gather of unit 3 has code 7, reduce of unit 3 code 8."""
    assert _trace([("gather", 3)]).digest == 7
    assert _trace([("gather", 3), ("reduce", 3)]).digest == 7 * 1_000_003 + 8


def test_reset() -> None:
    """After a step the sequence begins anew."""
    trace = _trace([("gather", 3), ("reduce", 1)])
    trace.reset()
    assert list(trace.events) == [] and trace.digest == Trace().digest == 0


def test_first_difference() -> None:
    """The place, and every rank's event there by the unit's name."""
    names = ["emb", "layers.0", "layers.1"]
    common = [("gather", 0), ("gather", 1)]
    text = first_difference(
        [[*common, ("gather", 2)], [*common, ("reduce", 2)], list(common)], names
    )
    assert text == (
        "at collective #2: rank 0: gather of 'layers.1'; rank 1: reduce of 'layers.1'; "
        "rank 2: nothing"
    )
    assert first_difference([common, list(common)], names) == "no difference"
    assert "rank 1: nothing" in first_difference([common, []], names)
