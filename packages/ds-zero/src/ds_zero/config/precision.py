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
    Number,
    Section,
    Strings,
    Whole,
)

__all__ = ["Bf16Section", "DataTypesSection", "Fp16Section", "TorchAutocastSection"]


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
    bf16_master_weights_and_grads: Flag = False
    """Let the optimiser update the bfloat16 parameters themselves, from gradients that are summed
    in bfloat16 unless ``data_types.grad_accum_dtype`` says otherwise. Halves the memory, and small
    updates are lost in rounding."""
    bf16_optimizer_states: Flag = False
    """Keep optimiser states in bfloat16."""


class Fp16Section(Section):
    """``fp16``: compute in float16 with loss scaling and fp32 master weights.

    The keys on the loss scale also serve ``torch_autocast`` with dtype float16.
    """

    key_rules: ClassVar[KeyRules] = KeyRules(switch="enabled")

    enabled: Flag = False
    """Cast the model to float16 and scale the loss. Batch norm keeps fp32 parameters."""
    auto_cast: Flag = False
    """Cast floating-point inputs of the engine's forward to float16."""
    loss_scale: Annotated[Number, Field(ge=0)] = 0.0
    """Fixed loss scale; 0 scales dynamically."""
    initial_scale_power: Annotated[Whole, Field(ge=0, le=127)] = 16
    """The first dynamic loss scale is 2 to this power."""
    loss_scale_window: Annotated[Whole, Field(gt=0)] = 1000
    """Clean steps since the last overflow or growth after which the dynamic loss scale doubles."""
    hysteresis: Annotated[Whole, Field(gt=0)] = 2
    """The how manyth overflow halves the dynamic loss scale; those before are tolerated. Growth
    begins the count anew."""
    consecutive_hysteresis: Flag = False
    """Begin the count of overflows anew after every clean step."""
    min_loss_scale: Annotated[Number, Field(gt=0)] = 1.0
    """Smallest dynamic loss scale; an overflow that would halve it further is an error."""
    fp16_master_weights_and_grads: Flag = False
    """Let the optimiser update the float16 parameters themselves, from gradients that are summed
    in float16 unless ``data_types.grad_accum_dtype`` says otherwise."""

    def contradictions(self) -> Iterator[Contradiction]:
        """A dynamic loss scale that begins below its minimum."""
        if self.loss_scale == 0 and 2.0**self.initial_scale_power < self.min_loss_scale:
            yield Contradiction(
                "min_loss_scale",
                f"{self.min_loss_scale:g} is above the first scale, 2 to the power of "
                f"{self.initial_scale_power}",
                ("initial_scale_power", "min_loss_scale"),
            )


class TorchAutocastSection(Section):
    """``torch_autocast``: fp32 parameters, computation under ``torch.autocast``.

    With dtype float16 losses are scaled as the keys of ``fp16`` say.
    """

    key_rules: ClassVar[KeyRules] = KeyRules(switch="enabled")

    enabled: Flag = False
    """Run the model's forward under autocast."""
    dtype: DTypeName = "bfloat16"
    """Low-precision dtype."""
    lower_precision_safe_modules: Strings = (
        "torch.nn.Linear",
        "torch.nn.Conv1d",
        "torch.nn.Conv2d",
        "torch.nn.Conv3d",
    )
    """Classes of modules whose trained parameters are gathered, and their gradients reduced, in the
    low-precision dtype at stage 3. Their forward must cast its parameters, as torch's does."""

    def contradictions(self) -> Iterator[Contradiction]:
        """A dtype that is not low."""
        if self.dtype == "float32":
            yield Contradiction("dtype", 'write "bf16" or "fp16"', ("dtype",))


class DataTypesSection(Section):
    """``data_types``: dtypes other than those that the precision mode implies."""

    grad_accum_dtype: DTypeName | None = None
    """Dtype in which gradients of several micro-batches are summed; fp32 unless given."""
    param_dtype: DTypeName | None = None
    """Dtype of the computation; if given it must be that of the precision mode."""
    buffer_dtype: DTypeName | None = None
    """Dtype of floating-point buffers, except the statistics of batch norm; ``null`` keeps them as
    they are."""
