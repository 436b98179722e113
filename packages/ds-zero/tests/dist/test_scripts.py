"""Whole training scripts with two engines, against the same scripts in one plain process (fp32)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import pytest
import torch
from torch import Tensor, nn

import ds_zero
from ds_comm.testing.plugin import Ranks

WORLD = 2
STEPS = 3
STAGES = [0, 1, 2, 3]


class Trained(Protocol):
    """What a script needs of a model in training: an engine, or plain torch behind its verbs."""

    def __call__(self, *args: Any) -> Tensor: ...
    def backward(self, loss: Tensor) -> Any: ...
    def step(self) -> None: ...
    def zero_grad(self) -> None: ...


Wrap = Callable[[nn.Module], Trained]


class Plain:
    """A model and its optimiser in one process that sees the batches of all ranks."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3)

    def __call__(self, *args: Any) -> Tensor:
        out: Tensor = self._model(*args)
        return out

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        self._optimizer.step()
        self.zero_grad()

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()


def sharded(stage: int) -> Wrap:
    def wrap(model: nn.Module) -> Trained:
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_clipping": 0.0,
            "optimizer": {
                "type": "Adam",
                "params": {"lr": 0.01, "eps": 1e-3, "adam_w_mode": False},
            },
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        }
        engine: Trained = ds_zero.initialize(model=model, config=config).engine
        return engine

    return wrap


def net(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in zip(sizes, sizes[1:], strict=False):
        layers += [nn.Linear(a, b), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def batches(step: int, ranks: list[int], width: int) -> list[Tensor]:
    """The batches of some ranks."""
    return [
        torch.randn(4, width, generator=torch.Generator().manual_seed(100 * step + rank))
        for rank in ranks
    ]


def penalty(critic: Trained, real: Tensor, fake: Tensor) -> Tensor:
    """Gradient penalty of WGAN-GP (Gulrajani et al. 2017, equation 3) at the midpoints."""
    between = (0.5 * real + 0.5 * fake).requires_grad_()
    (grad,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return ((grad.norm(dim=1) - 1) ** 2).mean()


def gan(wrap: Wrap, ranks: list[int]) -> list[float]:
    """Train critic and generator in turn; return checksums of both on fixed inputs."""
    torch.manual_seed(1)
    models = net(3, 16, 6), net(6, 16, 1)
    generator, critic = (wrap(model) for model in models)
    for step in range(STEPS):
        share = 1 / len(ranks)
        for real, noise in zip(batches(step, ranks, 6), batches(step + 50, ranks, 3), strict=True):
            fake = generator(noise).detach()
            loss = critic(fake).mean() - critic(real).mean() + 10 * penalty(critic, real, fake)
            critic.backward(loss * share)
        critic.step()
        for noise in batches(step + 90, ranks, 3):
            generator.backward(-critic(generator(noise)).mean() * share)
        generator.step()
        # The critic took part in the generator's backward: those gradients are not its own.
        critic.zero_grad()
    with torch.no_grad():
        made = generator(batches(7, [0], 3)[0])
        return [*made.flatten().tolist(), *critic(made).flatten().tolist()]


def distillation(wrap: Wrap, ranks: list[int]) -> list[float]:
    """A student follows a trained teacher, which goes on learning by itself."""
    torch.manual_seed(2)
    teacher, student = wrap(net(6, 24, 4)), wrap(net(6, 8, 4))
    for step in range(STEPS):
        share = 1 / len(ranks)
        for x in batches(step, ranks, 6):
            with torch.no_grad():
                wanted = teacher(x).softmax(-1)
            student.backward(nn.functional.cross_entropy(student(x), wanted) * share)
        student.step()
        for x in batches(step, ranks, 6):
            target = x[:, :4].argmax(1)
            teacher.backward(nn.functional.cross_entropy(teacher(x), target) * share)
        teacher.step()
    with torch.no_grad():
        x = batches(7, [0], 6)[0]
        return [*student(x).flatten().tolist(), *teacher(x).flatten().tolist()]


SCRIPTS: dict[str, Callable[[Wrap, list[int]], list[float]]] = {
    "gan": gan,
    "distillation": distillation,
}


def run(script: str, stage: int) -> list[float]:
    return SCRIPTS[script](sharded(stage), [torch.distributed.get_rank()])


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_with_two_engines(ranks: Ranks, script: str) -> None:
    """Outputs within 1e-5 of plain torch, and the same bits at every stage and on every rank."""
    wanted = torch.tensor(SCRIPTS[script](Plain, list(range(WORLD))))
    found = [ranks(WORLD, run, script, stage) for stage in STAGES]
    for stage, by_rank in zip(STAGES, found, strict=True):
        assert by_rank[0] == by_rank[1], stage
        torch.testing.assert_close(torch.tensor(by_rank[0]), wanted, rtol=1e-5, atol=1e-5)
        assert by_rank[0] == found[0][0], stage


@pytest.mark.parametrize("stage", STAGES)
def test_a_gan_learns(ranks: Ranks, stage: int) -> None:
    """Parameters move: the outputs after training are not those of the first weights."""
    torch.manual_seed(1)
    generator, critic = net(3, 16, 6), net(6, 16, 1)
    with torch.no_grad():
        made = generator(batches(7, [0], 3)[0])
        before = torch.tensor([*made.flatten().tolist(), *critic(made).flatten().tolist()])
    after = torch.tensor(ranks(WORLD, run, "gan", stage)[0])
    assert (after - before).abs().min() > 1e-4
