"""Which algorithm serves which group."""

from __future__ import annotations

import torch.distributed as dist

from ds_comm.collectives.base import Collectives
from ds_comm.collectives.local import LocalCollectives
from ds_comm.collectives.native import NativeCollectives
from ds_comm.collectives.pairwise import PairwiseCollectives
from ds_comm.collectives.shared import connect_shared
from ds_comm.device import device_type
from ds_comm.group import Group

__all__ = ["collectives_for"]


def collectives_for(group: Group) -> Collectives:
    """Return the fastest collectives for ``group``.  All ranks of the group must call it.

    One rank needs none; CPU ranks of one host share memory, where ds-kernels is installed
    (``DS_COMM_SHM=0`` turns that off); other gloo groups exchange pairwise ([Note: pairwise
    exchange]); every other backend uses its own tensor collectives.

    Args:
        group: The ranks that will take part.
    """
    if group.size == 1:
        return LocalCollectives(group)
    if dist.get_backend(group.handle) == "gloo":
        shared = connect_shared(group) if device_type() == "cpu" else None
        return PairwiseCollectives(group) if shared is None else shared
    return NativeCollectives(group)
