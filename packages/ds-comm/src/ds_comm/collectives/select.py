"""Which algorithm serves which group."""

from __future__ import annotations

import torch.distributed as dist

from ds_comm.collectives.base import Collectives
from ds_comm.collectives.local import LocalCollectives
from ds_comm.collectives.native import NativeCollectives
from ds_comm.collectives.pairwise import PairwiseCollectives
from ds_comm.collectives.shared import connect_shared, shared_memory_wanted
from ds_comm.device import device_type
from ds_comm.group import Group

__all__ = ["collectives_for"]


def collectives_for(group: Group) -> Collectives:
    """Return the fastest collectives for ``group``.  All ranks of the group must call it.

    One rank needs none; CPU ranks of one host share memory, where ds-kernels is installed and
    ``DS_COMM_SHM=1`` asks for it; other gloo groups exchange pairwise ([Note: pairwise exchange]);
    every other backend uses its own tensor collectives.

    Args:
        group: The ranks that will take part.
    """
    if group.size == 1:
        return LocalCollectives(group)
    if dist.get_backend(group.handle) == "gloo":
        # Off by default: under heavy load an uneven all_to_all was seen to report sizes that the
        # ranks had not sent (tests/dist/test_sparse_gradients.py of ds-zero).
        wanted = shared_memory_wanted()
        shared = connect_shared(group, wanted=wanted) if device_type() == "cpu" else None
        return PairwiseCollectives(group) if shared is None else shared
    return NativeCollectives(group)
