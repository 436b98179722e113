"""Every order of forwards and backwards that torch allows, against plain torch."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from twin import STAGES, STEPS, Loss, close, compare, engine_of, inputs, plain_run, square
from zoo import Checkpointed, FarApart, Reentrant, Stack

import ds_zero


def _two_forwards(model: Any, step: int) -> Tensor:
    return square(model, step) + model(2 * inputs(step + 50)).abs().mean()


def _no_grad_between(model: Any, step: int) -> Tensor:
    out = model(inputs(step))
    with torch.no_grad():
        model(inputs(step + 50))
    loss: Tensor = out.square().mean()
    return loss


def _inference_between(model: Any, step: int) -> Tensor:
    out = model(inputs(step))
    with torch.inference_mode():
        model(inputs(step + 50))
    loss: Tensor = out.square().mean()
    return loss


def _inference_before(model: Any, step: int) -> Tensor:
    with torch.inference_mode():
        model(inputs(step + 50))
    return square(model, step)


def _grad_of_input(model: Any, step: int) -> Tensor:
    x = inputs(step).requires_grad_()
    (grad,) = torch.autograd.grad(model(x).sum(), x)
    out: Tensor = model(x.detach() + grad).square().mean()
    return out


def _retained(model: Any, step: int) -> Tensor:
    out = model(inputs(step))
    out.square().mean().backward(retain_graph=True)
    loss: Tensor = out.abs().mean()
    return loss


def _unused_forward(model: Any, step: int) -> Tensor:
    model(inputs(step + 50))
    model(inputs(step + 60)).detach()
    return square(model, step)


def _penalty(model: Any, step: int) -> Tensor:
    """The size of the gradient by the input, as in WGAN-GP."""
    x = inputs(step).requires_grad_()
    (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return grad.square().sum()


def _penalty_last(model: Any, step: int) -> Tensor:
    return square(model, step) + _penalty(model, step)


def _penalty_first(model: Any, step: int) -> Tensor:
    penalty = _penalty(model, step)
    return penalty + square(model, step)


def _penalty_then_eval(model: Any, step: int) -> Tensor:
    penalty = _penalty(model, step)
    with torch.no_grad():
        model(inputs(step + 50))
    return penalty


def _two_penalties(model: Any, step: int) -> Tensor:
    return _penalty(model, step) + 0.5 * _penalty(model, step + 50)


CALLS: dict[str, Loss] = {
    "two forwards, one backward": _two_forwards,
    "no_grad forward in between": _no_grad_between,
    "inference forward in between": _inference_between,
    "inference forward before": _inference_before,
    "autograd.grad by the input": _grad_of_input,
    "retain_graph": _retained,
    "forwards without backward": _unused_forward,
    "gradient penalty": _penalty,
    "gradient penalty last": _penalty_last,
    "gradient penalty first": _penalty_first,
    "gradient penalty, then an evaluation": _penalty_then_eval,
    "two gradient penalties": _two_penalties,
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", CALLS)
def test_calls(name: str, stage: int) -> None:
    """Every order of forwards and backwards that torch allows."""
    compare(Stack, CALLS[name], stage)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", [Checkpointed, Reentrant, FarApart])
def test_two_forwards_through_special_models(kind: Callable[[], nn.Module], stage: int) -> None:
    """Checkpoints and repeated modules, twice before one backward."""
    compare(kind, _two_forwards, stage)


@pytest.mark.parametrize("stage", STAGES)
def test_backward_with_create_graph(stage: int) -> None:
    """``loss.backward(create_graph=True)``: gradients enter though grad mode is on."""
    plain, model = Stack(), Stack()
    model.load_state_dict(plain.state_dict())
    engine = engine_of(model, stage)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the reference cycle that torch warns about
            square(plain, step).backward(create_graph=True)
            square(engine, step).backward(create_graph=True)
        optimizer.step()
        optimizer.zero_grad()
        engine.step()
    close(engine.module_state_dict(), dict(plain.state_dict()))


@pytest.mark.parametrize("stage", STAGES)
def test_autograd_grad_by_parameters(stage: int) -> None:
    """Values equal torch's, and nothing is left for the next step."""
    torch.manual_seed(11)
    plain = Stack()
    model = copy.deepcopy(plain)
    engine = engine_of(model, stage)
    grads = torch.autograd.grad(square(engine, 7), list(model.parameters()))
    wanted = torch.autograd.grad(square(plain, 7), list(plain.parameters()))
    for got, value in zip(grads, wanted, strict=True):
        torch.testing.assert_close(got, value)
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())
    losses, values = plain_run(plain, square)
    for step in range(STEPS):
        loss = square(engine, step)
        engine.backward(loss)
        engine.step()
        assert loss.item() == pytest.approx(losses[step], rel=1e-5)
    close(engine.module_state_dict(), values)


@pytest.mark.parametrize("stage", STAGES)
def test_backward_with_inputs(stage: int) -> None:
    """``backward(inputs=...)`` gives gradients to those alone."""
    plain, model = Stack(), Stack()
    model.load_state_dict(plain.state_dict())
    engine = engine_of(model, stage)
    square(plain, 0).backward(inputs=[plain.inp.weight, plain.out.bias])
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    square(engine, 0).backward(inputs=[model.inp.weight, model.out.bias])
    engine.step()
    close(engine.module_state_dict(), dict(plain.state_dict()))


@pytest.mark.parametrize("stage", STAGES)
def test_an_engine_built_in_inference_mode(stage: int) -> None:
    """Its buffers are ordinary tensors: training follows."""
    torch.manual_seed(11)
    plain = Stack()
    model = copy.deepcopy(plain)
    losses, values = plain_run(plain, square)
    with torch.inference_mode():
        engine = engine_of(model, stage)
        engine(inputs(0))
    for step in range(STEPS):
        loss = square(engine, step)
        engine.backward(loss)
        engine.step()
        assert loss.item() == pytest.approx(losses[step], rel=1e-5)
    close(engine.module_state_dict(), values)


@pytest.mark.parametrize("stage", STAGES)
def test_a_block_called_without_the_model(stage: int) -> None:
    """The root's forward never runs."""

    def loss(model: Any, step: int) -> Tensor:
        root = model.module if isinstance(model, ds_zero.Engine) else model
        out: Tensor = root.out(root.blocks[1](root.inp(inputs(step)))).square().mean()
        return out

    compare(Stack, loss, stage)


def _decay(model: nn.Module) -> Tensor:
    """A loss on the parameters alone: no module runs."""
    total = torch.zeros(())
    for param in model.parameters():
        total = total + param.square().sum()
    return 0.1 * total


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_loss_on_the_parameters_alone(stage: int) -> None:
    """Its backward meets no hook of an output; before and after an ordinary one it just adds."""
    for order in ("before", "after", "alone", "twice"):
        torch.manual_seed(11)
        plain = Stack()
        model = copy.deepcopy(plain)
        engine = engine_of(model, stage)
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        for step in range(2):
            for owner, root in ((plain, plain), (engine, model)):
                if order in ("after", "twice"):
                    square(owner, step).backward()
                _decay(root).backward()
                if order == "twice":
                    _decay(root).backward()
                if order == "before":
                    square(owner, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            engine.step()
        close(engine.module_state_dict(), dict(plain.state_dict()))
