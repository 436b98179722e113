"""The optimisers under the names and with the signatures that DeepSpeed's users know.

Each is an ordinary torch optimiser on plain parameters, and runs on shards under an engine.
"""

from __future__ import annotations

from typing import Any

from ds_comm.errors import ConfigError
from ds_zero.optim.adagrad import FlatAdagrad
from ds_zero.optim.adam import FlatAdam
from ds_zero.optim.checks import refuse_amsgrad
from ds_zero.optim.lamb import FlatLamb
from ds_zero.optim.lion import FlatLion
from ds_zero.optim.muon import FlatMuon

__all__ = [
    "DeepSpeedCPUAdagrad",
    "DeepSpeedCPUAdam",
    "DeepSpeedCPULion",
    "FusedAdam",
    "FusedLamb",
    "FusedLion",
    "MuonWithAuxAdam",
]


class FusedAdam(FlatAdam):
    """Adam with decoupled decay unless ``adam_w_mode`` is false."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        """Register the parameter groups; see :class:`FlatAdam`.

        Args:
            params: Parameters or group dictionaries.
            lr: Learning rate.
            bias_correction: Correct the moments for their zero start.
            betas: Decay rates of the two moments.
            eps: Added to the root of the second moment.
            adam_w_mode: Decouple the decay from the gradient.
            weight_decay: Decay factor.
            amsgrad: Must be false.
            set_grad_none: What ``zero_grad()`` does when it is not told.

        Raises:
            ConfigError: A value is out of its range.
        """
        refuse_amsgrad("FusedAdam", amsgrad)
        super().__init__(params, lr, betas, eps, weight_decay, bias_correction, adam_w_mode)
        self._set_grad_none = set_grad_none

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Forget the gradients.

        Args:
            set_to_none: Drop them instead of filling them with zeros; ``set_grad_none`` by default.
        """
        super().zero_grad(self._set_grad_none if set_to_none is None else set_to_none)


class DeepSpeedCPUAdam(FlatAdam):
    """Adam with the argument names of the optimiser on the host; runs on every device."""

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        """Register the parameter groups; see :class:`FlatAdam`.

        Args:
            model_params: Parameters or group dictionaries.
            lr: Learning rate.
            bias_correction: Correct the moments for their zero start.
            betas: Decay rates of the two moments.
            eps: Added to the root of the second moment.
            weight_decay: Decay factor.
            amsgrad: Must be false.
            adamw_mode: Decouple the decay from the gradient.
            fp32_optimizer_states: Keep fp32 states of 16-bit parameters.

        Raises:
            ConfigError: A value is out of its range.
        """
        refuse_amsgrad("DeepSpeedCPUAdam", amsgrad)
        super().__init__(model_params, lr, betas, eps, weight_decay, bias_correction, adamw_mode)
        self.fp32_optimizer_states = fp32_optimizer_states


class DeepSpeedCPUAdagrad(FlatAdagrad):
    """Adagrad with the argument names of the optimiser on the host; runs on every device."""

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        """Register the parameter groups; see :class:`FlatAdagrad`.

        Args:
            model_params: Parameters or group dictionaries.
            lr: Learning rate.
            eps: Added to the root of the sums.
            weight_decay: L2 factor.
            amsgrad: Must be false.
            fp32_optimizer_states: Keep fp32 states of 16-bit parameters.

        Raises:
            ConfigError: A value is out of its range.
        """
        refuse_amsgrad("DeepSpeedCPUAdagrad", amsgrad)
        super().__init__(model_params, lr, weight_decay=weight_decay, eps=eps)
        self.fp32_optimizer_states = fp32_optimizer_states


class FusedLion(FlatLion):
    """Lion; see :class:`FlatLion`."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        """Register the parameter groups.

        Args:
            params: Parameters or group dictionaries.
            lr: Length of every element's step.
            betas: Weight of the momentum in the direction, and its own decay rate.
            weight_decay: Decoupled decay factor.
            set_grad_none: What ``zero_grad()`` does when it is not told.

        Raises:
            ConfigError: A value is out of its range.
        """
        super().__init__(params, lr, betas, weight_decay)
        self._set_grad_none = set_grad_none

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Forget the gradients.

        Args:
            set_to_none: Drop them instead of filling them with zeros; ``set_grad_none`` by default.
        """
        super().zero_grad(self._set_grad_none if set_to_none is None else set_to_none)


class DeepSpeedCPULion(FlatLion):
    """Lion with the argument names of the optimiser on the host; runs on every device."""

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        """Register the parameter groups; see :class:`FlatLion`.

        Args:
            model_params: Parameters or group dictionaries.
            lr: Length of every element's step.
            betas: Weight of the momentum in the direction, and its own decay rate.
            weight_decay: Decoupled decay factor.
            fp32_optimizer_states: Keep fp32 states of 16-bit parameters.

        Raises:
            ConfigError: A value is out of its range.
        """
        super().__init__(model_params, lr, betas, weight_decay)
        self.fp32_optimizer_states = fp32_optimizer_states


class FusedLamb(FlatLamb):
    """LAMB with all arguments of its predecessors; see :class:`FlatLamb`."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> None:
        """Register the parameter groups.

        Args:
            params: Parameters or group dictionaries.
            lr: Learning rate.
            bias_correction: Correct the moments for their zero start.
            betas: Decay rates of the two moments.
            eps: Added to the root of the second moment.
            eps_inside_sqrt: Must be false.
            weight_decay: Decay factor; the decay is part of the direction.
            max_grad_norm: Must be 0; the engine clips (``gradient_clipping``).
            max_coeff: Largest trust ratio.
            min_coeff: Smallest trust ratio.
            amsgrad: Must be false.

        Raises:
            ConfigError: A value is out of its range.
        """
        refuse_amsgrad("FusedLamb", amsgrad)
        if eps_inside_sqrt:
            raise ConfigError("FusedLamb adds eps to the root; leave eps_inside_sqrt false")
        if max_grad_norm:
            raise ConfigError(
                f"FusedLamb does not clip (max_grad_norm={max_grad_norm}); set gradient_clipping "
                "in the configuration, or call torch.nn.utils.clip_grad_norm_"
            )
        super().__init__(
            params, lr, bias_correction, betas, eps, weight_decay, max_coeff, min_coeff
        )


MuonWithAuxAdam = FlatMuon
