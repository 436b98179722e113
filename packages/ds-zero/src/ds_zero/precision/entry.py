"""Where the loss scale enters a backward pass, and by what arriving gradients are multiplied.

[Note: entry of the loss scale]
``engine.backward(loss)`` and ``engine.scale(loss).backward()`` multiply the loss itself, so the
scale holds for *everything* in that backward, whichever engine's parameters it reaches.  A plain
``loss.backward()`` tells nobody where it starts, so the scale enters where gradients enter the
model: at what its forward returned.  Three cases remain in which no hook could do that, and each
is an error that names ``engine.scale``: gradients that reach a parameter without having passed an
output, gradients that leave the model again through an input, and a scaled loss that is seen to be
added to an unscaled one.  Two things that no hook can see stay with the caller of
``loss.backward()``: a term of the loss that comes from inside of the model beside its outputs is
not scaled, and what the loss function computes in fp16 outside of the model underflows as if there
were no scale.  A warning says so once.

A model with several outputs returns aliases of them.  One output is often computed from another
(a loss from logits), and a gradient that came through the first must not be scaled again at the
second; an alias only sees what the caller does with it.

Gradients are stored as they arrive, multiplied by the scale of the first one in the accumulation
window.  The optimiser divides by that scale, not by what the scaler says later.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ds_comm.errors import EngineError
from ds_comm.logging import get_logger, log_once
from ds_zero.precision.scaler import LossScaler
from ds_zero.tensors import changed_or_new, map_tensors, tensor_versions, tensors_in

__all__ = ["ScaleEntry"]

logger = get_logger(__name__)

_USE_SCALE = "Call engine.backward(loss), or engine.scale(loss).backward()."


class _Running:
    """What is known of the backward that runs in this process.

    A backward may pass through several engines, and its hooks run in autograd's own threads, so
    there is one of these in a process.  Two threads that run scaled backwards at the same time
    would confuse it; their collectives could not be told apart either.
    """

    def __init__(self) -> None:
        self.scale: float | None = None
        """By what the whole backward is multiplied; None if it began without a scale."""
        self.task: int | None = None
        """The graph task that began with a scaled loss; None under ``engine.backward``."""
        self.outputs_task: int | None = None
        """The graph task in which the scale last entered at the outputs of a model."""

    def begin(self, scale: float) -> None:
        """Note that the present graph task began with a loss times ``scale``."""
        task = torch._C._current_graph_task_id()
        if self.scale is not None and self.task is None:
            raise EngineError(
                "engine.backward() was given a loss that engine.scale() had multiplied already; "
                "give it the plain loss"
            )
        if self.outputs_task == task:
            raise EngineError(
                "this backward adds a loss of engine.scale() to one without; pass the whole loss "
                "through engine.scale()"
            )
        if self.scale is not None and self.task == task:
            if self.scale != scale:
                raise EngineError(
                    f"this backward adds losses of different scales, {self.scale:g} and {scale:g}; "
                    "run one backward for each engine"
                )
            return
        self.scale, self.task = scale, task
        torch.autograd.Variable._execution_engine.queue_callback(lambda: self.end(task))

    def end(self, task: int | None) -> None:
        """Forget a scaled backward."""
        if self.task == task:
            self.scale = self.task = None

    def forget_ended(self) -> None:
        """Forget a scaled backward that an exception ended without a callback.

        Called in another outermost graph task, or outside of any.
        """
        if self.task is not None and self.task != torch._C._current_graph_task_id():
            self.end(self.task)


_RUNNING = _Running()


class ScaleEntry:
    """The loss scale of one engine, as far as backward passes are concerned.

    See [Note: entry of the loss scale].
    """

    def __init__(self, scaler: LossScaler | None) -> None:
        """Serve ``scaler``; without one losses are not multiplied."""
        self.scaler = scaler
        self._entered: float | None = None
        """The scale that entered at the outputs of the model in the present backward."""

    @property
    def scale(self) -> float:
        """What a loss is multiplied by now."""
        return self.scaler.scale if self.scaler is not None else 1.0

    # ---- at the loss -------------------------------------------------------------------------

    def multiply(self, loss: Tensor) -> Tensor:
        """Return ``loss`` times the scale, in fp32 where it is a scalar; see ``Engine.scale``."""
        if self.scaler is None:
            return loss
        if not loss.requires_grad:
            raise EngineError(
                "scale(): the loss has no graph; was it computed under no_grad, or detached?"
            )
        scale = self.scale
        scaled = loss * torch.tensor(scale, dtype=torch.float32, device=loss.device)
        scaled.register_hook(_AtLoss(scale))
        return scaled

    @contextmanager
    def scaled_backward(self) -> Iterator[float]:
        """A context in which every gradient is multiplied by the scale from the start.

        Yields:
            The scale: the gradient of the loss with which to begin.
        """
        if self.scaler is None:
            yield 1.0
            return
        _RUNNING.scale, _RUNNING.task = self.scale, None
        try:
            yield self.scale
        finally:
            _RUNNING.end(None)

    # ---- at the outputs ----------------------------------------------------------------------

    def guard_outputs(self, inputs: Any, output: Any) -> Any:
        """Let the scale of a plain ``loss.backward()`` enter at ``output``.

        Args:
            inputs: What the model was given.
            output: What it returned.

        Returns:
            What is to be returned instead, or None for ``output`` itself.
        """
        if self.scaler is None or torch._C._functorch.peek_interpreter_stack() is not None:
            return None
        outputs = {id(t): t for t in changed_or_new(output, tensor_versions(inputs))}
        if not outputs:
            return None
        leaks = any(tensor.requires_grad for tensor in tensors_in(inputs))
        nested = torch._C._current_graph_task_id() != -1
        hook = _AtOutput(weakref.ref(self), leaks, nested)
        if len(outputs) == 1:
            next(iter(outputs.values())).register_hook(hook)
            return None
        aliases = {key: tensor.view_as(tensor) for key, tensor in outputs.items()}
        for alias in aliases.values():
            alias.register_hook(hook)
        return map_tensors(output, lambda tensor: aliases.get(id(tensor), tensor))

    def enter_at_output(self, grad: Tensor, *, leaks: bool, nested: bool) -> Tensor | None:
        """Multiply the gradient of an output, unless the whole backward is multiplied already.

        Args:
            grad: The gradient.
            leaks: Whether gradients leave the model through an input.
            nested: Whether a checkpoint recomputes the model within an outer backward.
        """
        if not nested:
            _RUNNING.forget_ended()
        if _RUNNING.scale is not None:
            return None
        if leaks:
            raise EngineError(
                "loss.backward() under loss scaling: an input of the model needs a gradient too, "
                f"which would leave the model multiplied by the scale. {_USE_SCALE}"
            )
        if grad.dtype == torch.float16 and grad.numel() > 1:
            log_once(
                logger,
                "warning",
                "loss.backward() under loss scaling: the scale enters at the outputs of the model. "
                "What the loss function computes outside of it may underflow in fp16, and terms "
                "that do not come from the outputs are not scaled. %s",
                _USE_SCALE,
            )
        self._entered = self.scale
        _RUNNING.outputs_task = torch._C._current_graph_task_id()
        return grad * self._entered

    # ---- at the parameters -------------------------------------------------------------------

    def arrived(self) -> float:
        """By what a gradient that arrives now is multiplied.

        Raises:
            EngineError: No scale has entered this backward.
        """
        if _RUNNING.scale is not None:
            return _RUNNING.scale
        if self.scaler is None:
            return 1.0
        if self._entered is None:
            raise EngineError(
                "loss.backward() under loss scaling: a gradient reached a parameter without having "
                "passed an output of the model's forward, so it could not be scaled. "
                f"{_USE_SCALE}"
            )
        return self._entered

    def end_backward(self) -> None:
        """Forget what entered the backward that has ended, or was abandoned."""
        self._entered = None

    def begin_forward(self) -> None:
        """Forget a scaled backward that an exception ended; called outside of any backward."""
        self._entered = None
        _RUNNING.forget_ended()


class _AtLoss:
    """The hook of a loss that was multiplied."""

    def __init__(self, scale: float) -> None:
        self._scale = scale

    def __call__(self, grad: Tensor) -> None:
        _RUNNING.begin(self._scale)


class _AtOutput:
    """The hook of an output of the model."""

    def __init__(self, entry: weakref.ref[ScaleEntry], leaks: bool, nested: bool) -> None:
        self._entry = entry
        self._leaks = leaks
        self._nested = nested

    def __call__(self, grad: Tensor) -> Tensor | None:
        entry = self._entry()
        if entry is None:
            return None
        return entry.enter_at_output(grad, leaks=self._leaks, nested=self._nested)
