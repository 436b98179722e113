"""The one message for ranks that run different collectives at the same place."""

from __future__ import annotations

from ds_comm.errors import DivergenceError

__all__ = ["divergence"]


def divergence(rank: int, mine: str, peer: int, theirs: str) -> DivergenceError:
    """Return the error that names both operations.

    Args:
        rank: Global rank of this process.
        mine: What it runs.
        peer: Global rank of the other one.
        theirs: What that runs.
    """
    return DivergenceError(
        f"rank {rank} runs {mine}, but rank {peer} runs {theirs} at the same place: the ranks "
        "executed different modules. Every rank must run the same modules in the same order at "
        "this stage; use stage 0-2, or make the diverging modules one leaf module "
        "(zero_optimization.leaf_module)."
    )
