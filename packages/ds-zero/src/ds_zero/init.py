"""``Init``: models built shard by shard, larger than the memory of one rank.

[Note: building shard by shard]
Nothing of torch is patched.  While the context is active, two kinds of torch's own extension
points are in use, and both are gone after it:

* The *registration hooks* of ``torch.nn.modules.module`` tell when a parameter or a child gets
  its owner.  A child that is registered has been built: its parameters are *settled*, cut into
  shards.  So are those of the module before, when another one registers its first parameter,
  which catches modules that are collected in a list first.
* A *torch function mode* sees every function that is called on a tensor.  One that reads or
  writes values of a settled parameter (``nn.init`` on a child's weight, ``weight.data.copy_``, a
  parametrisation, ``deepcopy``) finds it brought back first; it is settled again at the next
  registration.  Functions that only look at shape, dtype or device do not.

So *when* a parameter is settled matters for memory only, never for values; code in any
``__init__`` runs as it would without the context.  Values are those that rank 0 has at the moment
of settling, so every rank must run the same code; what one rank alone edits goes through
``GatheredParameters``.  Tensors that share memory with a whole parameter keep it from being
settled while they live, so that writes through them are not lost.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.overrides import TorchFunctionMode

from ds_comm.collectives import collectives_for
from ds_comm.device import current_device
from ds_comm.errors import ConfigError
from ds_comm.group import Group
from ds_comm.init import init_distributed
from ds_comm.mesh import Mesh
from ds_zero.newborn_access import guard_newborns
from ds_zero.nursery import Nursery, newborn_of, shardable
from ds_zero.on_device import checked_dtype, default_dtype
from ds_zero.presence import Presence
from ds_zero.registry import core_of
from ds_zero.tensors import tensors_in

__all__ = ["Init", "building_suspended", "settle_all"]

_BROUGHT_AT_MOST = 2
"""Settled parameters that may be whole at one time because something touched them."""


class Init:
    """Context in which any model is built so that each rank keeps its shard.  Collective.

    Example::

        with ds_zero.Init():
            model = AutoModelForCausalLM.from_pretrained(name)
        engine, *_ = ds_zero.initialize(model=model, config=config)

    Values equal those of plain construction on rank 0.  Between the context and ``initialize``
    the model cannot run, be copied or stored, except inside of ``GatheredParameters``.
    ``initialize`` takes the shards over at any stage.  Contexts nest; the outermost one counts.
    See [Note: building shard by shard].
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Any = None,
        param_swapper: Any = None,
    ) -> None:
        """Choose where shards live; with ``module``, shard it at once (collective).

        Args:
            module: An existing model to shard; then no context is needed.
            data_parallel_group: The ranks to shard over: a ``ds_comm.Group`` or torch's process
                group; all ranks by default.
            mem_efficient_linear: Accepted for compatibility; ``F.linear`` needs no replacement.
            remote_device: ``"cpu"`` keeps shards in host memory until ``initialize``.
            pin_memory: Page-lock them there.
            config_dict_or_path: Accepted for compatibility; ``initialize`` reads and checks it.
                Its 16-bit dtypes do not apply here, because fp32 masters start from full precision.
            config: Old name of it.
            enabled: Whether to do anything.
            dtype: Of floating-point tensors that are made without one; torch's default otherwise.
            mpu: A Megatron-style description of the groups.
            zero_param_parallel_group: Not available.
            zero_quantized_weights: Not available.
            zero_quantized_nontrainable_weights: Not available.
            sequence_data_parallel_group: Old name of ``data_parallel_group``.
            param_swapper: Not available.

        Raises:
            ConfigError: An argument is not available, or two contradict each other.
        """
        refused = {
            "zero_param_parallel_group": zero_param_parallel_group,
            "zero_quantized_weights": zero_quantized_weights,
            "zero_quantized_nontrainable_weights": zero_quantized_nontrainable_weights,
            "param_swapper": param_swapper,
        }
        for name, value in refused.items():
            if value:
                raise ConfigError(f"Init({name}=...) is not available; leave it out")
        if remote_device not in (None, "none", "cpu"):
            raise ConfigError(
                f"Init(remote_device={remote_device!r}): use 'cpu', or None for the accelerator"
            )
        groups = [g for g in (data_parallel_group, sequence_data_parallel_group) if g is not None]
        if len(groups) + (mpu is not None) > 1:
            raise ConfigError(
                "Init: give one of data_parallel_group, sequence_data_parallel_group and mpu"
            )
        self._enabled = enabled
        self._dtype = checked_dtype(dtype)
        self._group = groups[0] if groups else None
        self._mpu = mpu
        self._remote = remote_device == "cpu"
        self._pin_memory = pin_memory
        self._stacks: list[ExitStack] = []
        if module is not None and enabled:
            self._convert(module)

    def __enter__(self) -> Init:
        """Begin to shard what is built."""
        stack = ExitStack()
        if self._enabled:
            stack.enter_context(default_dtype(self._dtype))
            if _active() is None:
                nursery = self._nursery()
                if nursery.device.type != "cpu":
                    stack.enter_context(nursery.device)
                stack.enter_context(_Building(nursery))
        self._stacks.append(stack)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Shard what is whole still; after an exception only end."""
        self._stacks.pop().__exit__(kind, error, trace)

    def _nursery(self) -> Nursery:
        init_distributed()
        if self._mpu is not None:
            group = Mesh.from_mpu(self._mpu).shard
        elif self._group is None:
            group = Group.world()
        else:
            group = self._group if isinstance(self._group, Group) else Group.of(self._group)
        device = current_device()
        on_host = self._remote and device.type != "cpu"
        return Nursery(
            collectives_for(group),
            device,
            shard_device=torch.device("cpu") if on_host else None,
            pinned=on_host and self._pin_memory,
        )

    def _convert(self, module: nn.Module) -> None:
        building = _Building(self._nursery())
        for child in module.modules():
            building.adopt(child)
            building.settle_pending()
        guard_newborns(module.modules())


class _Building(TorchFunctionMode):
    """What an active context does; see [Note: building shard by shard]."""

    def __init__(self, nursery: Nursery) -> None:
        super().__init__()
        self.nursery = nursery
        self.suspended = False
        self._thread = threading.get_ident()
        self._hooks = ExitStack()
        self._modules: dict[int, nn.Module] = {}
        self._pending: dict[int, tuple[nn.Parameter, nn.Module, str]] = {}
        self._brought: dict[int, nn.Parameter] = {}

    def __enter__(self) -> _Building:
        for handle in (
            register_module_parameter_registration_hook(self._on_parameter),
            register_module_module_registration_hook(self._on_module),
        ):
            self._hooks.callback(handle.remove)
        _LOCAL.building = self
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._hooks.close()
        _LOCAL.building = None
        if error[0] is None:
            for module in list(self._modules.values()):
                self.adopt(module)
            self.settle_pending()
        guard_newborns(self._modules.values())

    # ---- what is built -----------------------------------------------------------------------

    def _on_parameter(self, module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if self.suspended or threading.get_ident() != self._thread:
            return
        self._modules.setdefault(id(module), module)
        self.settle_pending(but=module)
        if param is not None:
            self._expect(module, name, param)

    def _on_module(self, parent: nn.Module, name: str, child: nn.Module | None) -> None:
        if self.suspended or threading.get_ident() != self._thread:
            return
        self._modules.setdefault(id(parent), parent)
        if child is not None:
            for module in child.modules():
                self.adopt(module)
            self.settle_pending(but=parent)

    def adopt(self, module: nn.Module) -> None:
        """Note the parameters that ``module`` itself owns and that are whole."""
        self._modules.setdefault(id(module), module)
        for name, param in module._parameters.items():
            if param is not None:
                self._expect(module, name, param)

    def _expect(self, module: nn.Module, name: str, param: nn.Parameter) -> None:
        self.nursery.resolve(param)
        known = newborn_of(param)
        whole = known is None or known.presence is Presence.PRESENT
        if whole and core_of(param) is None:
            self._pending.setdefault(id(param), (param, module, name))

    def settle_pending(self, but: nn.Module | None = None) -> None:
        """Shard what is whole, except what ``but`` owns, which is still being built.  Collective.

        Args:
            but: A module; None settles everything, whatever else refers to it.
        """
        for key, (param, module, name) in list(self._pending.items()):
            if but is None or (module is not but and not _shared(param)):
                del self._pending[key]
                self.nursery.settle(param, f"{type(module).__name__}.{name}")
        self._settle_brought(force=but is None)

    # ---- what is touched ---------------------------------------------------------------------

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self.suspended and _reads_values(func):
            touched = [t for t in tensors_in((args, kwargs)) if isinstance(t, nn.Parameter)]
            if func == _SET_DATA:
                touched = []  # `param.data = x` needs no old values
                self._replaced(args[0])
            self._bring(touched)
        return func(*args, **kwargs)

    def _replaced(self, param: Tensor) -> None:
        if not isinstance(param, nn.Parameter):
            return
        known = newborn_of(param)
        if known is not None and known.presence is Presence.RELEASED:
            known.presence = Presence.PRESENT
            self._brought[id(param)] = param

    def _bring(self, params: list[nn.Parameter]) -> None:
        for param in params:
            known = newborn_of(param)
            if known is not None and known.presence is Presence.RELEASED:
                if len(self._brought) >= _BROUGHT_AT_MOST:
                    self._settle_brought(keep=params)
                known.nursery.bring(param)
                self._brought[id(param)] = param

    def _settle_brought(self, keep: Sequence[nn.Parameter] = (), *, force: bool = False) -> None:
        kept = {id(param) for param in keep}
        for key, param in list(self._brought.items()):
            if key not in kept and (force or not _shared(param)):
                del self._brought[key]
                known = newborn_of(param)
                assert known is not None
                self.nursery.settle(param, known.label)


_LOCAL = threading.local()


def _active() -> _Building | None:
    """The context that is active in this thread."""
    found: _Building | None = getattr(_LOCAL, "building", None)
    return found


def settle_all() -> None:
    """Shard everything that an active context has built so far.  Collective."""
    building = _active()
    if building is not None:
        building.settle_pending()


@contextmanager
def building_suspended() -> Iterator[None]:
    """Let an active context ignore what happens inside, as ``initialize`` needs it.  Collective."""
    building = _active()
    if building is None or building.suspended:
        yield
        return
    building.settle_pending()
    building.suspended = True
    try:
        yield
    finally:
        building.suspended = False


def _shared(param: nn.Parameter) -> bool:
    """Whether another tensor uses the memory of ``param``, so that writes to it count."""
    if not shardable(param):
        return False
    with torch._C.DisableTorchFunction():
        # One use by the parameter, one by the storage object that is asked.
        return torch._C._storage_Use_Count(param.untyped_storage()._cdata) > 2


_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_VALUE_PROPERTIES = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})
_SHAPE_ONLY = frozenset(
    {
        "__hash__", "__len__", "__repr__", "__format__", "__str__", "_is_view", "dim",
        "element_size", "empty_like", "full_like", "get_device", "is_complex", "is_contiguous",
        "is_floating_point", "is_inference", "is_signed", "is_tensor",
        "ndimension", "nelement", "new_empty", "new_full", "new_ones", "new_zeros",
        "numel", "ones_like", "rand_like", "randn_like", "register_hook",
        "register_post_accumulate_grad_hook", "requires_grad_", "result_type", "size", "stride",
        "storage_offset", "zeros_like",
    }
)  # fmt: skip
"""Functions that look at no value; all other ones find settled parameters brought back."""


def _reads_values(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(func.__self__, "__name__", "") in _VALUE_PROPERTIES
    if name in ("__set__", "__delete__"):
        return getattr(func.__self__, "__name__", "") == "data"
    return name not in _SHAPE_ONLY
