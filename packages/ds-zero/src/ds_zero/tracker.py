"""When a unit is used and when it has been passed: hooks on modules and gradients.

[Note: passed]
A unit is *opened* when the gradient of an output of its module arrives, and *passed* when
another unit is used in the same backward, or when the outermost graph task ends.  Passing
launches its reduction and releases it.  "All gradients arrived" would not do: backward through
frozen or detached weights still needs the values, and ranks whose unused parameters differ would
launch different collectives.

Hooks are tensor hooks on every output that needs a gradient, not an identity
``autograd.Function``: those break in-place code and the order in which gradients add up.
Outputs that are also inputs are skipped, because their gradient arrives last.  A module that runs
several times counts its calls, and is reduced after the last.

[Note: end of backward]
The first hook in each graph task queues a callback.  A reentrant checkpoint runs nested tasks,
so the callback acts only when no armed task is left.  After an exception the callback never
runs; the next forward of the root module finds tasks still armed and resets.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from ds_zero.access import watch_reads
from ds_zero.flat import Presence, Unit
from ds_zero.gradients import GradientFlow
from ds_zero.residency import Residency

__all__ = ["Tracker"]


class Tracker:
    """Drives residency and reductions from what the model does."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        residency: Residency,
        gradients: GradientFlow,
        owner: object,
    ) -> None:
        """Install hooks on ``model``; :meth:`remove` takes them off again.

        Args:
            model: The module tree.
            units: In layout order.
            residency: Gathers and releases them.
            gradients: Takes gradients in and reduces them.
            owner: Kept alive as long as the model has the hooks.
        """
        self._owner = owner
        self._units = units
        self._residency = residency
        self._gradients = gradients
        self.synced = True
        """Whether the next backward reduces (the engine sets it before each backward)."""
        self._armed: set[int] = set()
        self._open: list[Unit] = []
        self._hold_all = False
        self._depth = 0
        self._borrowed: list[Unit] = []
        self._net: tuple[nn.Module, AbstractContextManager[None]] | None = None
        self._nets_needed = any(unit.releasable for unit in units)
        self._handles: list[RemovableHandle] = []
        self._install(model)

    def _install(self, model: nn.Module) -> None:
        for unit in self._units:
            for module in unit.modules:
                self._handles.append(
                    module.register_forward_pre_hook(self._entering(unit, module), prepend=True)
                )
                self._handles.append(
                    module.register_forward_hook(
                        self._leaving(unit, module, model), with_kwargs=True, always_call=True
                    )
                )
        self._handles.append(
            model.register_forward_pre_hook(self._entering_root(model), prepend=True)
        )
        self._handles.append(
            model.register_forward_hook(
                self._leaving_root(model), with_kwargs=True, always_call=True
            )
        )
        releasable = {id(p): unit for unit in self._units if unit.releasable for p in unit.params}
        self._stop_watching = watch_reads(model, releasable, self._lend)
        # A parameter's hooks are out of the garbage collector's sight, so they refer weakly.
        take_grad = _TakeGrad(weakref.ref(self))
        for param in self._gradients.trainable_params():
            self._handles.append(param.register_post_accumulate_grad_hook(take_grad))

    def remove(self) -> None:
        """Take every hook off the model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._stop_watching()

    # ---- forward -----------------------------------------------------------------------------

    # Hooks are closures that act for one module only: copy.deepcopy copies them by reference, and
    # a copied module has no engine.

    def _entering_root(self, owner: nn.Module) -> Callable[[nn.Module, Any], None]:
        def enter(module: nn.Module, args: Any) -> None:
            if module is not owner:
                return
            if self._armed and not _in_backward():
                self.abandon_backward()
            if self._depth == 0 and not _in_backward():
                self._residency.begin_pass()
            self._depth += 1
            self._cast_net(module)

        return enter

    def _leaving_root(self, owner: nn.Module) -> Callable[..., None]:
        def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if module is not owner:
                return
            self._haul_net(module)
            self._depth = max(0, self._depth - 1)
            if not self._depth and not _in_backward():
                for unit in self._borrowed:
                    self._residency.release(unit)
                self._borrowed.clear()
            if torch.is_grad_enabled():
                for tensor in _grad_outputs(output, (args, kwargs)):
                    tensor.register_hook(self._begin_task_hook)

        return leave

    def _lend(self, unit: Unit) -> None:
        """Gather a unit whose parameter is read while the model runs; see ``access``."""
        if unit.presence is not Presence.PRESENT and (self._depth or _in_backward()):
            self._residency.ensure(unit)
            self._borrowed.append(unit)

    def _cast_net(self, module: nn.Module) -> None:
        """Watch what autograd saves from here on, unless it is watched already."""
        if self._nets_needed and self._net is None and torch.is_grad_enabled():
            net = self._residency.watch_saved()
            net.__enter__()
            self._net = (module, net)

    def _haul_net(self, module: nn.Module) -> None:
        """End the watch that this module began."""
        if self._net is not None and self._net[0] is module:
            net = self._net[1]
            self._net = None
            net.__exit__(None, None, None)

    def _begin_task_hook(self, grad: Tensor) -> None:
        self._arm()

    def _entering(self, unit: Unit, owner: nn.Module) -> Callable[[nn.Module, Any], None]:
        def enter(module: nn.Module, args: Any) -> None:
            if module is not owner:
                return
            backward = _in_backward()
            if backward:
                self._arm()
                self._pass_all_but(unit)
            self._residency.use(unit, backward=backward)
            self._cast_net(module)

        return enter

    def _leaving(self, unit: Unit, owner: nn.Module, model: nn.Module) -> Callable[..., None]:
        needs_values = not (isinstance(owner, nn.Embedding) and owner.max_norm is None)

        def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if module is not owner:
                return
            if module is not model:
                self._haul_net(module)
            hooked = False
            if torch.is_grad_enabled():
                call = _Call(self, unit, needs_values)
                for tensor in _grad_outputs(output, (args, kwargs)):
                    tensor.register_hook(call)
                    hooked = True
            unit.calls_pending += hooked
            if not _in_backward() and not (hooked and self._residency.ends_forward(unit)):
                self._residency.release(unit)

        return leave

    # ---- backward ----------------------------------------------------------------------------

    def open(self, unit: Unit, *, needs_values: bool) -> None:
        """Note that the gradient of an output of ``unit`` has arrived.

        Args:
            unit: The unit that is about to run backward.
            needs_values: Whether its backward reads the parameters.
        """
        self._arm()
        self._pass_all_but(unit)
        if torch.is_grad_enabled():
            # create_graph: a later double backward reads these values, without any hook.
            self._hold_all = True
        if unit not in self._open:
            self._open.append(unit)
        if needs_values:
            self._residency.use(unit, backward=True)

    def _pass_all_but(self, unit: Unit) -> None:
        for other in [u for u in self._open if u is not unit and not u.enclosing]:
            self._open.remove(other)
            if self.synced and other.calls_pending <= 0:
                self._gradients.mark_passed(other)
            if not self._hold_all:
                self._residency.release(other)

    def take_grad(self, param: nn.Parameter) -> None:
        """Move the gradient that autograd has just finished into the unit's buffer."""
        grad = param.grad
        if grad is not None:
            self._arm()
            param.grad = None
            self._gradients.accumulate(param, grad)

    def _arm(self) -> None:
        task = torch._C._current_graph_task_id()
        if task == -1 or task in self._armed:
            return
        if not self._armed:
            self._gradients.hide_grads()
            self._residency.begin_pass()
        self._armed.add(task)
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(_Ended(weakref.ref(self), task))

    def task_ended(self, task: int) -> None:
        """Act on the end of a graph task; see [Note: end of backward]."""
        self._armed.discard(task)
        if self._armed:
            return
        self._open.clear()
        if not self._hold_all:
            self._residency.release_all()
        if self.synced:
            self._gradients.finish_backward()
            self._gradients.expose_grads()

    def abandon_backward(self) -> None:
        """Forget a backward that ended by an exception, with the gradients it left."""
        self._armed.clear()
        self._open.clear()
        self._gradients.clear()
        self.end_step()

    def end_step(self) -> None:
        """Let held units go and forget calls that never ran backward."""
        self._hold_all = False
        for unit in self._units:
            unit.calls_pending = 0
        self._residency.release_all()


class _Call:
    """The tensor hook of one forward call of one unit."""

    def __init__(self, tracker: Tracker, unit: Unit, needs_values: bool) -> None:
        self._tracker = weakref.ref(tracker)
        self._unit = unit
        self._needs_values = needs_values
        self._counted = False

    def __call__(self, grad: Tensor) -> None:
        tracker = self._tracker()
        if tracker is None:
            return
        if not self._counted:
            self._counted = True
            self._unit.calls_pending -= 1
        tracker.open(self._unit, needs_values=self._needs_values)


class _TakeGrad:
    """The hook of every trainable parameter."""

    def __init__(self, tracker: weakref.ref[Tracker]) -> None:
        self._tracker = tracker

    def __call__(self, param: nn.Parameter) -> None:
        tracker = self._tracker()
        if tracker is not None:
            tracker.take_grad(param)


class _Ended:
    """The callback at the end of one graph task."""

    def __init__(self, tracker: weakref.ref[Tracker], task: int) -> None:
        self._tracker = tracker
        self._task = task

    def __call__(self) -> None:
        tracker = self._tracker()
        if tracker is not None:
            tracker.task_ended(self._task)


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def _grad_outputs(output: Any, inputs: Any) -> list[Tensor]:
    """Tensors in ``output`` that need a gradient and are not among ``inputs``."""
    given = {id(leaf) for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)}
    return [
        leaf
        for leaf in tree_leaves(output)
        if isinstance(leaf, Tensor) and leaf.requires_grad and id(leaf) not in given
    ]
