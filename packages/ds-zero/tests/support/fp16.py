"""fp16 training by hand in one process, with torch's GradScaler, and the masters of an engine."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

import ds_zero
from ds_comm.collectives import gather_objects
from ds_zero.optim.base import OptimizedRun

Loss = Callable[[nn.Module, Tensor], Tensor]


class PlainFp16:
    """An fp16 copy of a model, fp32 masters, and the steps that a textbook takes with them.

    The gradients of the ranks are what they are under an engine: each rank's fp16 gradients times
    1 / (ranks * micro-batches), in fp32 where micro-batches accumulate, summed in fp32.
    """

    def __init__(
        self,
        model: nn.Module,
        make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        *,
        scale: float,
        window: int = 1000,
        clip: float = 0.0,
    ) -> None:
        self.model = copy.deepcopy(model).half()
        self.masters = [nn.Parameter(p.detach().float()) for p in model.parameters()]
        self.optimizer = make(self.masters)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=window)
        self.clip = clip
        self.norm = float("nan")

    def step(self, loss: Loss, batches: Sequence[Sequence[Tensor]]) -> bool:
        """Take a step on ``batches[micro][rank]``; tell whether it was applied."""
        count = sum(len(ranks) for ranks in batches)
        for master in self.masters:
            master.grad = torch.zeros_like(master)
        for x in (x for ranks in batches for x in ranks):
            self.scaler.scale(loss(self.model, x)).backward()
            for master, param in zip(self.masters, self.model.parameters(), strict=True):
                assert master.grad is not None and param.grad is not None
                grad = param.grad.float() if len(batches) > 1 else param.grad
                master.grad += (grad * (1 / count)).float()
                param.grad = None
        self.scaler.unscale_(self.optimizer)
        limit = self.clip or float("inf")
        self.norm = nn.utils.clip_grad_norm_(self.masters, limit).item()
        before = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        with torch.no_grad():
            for master, param in zip(self.masters, self.model.parameters(), strict=True):
                param.copy_(master)
        return self.scaler.get_scale() >= before


def full_masters(engine: ds_zero.Engine) -> dict[str, Tensor]:
    """The whole masters of all parameters, by name.  Collective."""
    core = engine.core
    mine = [
        (
            piece.spec.name,
            piece.spec.shape,
            piece.param_start,
            run.master[piece.shard_start : piece.shard_start + piece.numel].clone(),
        )
        for unit in core.units
        for run in unit.runs
        for piece in OptimizedRun(run).pieces()
    ]
    found = {spec.name: torch.empty(spec.shape) for spec in core.layout.params if not spec.numel}
    for name, shape, start, values in sum(gather_objects(mine, core.collectives.group), []):
        whole = found.setdefault(name, torch.full(shape, float("nan"), dtype=values.dtype))
        whole.view(-1)[start : start + values.numel()] = values
    return {name: found[name] for name in core.params}
