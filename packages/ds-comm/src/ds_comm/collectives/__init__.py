"""Typed collectives of one group, with the algorithm picked per backend."""

from __future__ import annotations

from ds_comm.collectives.base import Allocator, Collectives, Done, Work
from ds_comm.collectives.basic import (
    Reduction,
    all_gather,
    all_reduce,
    all_reduce_coalesced,
    all_to_all,
    broadcast,
    broadcast_coalesced,
    reduce_scatter,
)
from ds_comm.collectives.local import LocalCollectives
from ds_comm.collectives.native import NativeCollectives
from ds_comm.collectives.objects import barrier, broadcast_object, gather_objects
from ds_comm.collectives.pairwise import PairwiseCollectives
from ds_comm.collectives.recording import Call, RecordingCollectives
from ds_comm.collectives.select import collectives_for
from ds_comm.collectives.shared import SharedCollectives, connect_shared

__all__ = [
    "Allocator",
    "Call",
    "Collectives",
    "Done",
    "LocalCollectives",
    "NativeCollectives",
    "PairwiseCollectives",
    "RecordingCollectives",
    "Reduction",
    "SharedCollectives",
    "Work",
    "all_gather",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "barrier",
    "broadcast",
    "broadcast_coalesced",
    "broadcast_object",
    "collectives_for",
    "connect_shared",
    "gather_objects",
    "reduce_scatter",
]
