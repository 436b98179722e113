"""Layers that become optimised ones when a model is built or loaded.

[Note: pending layers]
Inside of :class:`Init` every ``nn.Linear`` that is made is a :class:`PendingLinear`: an ordinary
layer with an ordinary weight, so that any code may initialise it or load a checkpoint into it.
Only afterwards are weights quantised and cut, one layer at a time.
"""

from __future__ import annotations

import weakref
from contextvars import ContextVar, Token
from dataclasses import replace
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import nn

from ds_comm.errors import ConfigError
from ds_zero.linear.config import LoRAConfig, QuantizationConfig
from ds_zero.linear.lora import LoRAOptimizedLinear
from ds_zero.linear.quantized import QuantizedParameter

__all__ = ["Init", "init_lora"]


class _Choice(NamedTuple):
    """What the layers of a context will become."""

    lora: LoRAConfig | None
    quantization: QuantizationConfig | None
    made: weakref.WeakSet[PendingLinear]


_CHOICE: ContextVar[_Choice | None] = ContextVar("ds_zero_linear_choice", default=None)


class PendingLinear(LoRAOptimizedLinear):
    """A layer made inside of :class:`Init`; see [Note: pending layers]."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Make the layer, with the arguments of ``nn.Linear``."""
        choice = _CHOICE.get()
        assert choice is not None
        lora = replace(choice.lora or LoRAConfig(), delay_lora_init=True)
        super().__init__(
            in_features, out_features, bias, lora, choice.quantization, device=device, dtype=dtype
        )
        self.wants_lora = choice.lora is not None
        choice.made.add(self)

    def quantize(self) -> None:
        """Quantise the weight where the context gave a format and no adapters."""
        if self.quantization_config is not None and not self.weight.is_meta:
            self.weight = QuantizedParameter(self.weight.detach(), False, self.quantization_config)


class Init:
    """Context in which a model is built, or loaded by ``from_pretrained``, for adapters.

    Example::

        with ds_zero.linear.Init(lora_config=LoRAConfig(), quant_config=QuantizationConfig()):
            model = AutoModelForCausalLM.from_pretrained(name)
        ds_zero.linear.init_lora(model)

    With ``quant_config`` alone all linear layers are quantised when the context ends.
    """

    def __init__(
        self,
        lora_config: LoRAConfig | None = None,
        quant_config: QuantizationConfig | None = None,
    ) -> None:
        """Choose what linear layers will become.

        Args:
            lora_config: Adapters for the layers that its ``target_mods`` name.
            quant_config: Format of their base weights.

        Raises:
            ConfigError: Neither is given.
        """
        if lora_config is None and quant_config is None:
            raise ConfigError("linear.Init needs a lora_config, a quant_config, or both")
        self._choice = _Choice(lora_config, quant_config, weakref.WeakSet())
        self._token: Token[_Choice | None] | None = None
        self._original: Any = None

    def __enter__(self) -> Init:
        """Let ``nn.Linear`` make pending layers."""
        if _CHOICE.get() is not None:
            raise ConfigError("linear.Init is active already; contexts do not nest")
        self._token = _CHOICE.set(self._choice)
        original = self._original = nn.Linear.__init__

        def init(layer: nn.Linear, *args: Any, **kwargs: Any) -> None:
            if type(layer) is nn.Linear:  # a subclass stays what it is
                layer.__class__ = PendingLinear
                layer.__init__(*args, **kwargs)  # type: ignore[misc]
            else:
                original(layer, *args, **kwargs)

        nn.Linear.__init__ = init  # type: ignore[assignment, method-assign]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Make ordinary layers again, and quantise where there are no adapters to come."""
        assert self._token is not None
        nn.Linear.__init__ = self._original  # type: ignore[method-assign]
        _CHOICE.reset(self._token)
        if kind is None and self._choice.lora is None:
            for layer in self._choice.made:
                layer.quantize()


def init_lora(model: nn.Module) -> list[str]:
    """Freeze ``model`` and give adapters to the layers that were configured for them.

    Collective where base weights are cut: all ranks call it with the same model.

    Args:
        model: Has layers made inside of :class:`Init`, or with ``delay_lora_init``.

    Returns:
        Names of the layers with adapters.

    Raises:
        ConfigError: No layer matches its ``target_mods``.
    """
    model.requires_grad_(False)
    waiting = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, LoRAOptimizedLinear) and not module.initialized
    ]
    found: list[str] = []
    for name, module in waiting:
        if not isinstance(module, PendingLinear) or (
            module.wants_lora and _matches(name, module.lora_config.target_mods)
        ):
            module.init_lora()
    for name, module in model.named_modules():
        if isinstance(module, LoRAOptimizedLinear) and module.initialized:
            found.append(name)
            for adapter in (module.lora_weight_1, module.lora_weight_2):
                assert adapter is not None
                adapter.requires_grad_(True)
    if not found:
        names = sorted({name.rpartition(".")[2] for name, _ in waiting})
        raise ConfigError(
            "init_lora() found no layer for adapters: LoRAConfig.target_mods names none of the "
            f"linear layers that were made inside of linear.Init, which are called {names}"
        )
    return found


def _matches(name: str, targets: list[str]) -> bool:
    return any(name == target or name.endswith(f".{target}") for target in targets)
