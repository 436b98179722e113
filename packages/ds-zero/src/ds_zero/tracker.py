"""When a unit is used and when it has been passed: hooks on modules and gradients.

[Note: passed]
A unit is *opened* when the gradient of an output of its module arrives, and *passed* when
another unit is used in the same backward, or when the outermost graph task ends.  Passing
launches its reduction and releases it.  "All gradients arrived" would not do: backward through
frozen or detached weights still needs the values, and ranks whose unused parameters differ would
launch different collectives.

Hooks are tensor hooks on every output that needs a gradient, not an identity
``autograd.Function``: those break in-place code and the order in which gradients add up.
Outputs that are also unchanged inputs are skipped, because their gradient arrives last.  A module
that runs several times counts its calls, and is reduced after the last.  A use inside of another
unit's module does not pass that unit, which is still at work.

[Note: end of backward]
The first hook in each graph task queues a callback.  A reentrant checkpoint runs nested tasks,
so the callback acts only when no armed task is left.  After an exception the callback never
runs; the next forward of the root module finds tasks still armed and resets.  A backward inside
of the model's own forward (``autograd.grad`` for forces or saliency) lets go of what it gathered
itself and reduces nothing: its gradients wait for the real one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ds_comm.errors import EngineError
from ds_zero.access import watch_reads
from ds_zero.external import external_users
from ds_zero.flat import Presence, Unit
from ds_zero.gradients import GradientFlow
from ds_zero.precision.entry import ScaleEntry
from ds_zero.residency import Residency
from ds_zero.saved import checkpoint_saves
from ds_zero.tensors import changed_or_new, tensor_versions

__all__ = ["Tracker"]


class Tracker:
    """Drives residency and reductions from what the model does."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        residency: Residency,
        gradients: GradientFlow,
        entry: ScaleEntry,
        owner: object,
    ) -> None:
        """Install hooks on ``model``; :meth:`remove` takes them off again.

        Args:
            model: The module tree.
            units: In layout order.
            residency: Gathers and releases them.
            gradients: Takes gradients in and reduces them.
            entry: Lets the loss scale in.
            owner: Kept alive as long as the model has the hooks.
        """
        self._owner = owner
        self._units = units
        self._residency = residency
        self._gradients = gradients
        self._entry = entry
        self.synced = True
        """Whether the next backward reduces (the engine sets it before each backward)."""
        self.backwards = 0
        """How many have ended; whoever counts them sets it back."""
        self.around_reductions: Callable[[], AbstractContextManager[None]] = nullcontext
        """Around the wait for reductions at the end of a backward."""
        self._armed: set[int] = set()
        self._open: list[Unit] = []
        self._gathered_in_task: list[Unit] = []
        self._hold_all = False
        self._depth = 0
        self._borrowed: list[Unit] = []
        self._inputs: list[tuple[nn.Module, dict[int, int]]] = []
        self._net: tuple[nn.Module, AbstractContextManager[None]] | None = None
        self._nets_needed = any(unit.releasable for unit in units)
        self._enclosers = _enclosers(units)
        self._handles: list[RemovableHandle] = []
        self._users: dict[tuple[int, int], list[RemovableHandle]] = {}
        """Hooks on modules that use a unit without owning any of it."""
        self._unit_of = {id(param): unit for unit in units for param in unit.params}
        self._install(model)

    def _install(self, model: nn.Module) -> None:
        for unit in self._units:
            for module in unit.modules:
                self._handles += self._watch(unit, module)
        for module, param in external_users(model):
            self.add_user(param, module)
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
            if self._gradients.exposes_grads:
                # A gradient may arrive before any module's hook; the view in ``param.grad`` must
                # be gone before autograd adds to it.
                self._handles.append(param.register_hook(_ArmFirst(weakref.ref(self))))

    def _watch(self, unit: Unit, module: nn.Module) -> list[RemovableHandle]:
        """Install the hooks by which ``module`` uses ``unit``."""
        before = module.register_forward_pre_hook(
            self._entering(unit, module), prepend=True, with_kwargs=True
        )
        after = module.register_forward_hook(
            self._leaving(unit, module), with_kwargs=True, always_call=True
        )
        return [before, after]

    def add_user(self, param: nn.Parameter, module: nn.Module) -> None:
        """Let a module use a parameter that it does not own; see ``external``."""
        unit = self._unit_of.get(id(param))
        if unit is None or not unit.releasable:
            return
        if not any(module is owner for owner in unit.modules):
            unit.modules = (*unit.modules, module)
            self._enclosers = _enclosers(self._units)
            self._users[unit.index, id(module)] = self._watch(unit, module)

    def remove_user(self, param: nn.Parameter, module: nn.Module, others: Iterable[Any]) -> None:
        """Undo :meth:`add_user`, unless the module uses ``others`` of the same unit."""
        unit = self._unit_of[id(param)]
        if any(self._unit_of.get(id(other)) is unit for other in others):
            return
        for handle in self._users.pop((unit.index, id(module)), ()):
            handle.remove()
            unit.modules = tuple(owner for owner in unit.modules if owner is not module)
        self._enclosers = _enclosers(self._units)

    def remove(self) -> None:
        """Take every hook off the model."""
        for handles in (self._handles, *self._users.values()):
            for handle in handles:
                handle.remove()
        self._handles.clear()
        self._users.clear()
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
                self._residency.begin_forward()
                self._entry.begin_forward()
                self._reset_running()
            self._depth += 1

        return enter

    def _leaving_root(self, owner: nn.Module) -> Callable[..., Any]:
        def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            if module is not owner:
                return None
            self._depth = max(0, self._depth - 1)
            if not self._depth and not _in_backward() and not torch.is_grad_enabled():
                self._return_borrowed()
            if torch.is_grad_enabled():
                for tensor in changed_or_new(output, tensor_versions((args, kwargs))):
                    tensor.register_hook(_ArmFirst(weakref.ref(self)))
                if not self._depth:
                    return self._entry.guard_outputs((args, kwargs), output)
            return None

        return leave

    def _entering(self, unit: Unit, owner: nn.Module) -> Callable[[nn.Module, Any, Any], None]:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            if module is not owner:
                return
            backward = _in_backward()
            if backward:
                self.arm()
                self._pass_all_but(unit, module)
            self._refuse_transforms(unit)
            self._residency.use(unit, backward=backward)
            unit.calls_running += 1
            self._cast_net(module, backward)
            watched = torch.is_grad_enabled()
            self._inputs.append((module, tensor_versions((args, kwargs)) if watched else {}))

        return enter

    def _leaving(self, unit: Unit, owner: nn.Module) -> Callable[..., None]:
        needs_values = not (isinstance(owner, nn.Embedding) and owner.max_norm is None)

        def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if module is not owner:
                return
            self._haul_net(module)
            unit.calls_running = max(0, unit.calls_running - 1)
            before = self._take_inputs(module)
            hooked = False
            if torch.is_grad_enabled():
                call = _Call(self, unit, module, needs_values)
                for tensor in changed_or_new(output, before):
                    tensor.register_hook(call)
                    hooked = True
            unit.calls_pending += hooked
            if self._residency.reaches_into(unit, output):
                self._borrow(unit)
            elif not _in_backward() and not (hooked and self._residency.ends_forward(unit)):
                self._let_go(unit)

        return leave

    def _reset_running(self) -> None:
        for unit in self._units:
            unit.calls_running = 0

    @staticmethod
    def _refuse_transforms(unit: Unit) -> None:
        """A gather would become part of a gradient transform; ``vmap`` leaves it alone."""
        transform = torch._C._functorch.peek_interpreter_stack()
        mapped = torch._C._functorch.TransformType.Vmap
        if transform is None or transform.key() == mapped:
            return
        if unit.presence is not Presence.PRESENT:
            raise EngineError(
                f"torch.func transforms {unit.name!r}, whose parameters are sharded. Run the "
                "transform inside `with ds_zero.GatheredParameters(module.parameters()):`, or use "
                "stage 0 to 2."
            )

    def _take_inputs(self, module: nn.Module) -> dict[int, int]:
        """The versions that :meth:`_entering` noted for the innermost call of ``module``."""
        while self._inputs:
            noted, versions = self._inputs.pop()
            if noted is module:
                return versions
        return {}

    def _let_go(self, unit: Unit) -> None:
        in_use = unit.calls_running > 0 or unit in self._borrowed
        if not in_use and not self._hold_all:
            self._residency.release(unit)

    # ---- units in use beyond their module ----------------------------------------------------

    def _borrow(self, unit: Unit) -> None:
        """Keep ``unit`` until the end of the backward, or of a forward without one."""
        if unit.releasable and unit not in self._borrowed:
            self._borrowed.append(unit)

    def _return_borrowed(self) -> None:
        borrowed, self._borrowed = self._borrowed, []
        for unit in borrowed:
            self._let_go(unit)

    def _lend(self, unit: Unit) -> None:
        """Gather a unit whose parameter is read while the model runs; see ``access``."""
        if unit.presence is not Presence.PRESENT and (self._depth or _in_backward()):
            self._residency.ensure(unit)
            self._borrow(unit)

    def _cast_net(self, module: nn.Module, backward: bool) -> None:
        """Watch what autograd saves in ``module``, unless that is watched already.

        Not inside of a checkpoint, which saves nothing and recomputes later: its own hooks must
        be innermost, in forward and while it recomputes.  And not inside of ``torch.func``
        transforms, which allow no such hooks.
        """
        if (
            self._nets_needed
            and self._net is None
            and not backward
            and torch.is_grad_enabled()
            and torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
            and not checkpoint_saves()
        ):
            net = self._residency.watch_saved()
            net.__enter__()
            self._net = (module, net)

    def _haul_net(self, module: nn.Module) -> None:
        """End the watch that this module began."""
        if self._net is not None and self._net[0] is module:
            net = self._net[1]
            self._net = None
            net.__exit__(None, None, None)

    # ---- backward ----------------------------------------------------------------------------

    def open(self, unit: Unit, module: nn.Module, *, needs_values: bool) -> None:
        """Note that the gradient of an output of ``unit`` has arrived.

        Args:
            unit: The unit that is about to run backward.
            module: The module whose output it was.
            needs_values: Whether its backward reads the parameters.
        """
        self.arm()
        self._pass_all_but(unit, module)
        if torch.is_grad_enabled():
            # create_graph: a later double backward reads these values, without any hook.
            self._hold_all = True
        if unit not in self._open:
            self._open.append(unit)
        if needs_values:
            if unit.presence is not Presence.PRESENT:
                self._gathered_in_task.append(unit)
            self._residency.use(unit, backward=True)

    def _pass_all_but(self, unit: Unit, module: nn.Module) -> None:
        at_work = self._enclosers.get(id(module), frozenset())
        for other in [u for u in self._open if u is not unit and u.index not in at_work]:
            self._open.remove(other)
            if self.synced and not self._depth and other.calls_pending <= 0:
                self._gradients.mark_passed(other)
            if not self._depth or other in self._gathered_in_task:
                self._let_go(other)

    @torch.no_grad()
    def take_grad(self, param: nn.Parameter) -> None:
        """Move the gradient that autograd has just finished into the unit's buffer."""
        grad = param.grad
        if grad is not None:
            self.arm()
            param.grad = None
            self._gradients.accumulate(param, grad.detach())

    def arm(self) -> None:
        """Have the end of the present graph task reported."""
        task = torch._C._current_graph_task_id()
        if task == -1 or task in self._armed:
            return
        if not self._armed:
            self._gradients.hide_grads()
            if not self._depth:
                self._residency.begin_backward()
        self._armed.add(task)
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(_Ended(weakref.ref(self), task))

    def task_ended(self, task: int) -> None:
        """Act on the end of a graph task; see [Note: end of backward]."""
        self._armed.discard(task)
        if self._armed:
            return
        self._entry.end_backward()
        self._open.clear()
        gathered, self._gathered_in_task = self._gathered_in_task, []
        if self._depth:
            for unit in gathered:
                self._let_go(unit)
            return
        self._borrowed.clear()
        if not self._hold_all:
            self._residency.release_all()
        self.backwards += 1
        if self.synced:
            with self.around_reductions():
                self._gradients.finish_backward()
            self._gradients.expose_grads()

    def abandon_backward(self) -> None:
        """Forget a backward that ended by an exception, with the gradients it left."""
        self._armed.clear()
        self._open.clear()
        self._gathered_in_task.clear()
        self._gradients.clear()
        self.end_step()

    def end_step(self) -> None:
        """Let held units go and forget calls that never ran backward."""
        self._hold_all = False
        self._borrowed.clear()
        self._inputs.clear()
        for unit in self._units:
            unit.calls_pending = 0
        self._residency.release_all()


class _Call:
    """The tensor hook of one forward call of one unit."""

    def __init__(self, tracker: Tracker, unit: Unit, module: nn.Module, needs_values: bool) -> None:
        self._tracker = weakref.ref(tracker)
        self._unit = unit
        self._module = module
        self._needs_values = needs_values
        self._counted = False

    def __call__(self, grad: Tensor) -> None:
        tracker = self._tracker()
        if tracker is None:
            return
        if not self._counted:
            self._counted = True
            self._unit.calls_pending -= 1
        tracker.open(self._unit, self._module, needs_values=self._needs_values)


class _TakeGrad:
    """The hook of every trainable parameter."""

    def __init__(self, tracker: weakref.ref[Tracker]) -> None:
        self._tracker = tracker

    def __call__(self, param: nn.Parameter) -> None:
        tracker = self._tracker()
        if tracker is not None:
            tracker.take_grad(param)


class _ArmFirst:
    """The hook of a tensor whose gradient may be the first thing seen of a backward."""

    def __init__(self, tracker: weakref.ref[Tracker]) -> None:
        self._tracker = tracker

    def __call__(self, grad: Tensor) -> None:
        tracker = self._tracker()
        if tracker is not None:
            tracker.arm()


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


def _enclosers(units: Sequence[Unit]) -> dict[int, frozenset[int]]:
    """For each hooked module, by id, the units of which a module contains it."""
    hooked = {id(module) for unit in units for module in unit.modules}
    found: dict[int, set[int]] = {}
    for unit in units:
        for module in unit.modules:
            for child in module.modules():
                if child is not module and id(child) in hooked:
                    found.setdefault(id(child), set()).add(unit.index)
    return {key: frozenset(indices) for key, indices in found.items()}
