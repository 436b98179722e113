"""The training engine: the verbs around a model under ZeRO."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ds_comm.device import current_device
from ds_comm.errors import ConfigError, EngineError
from ds_comm.group import Group
from ds_comm.logging import get_logger
from ds_zero.config import BatchSizes, EngineConfig, resolve_batch_sizes
from ds_zero.core import StepReport, ZeroCore
from ds_zero.data import DistributedLoader
from ds_zero.export import full_state_dict, load_state_dict, save_weights
from ds_zero.non_finite import NonFinite
from ds_zero.persistence import load_engine, save_engine
from ds_zero.protocols import Schedule
from ds_zero.tensors import map_tensors

if TYPE_CHECKING:
    from ds_zero.compiled import CompiledBlocks

__all__ = ["Counters", "Engine"]

logger = get_logger(__name__)


@dataclass
class Counters:
    """How far training has come; stored in checkpoints."""

    micro_steps: int = 0
    """Calls of ``step()``."""
    global_steps: int = 0
    """Accumulation windows that ended, skipped updates included."""
    global_samples: int = 0
    """Samples of those windows over all ranks."""
    skipped_steps: int = 0
    """Windows whose update was skipped because the gradient norm was not finite."""


class Engine(nn.Module):
    """A model that trains under ZeRO.  Every verb is called on all ranks, in the same order.

    Example::

        engine, optimizer, loader, schedule = ds_zero.initialize(model=model, config="ds.json")
        for batch in loader:
            loss = engine(batch)
            engine.backward(loss)
            engine.step()
    """

    def __init__(
        self,
        model: nn.Module,
        core: ZeroCore,
        config: EngineConfig,
        data_group: Group,
        schedule: Schedule | None = None,
    ) -> None:
        """Put the pieces together; use :func:`ds_zero.initialize`.

        Args:
            model: The module whose parameters ``core`` holds.
            core: The sharded model.
            config: The resolved configuration.
            data_group: Ranks that see different data.
            schedule: Moves the learning rate after each applied update.
        """
        super().__init__()
        self.module = model
        self.core = core
        self.config = config
        self.data_group = data_group
        self.lr_scheduler = schedule
        self.counters = Counters()
        self.training_dataloader: DistributedLoader | None = None
        self.collate_fn: Callable[[list[Any]], Any] | None = None
        self.device = current_device()
        self._boundary: bool | None = None
        self._in_no_sync = False
        self._warned_no_sync = False
        self._grad_norm: float | None = None
        self._applied = False
        self._problem: NonFinite | None = None
        self._compiled: CompiledBlocks | None = None

    # ---- training verbs ----------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; arguments and result are the model's own.

        With ``fp16.auto_cast`` floating-point tensors among the arguments are cast to fp16.
        """
        self._prepare()
        if self.config.fp16.enabled and self.config.fp16.auto_cast:
            args, kwargs = map_tensors((args, kwargs), _half)
        return self.module(*args, **kwargs)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> Tensor:
        """Compute gradients of ``loss`` and average them as the stage wants.

        ``loss.backward()`` does the same.  Gradients of several backwards before one ``step()``
        add up, at every stage.  Under loss scaling this is the better way: see :meth:`scale`.

        Args:
            loss: Scalar with a graph, not divided by the number of accumulation steps.
            retain_graph: Keep the graph for another backward.

        Returns:
            ``loss`` itself.

        Raises:
            EngineError: ``loss`` is no scalar, or has no graph.
        """
        if loss.numel() != 1:
            raise EngineError(
                f"backward() needs a scalar loss, got shape {tuple(loss.shape)}; reduce it, or "
                "call loss.backward(gradient) yourself"
            )
        if not loss.requires_grad:
            raise EngineError(
                "backward(): the loss has no graph; was it computed under no_grad, or detached?"
            )
        self._prepare()
        self.core.note_loss(loss)
        with self.core.entry.scaled_backward() as scale:
            loss.backward(torch.full_like(loss, scale), retain_graph=retain_graph)
        return loss

    def scale(self, loss: Tensor) -> Tensor:
        """Multiply a loss by the loss scale, for ``engine.scale(loss).backward()``.

        Needed where the engine cannot see where a plain ``loss.backward()`` begins: the loss has
        terms that are no outputs of the model's forward, or an input of the model needs a gradient
        too.  Gradients of tensors that are not the engine's are multiplied by the scale then, as
        under torch's ``GradScaler``.

        Args:
            loss: The whole loss, with a graph.

        Returns:
            The product; ``loss`` itself where losses are not scaled.

        Raises:
            EngineError: ``loss`` has no graph.
        """
        scaled = self.core.entry.multiply(loss)
        self.core.note_loss(loss)
        return scaled

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """End a micro-step; at an accumulation boundary update the parameters.

        A non-finite gradient norm skips the update on every rank: the schedule does not move,
        ``skipped_steps`` and ``global_steps`` advance, and a warning names the first gradient that
        is not finite.

        Args:
            lr_kwargs: Keyword arguments for the schedule's ``step``.

        Raises:
            EngineError: Called inside ``no_sync``, or without an optimiser.
            DivergenceError: Ranks ran different modules; nothing was updated.
            LossScaleError: Gradients overflow at the smallest loss scale; the step was skipped.
        """
        if self._in_no_sync:
            raise EngineError("step() inside no_sync(): leave the context first")
        boundary = self.is_gradient_accumulation_boundary()
        self.counters.micro_steps += 1
        self._applied = False
        if not boundary:
            self._prepare()
            return
        if isinstance(self.lr_scheduler, ReduceLROnPlateau) and not lr_kwargs:
            raise EngineError(
                'ReduceLROnPlateau needs its metric: step(lr_kwargs={"metrics": value})'
            )
        report = self.core.step()
        self._grad_norm = report.grad_norm
        self._applied = report.applied
        self._problem = report.problem
        self.counters.global_steps += 1
        self.counters.global_samples += self.train_batch_size()
        if report.applied:
            if self.lr_scheduler is not None:
                self.lr_scheduler.step(**(lr_kwargs or {}))
        else:
            self.counters.skipped_steps += 1
        self._follow_scale(report)
        self._prepare()
        self._report_progress()
        if self.core.scaler is not None:
            self.core.scaler.check()

    def _follow_scale(self, report: StepReport) -> None:
        """Move the loss scale, and tell of a step that was skipped."""
        before, scaler = self.loss_scale, self.core.scaler
        if scaler is not None:
            scaler.update(overflow=not report.applied)
        problem = report.problem
        if problem is not None:
            moved = f"; loss scale {before:g} -> {self.loss_scale:g}" if scaler is not None else ""
            # An overflow under loss scaling is part of the method.
            routine = scaler is not None and not problem.loss_ranks
            logger.log(
                logging.INFO if routine else logging.WARNING,
                "step %d skipped: the gradient norm is %s; %s%s",
                self.counters.global_steps,
                report.grad_norm,
                problem,
                moved,
            )

    def describe_start(self) -> None:
        """Log configuration and units where the configuration asks for it (``dump_state``)."""
        if self.config.dump_state:
            logger.info("configuration: %s", self.config.model_dump_json(indent=2))
            logger.info("units:\n%s", self.core.describe())

    def _prepare(self) -> None:
        """Tell the tracker whether the next backward reduces."""
        boundary = self.is_gradient_accumulation_boundary()
        each = self.core.options.stage >= 2
        self.core.tracker.synced = not self._in_no_sync and (each or boundary)

    def _report_progress(self) -> None:
        every = self.config.steps_per_print
        if every and self.counters.global_steps % every == 0:
            logger.info(
                "step=%d, skipped=%d, lr=%s, grad_norm=%.4g",
                self.counters.global_steps,
                self.counters.skipped_steps,
                self.get_lr(),
                self._grad_norm if self._grad_norm is not None else float("nan"),
            )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep gradients local; the next backward outside reduces them too.

        Raises:
            EngineError: The context is entered twice.
        """
        if self._in_no_sync:
            raise EngineError("no_sync() is already active")
        if self.core.options.stage >= 2 and not self._warned_no_sync:
            self._warned_no_sync = True
            logger.warning(
                "no_sync() at stage %d keeps unsharded gradients: it costs the memory that the "
                "stage saves",
                self.core.options.stage,
            )
        self._in_no_sync = True
        self.core.gradients.accumulating = True
        self._prepare()
        try:
            yield
        finally:
            self._in_no_sync = False
            self.core.gradients.accumulating = self.core.gradients.accumulation > 1
            self._prepare()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of this accumulation window.  ``step()`` does it by itself."""
        self.core.forget_gradients()

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next ``step()`` updates the parameters."""
        if self._boundary is not None:
            return self._boundary
        return (self.counters.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Decide by hand whether the next ``step()`` updates, until this is called again.

        Args:
            is_boundary: The decision, or None to go back to counting micro-steps.
        """
        self._boundary = is_boundary
        self._prepare()

    def was_step_applied(self) -> bool:
        """Whether the last ``step()`` updated the parameters."""
        return self._applied

    # ---- reading -----------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        """Look up what the engine does not have on the model."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            modules = self.__dict__.get("_modules", {})
            if "module" in modules:
                return getattr(modules["module"], name)
            raise

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimiser; its ``param_groups`` hold the hyper-parameters."""
        return self.core.optimizer.optimizer if self.core.optimizer is not None else None

    @property
    def micro_steps(self) -> int:
        """Calls of ``step()`` so far."""
        return self.counters.micro_steps

    @property
    def global_steps(self) -> int:
        """Optimiser steps so far, skipped ones included."""
        return self.counters.global_steps

    @property
    def global_samples(self) -> int:
        """Samples of all optimiser steps so far."""
        return self.counters.global_samples

    @property
    def skipped_steps(self) -> int:
        """Optimiser steps whose update was skipped."""
        return self.counters.skipped_steps

    @property
    def dp_world_size(self) -> int:
        """Number of ranks that see different data."""
        return self.data_group.size

    @property
    def global_rank(self) -> int:
        """Rank of this process among all."""
        return self.data_group.ranks[self.data_group.rank]

    def zero_optimization_stage(self) -> int:
        """The ZeRO stage, 0 to 3."""
        return self.core.options.stage

    def get_global_grad_norm(self) -> float | None:
        """L2 norm of the last step's averaged gradients before clipping; None before any."""
        return self._grad_norm

    def get_non_finite_gradient(self) -> NonFinite | None:
        """Why the last step was skipped; None if it was not."""
        return self._problem

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied by now; 1 where they are not scaled."""
        return self.core.entry.scale

    @property
    def cur_scale(self) -> float:
        """The same as :attr:`loss_scale`."""
        return self.loss_scale

    def get_loss_scale(self) -> float:
        """The same as :attr:`loss_scale`."""
        return self.loss_scale

    def get_lr(self) -> list[float]:
        """Learning rate of each parameter group."""
        return [float(group["lr"]) for group in self._groups()]

    def get_mom(self) -> list[Any]:
        """Momentum, or betas, of each parameter group."""
        return [group.get("betas", group.get("momentum")) for group in self._groups()]

    def _groups(self) -> list[dict[str, Any]]:
        optimizer = self.optimizer
        return optimizer.param_groups if optimizer is not None else []

    def get_batch_info(self) -> tuple[int, int, int]:
        """(train batch, micro-batch per rank, accumulation steps)."""
        train, micro, accumulation = self.config.batch
        return train, micro, accumulation

    def train_batch_size(self) -> int:
        """Samples of one optimiser step over all ranks."""
        return self.config.batch.train

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of one forward pass on one rank."""
        return self.config.batch.micro

    def gradient_accumulation_steps(self) -> int:
        """Micro-steps per optimiser step."""
        return self.config.batch.accumulation

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the samples of one optimiser step by changing the accumulation.

        Args:
            train_batch_size: A multiple of micro-batch size times ranks.

        Raises:
            ConfigError: It is no such multiple.
        """
        micro = self.train_micro_batch_size_per_gpu()
        self._resize(resolve_batch_sizes(train_batch_size, micro, None, self.data_group.size))

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the samples of one forward pass; accumulation stays, the total follows.

        Args:
            micro_batch_size: Samples, at least 1.

        Raises:
            ConfigError: It is not positive.
        """
        steps = self.gradient_accumulation_steps()
        self._resize(resolve_batch_sizes(None, micro_batch_size, steps, self.data_group.size))

    def _resize(self, sizes: BatchSizes) -> None:
        self.config = self.config.model_copy(
            update={
                "train_batch_size": sizes.train,
                "train_micro_batch_size_per_gpu": sizes.micro,
                "gradient_accumulation_steps": sizes.accumulation,
            }
        )
        self.core.gradients.set_accumulation(sizes.accumulation)
        # A new window begins, whatever was left of the old one.
        self.counters.micro_steps = self.counters.global_steps * sizes.accumulation
        self.core.forget_gradients()
        self._prepare()

    # ---- compilation -------------------------------------------------------------------------

    def compile(
        self,
        backend: str | Callable[..., Any] = "inductor",
        compile_kwargs: Mapping[str, Any] | None = None,
        schedule: None = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compile the ``forward`` of each block with ``torch.compile``; hooks stay outside.

        Blocks are compiled when they next run.  Calling it again compiles anew.

        Args:
            backend: As in ``torch.compile``.
            compile_kwargs: More keyword arguments of ``torch.compile``.
            schedule: Passes over the graph of the whole model, which does not exist here.
            compiled_autograd_enabled: Compile backward with the hooks in it: not possible.

        Raises:
            ConfigError: An argument asks for what is not there, or torch lacks the backend.
        """
        if schedule is not None or compiled_autograd_enabled:
            raise ConfigError(
                f"compile(schedule={schedule!r}, compiled_autograd_enabled="
                f"{compiled_autograd_enabled}): gathers and reductions stay outside of the "
                "compiled blocks, so there are no passes to schedule and backward is not compiled "
                "as a whole; leave both out"
            )
        from ds_zero.compiled import CompiledBlocks  # dynamo takes seconds to import

        if self._compiled is not None:
            self._compiled.restore()
        self._compiled = CompiledBlocks(self.core, backend, compile_kwargs)

    @property
    def is_compiled(self) -> bool:
        """Whether :meth:`compile` was called."""
        return self._compiled is not None

    def get_compile_time(self) -> float:
        """Seconds that this process spent compiling since :meth:`compile`; 0 without it."""
        return self._compiled.seconds() if self._compiled is not None else 0.0

    # ---- data --------------------------------------------------------------------------------

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        *,
        shuffle: bool = True,
        num_local_io_workers: int = 0,
        pin_memory: bool = False,
    ) -> DistributedLoader:
        """Make a loader that gives every rank its own micro-batches.

        Args:
            dataset: Map-style or iterable dataset.
            batch_size: Samples per micro-batch; the configured one by default.
            collate_fn: Joins samples; torch's default otherwise.
            shuffle: Draw samples in random order.
            num_local_io_workers: Loader processes of this rank.
            pin_memory: Put batches in page-locked memory.
        """
        return DistributedLoader(
            dataset,
            batch_size=batch_size or self.train_micro_batch_size_per_gpu(),
            rank=self.data_group.rank,
            world_size=self.data_group.size,
            collate_fn=collate_fn or self.collate_fn,
            drop_last=self.config.dataloader_drop_last,
            shuffle=shuffle,
            num_workers=num_local_io_workers,
            pin_memory=pin_memory,
        )

    # ---- weights and checkpoints -------------------------------------------------------------

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor]:
        """Return full copies of all parameters and buffers on every rank.  Collective.

        Args:
            exclude_frozen_parameters: Leave out what is not trained.
        """
        return full_state_dict(self.core, exclude_frozen=exclude_frozen_parameters)

    def load_module_state_dict(self, state_dict: Mapping[str, Tensor], strict: bool = True) -> None:
        """Set parameters and buffers by name, the fp32 masters with them.  Collective.

        Args:
            state_dict: The same full tensors on every rank.
            strict: Refuse missing and unknown names.

        Raises:
            CheckpointError: Names or shapes do not fit.
        """
        load_state_dict(self.core, state_dict, strict=strict)

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "model.safetensors",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the model's weights in their compute dtype from rank 0.  Collective.

        Args:
            save_dir: Folder; made if missing.
            save_filename: ``*.safetensors``, or ``*.bin`` for a torch pickle.
            exclude_frozen_parameters: Leave out what is not trained.

        Returns:
            True, once the file is whole.
        """
        save_weights(self.core, save_dir, save_filename, exclude_frozen=exclude_frozen_parameters)
        return True

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write model, optimiser, schedule and data position.  Collective.

        Args:
            save_dir: Folder of all checkpoints of a run.
            tag: Name of this one; ``global_step{N}`` by default.
            client_state: The caller's own values: JSON types and tensors.
            save_latest: Name it in ``latest``.
            exclude_frozen_parameters: Leave out parameters that are not trained.

        Returns:
            True, once the checkpoint is whole and named.

        Raises:
            CheckpointError: It could not be written; earlier checkpoints are untouched.
        """
        name = f"global_step{self.global_steps}" if tag is None else str(tag)
        save_engine(
            self,
            save_dir,
            name,
            client_state or {},
            save_latest=save_latest,
            exclude_frozen=exclude_frozen_parameters,
        )
        return True

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        missing_ok: bool = False,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Read what any stage and number of ranks saved.  Collective.

        Args:
            load_dir: Folder of all checkpoints of a run.
            tag: Which one; the one named in ``latest`` by default.
            load_module_strict: Refuse missing and unknown parameters.
            load_optimizer_states: Restore the optimiser; otherwise it starts anew.
            load_lr_scheduler_states: Restore the schedule.
            load_module_only: Restore nothing but the weights.
            missing_ok: Return ``(None, None)`` if there is no checkpoint.

        Returns:
            Path of the checkpoint and the client state.

        Raises:
            CheckpointNotFoundError: There is none, and ``missing_ok`` is false.
            CheckpointError: It is damaged or does not fit the model.
        """
        return load_engine(
            self,
            load_dir,
            tag,
            strict=load_module_strict,
            optimizer=load_optimizer_states and not load_module_only,
            schedule=load_lr_scheduler_states and not load_module_only,
            counters=not load_module_only,
            missing_ok=missing_ok,
        )

    def destroy(self) -> None:
        """Give the model back as an ordinary one: full parameters, no hooks.  Collective."""
        if self._compiled is not None:
            self._compiled.restore()
        self.core.destroy()


def _half(tensor: Tensor) -> Tensor:
    return tensor.half() if tensor.is_floating_point() else tensor
