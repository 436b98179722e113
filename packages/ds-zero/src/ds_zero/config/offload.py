"""Sections on where shards live between uses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from ds_comm.config import Contradiction, Flag, KeyRules, NotYet, Number, Section, Whole

__all__ = ["OffloadOptimizerSection", "OffloadParamSection"]

Device = Annotated[
    Literal["none", "cpu", "nvme"],
    NotYet('write "none": shards stay on the compute device, and every rank holds only its part'),
]
_PLAIN = "leave it out"


def _nvme_path(device: str, path: str | None) -> Iterator[Contradiction]:
    if device == "nvme" and not path:
        yield Contradiction(
            "nvme_path", 'device "nvme" needs the path of a folder here', ("device", "nvme_path")
        )


class OffloadParamSection(Section):
    """``zero_optimization.offload_param``: where parameter shards live (stage 3)."""

    key_rules: ClassVar[KeyRules] = KeyRules(switch="device")

    device: Device = "none"
    """``none``, ``cpu`` or ``nvme``."""
    nvme_path: str | None = None
    """Folder on an NVMe drive; needed with device ``nvme``."""
    buffer_count: Annotated[Whole, Field(gt=0)] = 5
    """Buffers in the staging pool."""
    buffer_size: Annotated[Whole, Field(gt=0)] = 100_000_000
    """Elements in one staging buffer."""
    max_in_cpu: Annotated[Whole, Field(ge=0)] = 1_000_000_000
    """Elements kept in host memory when the device is ``nvme``."""
    pin_memory: Flag = True
    """Page-lock host memory."""

    def contradictions(self) -> Iterator[Contradiction]:
        """NVMe without a path."""
        return _nvme_path(self.device, self.nvme_path)


class OffloadOptimizerSection(Section):
    """``zero_optimization.offload_optimizer``: where optimiser states live and are updated."""

    key_rules: ClassVar[KeyRules] = KeyRules(switch="device")

    device: Device = "none"
    """``none``, ``cpu`` or ``nvme``."""
    nvme_path: str | None = None
    """Folder on an NVMe drive; needed with device ``nvme``."""
    buffer_count: Annotated[Whole, Field(gt=0)] = 4
    """Buffers in the staging pool."""
    pin_memory: Flag = True
    """Page-lock host memory."""
    pipeline_read: Flag = False
    """Read the next part while the current one is updated."""
    pipeline_write: Flag = False
    """Write the last part while the current one is updated."""
    fast_init: Flag = False
    """Initialise states on the drive without a first pass over them."""
    ratio: Annotated[Number, Field(ge=0, le=1)] = 1.0
    """Part of the states that is updated on the host."""
    super_offload: Annotated[Flag, NotYet(_PLAIN)] = False
    """Overlap host updates with the backward pass, speculatively."""
    cpuadam_cores_perc: Annotated[Number, Field(gt=0, le=1)] = 0.8
    """Part of the host's cores that the speculative update may use."""

    def contradictions(self) -> Iterator[Contradiction]:
        """NVMe without a path."""
        return _nvme_path(self.device, self.nvme_path)
