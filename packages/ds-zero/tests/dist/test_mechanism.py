"""What models and users do around a gathered weight: stages 0 and 3 against plain torch.

Most cases run on one rank, where stage 3 gathers, releases and deflates as it does on many.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ds_zero
from ds_comm.collectives import LocalCollectives, RecordingCollectives, Work, collectives_for
from ds_comm.errors import CommError, DSError, EditError, EngineError
from ds_comm.group import Group
from ds_comm.testing.plugin import Ranks
from ds_zero import CoreOptions, ZeroCore
from ds_zero.flat import Presence
from ds_zero.units import UnitRules

STAGES = (0, 3)
STEPS = 3

Loss = Callable[[Any, int], Tensor]


def _engine(model: nn.Module, stage: int, threshold: int = 0, **extra: Any) -> ds_zero.Engine:
    return ds_zero.initialize(
        model=model,
        dist_init_required=False,
        config={
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "gradient_clipping": 0.0,
            "zero_optimization": {
                "stage": stage,
                "stage3_param_persistence_threshold": threshold,
            },
            **extra,
        },
    ).engine


def _x(step: int, rows: int = 5, width: int = 4) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(step))


def _square(model: Any, step: int) -> Tensor:
    out: Tensor = model(_x(step)).square().mean()
    return out


def _plain(model: nn.Module, loss: Loss) -> tuple[list[float], dict[str, Tensor]]:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        value = loss(model, step)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}


def _trained(model: nn.Module, loss: Loss, stage: int) -> tuple[list[float], dict[str, Tensor]]:
    engine = _engine(model, stage)
    losses = []
    for step in range(STEPS):
        value = loss(engine, step)
        engine.backward(value)
        engine.step()
        losses.append(value.item())
    _check_released(engine)
    state = engine.module_state_dict()
    return losses, {name: state[name] for name, _ in model.named_parameters()}


def _check_released(engine: ds_zero.Engine) -> None:
    """After a step nothing that may be released is still there, and nothing is held."""
    for unit in engine.core.units:
        assert unit.held == 0 and unit.calls_pending == 0
        assert unit.presence is (Presence.RELEASED if unit.releasable else Presence.PRESENT)


def _close(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name, value in got.items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-5, atol=1e-6, msg=name)


def _compare(make: Callable[[], nn.Module], loss: Loss, stage: int) -> None:
    """Train a plain twin and an engine; losses and parameters must agree."""
    models = []
    for _ in range(2):
        torch.manual_seed(11)
        models.append(make())
    losses, values = _plain(models[0], loss)
    assert all(torch.isfinite(torch.tensor(losses)))
    got_losses, got = _trained(models[1], loss, stage)
    assert got_losses == pytest.approx(losses, rel=1e-5)
    _close(got, values)


# ---- models ------------------------------------------------------------------------------------


class Block(nn.Module):
    """Residual, with a saved transpose of each weight."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.up = nn.Linear(width, 6)
        self.down = nn.Linear(6, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    """Three blocks between an input and an output projection."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = self.run(block, x)
        out: Tensor = self.out(x)
        return out

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = block(x)
        return out


class Checkpointed(Stack):
    """Recomputes every block; the modules' hooks run inside of the checkpoint."""

    reentrant = False

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(block, x, use_reentrant=self.reentrant)
        return out


class Reentrant(Checkpointed):
    reentrant = True


class Segment(Stack):
    """One checkpoint around all blocks."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self._all, self.inp(x), use_reentrant=self.reentrant)
        out: Tensor = self.out(x)
        return out

    def _all(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class ReentrantSegment(Segment):
    reentrant = True


class Mixed(Stack):
    """Every second block is recomputed."""

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        if block is self.blocks[1]:
            out: Tensor = checkpoint(block, x, use_reentrant=False)
            return out
        out = block(x)
        return out


class Nested(Stack):
    """A checkpoint of blocks inside of a checkpoint."""

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self._all, self.inp(x), use_reentrant=False)
        out: Tensor = self.out(x)
        return out

    def _all(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class FarApart(Stack):
    """The first block runs again after all others."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in (*self.blocks, self.blocks[0]):
            x = block(x)
        out: Tensor = self.out(x)
        return out


class Foreign(Stack):
    """Reads another module's weight in the model's own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(7, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.emb(torch.arange(x.shape[0]) % 7)
        for block in self.blocks:
            x = block(x)
        return F.linear(x, self.emb.weight)


class TupleBlock(Block):
    """Passes a shared tensor through, as T5 does with its position bias."""

    def forward(self, x: Tensor, *, bias: Tensor) -> tuple[Tensor, None, Tensor]:  # type: ignore[override]
        return super().forward(x) + bias, None, bias


class Tuples(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(TupleBlock() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias(x)
        for block in self.blocks:
            x, _, bias = block(x, bias=bias)
        return x


class DictBlock(Block):
    def forward(self, x: Tensor) -> dict[str, Any]:  # type: ignore[override]
        return {"parts": [super().forward(x), x.sum()], "name": "block"}


class Dicts(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(DictBlock() for _ in range(3))

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        found = block(x)
        out: Tensor = found["parts"][0] + 0.1 * found["parts"][1]
        return out


@dataclass
class Output:
    """What a block may return."""

    hidden: Tensor
    note: str = ""


class DataBlock(Block):
    def forward(self, x: Tensor) -> Output:  # type: ignore[override]
        return Output(super().forward(x))


class Dataclasses(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(DataBlock() for _ in range(3))

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = block(x).hidden
        return out


class InPlaceInput(Block):
    """Adds to its input and returns it."""

    def forward(self, x: Tensor) -> Tensor:
        return x.add_(self.down(torch.tanh(self.up(x.clone()))))


class InPlaceInputs(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(InPlaceInput() for _ in range(3))


class InPlaceOutputs(Stack):
    """Edits what a block returned, and half of it through a view."""

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        x = block(x)
        x.mul_(1.5)
        x[:, :2].add_(1)
        return x


class Recurrent(nn.Module):
    """Two-layer LSTM and GRU, which hold their weights in lists."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 5, num_layers=2, batch_first=True, bidirectional=True)
        self.gru = nn.GRU(10, 4, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.lstm(x.unsqueeze(0))
        out, hidden = self.gru(out)
        return out + hidden.sum()


class Attention(nn.Module):
    """torch's own encoder layers."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.encoder(x.unsqueeze(0))
        return out * torch.arange(4)


def _parametrised() -> nn.Module:
    from torch.nn.utils import parametrizations

    model = Stack()
    for block in model.blocks:
        assert isinstance(block, Block)
        parametrizations.weight_norm(block.up)
        parametrizations.orthogonal(block.down)
    return model


def _old_weight_norm() -> nn.Module:
    model = Stack()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for block in model.blocks:
            assert isinstance(block, Block)
            nn.utils.weight_norm(block.up)
    return model


class Lora(nn.Module):
    """A frozen weight with a trained update of low rank."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, base.in_features))
        self.b = nn.Parameter(torch.randn(base.out_features, 2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + x @ self.a.t() @ self.b.t()
        return out


def _lora() -> nn.Module:
    model = Stack()
    for block in model.blocks:
        assert isinstance(block, Block)
        block.up = Lora(block.up)  # type: ignore[assignment]
        block.down.requires_grad_(False)
    return model


class Detached(Block):
    """Uses a weight without and with its gradient."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.linear(x, self.up.weight.detach(), self.up.bias)
        return super().forward(x + F.linear(torch.tanh(hidden), self.up.weight.t()))


class DetachedStack(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Detached() for _ in range(3))


class OnContext(torch.autograd.Function):
    """Keeps the weight on ``ctx``, where no saved-tensor hook sees it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.x, ctx.weight = x, weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad @ ctx.weight, grad.t() @ ctx.x


class ContextLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = OnContext.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return out + self.bias


class ContextStack(Stack):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.up = ContextLinear(4, 6)


class Positions(nn.Module):
    """Returns a slice of its table: a view of the weight itself."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(9, 4))

    def forward(self, length: int) -> Tensor:
        return self.table[:length]


class Prompt(Positions):
    """Returns its parameter."""

    def forward(self, length: int) -> Tensor:
        return self.table


class WithPositions(Stack):
    kind: type[Positions] = Positions

    def __init__(self) -> None:
        super().__init__()
        self.positions = self.kind()

    def forward(self, x: Tensor) -> Tensor:
        where = self.positions(x.shape[0])[: x.shape[0]]
        return super().forward(x * where + where)


class WithPrompt(WithPositions):
    kind = Prompt


class Containers(nn.Module):
    """Parameters in lists and dictionaries, read by the root."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ParameterList(nn.Parameter(torch.randn(4, 4)) for _ in range(2))
        self.named = nn.ParameterDict({"scale": nn.Parameter(torch.randn(4, 4))})

    def forward(self, x: Tensor) -> Tensor:
        for row in self.rows:
            x = torch.tanh(x @ row)
        return x @ self.named["scale"]


class SparseMatrix(Stack):
    """Multiplies by a sparse adjacency matrix, as graph networks do."""

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        rows = x.shape[0]
        links = torch.sparse_coo_tensor(
            torch.tensor([list(range(rows)), [*range(1, rows), 0]]), torch.ones(rows)
        )
        out: Tensor = torch.sparse.mm(links, block(x))
        return out


class SparseGradient(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(7, 4, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.emb(torch.arange(x.shape[0])))


class Mapped(Stack):
    """vmap over a block."""

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = torch.vmap(block)(x)
        return out


class Jacobian(Stack):
    """torch.func inside of the forward."""

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = x + torch.func.grad(lambda y: block(y).sum())(x)
        return out


class Forces(Stack):
    """Differentiates in its own forward, as models of molecular forces do."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = super().forward(x).tanh().sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return force + x * self.out.bias.sum()


class Saliency(Stack):
    """Weighs its input by a first-order gradient, and goes on with weights it holds already."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        mix = self.mix
        x = x.detach().requires_grad_()
        (weight,) = torch.autograd.grad(super().forward(x @ mix).sum(), x)
        return super().forward(x.detach() * weight @ mix)


class Probing(Block):
    """Takes a gradient in the middle of a block's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        probe = x.detach().requires_grad_()
        (weight,) = torch.autograd.grad(super().forward(probe).sum(), probe)
        return x + self.lstm((weight * x).unsqueeze(0))[0].squeeze(0)


class ProbingStack(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Probing() for _ in range(2))


class Skipping(Stack):
    """Block 1 rests at odd rows' parity of the input's first value."""

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        if block is self.blocks[1] and x[0, 0] > 0:
            return x
        out: Tensor = block(x)
        return out


class Normalised(Stack):
    """Buffers that the forward updates, parameters of one and of no element."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.scale = nn.Parameter(torch.ones(()))
        self.empty = nn.Linear(4, 0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x) * self.scale + self.empty(x).sum())


class Compiled(Stack):
    """Dynamo traces the forward of each block; hooks stay outside."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.forward = torch.compile(  # type: ignore[method-assign]
                block.forward, backend="aot_eager", fullgraph=True
            )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "stack": Stack,
    "checkpoint": Checkpointed,
    "reentrant checkpoint": Reentrant,
    "checkpoint of a segment": Segment,
    "reentrant segment": ReentrantSegment,
    "mixed checkpoints": Mixed,
    "nested checkpoints": Nested,
    "module twice, far apart": FarApart,
    "foreign read": Foreign,
    "tuple outputs": Tuples,
    "dict outputs": Dicts,
    "dataclass outputs": Dataclasses,
    "in-place on inputs": InPlaceInputs,
    "in-place on outputs": InPlaceOutputs,
    "LSTM and GRU": Recurrent,
    "attention": Attention,
    "weight_norm and orthogonal": _parametrised,
    "old weight_norm": _old_weight_norm,
    "LoRA": _lora,
    "detached weight": DetachedStack,
    "weight on ctx": ContextStack,
    "output is a view of the weight": WithPositions,
    "output is the weight": WithPrompt,
    "parameter containers": Containers,
    "sparse matrix": SparseMatrix,
    "sparse gradient": SparseGradient,
    "vmap": Mapped,
    "torch.func.grad": Jacobian,
    "forces": Forces,
    "saliency": Saliency,
    "gradient within a block": ProbingStack,
    "skipped block": Skipping,
    "batch norm, scalar, empty": Normalised,
    "compiled blocks": Compiled,
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, stage: int) -> None:
    """Losses of three steps and the parameters after them, fp32, 1e-5 relative."""
    if name == "torch.func.grad" and stage == 3:
        with pytest.raises(EngineError, match="GatheredParameters"):
            _compare(MODELS[name], _square, stage)
        return
    _compare(MODELS[name], _square, stage)


def _double(model: Any, step: int) -> Tensor:
    out: Tensor = model(_x(step).double()).square().mean()
    return out


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_float64_models(stage: int) -> None:
    """``model.double()`` trains, to the precision of an fp32 master at least."""
    _compare(lambda: Stack().double(), _double, stage)


# ---- ways to call ------------------------------------------------------------------------------


def _two_forwards(model: Any, step: int) -> Tensor:
    return _square(model, step) + model(2 * _x(step + 50)).abs().mean()


def _no_grad_between(model: Any, step: int) -> Tensor:
    out = model(_x(step))
    with torch.no_grad():
        model(_x(step + 50))
    loss: Tensor = out.square().mean()
    return loss


def _inference_between(model: Any, step: int) -> Tensor:
    out = model(_x(step))
    with torch.inference_mode():
        model(_x(step + 50))
    loss: Tensor = out.square().mean()
    return loss


def _inference_before(model: Any, step: int) -> Tensor:
    with torch.inference_mode():
        model(_x(step + 50))
    return _square(model, step)


def _grad_of_input(model: Any, step: int) -> Tensor:
    x = _x(step).requires_grad_()
    (grad,) = torch.autograd.grad(model(x).sum(), x)
    out: Tensor = model(x.detach() + grad).square().mean()
    return out


def _retained(model: Any, step: int) -> Tensor:
    out = model(_x(step))
    out.square().mean().backward(retain_graph=True)
    loss: Tensor = out.abs().mean()
    return loss


def _unused_forward(model: Any, step: int) -> Tensor:
    model(_x(step + 50))
    model(_x(step + 60)).detach()
    return _square(model, step)


def _penalty(model: Any, step: int) -> Tensor:
    """The size of the gradient by the input, as in WGAN-GP."""
    x = _x(step).requires_grad_()
    (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return grad.square().sum()


def _penalty_last(model: Any, step: int) -> Tensor:
    return _square(model, step) + _penalty(model, step)


def _penalty_first(model: Any, step: int) -> Tensor:
    penalty = _penalty(model, step)
    return penalty + _square(model, step)


def _penalty_then_eval(model: Any, step: int) -> Tensor:
    penalty = _penalty(model, step)
    with torch.no_grad():
        model(_x(step + 50))
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
    _compare(Stack, CALLS[name], stage)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", [Checkpointed, Reentrant, FarApart])
def test_two_forwards_through_special_models(kind: Callable[[], nn.Module], stage: int) -> None:
    """Checkpoints and repeated modules, twice before one backward."""
    _compare(kind, _two_forwards, stage)


@pytest.mark.parametrize("stage", STAGES)
def test_backward_with_create_graph(stage: int) -> None:
    """``loss.backward(create_graph=True)``: gradients enter though grad mode is on."""
    plain, model = Stack(), Stack()
    model.load_state_dict(plain.state_dict())
    engine = _engine(model, stage)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the reference cycle that torch warns about
            _square(plain, step).backward(create_graph=True)
            _square(engine, step).backward(create_graph=True)
        optimizer.step()
        optimizer.zero_grad()
        engine.step()
    _close(engine.module_state_dict(), dict(plain.state_dict()))


@pytest.mark.parametrize("stage", STAGES)
def test_autograd_grad_by_parameters(stage: int) -> None:
    """Values equal torch's, and nothing is left for the next step."""
    torch.manual_seed(11)
    plain = Stack()
    model = copy.deepcopy(plain)
    engine = _engine(model, stage)
    grads = torch.autograd.grad(_square(engine, 7), list(model.parameters()))
    wanted = torch.autograd.grad(_square(plain, 7), list(plain.parameters()))
    for got, value in zip(grads, wanted, strict=True):
        torch.testing.assert_close(got, value)
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())
    losses, values = _plain(plain, _square)
    for step in range(STEPS):
        loss = _square(engine, step)
        engine.backward(loss)
        engine.step()
        assert loss.item() == pytest.approx(losses[step], rel=1e-5)
    _close(engine.module_state_dict(), values)


@pytest.mark.parametrize("stage", STAGES)
def test_backward_with_inputs(stage: int) -> None:
    """``backward(inputs=...)`` gives gradients to those alone."""
    plain, model = Stack(), Stack()
    model.load_state_dict(plain.state_dict())
    engine = _engine(model, stage)
    _square(plain, 0).backward(inputs=[plain.inp.weight, plain.out.bias])
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    _square(engine, 0).backward(inputs=[model.inp.weight, model.out.bias])
    engine.step()
    _close(engine.module_state_dict(), dict(plain.state_dict()))


@pytest.mark.parametrize("stage", STAGES)
def test_an_engine_built_in_inference_mode(stage: int) -> None:
    """Its buffers are ordinary tensors: training follows."""
    torch.manual_seed(11)
    plain = Stack()
    model = copy.deepcopy(plain)
    losses, values = _plain(plain, _square)
    with torch.inference_mode():
        engine = _engine(model, stage)
        engine(_x(0))
    for step in range(STEPS):
        loss = _square(engine, step)
        engine.backward(loss)
        engine.step()
        assert loss.item() == pytest.approx(losses[step], rel=1e-5)
    _close(engine.module_state_dict(), values)


@pytest.mark.parametrize("stage", STAGES)
def test_a_block_called_without_the_model(stage: int) -> None:
    """The root's forward never runs."""

    def loss(model: Any, step: int) -> Tensor:
        root = model.module if isinstance(model, ds_zero.Engine) else model
        out: Tensor = root.out(root.blocks[1](root.inp(_x(step)))).square().mean()
        return out

    _compare(Stack, loss, stage)


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
        engine = _engine(model, stage)
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        for step in range(2):
            for owner, root in ((plain, plain), (engine, model)):
                if order in ("after", "twice"):
                    _square(owner, step).backward()
                _decay(root).backward()
                if order == "twice":
                    _decay(root).backward()
                if order == "before":
                    _square(owner, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            engine.step()
        _close(engine.module_state_dict(), dict(plain.state_dict()))


# ---- errors in the middle ----------------------------------------------------------------------


class Bomb(torch.autograd.Function):
    """Raises in backward when armed."""

    armed = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if Bomb.armed:
            raise RuntimeError("boom")
        return grad


class Mined(Stack):
    """May fail in the middle of forward or backward."""

    fail_in_forward = False

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        x = block(x)
        if block is self.blocks[1]:
            if self.fail_in_forward:
                raise ValueError("no forward today")
            x = Bomb.apply(x)  # type: ignore[no-untyped-call]
        return x


@pytest.fixture
def disarmed() -> Iterator[None]:
    """Leave no armed bomb behind."""
    yield
    Bomb.armed = False


@pytest.mark.usefixtures("disarmed")
@pytest.mark.parametrize("recover", ["forward", "zero_grad", "kept graph"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_exception_in_backward(stage: int, recover: str) -> None:
    """Its partial gradients are dropped; training goes on as if it had not been."""
    torch.manual_seed(11)
    plain = Mined()
    model = copy.deepcopy(plain)
    losses, values = _plain(plain, _square)
    engine = _engine(model, stage)
    for step in range(STEPS):
        spare = _square(engine, step) if recover == "kept graph" else None
        Bomb.armed = True
        with pytest.raises(RuntimeError, match="boom"):
            engine.backward(_square(engine, step + 50))
        Bomb.armed = False
        if recover != "forward":
            engine.zero_grad()
        loss = _square(engine, step) if spare is None else spare
        engine.backward(loss)
        engine.step()
        assert loss.item() == pytest.approx(losses[step], rel=1e-5)
    _check_released(engine)
    _close(engine.module_state_dict(), values)


@pytest.mark.parametrize("stage", STAGES)
def test_an_exception_in_forward(stage: int) -> None:
    """Hooks of saved tensors and counts of calls are taken back."""
    torch.manual_seed(11)
    plain = Mined()
    model = copy.deepcopy(plain)
    losses, values = _plain(plain, _square)
    engine = _engine(model, stage)
    for step in range(STEPS):
        model.fail_in_forward = True
        with pytest.raises(ValueError, match="no forward today"):
            engine(_x(step))
        model.fail_in_forward = False
        loss = _square(engine, step)
        engine.backward(loss)
        engine.step()
        assert loss.item() == pytest.approx(losses[step], rel=1e-5)
    _close(engine.module_state_dict(), values)


class Careless(Stack):
    """Edits in place what exp() saved for its backward: an error in torch."""

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        return torch.exp(block(x)).add_(1)


@pytest.mark.parametrize("stage", STAGES)
def test_in_place_edits_of_saved_tensors_are_errors(stage: int) -> None:
    """As in torch; never a wrong gradient without a word."""
    engine = _engine(Careless(), stage)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        engine.backward(_square(engine, 0))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_graph_from_before_the_step_is_an_error(stage: int) -> None:
    """Its weights have changed: torch refuses, and so does every stage."""
    model = Stack()
    engine = _engine(model, stage)
    stale = _square(engine, 0)
    engine.backward(_square(engine, 1))
    engine.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stale.backward()


class Flaky(LocalCollectives):
    """Gathers that fail when waited for, as long as it is told so."""

    broken = False

    def gather(self, flat: Tensor, label: str) -> Work:
        return _FlakyWork(self)


class _FlakyWork:
    def __init__(self, owner: Flaky) -> None:
        self._owner = owner

    def wait(self) -> None:
        if self._owner.broken:
            raise CommError("the cable is out")


def test_a_gather_that_fails() -> None:
    """The typed error every time it is tried, and the right values once it works again."""
    model = Stack()
    wanted = model(_x(0)).detach()
    flaky = Flaky(Group.solo())
    options = CoreOptions(stage=3, rules=UnitRules(persistence_numel=0))
    core = ZeroCore(model, [list(model.parameters())], flaky, options)
    flaky.broken = True
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with pytest.raises(CommError, match="cable"):
                model(_x(0))
    flaky.broken = False
    core.tracker.end_step()
    assert torch.equal(model(_x(0)), wanted)


# ---- edits -------------------------------------------------------------------------------------


class Clamping(Stack):
    """Edits a weight in its own forward, as clipped critics and max-norm layers do."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.blocks[0].up.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


def test_an_edit_in_forward_is_not_lost() -> None:
    """Stage 3: as in torch, or an EditError; a released buffer may not swallow it."""
    try:
        _compare(Clamping, _square, 3)
    except EditError:
        return


def test_a_weight_replaced_after_initialize_is_an_error() -> None:
    """``module.weight = Parameter(...)``: it would train on local gradients, or not at all."""
    for stage in STAGES:
        model = Stack()
        engine = _engine(model, stage)
        model.out.weight = nn.Parameter(torch.zeros(3, 4))
        with pytest.raises(EditError, match=r"out\.weight"):
            engine.backward(_square(engine, 0))
            engine.step()


@pytest.mark.parametrize("stage", STAGES)
def test_one_model_belongs_to_one_engine(stage: int) -> None:
    """As ``ZeroCore`` says: a second engine on the same parameters is refused."""
    model = Stack()
    engine = _engine(model, stage)
    before = engine.module_state_dict()
    with pytest.raises(EngineError, match="another engine"):
        _engine(model, stage)
    _close(engine.module_state_dict(), before)
    engine.destroy()
    _engine(model, stage)


@pytest.mark.parametrize("stage", STAGES)
def test_a_copy_of_the_model_is_free(stage: int) -> None:
    """An averaged copy for evaluation runs without collectives, hooks or gradients of ours."""
    model = Stack()
    core, log = _recorded_core(model, stage)
    with ds_zero.GatheredParameters(model.parameters()):
        twin = copy.deepcopy(model)
    wanted = core.model(_x(0)).detach()
    core.tracker.end_step()
    log.calls.clear()
    assert torch.allclose(twin(_x(0)), wanted)
    twin(_x(0)).sum().backward()
    assert log.calls == []
    assert all(p.grad is not None for p in twin.parameters())
    assert not core.gradients.unreduced()
    assert all(unit.calls_pending == 0 for unit in core.units)


def _recorded_core(model: nn.Module, stage: int) -> tuple[ZeroCore, RecordingCollectives]:
    log = RecordingCollectives(collectives_for(Group.world()))
    params = [p for p in model.parameters() if p.requires_grad]
    options = CoreOptions(stage=stage, rules=UnitRules(persistence_numel=0))
    return ZeroCore(model, [params], log, options), log


@pytest.mark.parametrize("stage", STAGES)
def test_hooks_do_not_pile_up(stage: int) -> None:
    """A module that returns its parameter leaves one hook on it at most, not one per call."""
    model = WithPrompt()
    engine = _engine(model, stage)
    for step in range(4):
        engine.backward(_square(engine, step))
        engine.step()
    hooks = model.positions.table._backward_hooks
    assert hooks is None or len(hooks) <= 1


def test_the_trace_of_an_evaluation_does_not_grow() -> None:
    """A server that only runs forwards keeps no list of all gathers ever made."""
    engine = _engine(Stack(), 3)
    for step in range(60):
        with torch.no_grad():
            engine(_x(step))
    assert len(engine.core.trace.events) < 200


@pytest.mark.parametrize("stage", STAGES)
def test_requires_grad_toggled_later(stage: int) -> None:
    """Freezing after ``initialize`` changes participation: no gradient, no update, and back."""
    torch.manual_seed(11)
    plain = Stack()
    model = copy.deepcopy(plain)
    engine = _engine(model, stage)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(4):
        for owner in (plain, model):
            owner.blocks.requires_grad_(step % 2 == 0)
        optimizer.zero_grad()
        _square(plain, step).backward()
        optimizer.step()
        engine.backward(_square(engine, step))
        engine.step()
        _close(engine.module_state_dict(), dict(plain.state_dict()))


# ---- several engines ---------------------------------------------------------------------------


def _gan(
    generator: Any, critic: Any, step: Callable[[int], None], zero: Callable[[int], None]
) -> None:
    """One alternating round: the critic on detached fakes, the generator through the critic."""
    real, noise = _x(1), _x(2)
    zero(1)
    (critic(real).mean() - critic(generator(noise).detach()).mean()).square().backward()
    step(1)
    zero(0)
    critic(generator(noise)).square().mean().backward()
    step(0)


class Critic(Stack):
    """Ends in width 3; the generator in width 4."""


class Generator(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 4)


@pytest.mark.parametrize(("first", "second"), [(0, 0), (3, 3), (0, 3), (3, 0), (1, 2)])
def test_two_engines_that_alternate(first: int, second: int) -> None:
    """A generator and a critic, each with its own engine and stage."""
    torch.manual_seed(11)
    plain: list[nn.Module] = [Generator(), Critic()]
    models = copy.deepcopy(plain)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in plain]
    stages = (first, second)
    engines = [_engine(model, stage) for model, stage in zip(models, stages, strict=True)]
    for _ in range(3):
        _gan(
            plain[0], plain[1], lambda i: optimizers[i].step(), lambda i: optimizers[i].zero_grad()
        )
        _gan(engines[0], engines[1], lambda i: engines[i].step(), lambda i: engines[i].zero_grad())
    for engine, model in zip(engines, plain, strict=True):
        _close(engine.module_state_dict(), dict(model.state_dict()))


def test_a_destroyed_engine_leaves_a_plain_model() -> None:
    """No hook of ours remains: training by torch goes on."""
    for stage in STAGES:
        torch.manual_seed(11)
        plain = Stack()
        model = copy.deepcopy(plain)
        engine = _engine(model, stage)
        engine.backward(_square(engine, 9))
        engine.step()
        engine.destroy()
        plain.load_state_dict(model.state_dict())
        for param in model.parameters():
            param.grad = None
        one, two = _plain(plain, _square), _plain(model, _square)
        assert one[0] == two[0]
        _close(two[1], one[1])
        assert type(model.out._parameters) is dict


# ---- two ranks ---------------------------------------------------------------------------------

PAIRED = ("checkpoint", "reentrant checkpoint", "foreign read", "LoRA", "module twice, far apart")


def _on_two_ranks(name: str, stage: int) -> None:
    torch.manual_seed(11)
    plain = MODELS[name]()
    model = copy.deepcopy(plain)

    def both(twin: Any, step: int) -> Tensor:
        return (_square(twin, 2 * step) + _square(twin, 2 * step + 1)) / 2

    _, values = _plain(plain, both)
    rank = torch.distributed.get_rank()
    engine = _engine(model, stage)
    for step in range(STEPS):
        engine.backward(_square(engine, 2 * step + rank))
        engine.step()
    _check_released(engine)
    _close(engine.module_state_dict(), values)


@pytest.mark.parametrize("name", PAIRED)
def test_models_on_two_ranks(ranks: Ranks, name: str) -> None:
    """The same with real collectives, stage 3."""
    ranks(2, _on_two_ranks, name, 3)


class Buffered(nn.Module):
    """Buffers of many kinds."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.register_buffer("plain", torch.full((3,), value))
        self.register_buffer("turned", torch.full((3, 2), value).t())
        self.register_buffer("scalar", torch.tensor(value))
        self.register_buffer("flags", torch.full((3,), bool(value)))
        self.register_buffer("count", torch.tensor(int(value)))
        self.register_buffer("short", torch.full((3,), int(value), dtype=torch.int16))
        self.register_buffer("rotary", torch.full((3,), complex(value, -value)))
        self.register_buffer("wide", torch.tensor([value]).expand(4))
        self.register_buffer("none", None)
        self.register_buffer("empty", torch.empty(0), persistent=False)


def _buffers(name: str) -> None:
    rank = torch.distributed.get_rank()
    model = Buffered(float(2 - rank))
    wanted = Buffered(2.0).get_buffer(name)
    kept = {key: None for key, _ in model.named_buffers() if key != name}
    for key in kept:
        setattr(model, key, None)
    _engine(model, 0)
    assert torch.equal(model.get_buffer(name), wanted)


@pytest.mark.parametrize(
    "name", ["plain", "turned", "scalar", "flags", "count", "short", "rotary", "wide", "empty"]
)
def test_buffers_become_those_of_rank_0(ranks: Ranks, name: str) -> None:
    """Strided, scalar, bool, integer, complex (rotary tables), expanded and empty ones."""
    ranks(2, _buffers, name)


def _unequal_experts() -> str:
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 40)])
    engine = _engine(model, 3)
    with pytest.raises(DSError) as caught:
        engine.module[torch.distributed.get_rank()](_x(0))
    torch.distributed.barrier()
    return str(caught.value)


def test_diverging_modules_of_other_sizes(ranks: Ranks) -> None:
    """B36 with experts of different widths: an error that names both, not a crash."""
    for message in ranks(2, _unequal_experts):
        assert "'0'" in message and "'1'" in message
