"""Small models of many kinds: what users do around a gathered weight."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


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
        # Dynamo counts the graphs of a code object over the whole process, and a pool's ranks
        # run many tests: what others compiled must not use up the limit.
        torch._dynamo.reset()
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
