"""``engine.compile()``: the same training with compiled blocks, at every stage."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from twin import check_released, close, engine_of, inputs, square
from zoo import MODELS, Block, Checkpointed, Reentrant, Stack

import ds_zero
from ds_comm.errors import ConfigError
from ds_comm.testing.plugin import Ranks


@pytest.fixture(autouse=True)
def fresh_compiler() -> Any:
    """Graphs of one test must not count against the recompilation limit of the next."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _trained(
    model: nn.Module, stage: int, compile_: dict[str, Any] | None, threshold: int = 0
) -> dict[str, Tensor]:
    engine = engine_of(model, stage, threshold)
    if compile_ is not None:
        engine.compile(**compile_)
    rank = engine.data_group.rank
    for step in range(3):
        engine.backward(square(engine, 2 * step + rank))
        engine.step()
    check_released(engine)
    state = engine.module_state_dict()
    engine.destroy()
    return state


def _twins(make: Any) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(11)
    model = make()
    return model, copy.deepcopy(model)


class Graphs:
    """A backend that runs graphs eagerly and counts them."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, module: torch.fx.GraphModule, example_inputs: list[Tensor]) -> Any:
        self.count += 1
        return module.forward


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", [Stack, Checkpointed, Reentrant])
def test_equal_to_eager(kind: type[Stack], stage: int) -> None:
    """fp32, bit for bit; three blocks share one graph, or one for each grad mode."""
    plain, compiled = _twins(kind)
    graphs = Graphs()
    options = {"backend": graphs, "compile_kwargs": {"fullgraph": True}}
    wanted = _trained(plain, stage, None)
    got = _trained(compiled, stage, options)
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)
    assert graphs.count == (2 if kind is Reentrant else 1)  # without and with gradient


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("threshold", [0, 20, 10**6])
def test_aot_autograd(stage: int, threshold: int) -> None:
    """Forward and backward traced; none, some or all parameters resident; 1e-5."""
    plain, compiled = _twins(Stack)
    wanted = _trained(plain, stage, None, threshold)
    close(_trained(compiled, stage, {"backend": "aot_eager"}, threshold), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
def test_inductor(stage: int) -> None:
    """The default backend, with a C++ compiler; 1e-5."""
    plain, compiled = _twins(Stack)
    close(_trained(compiled, stage, {}), _trained(plain, stage, None))


def _on_two_ranks() -> None:
    for stage in range(4):
        plain, compiled = _twins(Stack)
        wanted = _trained(plain, stage, None)
        got = _trained(compiled, stage, {"backend": Graphs()})
        assert all(torch.equal(got[name], wanted[name]) for name in wanted)


def test_on_two_ranks(ranks: Ranks) -> None:
    ranks(2, _on_two_ranks)


# What a compiled block may contain.  Some of these do not pass a block's forward at all.
SPECIAL = (
    "tuple outputs",
    "dict outputs",
    "dataclass outputs",
    "in-place on inputs",
    "LoRA",
    "weight_norm and orthogonal",
    "detached weight",
    "weight on ctx",
    "attention",
    "module twice, far apart",
    "batch norm, scalar, empty",
)


@pytest.mark.parametrize("name", SPECIAL)
def test_special_blocks(name: str) -> None:
    """Stage 3 against stage 3 without compilation, 1e-5."""
    plain, compiled = _twins(MODELS[name])
    close(_trained(compiled, 3, {"backend": "aot_eager"}), _trained(plain, 3, None))


class Borrowing(Block):
    """A block that reads the weight of a module outside of it."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self._others = [other]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.linear(x, self._others[0].weight))


class Foreign(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Borrowing(self.other) for _ in range(3))


@pytest.mark.parametrize("stage", [0, 3])
def test_a_block_that_reads_a_foreign_weight(stage: int) -> None:
    plain, compiled = _twins(Foreign)
    for block in compiled.blocks:
        block._others = [compiled.other]
    close(_trained(compiled, stage, {"backend": "eager"}), _trained(plain, stage, None))


class TwoSizes(nn.Module):
    """No block occurs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 6)
        self.b = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(torch.tanh(self.a(x)))
        return out


@pytest.mark.parametrize(("stage", "threshold"), [(0, 0), (3, 0), (3, 10**6)])
def test_a_model_without_blocks(stage: int, threshold: int) -> None:
    """Its hooked modules are compiled, or itself where none has hooks."""
    plain, compiled = _twins(TwoSizes)
    graphs = Graphs()
    got = _trained(compiled, stage, {"backend": graphs}, threshold)
    close(got, _trained(plain, stage, None, threshold))
    assert graphs.count == (1 if threshold else 2)


class Shared(Stack):
    """The second block holds a parameter of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].up.weight = self.blocks[0].up.weight  # type: ignore[union-attr,assignment]


def test_a_block_with_hooks_inside_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    plain, compiled = _twins(Shared)
    graphs = Graphs()
    got = _trained(compiled, 3, {"backend": graphs})
    close(got, _trained(plain, 3, None))
    assert "'blocks.1' is not compiled: ['up']" in caplog.text and graphs.count == 1


def test_verbs() -> None:
    engine = engine_of(Stack(), 3)
    assert not engine.is_compiled and engine.get_compile_time() == 0
    engine.compile(backend="eager")
    assert engine.is_compiled
    engine(inputs(0))
    assert engine.get_compile_time() > 0
    engine.compile(backend=Graphs())
    block = engine.module.blocks[0]
    with ds_zero.GatheredParameters(engine.module.parameters()):
        twin = copy.deepcopy(engine.module)
    assert twin.blocks[0].forward.__self__ is twin.blocks[0]
    assert "forward" in vars(block)
    engine.destroy()
    assert "forward" not in vars(block)


def test_a_patched_forward_is_compiled_and_comes_back() -> None:
    """Other libraries replace ``forward`` on the instance."""
    model = Stack()
    block = model.blocks[0]
    own = block.forward

    def patched(x: Tensor) -> Tensor:
        return 2 * own(x)

    block.forward = patched  # type: ignore[method-assign]
    engine = engine_of(model, 0)
    wanted = engine(inputs(0))
    engine.compile(backend="eager")
    assert torch.equal(engine(inputs(0)), wanted)
    engine.destroy()
    assert block.forward is patched


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"backend": "indoctor"}, "'indoctor'; it has .*inductor"),
        ({"compile_kwargs": {"backend": "eager"}}, "twice"),
        ({"schedule": [(0, [])]}, "no passes"),
        ({"compiled_autograd_enabled": True}, "leave both out"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    engine = engine_of(Stack(), 0)
    with pytest.raises(ConfigError, match=message):
        engine.compile(**arguments)
    assert not engine.is_compiled
