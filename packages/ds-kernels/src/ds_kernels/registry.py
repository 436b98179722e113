"""Which implementation of an op runs: cuda, triton, cpu or the reference.

[Note: backends]
Every op has a reference in pure torch.  Its native binding serves CPU tensors (backend ``cpu``)
and, when the module was built with CUDA, CUDA tensors (backend ``cuda``); some ops have a Triton
version.  For each kind of device the first usable backend of cuda, triton, cpu, reference is taken,
once, and logged.  A CUDA or Triton kernel is taken by itself only if ``gpu_results.json`` records a
passing run of that very source on a GPU; before that it is "compiled, never run" and must be asked
for.  ``DS_KERNELS_BACKEND`` names the backends to consider, in order (``cuda,cpu``); naming one is
asking for it, and the reference is always the last resort.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Literal, ParamSpec, TypeVar, cast

from ds_kernels.errors import BackendUnavailableError
from ds_kernels.native import build_info, load_native, native_status

if TYPE_CHECKING:
    from ds_kernels._native import Native

__all__ = ["BACKENDS", "Backend", "Op", "triton_interprets"]

Backend = Literal["cuda", "triton", "cpu", "reference"]
"""Where an implementation comes from."""

BACKENDS: tuple[Backend, ...] = ("cuda", "triton", "cpu", "reference")
"""All backends, the preferred first."""

_DEVICES: dict[Backend, tuple[str, ...]] = {
    "cuda": ("cuda",),
    "triton": ("cuda",),
    "cpu": ("cpu",),
}
_VARIABLE = "DS_KERNELS_BACKEND"
_RESULTS = Path(__file__).with_name("gpu_results.json")
_logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")


class Op(Generic[P, R]):
    """One op and its implementations, all called alike; see [Note: backends].

    The object is made once, at the top of ``ops/<op>.py``::

        _ADAM = Op("adam", reference.adam_, native=lambda module: module.adam_, cuda=True)
        _ADAM.for_device(param.device.type)(param, grad, ...)
    """

    def __init__(
        self,
        name: str,
        reference: Callable[P, R],
        *,
        native: Callable[[Native], Callable[P, R]] | None = None,
        source: str = "",
        cpu: bool = True,
        cuda: bool = False,
        triton: str = "",
    ) -> None:
        """Describe the op.

        Args:
            name: The op's name, as it is shown and registered.
            reference: The pure-torch implementation; serves every device.
            native: Gives the native implementation, taking the module; None if there is none.
            source: The op's file name in ``csrc`` without suffix; by default ``name``.
            cpu: The native implementation serves CPU tensors.
            cuda: The native implementation serves CUDA tensors when built with CUDA.
            triton: ``"module:function"`` of a Triton version, imported when it is used.
        """
        self.name = name
        self.source = source or name
        self.reference = reference
        self._native = native
        self._serves: dict[Backend, bool] = {"cpu": cpu, "cuda": cuda, "triton": bool(triton)}
        self._triton = triton
        self._chosen: dict[str, Callable[P, R]] = {}

    def for_device(self, device_type: str) -> Callable[P, R]:
        """The implementation for tensors of a kind of device.

        Args:
            device_type: ``tensor.device.type``.

        Raises:
            ValueError: ``DS_KERNELS_BACKEND`` names something that is no backend.
        """
        try:
            return self._chosen[device_type]
        except KeyError:
            backend = self.chosen_backend(device_type)
            _logger.info("%s on %s: %s backend", self.name, device_type, backend)
            self._chosen[device_type] = implementation = self.on(backend)
            return implementation

    def chosen_backend(self, device_type: str) -> Backend:
        """The backend that :meth:`for_device` takes.

        Raises:
            ValueError: ``DS_KERNELS_BACKEND`` names something that is no backend.
        """
        wanted = _wanted()
        for backend in wanted or BACKENDS:
            if backend == "reference":
                break
            if device_type not in _DEVICES[backend]:
                continue
            reason = self.missing_reason(backend) or ("" if wanted else self.unproven(backend))
            if not reason:
                return backend
            if self._serves[backend]:
                _logger.info("%s on %s: no %s backend: %s", self.name, device_type, backend, reason)
        return "reference"

    def on(self, backend: Backend) -> Callable[P, R]:
        """The implementation of one backend.

        Raises:
            BackendUnavailableError: It is not there; the message has the reason.
        """
        if backend == "reference":
            return self.reference
        reason = self.missing_reason(backend)
        if reason:
            raise BackendUnavailableError(f"{self.name} has no {backend} backend here: {reason}")
        if backend == "triton":
            module, _, function = self._triton.partition(":")
            return cast("Callable[P, R]", vars(import_module(module))[function])
        assert self._native is not None
        return self._native(load_native())

    def missing_reason(self, backend: Backend) -> str:
        """Why a backend of this op cannot run at all, empty if it can."""
        if backend == "reference":
            return ""
        if not self._serves[backend] or (backend != "triton" and self._native is None):
            return "the op has no such version"
        if backend == "triton":
            return "" if find_spec("triton") else "the package triton is not installed"
        status = native_status()
        if not status.available:
            return status.reason
        if backend == "cuda" and not build_info().cuda_version:
            return (
                "ds_kernels was built without CUDA; build it where nvcc is found, "
                "with CMAKE_ARGS=-DDS_KERNELS_CUDA=ON"
            )
        return ""

    def unproven(self, backend: Backend) -> str:
        """Why a usable backend is no default, empty if it is one."""
        if backend in ("cpu", "reference"):
            return ""
        if backend == "triton":
            module = find_spec(self._triton.partition(":")[0])
            path = module.origin if module else None
            digest = hashlib.sha256(Path(path).read_bytes()).hexdigest() if path else ""
        else:
            digest = dict(build_info().cuda_sources).get(self.source, "")
        if digest and _gpu_results().get(f"{backend}/{self.source}") == digest:
            return ""
        return "compiled, never run: no passing GPU run of this source is recorded"

    @contextmanager
    def forced(self, backend: Backend) -> Iterator[None]:
        """Use one backend for every device within the block, for tests and measurements.

        Raises:
            BackendUnavailableError: It is not there.
        """
        before = self._chosen
        implementation = self.on(backend)
        self._chosen = {"cpu": implementation, "cuda": implementation}
        try:
            yield
        finally:
            self._chosen = before


def triton_interprets() -> bool:
    """Whether Triton runs kernels in its interpreter, on CPU tensors (``TRITON_INTERPRET=1``)."""
    return os.environ.get("TRITON_INTERPRET", "") not in ("", "0", "false", "off")


def _wanted() -> tuple[Backend, ...]:
    """The backends that DS_KERNELS_BACKEND names, in order; empty if unset."""
    names = [name.strip() for name in os.environ.get(_VARIABLE, "").split(",") if name.strip()]
    for name in names:
        if name not in BACKENDS:
            raise ValueError(f"{_VARIABLE} names {name!r}, allowed are {', '.join(BACKENDS)}")
    return tuple(backend for name in names for backend in BACKENDS if backend == name)


@cache
def _gpu_results() -> dict[str, str]:
    """Source digest of the last passing GPU run, by ``backend/source``."""
    return cast("dict[str, str]", json.loads(_RESULTS.read_text(encoding="utf-8")))
