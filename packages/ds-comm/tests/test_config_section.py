"""What every section gets from the base, on a small schema of its own."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import Field, ValidationError

from ds_comm.config import (
    Auto,
    ConfigReportError,
    Contradiction,
    DTypeName,
    Elsewhere,
    Flag,
    KeyRules,
    NoEffect,
    NotYet,
    Number,
    Pending,
    ProblemKind,
    Removed,
    Renamed,
    Section,
    Shorthand,
    Strings,
    Whole,
    build,
)
from ds_comm.errors import ConfigError

# Slow, busy machines must not fail a property.
RELAXED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def _positive(value: Any) -> Any:
    if not isinstance(value, bool):
        raise ValueError("true or false is expected")
    return 7 if value else 0


class Inner(Section):
    """A nested section."""

    depth: Annotated[Whole, Field(ge=0), Auto()] = 2
    name: str = "x"
    key_rules: ClassVar[KeyRules] = KeyRules(renamed=(Renamed("dept_old", ("depth",)),))


class Required(Section):
    """A section with a required key."""

    type: str
    params: dict[str, Any] = Field(default_factory=dict)


class Outer(Section):
    """The whole document."""

    count: Whole = 1
    ratio: Number = 0.5
    flag: Flag = False
    maybe: Flag | None = None
    names: Strings = ()
    dtype: DTypeName | None = None
    long_key: Whole = Field(default=3, alias="outer_long_key")
    hint: Annotated[Whole, NoEffect("of something")] = 4
    later: Annotated[Flag, NotYet("use flag")] = False
    near: Annotated[Whole | None, NotYet("leave it out", also=(1,))] = None
    inner: Inner = Field(default_factory=Inner)
    chosen: Required | None = None
    key_rules: ClassVar[KeyRules] = KeyRules(
        renamed=(
            Renamed("number", ("count",)),
            Renamed("on", ("inner.depth",), _positive),
            Renamed("twice", ("count", "outer_long_key")),
        ),
        removed=(Removed("gone", "write count"),),
        shorthands=(Shorthand("inner", bool, lambda value: {"depth": int(value)}),),
        elsewhere=(Elsewhere("foreign", "ds-x", "load it there"),),
        pending=(
            Pending("block", "ds-y", "wait", {"enabled": None, "sub": {"*": {"a": None}}}),
            Pending("sized", "ds-y", "wait", {"size": None}, switches=("size",), neutral=1),
            Pending("bare", "ds-y", "wait", {"a": None}, switches=()),
        ),
    )

    def contradictions(self) -> Iterator[Contradiction]:
        """Count and ratio."""
        if self.count > 10 and self.ratio > 0.9:
            yield Contradiction("ratio", "too much together", ("count", "ratio"))


def problems(data: Any, where: str = "") -> list[tuple[str, ProblemKind]]:
    with pytest.raises(ConfigReportError) as caught:
        build(Outer, data, where=where)
    assert isinstance(caught.value, ConfigError)
    lines = str(caught.value).split("\n  ")[1:]
    assert len(lines) == len(caught.value.problems)
    for line, problem in zip(lines, caught.value.problems, strict=True):
        assert line.startswith(f"{problem.path}: ")
    return [(problem.path, problem.kind) for problem in caught.value.problems]


def message(data: Any) -> str:
    with pytest.raises(ConfigReportError) as caught:
        build(Outer, data)
    return str(caught.value)


def test_defaults_and_values() -> None:
    outer = build(Outer, {"count": 2, "outer_long_key": 5, "inner": {"depth": 1}, "names": ["a"]})
    assert (outer.count, outer.long_key, outer.inner.depth, outer.names) == (2, 5, 1, ("a",))
    assert build(Outer, {}) == Outer()


def test_sections_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        build(Outer, {}).count = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("data", "path", "hint"),
    [
        ({"cuont": 1}, "cuont", 'did you mean "count"'),
        ({"COUNT": 1}, "COUNT", 'did you mean "count"'),
        ({"outer_longkey": 1}, "outer_longkey", '"outer_long_key"'),
        ({"inner": {"dpeth": 1}}, "inner.dpeth", 'did you mean "depth"'),
        ({"depth": 1}, "depth", 'did you mean "inner.depth"'),
        ({"chosen": {"type": "a", "parms": {}}}, "chosen.parms", 'did you mean "params"'),
        ({"blok": {}}, "blok", 'did you mean "block"'),
        ({"inner": {"qqqqq": 1}}, "inner.qqqqq", "known keys here: depth, name"),
        ({"zzzzzzzz": 1}, "zzzzzzzz", "unknown key"),
        ({"": 1}, "", "unknown key"),
    ],
)
def test_unknown_keys(data: Any, path: str, hint: str) -> None:
    text = message(data)
    assert "1 problem in" in text
    assert hint in text
    with pytest.raises(ConfigReportError) as caught:
        build(Outer, data)
    assert [problem.path for problem in caught.value.problems] == [path]


def test_everything_in_one_report() -> None:
    found = problems(
        {
            "cuont": 1,
            "ratio": "auto",
            "flag": 3,
            "names": ["a", 1],
            "later": True,
            "gone": None,
            "foreign": {},
            "block": {"enabled": True, "ebabled": 1, "sub": {"any": {"b": 1}}},
            "inner": {"depth": -1, "nane": "y"},
            "chosen": {"params": {"lr": "auto", "deep": [1, {"x": "auto"}]}},
        }
    )
    assert sorted(found, key=lambda item: item[0]) == [
        ("block.ebabled", ProblemKind.UNKNOWN),
        ("block.enabled", ProblemKind.UNAVAILABLE),
        ("block.sub.any.b", ProblemKind.UNKNOWN),
        ("chosen.params.deep[1].x", ProblemKind.AUTO),
        ("chosen.params.lr", ProblemKind.AUTO),
        ("chosen.type", ProblemKind.MALFORMED),
        ("cuont", ProblemKind.UNKNOWN),
        ("flag", ProblemKind.MALFORMED),
        ("foreign", ProblemKind.UNAVAILABLE),
        ("gone", ProblemKind.REMOVED),
        ("inner.depth", ProblemKind.MALFORMED),
        ("inner.nane", ProblemKind.UNKNOWN),
        ("later", ProblemKind.UNAVAILABLE),
        ("names", ProblemKind.MALFORMED),
        ("ratio", ProblemKind.AUTO),
    ]


def test_where_prefixes_every_path() -> None:
    found = problems({"cuont": 1, "inner": {"dpth": 1}}, where="a.b")
    assert [path for path, _ in found] == ["a.b.cuont", "a.b.inner.dpth"]


# B04: numbers in scientific notation.
@pytest.mark.parametrize(
    ("given_value", "expected"),
    [
        (5e8, 500_000_000),
        ("5e8", 500_000_000),
        ("500000000", 500_000_000),
        (" 12 ", 12),
        (8.0, 8),
        ("8.0", 8),
        (-3, -3),
        (np.int16(7), 7),
        (np.uint64(2**53 + 1), 2**53 + 1),
        (np.float64(8), 8),
        ("9007199254740993", 9_007_199_254_740_993),  # 2**53 + 1: no float in between
    ],
)
def test_whole_numbers(given_value: Any, expected: int) -> None:
    count = build(Outer, {"count": given_value}).count
    assert count == expected
    assert type(count) is int


@pytest.mark.parametrize(
    "value",
    [
        1.5,
        "1.5",
        True,
        False,
        None,
        "five",
        "",
        "1e400",
        "nan",
        2**63,
        "1e19",
        [],
        {},
        "0x10",
        np.bool_(True),
    ],
)
def test_what_is_no_whole_number(value: Any) -> None:
    assert problems({"count": value}) == [("count", ProblemKind.MALFORMED)]


@pytest.mark.parametrize(
    ("value", "expected"),
    [(1, 1.0), ("1e-4", 1e-4), ("2", 2.0), (0.1, 0.1), (np.float32(0.5), 0.5)],
)
def test_numbers(value: Any, expected: float) -> None:
    ratio = build(Outer, {"ratio": value}).ratio
    assert ratio == expected
    assert type(ratio) is float


@pytest.mark.parametrize(
    "value", [True, None, "x", float("nan"), float("inf"), "inf", 10**400, "1e999", [1.0]]
)
def test_what_is_no_number(value: Any) -> None:
    assert problems({"ratio": value}) == [("ratio", ProblemKind.MALFORMED)]


@RELAXED
@given(st.integers(-(2**62), 2**62))
def test_whole_numbers_survive_as_text(value: int) -> None:
    assert build(Outer, {"count": value}).count == value
    assert build(Outer, {"count": str(value)}).count == value


@pytest.mark.parametrize(("text", "flag"), [("true", True), ("False", False), (" TRUE ", True)])
def test_booleans_as_text_are_coerced_and_said(
    text: str, flag: bool, caplog: pytest.LogCaptureFixture
) -> None:
    outer = build(Outer, {"flag": text, "maybe": text})
    assert (outer.flag, outer.maybe) == (flag, flag)
    assert len(caplog.records) == 2
    assert caplog.records[0].levelno == logging.WARNING
    assert "flag: the text" in caplog.messages[0]


@pytest.mark.parametrize("value", [0, 1, 1.0, "yes", "on", None, []])
def test_what_is_no_boolean(value: Any) -> None:
    assert problems({"flag": value}) == [("flag", ProblemKind.MALFORMED)]


@pytest.mark.parametrize(
    ("value", "name"),
    [("fp32", "float32"), ("bf16", "bfloat16"), ("FP16", "float16"), ("torch.float16", "float16")],
)
def test_dtypes(value: str, name: str) -> None:
    assert build(Outer, {"dtype": value}).dtype == name


@pytest.mark.parametrize("value", ["int8", 16, True, ["fp32"]])
def test_what_is_no_dtype(value: Any) -> None:
    assert problems({"dtype": value}) == [("dtype", ProblemKind.MALFORMED)]


def test_old_keys_map_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert build(Outer, {"number": 9}).count == 9
    assert len(caplog.records) == 1
    assert "number" in caplog.text
    assert "count" in caplog.text


def test_old_keys_reach_into_sections(caplog: pytest.LogCaptureFixture) -> None:
    data = {"on": True, "inner": {"name": "y"}}
    outer = build(Outer, data)
    assert (outer.inner.depth, outer.inner.name) == (7, "y")
    assert data == {"on": True, "inner": {"name": "y"}}
    assert build(Outer, {"inner": {"dept_old": 4}}).inner.depth == 4
    assert build(Outer, {"twice": 6}) == Outer(count=6, long_key=6)
    assert len(caplog.records) == 3


@pytest.mark.parametrize(
    ("data", "path"),
    [
        ({"number": 1, "count": 1}, "number"),
        ({"on": False, "inner": {"depth": 1}}, "on"),
        ({"inner": {"dept_old": 1, "depth": 1}}, "inner.dept_old"),
        ({"twice": 1, "outer_long_key": 1}, "twice"),
    ],
)
def test_old_and_new_together(data: Any, path: str) -> None:
    assert problems(data) == [(path, ProblemKind.CONTRADICTION)]


def test_malformed_old_values() -> None:
    assert problems({"on": 3}) == [("on", ProblemKind.MALFORMED)]
    assert problems({"number": 1.5}) == [("count", ProblemKind.MALFORMED)]
    assert problems({"number": "auto"}) == [("count", ProblemKind.AUTO)]
    assert problems({"on": True, "inner": 3}) == [("inner", ProblemKind.MALFORMED)]


def test_short_forms(caplog: pytest.LogCaptureFixture) -> None:
    assert build(Outer, {"inner": True}).inner.depth == 1
    assert len(caplog.records) == 1
    assert problems({"inner": 3}) == [("inner", ProblemKind.MALFORMED)]
    assert problems({"inner": None}) == [("inner", ProblemKind.MALFORMED)]


@pytest.mark.parametrize("value", [None, {}, {"enabled": False}, False, 3, "auto"])
def test_removed_and_foreign_keys_whatever_their_value(value: Any) -> None:
    assert problems({"gone": value}) == [("gone", ProblemKind.REMOVED)]
    assert problems({"foreign": value}) == [("foreign", ProblemKind.UNAVAILABLE)]
    assert "write count" in message({"gone": value})
    assert "ds-x" in message({"foreign": value})


@pytest.mark.parametrize(
    "data",
    [
        {"block": {}},
        {"block": {"enabled": False, "sub": {"x": {"a": "auto"}}}},
        {"block": {"enabled": "false"}},
        {"block": {"enabled": None}},
        {"sized": {"size": 0}},
        {"sized": {"size": 1}},
        {"bare": {}},
        {"later": False},
        {"near": 1},
        {"near": None},
    ],
)
def test_what_is_off_is_accepted(data: Any) -> None:
    assert build(Outer, data).count == 1


@pytest.mark.parametrize(
    ("data", "path", "kind"),
    [
        ({"block": {"enabled": True}}, "block.enabled", ProblemKind.UNAVAILABLE),
        ({"block": {"enabled": "true"}}, "block.enabled", ProblemKind.UNAVAILABLE),
        ({"block": {"enabled": "odd"}}, "block.enabled", ProblemKind.UNAVAILABLE),
        ({"block": {"enabled": "auto"}}, "block.enabled", ProblemKind.AUTO),
        ({"block": None}, "block", ProblemKind.MALFORMED),
        ({"block": True}, "block", ProblemKind.MALFORMED),
        ({"sized": {"size": 2}}, "sized.size", ProblemKind.UNAVAILABLE),
        ({"bare": {"a": 0}}, "bare", ProblemKind.UNAVAILABLE),
        ({"later": True}, "later", ProblemKind.UNAVAILABLE),
        ({"near": 2}, "near", ProblemKind.UNAVAILABLE),
    ],
)
def test_what_is_on_is_refused_by_name(data: Any, path: str, kind: ProblemKind) -> None:
    assert problems(data) == [(path, kind)]


def test_auto_where_it_is_resolved() -> None:
    assert build(Outer, {"inner": {"depth": "auto"}}).inner.depth == 2


def test_keys_without_effect_are_listed_once(caplog: pytest.LogCaptureFixture) -> None:
    assert build(Outer, {"hint": 9, "count": 2}).hint == 9
    assert len(caplog.records) == 1
    assert caplog.messages[0].endswith(": hint")


def test_contradictions_are_found_beside_other_mistakes() -> None:
    found = problems({"count": 11, "ratio": 1, "flag": 3})
    assert found == [("flag", ProblemKind.MALFORMED), ("ratio", ProblemKind.CONTRADICTION)]


def test_a_contradiction_is_not_guessed_from_malformed_values() -> None:
    assert problems({"count": 11.5, "ratio": 1}) == [("count", ProblemKind.MALFORMED)]


def test_a_misspelt_required_key_is_one_problem() -> None:
    assert problems({"chosen": {"typ": "a"}}) == [("chosen.typ", ProblemKind.UNKNOWN)]
    assert problems({"chosen": {"type": "auto"}}) == [("chosen.type", ProblemKind.AUTO)]
    assert problems({"chosen": {}}) == [("chosen.type", ProblemKind.MALFORMED)]


@pytest.mark.parametrize("data", [[], 3, None, "x"])
def test_a_document_that_is_no_object(data: Any) -> None:
    with pytest.raises(ConfigReportError, match="an object"):
        build(Outer, data)


def test_warnings_are_logged_even_when_the_document_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    problems({"number": 1, "cuont": 2})
    assert len(caplog.records) == 1


def test_sections_made_in_python_check_the_same() -> None:
    assert Outer(count=5, long_key=2).long_key == 2
    with pytest.raises(ValidationError, match="too much together"):
        Outer(count=11, ratio=1.0)
    with pytest.raises(ValidationError, match="use flag"):
        Outer(later=True)
    with pytest.raises(ValidationError, match="whole number"):
        Outer(count=1.5)  # type: ignore[arg-type]
    with pytest.raises(ValidationError, match="cuont"):
        Outer(cuont=1)  # type: ignore[call-arg]


JSON = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.sampled_from(["auto", "x", "true"])
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(
                [*Outer.model_fields, "enabled", "type", "depth", "gone", "block", "on"]
            ),
            inner,
            max_size=5,
        ),
    ),
    max_leaves=12,
)


@RELAXED
@given(st.dictionaries(st.sampled_from([*Outer.model_fields, "gone", "block", "on", "qq"]), JSON))
def test_any_document_is_read_or_refused_with_a_typed_error(data: Any) -> None:
    try:
        assert isinstance(build(Outer, data), Outer)
    except ConfigReportError as error:
        assert error.problems
