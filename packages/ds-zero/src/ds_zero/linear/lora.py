"""A frozen base weight with low-rank adapters (Hu et al. 2021, arXiv:2106.09685)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ds_comm.errors import ConfigError
from ds_zero.linear.base import HeldWeight, frozen_linear
from ds_zero.linear.config import LoRAConfig, QuantizationConfig
from ds_zero.linear.packed import PackedFormat
from ds_zero.linear.quantized import QuantizedLinear, QuantizedParameter, packed_state
from ds_zero.protocols import HeldTensor

__all__ = ["LoRAOptimizedLinear", "OptimizedLinear"]


class Adapter(nn.Linear):
    """One of the two small matrices; a class of its own, so that ``Init`` leaves it alone."""


class LoRAOptimizedLinear(nn.Linear):
    """``y = x W^T + b + (alpha / r) B(A x)`` with trainable ``A`` and ``B`` and all else frozen.

    The base weight ``W`` may be quantised, cut over all ranks, and kept in host memory; cut or
    hosted weights are held by the module ([Note: held weights] in ``base``).
    """

    weight: nn.Parameter

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        bias: bool = False,
        lora_config: LoRAConfig | None = None,
        quantization_config: QuantizationConfig | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = torch.bfloat16,
    ) -> None:
        """Make the layer with a random weight, equal on all ranks if their seeds are.

        Args:
            input_dim: Size of the input's last dimension.
            output_dim: Size of the output's.
            bias: Whether there is a (frozen) one.
            lora_config: Rank and scale of the adapters, where the base weight is.
            quantization_config: Format of the base weight; it is not quantised by default.
            device: Where the layer lives.
            dtype: Of base weight and adapters.
        """
        super().__init__(input_dim, output_dim, bias, device=device, dtype=dtype)
        self.lora_config = lora_config or LoRAConfig()
        self.quantization_config = quantization_config
        self.lora_weight_1: nn.Linear | None = None
        self.lora_weight_2: nn.Linear | None = None
        self._held: HeldWeight | None = None
        self.requires_grad_(False)
        if not self.lora_config.delay_lora_init:
            self.init_lora()

    @property
    def initialized(self) -> bool:
        """Whether there are adapters; before, the layer is an ordinary frozen one."""
        return self.lora_weight_1 is not None

    def init_lora(self) -> None:
        """Quantise, cut and host the base weight as configured, and make the adapters.

        Collective where the base weight is cut.  Called again it does nothing.

        Raises:
            ConfigError: The weight has no values yet (it is on the meta device), or the number of
                ranks is not that of the configuration.
        """
        if self.initialized:
            return
        weight, lora = self.weight.detach(), self.lora_config
        if weight.is_meta:
            raise ConfigError(
                "init_lora() needs a weight with values, but it is on the meta device; load it "
                "first"
            )
        self._keep_base(weight)
        kind: dict[str, Any] = {"bias": False, "device": weight.device, "dtype": weight.dtype}
        first = Adapter(self.in_features, lora.lora_r, **kind)
        second = Adapter(lora.lora_r, self.out_features, **kind)
        nn.init.kaiming_uniform_(first.weight, a=math.sqrt(5))
        nn.init.zeros_(second.weight)
        self.lora_weight_1, self.lora_weight_2 = first, second

    def _keep_base(self, weight: Tensor) -> None:
        lora, quantization = self.lora_config, self.quantization_config
        if lora.base_weight_sharding > 1 or lora.host_share > 0:
            packing = PackedFormat(tuple(weight.shape), weight.dtype, quantization)
            num_shards = lora.base_weight_sharding
            self._held = HeldWeight(weight, packing, num_shards, lora.host_share)
            del self.weight
        elif quantization is not None:
            self.weight = QuantizedParameter(weight, False, quantization)

    def full_weight(self) -> Tensor:
        """The base weight, ``[out, in]``.  Collective where it is cut."""
        if self._held is not None:
            return self._held.full()
        weight = self.weight
        return weight.dequantized() if isinstance(weight, QuantizedParameter) else weight

    def merged_weight(self) -> Tensor:
        """Base weight and adapters in one, ``[out, in]``.  Collective where the base is cut."""
        full = self.full_weight().detach()
        if self.lora_weight_1 is None or self.lora_weight_2 is None:
            return full
        low = self.lora_weight_2.weight.detach() @ self.lora_weight_1.weight.detach()
        return full + self.lora_config.scaling * low.to(full.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x W^T + b + (alpha / r) B(A x)``; ``x`` is ``[..., in]``."""
        if self._held is not None or isinstance(self.weight, QuantizedParameter):
            base = frozen_linear(x, self.full_weight, self.bias)
        else:
            base = F.linear(x, self.weight, self.bias)
        if self.lora_weight_1 is None or self.lora_weight_2 is None:
            return base
        low: Tensor = self.lora_weight_2(self.lora_weight_1(x))
        return base + self.lora_config.scaling * low

    def extra_repr(self) -> str:
        """Sizes, rank and format."""
        quantization = self.quantization_config
        return (
            f"{super().extra_repr()}, lora_r={self.lora_config.lora_r}, "
            f"sharding={self.lora_config.base_weight_sharding}, "
            f"base={quantization.format_name if quantization else 'plain'}"
        )

    # ---- held weights ------------------------------------------------------------------------

    def held_tensors(self) -> Mapping[str, HeldTensor]:
        """See :class:`ds_zero.protocols.HoldsTensors`."""
        return {"weight": self._held.held()} if self._held is not None else {}

    def set_held_tensor(self, name: str, data: Tensor) -> None:
        """See :class:`ds_zero.protocols.HoldsTensors`."""
        if self._held is None or name != "weight":
            raise ConfigError(f"this layer holds no {name!r}")
        self._held.replace(data)

    def full_held_tensor(self, name: str) -> Tensor:
        """See :class:`ds_zero.protocols.HoldsTensors`."""
        if self._held is None or name != "weight":
            raise ConfigError(f"this layer holds no {name!r}")
        return self._held.stored()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Add the whole of a held weight; collective where it is cut."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._held is not None:
            destination[f"{prefix}weight"] = self.full_held_tensor("weight")

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """Take a base weight as floats in its own shape, or as bytes."""
        key = f"{prefix}weight"
        given = state_dict.get(key)
        if self._held is not None and given is not None:
            self._held.take(given)
            state_dict = {name: value for name, value in state_dict.items() if name != key}
        else:
            state_dict = packed_state(self, state_dict, key)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LoRAOptimizedLinear:
        """Move what is held with the module; its dtype stays."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self._held is not None:
            self._held.move(fn(torch.empty(0, device=self._held.device)).device)
        return self


class OptimizedLinear(nn.Module):
    """Makes the layer that fits its configurations; the result is none of this class.

    Example::

        layer = OptimizedLinear(512, 512, lora_config=LoRAConfig(lora_r=16))
    """

    def __new__(  # type: ignore[misc]
        cls,
        input_dim: int,
        output_dim: int,
        lora_config: LoRAConfig | None = None,
        quantization_config: QuantizationConfig | None = None,
        bias: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> nn.Linear:
        """Make a layer.

        Args:
            input_dim: Size of the input's last dimension.
            output_dim: Size of the output's.
            lora_config: With one, a :class:`LoRAOptimizedLinear`.
            quantization_config: With only this, a :class:`QuantizedLinear`.
            bias: Whether there is one.
            dtype: Of the weight when it is used.
            device: Where the layer lives.

        Returns:
            Without any configuration an ordinary ``nn.Linear``.
        """
        kind: dict[str, Any] = {"device": device, "dtype": dtype}
        if lora_config is not None:
            return LoRAOptimizedLinear(
                input_dim, output_dim, bias, lora_config, quantization_config, **kind
            )
        if quantization_config is not None:
            return QuantizedLinear(input_dim, output_dim, bias, quantization_config, **kind)
        return nn.Linear(input_dim, output_dim, bias=bias, **kind)
