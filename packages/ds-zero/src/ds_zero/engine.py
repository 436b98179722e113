"""The training engine: the verbs around a model under ZeRO."""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, Sampler

from ds_comm.errors import ConfigError, EngineError
from ds_comm.logging import get_logger
from ds_comm.mesh import Mesh
from ds_zero.config import BatchSizes, EngineConfig, resolve_batch_sizes
from ds_zero.core import StepReport, ZeroCore
from ds_zero.data import DistributedLoader
from ds_zero.protocols import Schedule
from ds_zero.storing import EngineStorage
from ds_zero.tensors import map_tensors

if TYPE_CHECKING:
    from ds_zero.compiled import CompiledBlocks

__all__ = ["Engine"]

logger = get_logger(__name__)


class Engine(EngineStorage):
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
        mesh: Mesh,
        schedule: Schedule | None = None,
    ) -> None:
        """Put the pieces together; use :func:`ds_zero.initialize`.

        Args:
            model: The module whose parameters ``core`` holds.
            core: The sharded model.
            config: The resolved configuration.
            mesh: The groups of this rank.
            schedule: Moves the learning rate after each applied update.
        """
        super().__init__(model, core, config, mesh)
        self.lr_scheduler = schedule
        self.collate_fn: Callable[[list[Any]], Any] | None = None
        self.enable_backward_allreduce = True
        """Whether backward reduces; otherwise :meth:`allreduce_gradients` or the step does."""
        self._warned_of_memory = False
        self._compiled: CompiledBlocks | None = None
        core.tracker.around_reductions = lambda: self.clock.measure("backward_allreduce")

    # ---- training verbs ----------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; arguments and result are the model's own.

        With ``fp16.auto_cast`` floating-point tensors among the arguments are cast to fp16.
        """
        self._prepare()
        if self.config.fp16.enabled and self.config.fp16.auto_cast:
            args, kwargs = map_tensors((args, kwargs), _half)
        with self.clock.measure("forward"):
            return self.module(*args, **kwargs)

    def backward(
        self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> Tensor:
        """Compute gradients of ``loss`` and average them as the stage wants.

        ``loss.backward()`` does the same.  Gradients of several backwards before one ``step()``
        add up, at every stage.  Under loss scaling this is the better way: see :meth:`scale`.

        Args:
            loss: Scalar with a graph.
            retain_graph: Keep the graph for another backward.
            scale_wrt_gas: Divide gradients by the number of accumulation steps; false where
                ``loss`` was divided already.

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
        undone = 1 if scale_wrt_gas else self.gradient_accumulation_steps()
        with self.clock.measure("backward"), self.core.entry.scaled_backward() as scale:
            loss.backward(torch.full_like(loss, scale * undone), retain_graph=retain_graph)
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
        needs_metric = isinstance(self.lr_scheduler, ReduceLROnPlateau) and not lr_kwargs
        if needs_metric and self.window.is_boundary():
            raise EngineError(
                'ReduceLROnPlateau needs its metric: step(lr_kwargs={"metrics": value})'
            )
        ended = self.window.end_micro_step()
        self.counters.micro_steps += 1
        self._applied = False
        if ended:
            with self.clock.measure("step"):
                self._update(lr_kwargs or {})
        self._prepare()
        self.clock.end_micro_step(ends_window=ended)
        if ended:
            self._report_progress()
            if self.core.scaler is not None:
                self.core.scaler.check()

    def _update(self, lr_kwargs: Mapping[str, Any]) -> None:
        """End the window: update the parameters, the counters and the learning rate."""
        report = self._report = self.core.step()
        self._applied = report.applied
        self.counters.global_steps += 1
        self.counters.global_samples += self._samples()
        if not report.applied:
            self.counters.skipped_steps += 1
        elif self.lr_scheduler is not None:
            self.lr_scheduler.step(**lr_kwargs)
        self._follow_scale(report)

    def _samples(self) -> int:
        """Samples of the window that has just ended."""
        backwards, self.core.tracker.backwards = self.core.tracker.backwards, 0
        if self.window.managed:
            return self.train_batch_size()
        return backwards * self.train_micro_batch_size_per_gpu() * self.dp_world_size

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
        """Tell core whether the next backward reduces, and whether it adds to another."""
        window = self.window
        each = self.core.options.stage >= 2
        reduces = each or (window.managed and window.is_boundary())
        self.core.tracker.synced = reduces and self.enable_backward_allreduce and not window.paused
        self.core.gradients.accumulating = window.sums_up()

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
            EngineError: Gradients are being kept local already.
        """
        with self._local_gradients("no_sync()"):
            yield

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Reduce the gradients of all backwards inside once, at the end.  Collective.

        Where the next ``step()`` is no boundary, stages 0 and 1 leave them local, as ever.  After
        an exception nothing is reduced; ``zero_grad()`` drops what was computed.

        Raises:
            EngineError: Gradients are being kept local already.
        """
        with self._local_gradients("coalesce_grad_reduction()"):
            yield
        if self.core.tracker.synced:
            self.core.reduce_gradients()

    @contextmanager
    def _local_gradients(self, context: str) -> Iterator[None]:
        self.window.pause(context)
        if self.core.options.stage >= 2 and not self._warned_of_memory:
            self._warned_of_memory = True
            logger.warning(
                "%s at stage %d keeps unsharded gradients: it costs the memory that the stage "
                "saves",
                context,
                self.core.options.stage,
            )
        self._prepare()
        try:
            yield
        finally:
            self.window.resume()
            self._prepare()

    def allreduce_gradients(self, bucket_size: int = 500_000_000) -> None:
        """Reduce now what backward has left local, if this window ends.  Collective.

        For loops that set ``engine.enable_backward_allreduce = False``; otherwise nothing is left.
        At stages 2 and 3 it reduces in every micro-step.

        Args:
            bucket_size: Of no effect: a unit is one reduction.
        """
        if self.core.options.stage >= 2 or self.window.is_boundary():
            self.core.reduce_gradients()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of this accumulation window.  ``step()`` does it by itself."""
        self.core.forget_gradients()

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Decide by hand whether the next ``step()`` updates, until this is called again.

        A window that ends early is divided by its full length all the same; the next one has its
        full length again.  See [Note: accumulation windows] in ``window``.

        Args:
            is_boundary: The decision, or None to go back to counting micro-steps.

        Raises:
            EngineError: ``managed_gradient_accumulation`` is false.
        """
        self.window.force(is_boundary)
        self._prepare()

    # ---- changing ----------------------------------------------------------------------------

    def set_lr(self, lr: float | Sequence[float]) -> None:
        """Set the learning rate; a schedule moves it again at its next step.

        Args:
            lr: One rate for all parameter groups, or one for each.

        Raises:
            ConfigError: A rate is negative or not finite, or there are too many or too few.
        """
        groups = self._groups()
        rates = list(lr) if isinstance(lr, Sequence) else [lr] * len(groups)
        if len(rates) != len(groups) or not all(0 <= rate < math.inf for rate in rates):
            raise ConfigError(
                f"set_lr({lr!r}): a finite rate of at least 0 is expected, or one for each of the "
                f"{len(groups)} parameter groups"
            )
        for group, rate in zip(groups, rates, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = float(rate)

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the samples of one optimiser step by changing the accumulation.

        In the middle of a window its gradients are dropped, with a warning, and a new one begins.

        Args:
            train_batch_size: A multiple of micro-batch size times ranks.

        Raises:
            ConfigError: It is no such multiple.
        """
        micro = self.train_micro_batch_size_per_gpu()
        train = _whole("set_train_batch_size", train_batch_size)
        self._resize(resolve_batch_sizes(train, micro, None, self.dp_world_size))

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the samples of one forward pass; accumulation stays, the total follows.

        Loaders that exist already keep their batch size.

        Args:
            micro_batch_size: Samples, at least 1.

        Raises:
            ConfigError: It is not positive.
        """
        steps = self.gradient_accumulation_steps()
        micro = _whole("set_train_micro_batch_size", micro_batch_size)
        self._resize(resolve_batch_sizes(None, micro, steps, self.dp_world_size))

    def _resize(self, sizes: BatchSizes) -> None:
        if sizes == self.config.batch:
            return
        longer = sizes.accumulation != self.gradient_accumulation_steps()
        self.config = self.config.model_copy(
            update={
                "train_batch_size": sizes.train,
                "train_micro_batch_size_per_gpu": sizes.micro,
                "gradient_accumulation_steps": sizes.accumulation,
            }
        )
        if longer:
            self._begin_window(sizes.accumulation)

    def _begin_window(self, accumulation: int) -> None:
        """Begin a window of another length; gradients so far were divided by the old one."""
        cut = self.window.restart(accumulation)
        if cut:
            logger.warning(
                "the number of accumulation steps changed in the middle of a window: the gradients "
                "of its first %d micro-steps are dropped",
                cut,
            )
        self.core.gradients.set_accumulation(accumulation)
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
        route: Literal["train", "predict", "eval"] = "train",
        pin_memory: bool = True,
        data_sampler: Sampler[Any] | Iterable[Any] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
        *,
        shuffle: bool = True,
    ) -> DistributedLoader | DataLoader[Any]:
        """Make a loader that gives every rank its own micro-batches.

        Args:
            dataset: Map-style or iterable dataset.
            batch_size: Samples per micro-batch; the configured one by default.
            route: ``predict`` and ``eval`` keep the order of the samples and leave none out.
            pin_memory: Put batches in page-locked memory, where there is an accelerator.
            data_sampler: Indices for this rank in their order; the position is then its own
                affair, and the result is torch's loader.
            collate_fn: Joins samples; torch's default otherwise.
            num_local_io_workers: Loader processes of this rank; by default none.
            shuffle: Draw samples in random order when training.

        Returns:
            A loader that can be resumed in the middle of an epoch, or torch's for a sampler.

        Raises:
            ConfigError: An argument has no such value.
        """
        if route not in ("train", "predict", "eval"):
            raise ConfigError(
                f'deepspeed_io(route={route!r}): "train", "predict" or "eval" is expected'
            )
        training = route == "train"
        size = self.train_micro_batch_size_per_gpu() if batch_size is None else batch_size
        size = _whole("deepspeed_io", size)
        collate = collate_fn or self.collate_fn
        pinned = pin_memory and self.device.type != "cpu"
        drop_last = self.config.dataloader_drop_last and training
        if data_sampler is not None:
            return DataLoader(
                dataset,
                batch_size=size,
                sampler=data_sampler,
                collate_fn=collate,
                drop_last=drop_last,
                num_workers=num_local_io_workers or 0,
                pin_memory=pinned,
            )
        return DistributedLoader(
            dataset,
            batch_size=size,
            rank=self.mesh.data.rank,
            world_size=self.mesh.data.size,
            collate_fn=collate,
            drop_last=drop_last,
            shuffle=shuffle and training,
            num_workers=num_local_io_workers or 0,
            pin_memory=pinned,
        )

    # ---- end ---------------------------------------------------------------------------------

    def destroy(self) -> None:
        """Give the model back as an ordinary one: full parameters, no hooks.  Collective."""
        if self._compiled is not None:
            self._compiled.restore()
        self.core.destroy()


def _whole(verb: str, value: SupportsIndex) -> int:
    """An integer of Python or numpy; nothing that only looks like one.

    Raises:
        ConfigError: It is none.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise ConfigError(f"{verb}() needs a whole number, got {value!r}") from None


def _half(tensor: Tensor) -> Tensor:
    return tensor.half() if tensor.is_floating_point() else tensor
