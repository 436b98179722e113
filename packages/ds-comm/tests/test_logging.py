"""The rank filter, the fallback handler and log_once."""

from __future__ import annotations

import io
import logging
import subprocess
import sys
import uuid

import pytest

from ds_comm.logging import RankFilter, get_logger, log_once
from ds_comm.testing.plugin import Ranks

PROGRAM = """
import os
from ds_comm.logging import get_logger
log = get_logger("ds_x.part")
for rank, world_size in [("", ""), ("0", "2"), ("1", "2"), ("x", "2")]:
    os.environ.update(RANK=rank, WORLD_SIZE=world_size)
    log.debug("quiet"); log.info("once %d", 1); log.warning("careful")
"""


def shown(level: int) -> list[str]:
    """Return the lines that an application's own root handler gets to see."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logging.getLogger().addHandler(handler)
    try:
        get_logger("ds_y.part").log(level, "50%% of %s", "it")
        get_logger("ds_y.part").log(level, "plain 50%")
    finally:
        logging.getLogger().removeHandler(handler)
    return stream.getvalue().splitlines()


def test_info_is_shown_by_rank_0_alone(ranks: Ranks) -> None:
    assert ranks(3, shown, logging.INFO) == [["50% of it", "plain 50%"], [], []]


def test_warnings_are_shown_by_all_with_their_rank(ranks: Ranks) -> None:
    assert ranks(2, shown, logging.WARNING) == [
        [f"[rank {rank}] 50% of it", f"[rank {rank}] plain 50%"] for rank in (0, 1)
    ]
    assert ranks(1, shown, logging.ERROR) == [["50% of it", "plain 50%"]]


def test_before_the_group_the_environment_tells_the_rank() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == ""
    assert [line.split(" ", 1)[1] for line in done.stderr.splitlines()] == [
        "INFO ds_x.part: once 1",
        "WARNING ds_x.part: careful",
        "INFO ds_x.part: once 1",
        "WARNING ds_x.part: [rank 0] careful",
        "WARNING ds_x.part: [rank 1] careful",
        "INFO ds_x.part: once 1",
        "WARNING ds_x.part: careful",
    ]


def test_settings_of_the_application_are_kept() -> None:
    top = logging.getLogger("ds_z")
    own = logging.NullHandler()
    top.addHandler(own)
    top.setLevel(logging.ERROR)
    logger = get_logger("ds_z.part")
    assert get_logger("ds_z.part") is logger
    assert top.handlers == [own]
    assert top.level == logging.ERROR
    assert [type(each) for each in logger.filters] == [RankFilter]


def test_log_once(caplog: pytest.LogCaptureFixture) -> None:
    logger = get_logger(f"ds_once.{uuid.uuid4().hex}")
    assert log_once(logger, "warning", "value %d", 1)
    assert not log_once(logger, "warning", "value %d", 1)
    assert log_once(logger, "warning", "value %d", 2)
    assert log_once(logger, "error", "100% sure")
    records = caplog.records
    assert [record.getMessage() for record in records] == ["value 1", "value 2", "100% sure"]
    assert {record.funcName for record in records} == {"test_log_once"}
