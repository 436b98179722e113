from __future__ import annotations

import pytest

from ds_launch.errors import UsageError
from ds_launch.options import Option, describe, parse, whole_number

TABLE = (
    Option(("--num-ranks", "-n", "--num-gpus"), "ranks", "N"),
    Option(("--quiet", "-q"), "say less"),
)


@pytest.mark.parametrize(
    "words",
    [
        ["--num-ranks", "2", "s.py"],
        ["--num_ranks=2", "s.py"],
        ["--num_gpus", "2", "s.py"],
        ["-n", "2", "s.py"],
        ["-n=2", "s.py"],
        ["-n", "2", "--", "s.py"],
    ],
)
def test_spellings(words: list[str]) -> None:
    values, rest = parse(words, TABLE, command="ds run")
    assert values == {"--num-ranks": "2"}
    assert rest == ["s.py"]


def test_options_end_at_the_first_word() -> None:
    values, rest = parse(["-q", "s.py", "--quiet", "--", "-n"], TABLE, command="ds run")
    assert values == {"--quiet": ""}
    assert rest == ["s.py", "--quiet", "--", "-n"]


def test_only_the_first_double_dash_is_dropped() -> None:
    assert parse(["--", "--", "-q"], TABLE, command="ds run").rest == ["--", "-q"]


def test_value_may_look_like_an_option_or_be_empty() -> None:
    assert parse(["-n", "-q"], TABLE, command="ds run").values == {"--num-ranks": "-q"}
    assert parse(["--num-ranks="], TABLE, command="ds run").values == {"--num-ranks": ""}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num-rank", "2"], "Did you mean '--num-ranks'"),
        (["-n"], "needs a value"),
        (["--quiet=1"], "takes no value"),
        (["-n", "1", "--num-gpus", "2"], "given twice"),
        (["--hostfile", "h"], "not available yet: one machine"),
        (["-x"], "unknown option '-x'"),
    ],
)
def test_mistakes(words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse(words, TABLE, command="ds run", refused={"--hostfile": "one machine"})


@pytest.mark.parametrize(
    "text", ["0", "-1", "1.0", "", "two", "1_0", " 2", "+2", "２", "9" * 5000, "4097", "--2"]
)
def test_whole_number_refuses(text: str) -> None:
    with pytest.raises(UsageError, match="--num-ranks"):
        whole_number("--num-ranks", text, least=1, most=4096, command="ds run")


def test_whole_number() -> None:
    assert whole_number("-n", "0012", least=1, most=4096, command="ds run") == 12


def test_describe_lists_every_spelling() -> None:
    assert describe(TABLE, width=40) == (
        "  --num-ranks, -n, --num-gpus N         ranks\n"
        "  --quiet, -q                           say less"
    )
