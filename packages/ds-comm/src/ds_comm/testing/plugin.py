"""pytest plugin: the fixture ``ranks``.

Loaded with ``-p ds_comm.testing.plugin`` or ``pytest_plugins`` in a root conftest; not through an
entry point, so that pytest runs that need no ranks import no torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import pytest

from ds_comm.testing.pool import RankError, RankPool

__all__ = ["Ranks", "rank_pool", "ranks"]

T = TypeVar("T")

# Workers start in the middle of some test, whose patched environment they must not keep.
_ENVIRON = dict(os.environ)


@dataclass(frozen=True)
class Ranks:
    """``ranks(world_size, fn, *args, timeout=120, **kwargs)`` returns each rank's result."""

    pool: RankPool

    def __call__(
        self,
        world_size: int,
        function: Callable[..., T],
        *args: object,
        timeout: float = 120.0,
        **kwargs: object,
    ) -> list[T]:
        """Run a module-level function on every rank of a fresh gloo group.

        The rules are those of ``RankPool.run``.  Where every failing rank called ``pytest.skip``,
        the test is skipped.
        """
        __tracebackhide__ = True
        try:
            return self.pool.run(world_size, function, *args, timeout=timeout, **kwargs)
        except RankError as error:
            reasons = [failure.skipped for failure in error.failures if failure.kind == "raised"]
            if reasons and all(reason is not None for reason in reasons):
                pytest.skip(str(reasons[0]))
            raise


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """The session's pool of at most four ranks; its processes start with the first call."""
    with RankPool(4, environ=_ENVIRON) as pool:
        yield pool


@pytest.fixture(scope="session")
def ranks(rank_pool: RankPool) -> Ranks:
    """Run a function of the test file on several ranks, see ``Ranks``."""
    return Ranks(rank_pool)
