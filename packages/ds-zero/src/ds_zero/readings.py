"""What an engine tells about itself and its training: the verbs that change nothing."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ds_comm.device import current_device
from ds_comm.group import Group
from ds_comm.mesh import Mesh
from ds_zero.config import EngineConfig
from ds_zero.core import StepReport, ZeroCore
from ds_zero.data import DistributedLoader
from ds_zero.non_finite import NonFinite
from ds_zero.protocols import Schedule
from ds_zero.timing import WallClock
from ds_zero.window import AccumulationWindow

__all__ = ["Counters", "EngineReadings"]


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


class EngineReadings(nn.Module):
    """The state of an engine, and what can be read of it.  Nothing here communicates."""

    def __init__(self, model: nn.Module, core: ZeroCore, config: EngineConfig, mesh: Mesh) -> None:
        """Hold the pieces; see :class:`ds_zero.engine.Engine`."""
        super().__init__()
        self.module = model
        self.core = core
        self.config = config
        self.mesh = mesh
        self.lr_scheduler: Schedule | None = None
        self.counters = Counters()
        self.training_dataloader: DistributedLoader | None = None
        self.device = current_device()
        self.loaded_checkpoint_tag: str | None = None
        """Tag of the checkpoint that was loaded last."""
        self.window = AccumulationWindow(
            config.batch.accumulation, managed=config.managed_gradient_accumulation
        )
        self.clock = WallClock(enabled=config.wall_clock_breakdown)
        self._report: StepReport | None = None
        self._applied = False

    def __getattr__(self, name: str) -> Any:
        """Look up what the engine does not have on the model."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            modules = self.__dict__.get("_modules", {})
            if "module" in modules:
                return getattr(modules["module"], name)
            raise

    # ---- progress ----------------------------------------------------------------------------

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

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next ``step()`` updates the parameters."""
        return self.window.is_boundary()

    def was_step_applied(self) -> bool:
        """Whether the last ``step()`` updated the parameters."""
        return self._applied

    def get_global_grad_norm(self) -> float | None:
        """L2 norm of the last step's averaged gradients before clipping; None before any."""
        return self._report.grad_norm if self._report is not None else None

    def get_non_finite_gradient(self) -> NonFinite | None:
        """Why the last step was skipped; None if it was not."""
        return self._report.problem if self._report is not None else None

    def get_wall_clock_timers(self) -> dict[str, float]:
        """Milliseconds of the last accumulation window; empty without ``wall_clock_breakdown``.

        ``forward``, ``backward``, ``step``, and of the backward ``backward_allreduce``, in which
        it waited for reductions, and ``backward_inner``, the rest; ``…_microstep`` are those of the
        window's last micro-step.  A backward that was not started by ``engine.backward`` counts
        in ``backward_allreduce`` alone.
        """
        return self.clock.times()

    # ---- optimiser ---------------------------------------------------------------------------

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimiser; its ``param_groups`` hold the hyper-parameters."""
        return self.core.optimizer.optimizer if self.core.optimizer is not None else None

    def _groups(self) -> list[dict[str, Any]]:
        """The optimiser's parameter groups; none without an optimiser."""
        optimizer = self.optimizer
        return optimizer.param_groups if optimizer is not None else []

    def get_lr(self) -> list[float]:
        """Learning rate of each parameter group."""
        return [float(group["lr"]) for group in self._groups()]

    def get_mom(self) -> list[Any]:
        """Momentum, or betas, of each parameter group."""
        return [group.get("betas", group.get("momentum")) for group in self._groups()]

    def get_type(self) -> list[Any]:
        """What users noted as ``type`` in each parameter group; 0.0 where they did not."""
        return [group.get("type", 0.0) for group in self._groups()]

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

    # ---- ranks -------------------------------------------------------------------------------

    @property
    def data_group(self) -> Group:
        """Ranks that see different data."""
        return self.mesh.data

    @property
    def world_size(self) -> int:
        """Number of all ranks."""
        return self.mesh.world.size

    @property
    def dp_world_size(self) -> int:
        """Number of ranks that see different data."""
        return self.mesh.data.size

    @property
    def mp_world_size(self) -> int:
        """Number of ranks that hold different parts of the same layers."""
        return self.mesh.tensor.size

    @property
    def global_rank(self) -> int:
        """Rank of this process among all."""
        return self.mesh.rank

    @property
    def local_rank(self) -> int:
        """Rank of this process on its machine."""
        return int(os.environ.get("LOCAL_RANK", "0"))

    def get_data_parallel_rank(self) -> int:
        """Place of this rank among those that see different data."""
        return self.mesh.data.rank

    def get_data_parallel_group(self) -> Any:
        """Torch's process group of the ranks that see different data; None for one rank."""
        return self.mesh.data.handle

    def get_sequence_parallel_group(self) -> Any:
        """Torch's process group of the ranks that share sequences; None for one rank."""
        return self.mesh.sequence.handle

    # ---- configuration -----------------------------------------------------------------------

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

    def zero_optimization_stage(self) -> int:
        """The ZeRO stage, 0 to 3."""
        return self.core.options.stage

    def zero_optimization(self) -> bool:
        """Whether anything is sharded."""
        return self.core.options.stage > 0

    def gradient_clipping(self) -> float:
        """Largest norm of all gradients together; 0 does not clip."""
        return self.config.gradient_clipping

    def fp16_enabled(self) -> bool:
        """Whether the model computes in float16."""
        return self.config.fp16.enabled

    def bfloat16_enabled(self) -> bool:
        """Whether the model computes in bfloat16."""
        return self.config.bf16.enabled

    def wall_clock_breakdown(self) -> bool:
        """Whether forward, backward and step are timed."""
        return self.config.wall_clock_breakdown

    def steps_per_print(self) -> int | None:
        """Optimiser steps between progress lines; None prints none."""
        return self.config.steps_per_print
