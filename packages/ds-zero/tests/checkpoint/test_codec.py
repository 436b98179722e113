"""Client state: what is stored comes back as it was, and what cannot be is named."""

from __future__ import annotations

import collections
import enum
import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_zero.checkpoint import CheckpointError, open_checkpoint
from ds_zero.checkpoint.codec import decode, encode, encode_plain

leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(
            st.text(max_size=3) | st.integers() | st.just("$tuple"), inner, max_size=3
        )
    ),
    max_leaves=12,
)


def types_of(value: object) -> object:
    if isinstance(value, dict):
        return {key: types_of(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value), [types_of(item) for item in value]
    return type(value)


@given(values)
def test_plain_values_round_trip(value: object) -> None:
    text = json.dumps(encode_plain(value, "x"), allow_nan=False)
    back = decode(json.loads(text), "x", lambda key, shape: torch.empty(shape))
    assert back == value
    assert types_of(back) == types_of(value)


def test_nan_and_subclasses() -> None:
    back = decode(
        encode_plain([float("nan"), np.float64(0.5)], "x"), "x", lambda *_: torch.empty(0)
    )
    assert isinstance(back, list)
    assert math.isnan(back[0])
    assert type(back[1]) is float and back[1] == 0.5
    assert encode_plain(collections.OrderedDict(a=1), "x") == {"a": 1}


def test_client_state_round_trip(tmp_path: Path, tools: Any) -> None:
    base = torch.randn(4, 6)
    state = {
        "rng": torch.get_rng_state(),
        "python_rng": random.getstate(),
        "transposed": base.t(),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "scalar": torch.tensor(3),
        "nothing": torch.empty(0, 3),
        "low": torch.tensor([1.5], dtype=torch.bfloat16),
        "parameter": torch.nn.Parameter(base.clone()),
        "nested": [{"best": (0.25, None)}, {3: "three"}],
        "größe": "ü\n\u2028",
    }
    tools.save(tmp_path, "x", tools.example_state(), 3, client=state)
    back = open_checkpoint(tmp_path).client_state
    assert back.keys() == state.keys()
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            found = back[key]
            assert isinstance(found, torch.Tensor)
            assert found.dtype == value.dtype
            assert torch.equal(found, value.detach())
        else:
            assert back[key] == value


class Colour(enum.Enum):
    RED = 1


@pytest.mark.parametrize(
    ("state", "path"),
    [
        ({"a": {"b": [1, Colour.RED]}}, r"client_state\.a\.b\[1\] is a .*Colour"),
        ({"f": print}, r"client_state\.f is a builtins\.builtin_function"),
        ({"n": np.zeros(2)}, r"client_state\.n is a numpy\.ndarray.*torch\.from_numpy"),
        ({"s": {1, 2}}, r"client_state\.s is a builtins\.set"),
        ({"b": b"x"}, r"client_state\.b is a builtins\.bytes"),
        ({"d": torch.float32}, r"client_state\.d is a torch\.dtype"),
        ({"k": {Colour.RED: 1}}, r"client_state\.k has a key of type Colour"),
        ({"t": torch.eye(2).to_sparse()}, r"client_state\.t is a sparse"),
        ({"c": torch.zeros(1, dtype=torch.complex128)}, r"client_state\.c: .*complex128"),
    ],
)
def test_what_cannot_be_stored_is_named_on_all_ranks(
    tmp_path: Path, tools: Any, state: dict[str, object], path: str
) -> None:
    errors = tools.save(tmp_path, "x", tools.example_state(), 2, client=state)
    for error in errors:
        assert isinstance(error, CheckpointError)
        with pytest.raises(CheckpointError, match=path):
            raise error
    assert not tmp_path.exists() or not list(tmp_path.iterdir())


def test_a_value_inside_itself_is_refused() -> None:
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(CheckpointError, match="nested deeper"):
        encode(loop, "client_state")
    with pytest.raises(CheckpointError, match="optimizer holds a tensor"):
        encode_plain({"lr": torch.tensor(0.1)}, "optimizer")


@pytest.mark.parametrize(
    "document",
    [{"$tuple": 3}, {"$pickle": "x"}, {"$float": "1e3"}, {"$dict": [[1]]}, {"$a": 1, "b": 2}],
)
def test_unknown_tags_are_refused(document: Any) -> None:
    with pytest.raises(CheckpointError):
        decode(document, "x", lambda *_: torch.empty(0))
