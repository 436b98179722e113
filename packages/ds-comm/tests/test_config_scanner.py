"""Comments and trailing commas vanish, everything else and every position stays."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ds_comm.config.scanner import plain_json
from ds_comm.errors import ConfigError

# Slow, busy machines must not fail a property.
RELAXED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    # Text full of the marks that the scanner looks for.
    st.text(alphabet=st.sampled_from(list('/*#,"\\]}{[:\n\tab é')), max_size=12),
    st.text(max_size=8),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=6), inner, max_size=4)
    ),
    max_leaves=15,
)
# What may stand between two tokens.  The text of a line comment has no newline, that of a block
# comment no end mark.
LINE = st.text(alphabet=st.sampled_from(list('/*#,"\\]}{[:ab')), max_size=8)
GAPS = st.one_of(
    st.sampled_from(["", " ", "\n", "\t\r\n"]),
    LINE.map(lambda text: f"//{text}\n"),
    LINE.map(lambda text: f"#{text}\n"),
    LINE.filter(lambda text: "*/" not in f"{text}*/"[:-1]).map(lambda text: f"/*{text}*/"),
)


def noisy(value: Any, draw: Any) -> str:
    """The value as JSON with a drawn gap between every two tokens and drawn trailing commas."""

    def gap() -> str:
        return str(draw(GAPS))

    def members(texts: list[str]) -> str:
        body = f"{gap()},{gap()}".join(texts)
        return f"{body}{gap()},{gap()}" if texts and draw(st.booleans()) else f"{body}{gap()}"

    if isinstance(value, list):
        return f"[{gap()}{members([noisy(item, draw) for item in value])}]"
    if isinstance(value, dict):
        pairs = [f"{json.dumps(k)}{gap()}:{gap()}{noisy(v, draw)}" for k, v in value.items()]
        return f"{{{gap()}{members(pairs)}}}"
    return json.dumps(value, ensure_ascii=draw(st.booleans()))


@RELAXED
@given(VALUES, st.data())
def test_a_commented_document_means_the_same(value: Any, data: st.DataObject) -> None:
    text = noisy(value, data.draw)
    plain = plain_json(text)
    assert json.loads(plain) == value
    assert len(plain) == len(text)
    assert [i for i, c in enumerate(plain) if c == "\n"] == [
        i for i, c in enumerate(text) if c == "\n"
    ]


@RELAXED
@given(VALUES, st.sampled_from([None, 2]))
def test_plain_json_is_left_alone(value: Any, indent: int | None) -> None:
    text = json.dumps(value, indent=indent)
    assert plain_json(text) == text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": 1, // one\n "b": 2}', {"a": 1, "b": 2}),
        ('{"a": 1, # one\n "b": 2,}', {"a": 1, "b": 2}),
        ('{"a": /* 3, */ 1}', {"a": 1}),
        ('{"url": "http://x/*y*/#z", }', {"url": "http://x/*y*/#z"}),
        ('{"a": "\\"//", "b": [1, 2, ] , }', {"a": '"//', "b": [1, 2]}),
        ('{"a": ",]"}', {"a": ",]"}),
        ("[1, /* , */ ]", [1]),
        ("/**/[/***/]//", []),
        ('{"a": "\\\\"} // "', {"a": "\\"}),
    ],
)
def test_examples(text: str, value: Any) -> None:
    assert json.loads(plain_json(text)) == value


@pytest.mark.parametrize("text", ["[,]", "[1,,]", "{,}", '{"a":,}', ",", "[1,,2]", '["a', "1 / 2"])
def test_other_mistakes_stay_mistakes(text: str) -> None:
    with pytest.raises(json.JSONDecodeError):
        json.loads(plain_json(text))


def test_an_open_comment_is_reported_with_its_line() -> None:
    with pytest.raises(ConfigError, match="line 3: .*never closed"):
        plain_json('{\n"a": 1,\n/* b\n}')
