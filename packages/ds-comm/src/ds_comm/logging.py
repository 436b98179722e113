"""Logging for many ranks: INFO once, warnings from everybody, each with its rank.

Loggers are the standard library's.  A filter drops what is below WARNING on ranks other than 0
and writes the rank into what is left; a handler prints to stderr only where the application has
set up no logging of its own.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Literal

import torch.distributed as dist

__all__ = ["RankFilter", "get_logger", "log_once"]

Level = Literal["debug", "info", "warning", "error"]

_LEVELS: dict[Level, int] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


def _place() -> tuple[int, int]:
    """Return (rank, world size) as far as they are known, before and after initialisation."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    rank, world_size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if rank.isdigit() and world_size.isdigit():
        return int(rank), int(world_size)
    return 0, 1


class RankFilter(logging.Filter):
    """Lets INFO and below pass on rank 0 only; with several ranks, names the rank in the line.

    Also sets ``record.rank`` for the application's own formats.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Tell whether the record is shown, after marking it."""
        rank, world_size = _place()
        record.rank = rank
        if record.levelno < logging.WARNING:
            return rank == 0
        if world_size > 1:
            record.msg = f"[rank {rank}] {record.msg}"
        return True


class _FallbackHandler(logging.StreamHandler):  # type: ignore[type-arg]  # not generic at run time
    """Prints to the present ``sys.stderr``, unless the application has handlers on the root."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self.setFormatter(
            logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S")
        )

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record if nobody else will."""
        if logging.getLogger().handlers:
            return
        self.stream = sys.stderr  # tests and notebooks replace it
        super().emit(record)


def get_logger(name: str) -> logging.Logger:
    """Return the logger ``name`` with the rank filter.

    The package's top logger (the part of ``name`` before the first dot) gets level INFO and a
    stderr handler, unless it has them: set another level or handler there to change what is shown.
    """
    logger = logging.getLogger(name)
    if not any(isinstance(present, RankFilter) for present in logger.filters):
        logger.addFilter(RankFilter())
    top = logging.getLogger(name.partition(".")[0])
    if top.level == logging.NOTSET:
        top.setLevel(logging.INFO)
    if not top.handlers:
        top.addHandler(_FallbackHandler())
    return logger


_seen: set[tuple[str, str]] = set()


def log_once(logger: logging.Logger, level: Level, message: str, *args: object) -> bool:
    """Log a message unless this process has logged the very same text on this logger before.

    Args:
        logger: from ``get_logger``.
        level: ``debug``, ``info``, ``warning`` or ``error``.
        message: with %-placeholders for ``args``.
        args: values of the placeholders; other values make another message.

    Returns:
        Whether it was logged now.
    """
    text = message % args if args else message
    if (logger.name, text) in _seen:
        return False
    _seen.add((logger.name, text))
    logger.log(_LEVELS[level], message, *args, stacklevel=2)
    return True
