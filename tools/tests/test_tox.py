"""tox's environments hold exactly what the graph allows, no sibling more or less."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

import pytest

import check_graph

ROOT = Path(__file__).resolve().parents[2]


def _siblings_of_environments() -> dict[str, set[str]]:
    """The siblings that each factor of tox.ini installs."""
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(ROOT / "tox.ini")
    found: dict[str, set[str]] = {}
    for line in parser["testenv"]["deps"].splitlines():
        match = re.fullmatch(r"\{([\w,]+)\}: -e packages/([\w-]+)", line.strip())
        if match:
            for environment in match[1].split(","):
                found.setdefault(environment, set()).add(match[2])
    return found


def _with_all_it_needs(name: str) -> set[str]:
    """A package, its declared siblings, and theirs."""
    needed = {name}
    for sibling in check_graph.HARD_SIBLINGS[name]:
        needed |= _with_all_it_needs(sibling)
    return needed


@pytest.mark.parametrize("name", sorted(check_graph.HARD_SIBLINGS))
def test_environment_holds_the_declared_siblings_only(name: str) -> None:
    environment = name.removeprefix("ds-")
    assert _siblings_of_environments()[environment] == _with_all_it_needs(name)


def test_every_package_has_an_environment_and_there_is_no_other() -> None:
    names = {name.removeprefix("ds-") for name in check_graph.HARD_SIBLINGS}
    assert _siblings_of_environments().keys() == names | {"full"}
