"""A model under ZeRO: the one mechanism behind every stage, without the engine's verbs.

    ZeRO = layout x residency x collective x optimiser

``layout`` places parameters, ``residency`` gathers and releases them, the collectives move them,
the optimiser updates this rank's masters.  ``tracker`` drives all from what the model does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ds_comm.collectives import Collectives, broadcast
from ds_comm.errors import EditError, EngineError
from ds_comm.group import Group
from ds_comm.logging import get_logger
from ds_zero.agreement import Agreement, agree, reduce_late
from ds_zero.flat import FlatRun, Presence, build_units
from ds_zero.gradients import GradientFlow
from ds_zero.guards import guard_state_dicts
from ds_zero.held import share_held
from ds_zero.layout import ModelLayout
from ds_zero.newborn_access import unguard_newborns
from ds_zero.non_finite import NonFinite, find_non_finite
from ds_zero.optim.base import OptimizedRun, ShardOptimizer, StepGradients
from ds_zero.options import CoreOptions
from ds_zero.precision import Autocast, LossScaler, ScaleEntry
from ds_zero.registry import core_of, forget, register
from ds_zero.residency import Residency
from ds_zero.specs import cast_buffers, describe_params
from ds_zero.stages import STAGES
from ds_zero.trace import Trace
from ds_zero.tracker import Tracker
from ds_zero.units import param_names, plan_units

__all__ = ["StepReport", "ZeroCore"]

logger = get_logger(__name__)

_WATCHED_STEPS = 100
"""Steps after a skipped one in which local gradients are looked at."""


@dataclass(frozen=True)
class StepReport:
    """What one optimiser step did; the same on every rank."""

    grad_norm: float
    """L2 norm of the averaged gradients before clipping; may be non-finite."""
    applied: bool
    """Whether parameters were updated; not if the norm is non-finite."""
    problem: NonFinite | None = None
    """What was not finite, if the update was skipped."""


class ZeroCore:
    """Parameters in flat shards, with everything that moves them.  Construction is collective."""

    @torch.inference_mode(False)
    def __init__(
        self,
        model: nn.Module,
        groups: Sequence[Sequence[nn.Parameter]],
        collectives: Collectives,
        options: CoreOptions,
    ) -> None:
        """Shard the parameters of ``model`` with rank 0's values.

        Args:
            model: Any module tree; parameters keep their identity, their ``data`` is replaced.
            groups: Parameters by optimiser group; those in none are sharded but not updated.
            collectives: Of the group to shard over.
            options: The choices.

        Raises:
            EngineError: A parameter already belongs to another engine, or cannot be sharded.
        """
        self.model = model
        self.options = options
        self.collectives = collectives
        self.stage = STAGES[options.stage]
        self.params, self.aliases = param_names(model)
        owned = [name for name, param in self.params.items() if core_of(param) is not None]
        if owned:
            raise EngineError(
                f"{owned[0]!r} and {len(owned) - 1} more parameters belong to another engine; call "
                "its destroy() first"
            )
        self.trace = Trace()
        specs = describe_params(model, self.params, groups, options)
        plans = plan_units(model, specs, options.rules)
        group = collectives.group
        self.layout = ModelLayout.build(
            [plan.spec for plan in plans], group.size, options.granularity
        )
        self.units = build_units(
            self.layout,
            plans,
            self.params,
            self.stage,
            group.rank,
            lambda tensor: collectives.broadcast(tensor, 0),
            narrow_masters=options.narrow_masters,
            allocator=collectives.allocator,
        )
        unguard_newborns(model)
        if options.buffer_dtype is not None:
            cast_buffers(model, options.buffer_dtype)
        for buffer in model.buffers():
            _broadcast_buffer(buffer, group)
        share_held(model, group)
        self.residency = Residency(self.units, collectives, self.trace, prefetch=options.prefetch)
        self.scaler = LossScaler(options.scaling) if options.scaling is not None else None
        """Moves the loss scale; None where losses are not scaled."""
        self.entry = ScaleEntry(self.scaler)
        self.gradients = GradientFlow(
            self.units,
            self.stage,
            collectives,
            self.trace,
            accumulation=options.accumulation,
            accumulation_dtype=options.accumulation_dtype,
            wire_dtype=options.wire_dtype,
            averaging=options.averaging,
            entry=self.entry,
        )
        self.gradients.watching = self.scaler is not None
        self._watched_steps = 0
        self._losses: list[Tensor] = []
        self.tracker = Tracker(model, self.units, self.residency, self.gradients, self.entry, self)
        choice = options.autocast
        kind = self.gradients.device.type
        self._autocast = Autocast(model, kind, choice.dtype) if choice is not None else None
        released = {id(p): u for u in self.units if u.releasable for p in u.params}
        self._guards = guard_state_dicts(model, released)
        grouped = {id(param) for group in groups for param in group}
        self._untrained = [
            p for p in self.params.values() if p.requires_grad and id(p) not in grouped
        ]
        if self._untrained:
            logger.warning(
                "%d parameters require a gradient but are in no parameter group: they are sharded "
                "and never updated; freeze them to save their gradients",
                len(self._untrained),
            )
        self._versions: dict[int, int] = {}
        self._members = [
            (f"{prefix}.{name}" if prefix else name, module, name, param)
            for prefix, module in model.named_modules()
            for name, param in module._parameters.items()
            if param is not None
        ]
        self._note_versions()
        register(self, list(self.params.values()))
        self.optimizer: ShardOptimizer | None = None

    # ---- structure ---------------------------------------------------------------------------

    def optimized_runs(self) -> tuple[OptimizedRun, ...]:
        """The masters that an optimiser updates on this rank."""
        return tuple(
            OptimizedRun(run, None if unit.releasable or run.aliased else run.master_copy)
            for unit, members in zip(self.units, self.gradients.by_unit, strict=True)
            for run in (gradients.run for gradients in members)
        )

    def describe(self) -> str:
        """One line a unit, for people."""
        lines = [f"{'unit':40} {'elements':>12}  runs"]
        for unit in self.units:
            runs = ", ".join(
                f"{len(run.params)} x {str(run.layout.dtype).removeprefix('torch.')}"
                + ("" if run.layout.trainable else " frozen")
                for run in unit.runs
            )
            kept = "  resident" if unit.layout.resident else ""
            lines.append(f"{unit.name:40} {unit.layout.numel:12,}  {runs}{kept}")
        return "\n".join(lines)

    # ---- step --------------------------------------------------------------------------------

    def step(self) -> StepReport:
        """Average, check, clip, update and publish.  Collective.

        Raises:
            DivergenceError: Ranks issued different collectives since the last step.
            EditError: A parameter was changed in a way that would be lost.
            EngineError: There is no optimiser, or a parameter went unused and that is an error.
        """
        if self.optimizer is None:
            raise EngineError("step(): the engine was built without an optimiser")
        self.check_not_held("step()")
        self.tracker.end_step()
        self._check_edits()
        names = [unit.name for unit in self.units]
        agreement = agree(self.gradients, self.collectives, self.trace, names)
        problem = None
        if math.isfinite(agreement.grad_norm):
            self._check_used(agreement)
            self._update(agreement)
        else:
            problem = self._find_problem(names)
        self._watch_for(_WATCHED_STEPS if problem is not None else self._watched_steps - 1)
        self.forget_gradients()
        self.trace.reset()
        return StepReport(agreement.grad_norm, problem is None, problem)

    def check_not_held(self, verb: str) -> None:
        """Raise if a context keeps values gathered that are about to change.

        Raises:
            EngineError: One does.
        """
        held = [unit.name for unit in self.units if unit.releasable and unit.held]
        if held:
            raise EngineError(
                f"{verb} inside of a context that keeps {held[0]!r} gathered: it would go on with "
                "the old values. Leave the context first."
            )

    def reduce_gradients(self) -> None:
        """Reduce what backward has left local.  Collective."""
        reduce_late(self.gradients, self.collectives)
        self.gradients.expose_grads()

    def note_loss(self, loss: Tensor) -> None:
        """Remember a loss of this window, to be looked at if the step has to be skipped."""
        self._losses.append(loss.detach())

    def forget_gradients(self) -> None:
        """Drop the gradients and losses of this window."""
        self.gradients.hide_grads()
        self.gradients.clear()
        self._losses.clear()

    def _find_problem(self, unit_names: Sequence[str]) -> NonFinite:
        finite = all(bool(torch.isfinite(loss).all()) for loss in self._losses)
        return find_non_finite(
            self.gradients, self.collectives, list(self.params), unit_names, loss_finite=finite
        )

    def _watch_for(self, steps: int) -> None:
        """Look at local gradients for some steps; see [Note: first non-finite gradient]."""
        self._watched_steps = max(steps, 0)
        self.gradients.watching = self.scaler is not None or self._watched_steps > 0

    def _update(self, agreement: Agreement) -> None:
        assert self.optimizer is not None
        limit = self.options.clip_norm
        # torch.nn.utils.clip_grad_norm_ uses the same 1e-6.
        factor = limit / (agreement.grad_norm + 1e-6) if limit > 0 else 1.0
        self.optimizer.update(
            StepGradients(
                grads=[g.reduced if g.has_reduced else None for g in self.gradients.all_runs()],
                used=[mask.tolist() for mask in agreement.used],
                scale=min(factor, 1.0) / self.gradients.multiplier,
            )
        )
        self.publish(copied=True)

    def publish(self, *, frozen: bool = False, copied: bool = False) -> None:
        """Bring updated masters to the parameters that are kept whole.  Collective.

        Args:
            frozen: Do so for parameters that are not trained too.
            copied: The optimiser has written this rank's part already.
        """
        works = []
        for unit in self.units:
            if unit.releasable:
                continue
            for run in unit.runs:
                if run.layout.trainable or frozen:
                    if not copied:
                        run.publish_master()
                    if run.master.numel() != run.layout.numel:
                        works.append(self.collectives.gather(run.flat, run.layout.name))
        for work in works:
            work.wait()
        trainable = self.gradients.trainable_params()
        if trainable:
            torch.autograd.graph.increment_version(trainable)
        self._note_versions()

    def _check_used(self, agreement: Agreement) -> None:
        if self.options.ignore_unused:
            return
        unused = [
            slot.spec.name
            for gradients, mask in zip(self.gradients.all_runs(), agreement.used, strict=True)
            for slot, flag in zip(gradients.run.layout.slots, mask.tolist(), strict=True)
            if not flag
        ]
        if unused:
            raise EngineError(
                f"no rank computed a gradient for {unused}, and "
                "zero_optimization.ignore_unused_parameters is false. Use them in the loss, "
                "freeze them, or set it to true."
            )

    # ---- edits -------------------------------------------------------------------------------

    def _kept_copies(self) -> list[tuple[str, nn.Parameter]]:
        """Parameters that are whole here but only a copy of a master in another dtype."""
        return [
            (slot.spec.name, param)
            for unit in self.units
            if not unit.releasable
            for run in unit.runs
            if not run.aliased
            for slot, param in zip(run.layout.slots, run.params, strict=True)
        ]

    def _note_versions(self) -> None:
        self._versions = {id(param): param._version for _, param in self._kept_copies()}

    def _check_edits(self) -> None:
        for full, module, name, param in self._members:
            if module._parameters.get(name) is not param:
                raise EditError(
                    f"parameter {full!r} was replaced by another object after initialize(), which "
                    "would never be trained. Change its values inside GatheredParameters, or "
                    "build a new engine after engine.destroy()."
                )
        self._check_strays()
        for unit in self.units:
            for run in unit.runs:
                if unit.presence is Presence.PRESENT:
                    run.check_exposed()
                elif unit.presence is Presence.RELEASED:
                    run.check_hidden()
        for name, param in self._kept_copies():
            if param._version != self._versions[id(param)]:
                raise EditError(
                    f"parameter {name!r} was written to, but it is a low-precision copy of an fp32 "
                    "master, which would overwrite the change. Edit it inside `with "
                    "ds_zero.GatheredParameters([param], modifier_rank=0):`, or load values with "
                    "engine.load_module_state_dict()."
                )

    def _check_strays(self) -> None:
        """Refuse gradients of parameters that no optimiser would ever update."""
        for param in self._untrained:
            param.grad = None
        taken = {id(param) for param in self.gradients.trainable_params()}
        strays = [
            name
            for name, param in self.model.named_parameters()
            if param.grad is not None and id(param) not in taken
        ]
        if strays:
            raise EditError(
                f"{strays} have gradients, but when the engine was built they were frozen or not "
                "there, so they are never trained. Build a new engine after engine.destroy(), or "
                "call requires_grad_(False) on them."
            )

    def accept_edits(self, params: Sequence[nn.Parameter]) -> None:
        """Make the masters follow the present values of ``params``, which are equal on all ranks.

        Args:
            params: Gathered parameters of this model.
        """
        wanted = {id(param) for param in params}
        for unit in self.units:
            for run in unit.runs:
                for index, param in enumerate(run.params):
                    if id(param) in wanted:
                        run.adopt(index)
        self._note_versions()

    def full_values(self, run: FlatRun) -> tuple[Tensor, ...]:
        """The values of a present run's parameters, in their shapes.  Collective.

        In the compute dtype; under autocast, where parameters count as fp32, in that of the master.
        """
        if self.options.autocast is None or run.master.dtype == run.layout.dtype:
            return run.views
        flat = self.full_masters(run)
        return tuple(flat[s.start : s.stop].view(s.spec.shape) for s in run.layout.slots)

    def full_masters(self, run: FlatRun) -> Tensor:
        """The master values of a whole run, ``[numel]``; not to be written to.  Collective."""
        if run.master.numel() == run.layout.numel:
            return run.master
        flat = torch.empty(run.layout.numel, dtype=run.master.dtype, device=run.master.device)
        flat[slice(*run.layout.shard_range(run.shard))] = run.master_shard()
        self.collectives.gather(flat, run.layout.name).wait()
        return flat

    @torch.no_grad()
    def load_values(self, values: Mapping[str, Tensor]) -> None:
        """Set parameters by name, in full precision.  All ranks pass the same values.

        Args:
            values: Full tensors, by first name; parameters that are missing keep their values.
        """
        self.tracker.end_step()
        for unit in self.units:
            for run in unit.runs:
                begin, end = run.master_range
                for slot, view in zip(run.layout.slots, run.views, strict=True):
                    value = values.get(slot.spec.name)
                    if value is None:
                        continue
                    low, high = max(slot.start, begin), min(slot.stop, end)
                    flat = value.detach().reshape(-1)
                    if low < high:
                        part = flat[low - slot.start : high - slot.start]
                        run.master[low - begin : high - begin].copy_(part)
                    if unit.presence is Presence.PRESENT:
                        view.copy_(value)
        self._note_versions()

    def destroy(self) -> None:
        """Take hooks off the model and gather all parameters into ordinary tensors.  Collective."""
        for unit in self.units:
            self.residency.ensure(unit)
            for run in unit.runs:
                values = self.full_values(run)
                for param, value in zip(run.params, values, strict=True):
                    param.data = value.clone()
        self.tracker.remove()
        if self._autocast is not None:
            self._autocast.remove()
        for handle in self._guards:
            handle.remove()
        forget(list(self.params.values()))


def _broadcast_buffer(buffer: Tensor, group: Group) -> None:
    """Set a buffer of any dtype and strides to rank 0's values."""
    if not buffer.numel():
        return
    whole = buffer.detach().clone(memory_format=torch.contiguous_format)
    broadcast(whole, group)
    if not torch.equal(whole, buffer):
        # An expanded buffer cannot be written to; its values become a tensor of their own.
        overlapping = any(
            s == 0 and n > 1 for s, n in zip(buffer.stride(), buffer.shape, strict=True)
        )
        if overlapping:
            buffer.data = whole
        else:
            buffer.copy_(whole)
