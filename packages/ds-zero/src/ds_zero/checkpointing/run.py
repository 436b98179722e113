"""Running a function without keeping its activations, on top of ``torch.utils.checkpoint``.

torch decides what is recomputed and when, and restores the random states of the CPU and the
device and the autocast state.  Added here are the way in which inputs are kept (``storage``), the
named random states (``rng``), nested arguments and results, and times.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from ds_comm.collectives import Collectives, collectives_for
from ds_comm.device import current_device, synchronize
from ds_comm.errors import EngineError
from ds_comm.group import Group
from ds_comm.logging import get_logger, log_once
from ds_zero.checkpointing.rng import RngTracker
from ds_zero.checkpointing.storage import ActivationStore, make_store
from ds_zero.config import ActivationCheckpointingSection
from ds_zero.saved import checkpoint_saves, layered_saved_hooks
from ds_zero.tensors import tensors_in

__all__ = ["ActivationCheckpointing"]

logger = get_logger(__name__)


class ActivationCheckpointing:
    """Runs functions whose activations are recomputed in backward."""

    def __init__(
        self,
        options: ActivationCheckpointingSection | None = None,
        tensor: Group | None = None,
        tracker: RngTracker | None = None,
    ) -> None:
        """Collective over ``tensor`` if that has several ranks.

        Args:
            options: How inputs are kept; by default as they are.
            tensor: The tensor-parallel ranks, whose activations are equal.
            tracker: Named random states that a recomputation restores.
        """
        self.options = options or ActivationCheckpointingSection()
        self.tensor = tensor or Group.solo()
        self.tracker = tracker or RngTracker()
        self._store: ActivationStore | None = None
        self._collectives: Collectives | None = None
        if self.tensor.size > 1 and self.options.partition_activations:
            self._collectives = collectives_for(self.tensor)
        elif self.options.partition_activations:
            log_once(
                logger,
                "info",
                "partition_activations changes nothing: there is one tensor-parallel rank",
            )
        if self.options.cpu_checkpointing and current_device().type == "cpu":
            log_once(
                logger, "info", "cpu_checkpointing changes nothing: activations are on the host"
            )
        self.reset()

    def reset(self) -> None:
        """Drop the buffers of stored inputs; what backward still needs stays alive."""
        self._store = make_store(self.options, self._collectives, current_device())

    def checkpoint(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run ``function`` by reentrant autograd: no graph in forward, a nested one in backward.

        Only ``backward()`` works on the result, not ``torch.autograd.grad``.  Where no argument
        requires a gradient, this is :meth:`non_reentrant_checkpoint`: reentrant autograd would
        lose the gradients of the parameters.

        Args:
            function: Takes the arguments; must compute the same again.
            *args: Tensors, tuples, lists and dictionaries of them, and anything else.
            **kwargs: The same.

        Returns:
            What ``function`` returns.

        Raises:
            EngineError: An argument or a result hides tensors from autograd in an object other
                than a tuple, list, dictionary or registered pytree node.
        """
        return self._run(function, args, kwargs, reentrant=True)

    def non_reentrant_checkpoint(
        self, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Run ``function`` in one graph, whose saved tensors are recomputed when first needed.

        Args:
            function: Takes the arguments; must compute the same again.
            *args: Anything.
            **kwargs: Anything.

        Returns:
            What ``function`` returns.
        """
        return self._run(function, args, kwargs, reentrant=False)

    def _run(self, function: Callable[..., Any], args: Any, kwargs: Any, *, reentrant: bool) -> Any:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs), is_leaf=_is_opaque)
        reentrant = reentrant and any(_needs_grad(leaf) for leaf in leaves)
        segment = _Segment(function, spec, self, flat_results=reentrant)
        with self._hooks():
            if not reentrant:
                return torch_checkpoint(segment, *leaves, use_reentrant=False)
            _refuse_hidden(leaves)
            results = _Reentrant.apply(segment, True, *leaves)  # type: ignore[no-untyped-call]
        assert segment.results is not None
        return tree_unflatten(results, segment.results)

    def _hooks(self) -> AbstractContextManager[None]:
        # Inside of another checkpoint nothing is stored: its own inputs are enough.
        if self._store is None or checkpoint_saves():
            return nullcontext()
        return layered_saved_hooks(self._store.take, self._store.give)

    @contextmanager
    def boundary(self, what: str) -> Iterator[None]:
        """Synchronise and log the time of ``what``, as far as the options ask for it."""
        if not (self.options.synchronize_checkpoint_boundary or self.options.profile):
            yield
            return
        synchronize()
        begin = time.perf_counter()
        try:
            yield
        finally:  # torch ends a recomputation by an exception when nothing more is needed
            synchronize()
            if self.options.profile:
                passed_ms = 1e3 * (time.perf_counter() - begin)
                logger.info("checkpoint: %s took %.3f ms", what, passed_ms)


class _Segment:
    """A checkpointed function on flat arguments; the second call and later ones recompute."""

    def __init__(
        self,
        function: Callable[..., Any],
        spec: TreeSpec,
        owner: ActivationCheckpointing,
        *,
        flat_results: bool,
    ) -> None:
        self.results: TreeSpec | None = None
        """Structure of the results, if they are returned flat."""
        self.owner = owner
        self._function = function
        self._spec = spec
        self._flat_results = flat_results
        self._states: dict[str, Tensor] | None = None

    def __call__(self, *leaves: Any) -> Any:
        args, kwargs = tree_unflatten(leaves, self._spec)
        tracker = self.owner.tracker
        if self._states is None:
            self._states = tracker.get_states()
            with self.owner.boundary("forward"):
                return self._finish(self._function(*args, **kwargs))
        present = tracker.get_states()
        tracker.set_states(self._states)
        try:
            with self.owner.boundary("recomputation"):
                return self._finish(self._function(*args, **kwargs))
        finally:
            tracker.set_states(present)

    def _finish(self, results: Any) -> Any:
        if not self._flat_results:
            return results
        leaves, self.results = tree_flatten(results)
        _refuse_hidden(leaves, results=True)
        return tuple(leaves)


class _Reentrant(CheckpointFunction):
    """torch's function, with the boundary around its backward."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        with ctx.run_function.owner.boundary("recomputation and backward"):
            return CheckpointFunction.backward(ctx, *grads)


def _is_opaque(value: Any) -> bool:
    """Whether an argument is passed on as the very object: it may have a state of its own."""
    named_tuple = isinstance(value, tuple) and hasattr(value, "_fields")
    return type(value) not in (tuple, list, dict) and not named_tuple


def _needs_grad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _refuse_hidden(leaves: list[Any], *, results: bool = False) -> None:
    """Refuse objects whose tensors reentrant autograd would cut off without a word."""
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            continue
        inside = [tensor for tensor in tensors_in(leaf) if tensor.is_floating_point()]
        if any(results or tensor.requires_grad for tensor in inside):
            what = "result" if results else "argument"
            raise EngineError(
                f"checkpoint(): the {what} of type {type(leaf).__name__} holds tensors that "
                "reentrant autograd does not see, so their gradients would be lost; use a tuple, "
                "list or dictionary, or non_reentrant_checkpoint()"
            )
