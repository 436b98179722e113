"""Weights of few bits: a parameter of bytes, and the layer that uses it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ds_comm.errors import ConfigError
from ds_zero.linear.base import frozen_linear
from ds_zero.linear.config import QuantizationConfig
from ds_zero.linear.packed import PackedFormat

__all__ = ["QuantizedLinear", "QuantizedParameter"]


class QuantizedParameter(nn.Parameter):
    """A frozen weight whose data are the bytes of its codes and scales, ``[num_bytes]`` uint8.

    An engine keeps it whole at every stage, as any integer parameter, and stores its bytes.
    """

    packing: PackedFormat

    def __new__(
        cls,
        data: Tensor,
        requires_grad: bool = False,
        quantization_config: QuantizationConfig | None = None,
        packing: PackedFormat | None = None,
    ) -> QuantizedParameter:
        """Quantise ``data``, or take bytes over.

        Args:
            data: The weight, any float dtype; or with ``packing`` its bytes.
            requires_grad: Must be false.
            quantization_config: The format; 8-bit floats by default.
            packing: How ``data``, already bytes, is laid out.

        Raises:
            ConfigError: ``requires_grad`` is true, or ``data`` is no float tensor.
        """
        if requires_grad:
            raise ConfigError("a quantised weight is frozen: requires_grad must be false")
        if packing is None:
            if not data.is_floating_point():
                raise ConfigError(f"only float weights are quantised, got {data.dtype}")
            config = quantization_config or QuantizationConfig()
            packing = PackedFormat(tuple(data.shape), data.dtype, config)
            data = packing.pack(data)
        made: QuantizedParameter = torch.Tensor._make_subclass(cls, data, False)
        made.packing = packing
        return made

    def dequantized(self) -> Tensor:
        """The weight in its own shape and dtype."""
        return self.packing.unpack(self.data)

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedParameter:
        """Copy bytes and their meaning."""
        if id(self) not in memo:
            memo[id(self)] = QuantizedParameter(self.data.clone(), packing=self.packing)
        copied: QuantizedParameter = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle bytes and their meaning."""
        return _rebuild, (self.data, self.packing)


def _rebuild(data: Tensor, packing: PackedFormat) -> QuantizedParameter:
    return QuantizedParameter(data, packing=packing)


class QuantizedLinear(nn.Linear):
    """A linear layer with a frozen quantised weight; the bias is frozen too."""

    weight: nn.Parameter

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        bias: bool = False,
        quantization_config: QuantizationConfig | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = torch.bfloat16,
    ) -> None:
        """Make the layer with a random weight.

        Args:
            input_dim: Size of the input's last dimension.
            output_dim: Size of the output's.
            bias: Whether there is one.
            quantization_config: The format; 8-bit floats by default.
            device: Where it lives.
            dtype: Of the weight when it is used.
        """
        super().__init__(input_dim, output_dim, bias, device=device, dtype=dtype)
        self.requires_grad_(False)
        self.weight = QuantizedParameter(self.weight.data, False, quantization_config)

    def dequantized_weight(self) -> Tensor:
        """The weight, ``[out, in]``."""
        weight = self.weight
        assert isinstance(weight, QuantizedParameter)
        return weight.dequantized()

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x W^T + b``; ``x`` is ``[..., in]``."""
        return frozen_linear(x, self.dequantized_weight, self.bias)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """Quantise a weight that comes as floats in its own shape."""
        state_dict = packed_state(self, state_dict, f"{prefix}weight")
        super()._load_from_state_dict(state_dict, prefix, *args)


def packed_state(layer: nn.Linear, state_dict: dict[str, Tensor], key: str) -> dict[str, Tensor]:
    """``state_dict``, with the float weight of a quantised layer as bytes.

    Args:
        layer: Whose weight may be quantised.
        state_dict: May have the weight in its own shape.
        key: Name of the weight.
    """
    given = state_dict.get(key)
    weight: nn.Parameter | None = layer._parameters.get("weight")
    if isinstance(weight, QuantizedParameter) and given is not None:
        if given.is_floating_point() and given.shape == weight.packing.shape:
            return {**state_dict, key: weight.packing.pack(given)}
    return state_dict
