"""Sections on the dtypes of training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar

from pydantic import Field

from ds_comm.config import (
    Contradiction,
    DTypeName,
    Flag,
    KeyRules,
    NoEffect,
    NotYet,
    Number,
    Section,
    Strings,
    Whole,
)

__all__ = ["Bf16Section", "DataTypesSection", "Fp16Section", "TorchAutocastSection"]

_USE_BF16 = 'use "bf16": {"enabled": true} or train in fp32'
_FP32_STATES = "leave it false: master weights and optimiser states are fp32"


class Bf16Section(Section):
    """``bf16``: compute in bfloat16 with fp32 master weights."""

    key_rules: ClassVar[KeyRules] = KeyRules(switch="enabled")

    enabled: Flag = False
    """Cast the model to bfloat16 and keep fp32 master weights. Inputs are not cast, and batch norm
    keeps fp32 parameters."""
    immediate_grad_update: Annotated[
        Flag, NoEffect("gradients always enter the accumulation buffer as they are produced")
    ] = False
    """Accumulate each gradient as soon as it exists instead of at the end of backward."""
    check_grad_overflow: Annotated[
        Flag, NoEffect("a non-finite gradient norm is always noticed and reported")
    ] = True
    """Look for non-finite gradients."""
    bf16_master_weights_and_grads: Annotated[Flag, NotYet(_FP32_STATES)] = False
    """Keep master weights and gradients in bfloat16."""
    bf16_optimizer_states: Annotated[Flag, NotYet(_FP32_STATES)] = False
    """Keep optimiser states in bfloat16."""


class Fp16Section(Section):
    """``fp16``: compute in float16 with loss scaling."""

    key_rules: ClassVar[KeyRules] = KeyRules(switch="enabled")

    enabled: Annotated[Flag, NotYet(_USE_BF16)] = False
    """Cast the model to float16 and scale the loss."""
    auto_cast: Annotated[Flag, NotYet(_USE_BF16)] = False
    """Cast the inputs of the model to float16."""
    loss_scale: Annotated[Number, Field(ge=0)] = 0.0
    """Fixed loss scale; 0 scales dynamically."""
    initial_scale_power: Annotated[Whole, Field(ge=0)] = 16
    """The first dynamic loss scale is 2 to this power."""
    loss_scale_window: Annotated[Whole, Field(gt=0)] = 1000
    """Clean steps before the dynamic loss scale doubles."""
    hysteresis: Annotated[Whole, Field(gt=0)] = 2
    """Overflows tolerated before the dynamic loss scale halves."""
    consecutive_hysteresis: Flag = False
    """Refill the hysteresis after every clean step."""
    min_loss_scale: Annotated[Whole, Field(gt=0)] = 1
    """Smallest dynamic loss scale."""
    fp16_master_weights_and_grads: Annotated[Flag, NotYet(_FP32_STATES)] = False
    """Keep master weights and gradients in float16."""


class TorchAutocastSection(Section):
    """``torch_autocast``: fp32 parameters, computation under ``torch.autocast``."""

    key_rules: ClassVar[KeyRules] = KeyRules(switch="enabled")

    enabled: Annotated[Flag, NotYet(_USE_BF16)] = False
    """Run the model under autocast."""
    dtype: DTypeName = "bfloat16"
    """Low-precision dtype."""
    lower_precision_safe_modules: Strings = (
        "torch.nn.Linear",
        "torch.nn.Conv1d",
        "torch.nn.Conv2d",
        "torch.nn.Conv3d",
    )
    """Classes whose parameters are communicated in the low-precision dtype."""


class DataTypesSection(Section):
    """``data_types``: dtypes other than those that the precision mode implies."""

    grad_accum_dtype: DTypeName | None = None
    """Dtype in which gradients of several micro-batches are summed; fp32 unless given."""
    param_dtype: DTypeName | None = None
    """Dtype of the computation; if given it must be that of the precision mode."""
    buffer_dtype: Annotated[
        DTypeName | None, NotYet("leave it out: buffers keep the dtype of the model")
    ] = None
    """Dtype of floating-point buffers; ``null`` keeps them as they are."""

    def contradictions(self) -> Iterator[Contradiction]:
        """fp16 accumulation, which needs the loss scaling of fp16 training."""
        if self.grad_accum_dtype == "float16":
            yield Contradiction(
                "grad_accum_dtype",
                'accumulating in fp16 needs fp16 training; write "fp32" or "bf16"',
                ("grad_accum_dtype",),
            )
