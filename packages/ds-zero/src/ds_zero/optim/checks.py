"""Checks of hyper-parameters that several optimisers share."""

from __future__ import annotations

from collections.abc import Sequence

from ds_comm.errors import ConfigError

__all__ = ["check_betas", "check_not_negative", "refuse_amsgrad"]


def check_not_negative(name: str, **values: float) -> None:
    """Refuse negative values.

    Args:
        name: Of the optimiser, for the message.
        values: Hyper-parameters by name.

    Raises:
        ConfigError: One is below 0 or no number.
    """
    wrong = {key: value for key, value in values.items() if not value >= 0}
    if wrong:
        wanted = ", ".join(f"{key} >= 0" for key in wrong)
        given = ", ".join(f"{key}={value}" for key, value in wrong.items())
        raise ConfigError(f"{name} needs {wanted}; got {given}")


def check_betas(name: str, betas: Sequence[float]) -> tuple[float, float]:
    """Return two decay rates as a tuple.

    Args:
        name: Of the optimiser, for the message.
        betas: Two numbers in [0, 1).

    Raises:
        ConfigError: They are not.
    """
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise ConfigError(f"{name} needs betas of two numbers, got {betas!r}")
    if not all(0 <= beta < 1 for beta in betas):
        raise ConfigError(f"{name} needs betas in [0, 1), got {betas}")
    return betas[0], betas[1]


def refuse_amsgrad(name: str, amsgrad: bool) -> None:
    """Refuse the AMSGrad variant where it is not implemented.

    Raises:
        ConfigError: It is asked for.
    """
    if amsgrad:
        raise ConfigError(f"{name} has no amsgrad; pass torch.optim.AdamW(..., amsgrad=True)")
