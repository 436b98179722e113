"""What a linear layer with a frozen base weight looks like."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ds_comm.errors import ConfigError
from ds_kernels.blockwise import Code

__all__ = ["LoRAConfig", "QuantizationConfig"]

_FORMATS: dict[tuple[int, int], tuple[Code, str]] = {
    (8, 0): ("int8", "int8"),
    (4, 0): ("int4", "int4"),
    (8, 3): ("e4m3", "fp8 e4m3"),
    (8, 2): ("e5m2", "fp8 e5m2"),
    (6, 2): ("e3m2", "fp6 e3m2"),
    (6, 3): ("e2m3", "fp6 e2m3"),
    (4, 1): ("e2m1", "fp4 e2m1"),
}


@dataclass
class LoRAConfig:
    """Low-rank adapters beside a frozen base weight (Hu et al. 2021, arXiv:2106.09685)."""

    lora_r: int = 64
    """Rank of the adapters."""
    lora_alpha: float = 16.0
    """The adapters' output is scaled by ``lora_alpha / lora_r``."""
    base_weight_sharding: int = 1
    """Ranks that share a base weight; 1, or the number of all ranks."""
    offload: bool = False
    """Keep the base weight in host memory between uses."""
    offload_ratio: float = 0.0
    """Keep only this part of it there; with ``offload`` and 0, all of it."""
    delay_lora_init: bool = False
    """Stay an ordinary frozen layer until ``init_lora``, so that weights can be loaded first."""
    target_mods: list[str] = field(
        default_factory=lambda: [
            "q_proj",
            "k_proj",
            "v_proj",
            "o_proj",
            "gate_proj",
            "up_proj",
            "down_proj",
        ]
    )
    """Names of the modules that ``init_lora`` gives adapters; a name matches a module's own name,
    or the end of its full one."""

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ConfigError: One is out of its range.
        """
        if self.lora_r < 1 or self.base_weight_sharding < 1 or not 0 <= self.offload_ratio <= 1:
            raise ConfigError(
                "LoRAConfig needs lora_r >= 1, base_weight_sharding >= 1 and offload_ratio in "
                f"[0, 1]; got {self.lora_r}, {self.base_weight_sharding} and {self.offload_ratio}"
            )

    @property
    def host_share(self) -> float:
        """Part of the base weight that stays in host memory."""
        return (self.offload_ratio or 1.0) if self.offload else 0.0

    @property
    def scaling(self) -> float:
        """Factor of the adapters' output."""
        return self.lora_alpha / self.lora_r


@dataclass(frozen=True)
class QuantizationConfig:
    """How a frozen weight is quantised: floats of few bits, or integers, with a scale a group."""

    q_bits: int = 8
    """Bits of an element: 8, 6 or 4."""
    mantissa_bits: int = 3
    """Of them, bits of the mantissa; 0 for integers."""
    group_size: int = 512
    """Elements that share a scale; a multiple of 8."""
    q_dtype: torch.dtype = torch.uint8
    """Dtype of the storage; only ``torch.uint8``."""

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ConfigError: There is no such format.
        """
        if (self.q_bits, self.mantissa_bits) not in _FORMATS:
            known = "; ".join(f"{b}, {m}: {name}" for (b, m), (_, name) in _FORMATS.items())
            raise ConfigError(
                f"no format of q_bits={self.q_bits} with mantissa_bits={self.mantissa_bits}; there "
                f"are (bits, mantissa) {known}"
            )
        if self.group_size < 8 or self.group_size % 8:
            raise ConfigError(f"group_size must be a multiple of 8, got {self.group_size}")
        if self.q_dtype != torch.uint8:
            raise ConfigError(f"q_dtype must be torch.uint8, got {self.q_dtype}")

    @property
    def format_name(self) -> str:
        """Name of the format, such as ``fp8 e4m3``."""
        return _FORMATS[self.q_bits, self.mantissa_bits][1]

    @property
    def code(self) -> Code:
        """Its name in ds-kernels."""
        return _FORMATS[self.q_bits, self.mantissa_bits][0]
