"""``OnDevice``: modules built in a dtype on a device, ``meta`` by default."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType

import torch

from ds_comm.errors import ConfigError

__all__ = ["OnDevice", "checked_dtype", "default_dtype"]


def checked_dtype(dtype: torch.dtype | None) -> torch.dtype | None:
    """Return ``dtype``.

    Raises:
        ConfigError: It is not a floating-point dtype.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigError(
            f"dtype={dtype!r}: give a floating-point torch.dtype such as torch.bfloat16, or None "
            "for torch's default"
        )
    return dtype


@contextmanager
def default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """Make tensors in ``dtype`` where the code that makes them names none; None changes nothing."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class OnDevice:
    """Context in which modules are built on a device, in a dtype.  Local.

    Example::

        with ds_zero.OnDevice(dtype=torch.bfloat16, device="meta"):
            model = Model()          # shapes and dtypes, no memory

    It uses torch's own settings (the ``torch.device`` context and the default dtype), which are
    restored on exit, also after an exception.  Code that names a dtype or a device gets what it
    names.  Parameters on ``meta`` get their values at ``initialize``, see [Note: meta].
    """

    def __init__(
        self,
        dtype: torch.dtype | None = None,
        device: str | torch.device = "meta",
        enabled: bool = True,
    ) -> None:
        """Choose dtype and device.

        Args:
            dtype: A floating-point dtype; None for torch's default.
            device: Anything that ``torch.device`` takes.
            enabled: Whether to do anything.

        Raises:
            ConfigError: ``dtype`` is not floating-point, or ``device`` is no device.
        """
        self._enabled = enabled
        self._dtype = checked_dtype(dtype)
        try:
            self._device = torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise ConfigError(
                f"OnDevice(device={device!r}): not a device; use 'meta', 'cpu' or 'cuda:0'"
            ) from error
        self._stacks: list[ExitStack] = []

    def __enter__(self) -> OnDevice:
        """Begin to build there; contexts nest, the inner one counts."""
        stack = ExitStack()
        if self._enabled:
            stack.enter_context(default_dtype(self._dtype))
            stack.enter_context(self._device)
        self._stacks.append(stack)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Restore torch's settings."""
        self._stacks.pop().__exit__(kind, error, trace)
