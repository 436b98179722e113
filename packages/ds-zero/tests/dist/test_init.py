"""Models built under ``Init``: every module tree has rank 0's values, and trains as without it."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules
from twin import close, engine_of, plain_run, square
from zoo import MODELS, Stack

import ds_zero
from ds_comm.errors import ConfigError, EditError, EngineError
from ds_comm.group import Group
from ds_comm.testing.plugin import Ranks
from ds_zero.nursery import newborn_of


class Encoder(nn.Module):
    """Everything that a constructor may do to parameters that are not its own."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)  # deep copies
        self.emb = nn.Embedding(11, 8, padding_idx=0)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.emb.weight
        self.scale = nn.Parameter(torch.randn(3, 5) * self.emb.weight.std())  # after children
        self.count = nn.Parameter(torch.arange(3), requires_grad=False)
        self.one = nn.Parameter(torch.ones(()))
        self.none = nn.Parameter(torch.empty(0, 4))
        self.turned = nn.Parameter(torch.randn(5, 7).t())
        for param in self.parameters():
            if param.dim() > 1 and param.is_floating_point() and param.numel():
                nn.init.xavier_uniform_(param)
        first, second = self.layers.layers[0], self.layers.layers[1]
        first.linear1.weight.data.copy_(second.linear1.weight.data)
        with torch.no_grad():
            self.emb.weight[0].fill_(0.5)
            second.linear2.bias += 1
            first.linear2.weight.mul_(second.linear2.weight.norm())
        self.apply(self._zero_biases)

    @staticmethod
    def _zero_biases(module: nn.Module) -> None:
        if isinstance(module, nn.LayerNorm):
            module.bias.data.fill_(0.25)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layers(self.emb.weight[:5, None]))
        return out.sum(0) * self.one + self.scale.sum() + self.turned.mean() + x.sum()


def _listed() -> nn.Module:
    """Modules that wait in a list before anybody owns them."""
    torch.manual_seed(torch.initial_seed())
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(5)])


TREES: dict[str, Callable[[], nn.Module]] = {
    **{name: make for name, make in MODELS.items() if "compiled" not in name},
    "encoder": Encoder,
    "listed": _listed,
}


def _build(make: Callable[[], nn.Module], seed: int) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(seed)
    return make(), torch.get_rng_state()


def _check_values(names: list[str]) -> None:
    rank = torch.distributed.get_rank()
    for name in names:
        plain, _ = _build(TREES[name], 7)
        _, state = _build(TREES[name], 7 + rank)
        with ds_zero.Init():
            model, after = _build(TREES[name], 7 + rank)
        assert torch.equal(after, state), name
        for param in model.parameters():
            known = newborn_of(param)
            whole = param.numel() <= 1 or not param.is_floating_point()
            assert (known is None) is whole, name
            assert known is None or bool(param.isnan().all())
        with ds_zero.GatheredParameters(model.parameters()):
            pairs = zip(plain.named_parameters(), model.named_parameters(), strict=True)
            for (wanted_name, wanted), (got_name, got) in pairs:
                assert wanted_name == got_name
                assert got.requires_grad is wanted.requires_grad
                assert got.dtype == wanted.dtype
                if newborn_of(got) is not None:  # others follow rank 0 at initialize
                    assert torch.equal(got, wanted), (name, got_name)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_values_are_those_of_rank_0(ranks: Ranks, world: int) -> None:
    """Bit-equal to plain construction with rank 0's seed; each rank's generator moves as usual."""
    ranks(world, _check_values, list(TREES))


def _trains_alike(names: list[str], stage: int) -> None:
    rank = torch.distributed.get_rank()
    for name in names:
        torch.manual_seed(5)
        engines = [engine_of(TREES[name](), stage)]
        torch.manual_seed(5 + rank)
        with ds_zero.Init():
            model = TREES[name]()
        engines.append(engine_of(model, stage))
        assert all(newborn_of(param) is None for param in model.parameters())
        losses: list[list[float]] = []
        for engine in engines:
            losses.append([])
            for step in range(2):
                loss = square(engine, 2 * step + rank)
                engine.backward(loss)
                engine.step()
                losses[-1].append(loss.item())
        assert losses[0] == losses[1], name
        plain, born = (engine.module_state_dict() for engine in engines)
        assert plain.keys() == born.keys()
        for key, value in plain.items():
            assert torch.equal(value, born[key]), (name, key)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_training_is_bit_identical(ranks: Ranks, stage: int) -> None:
    """Losses and parameters of two steps, fp32, against an engine on a plainly built model."""
    names = ["stack", "foreign read", "weight_norm and orthogonal", "LSTM and GRU", "LoRA"]
    ranks(2, _trains_alike, [*names, "encoder", "listed", "parameter containers"], stage)


def test_training_equals_plain_torch() -> None:
    """Stage 3 on one rank, fp32, 1e-5 relative."""
    torch.manual_seed(2)
    _, values = plain_run(Stack(), square)
    torch.manual_seed(2)
    with ds_zero.Init():
        model = Stack()
        engine = engine_of(model, 3)  # inside of the context as well
    for step in range(3):
        engine.backward(square(engine, step))
        engine.step()
    close(engine.module_state_dict(), values)


def _converted() -> None:
    torch.manual_seed(3)
    wanted = Encoder()
    torch.manual_seed(3 + torch.distributed.get_rank())
    model = Encoder()
    ds_zero.Init(module=model)
    engine = engine_of(model, 3)
    got = engine.module_state_dict()
    for name, param in wanted.named_parameters():
        assert torch.equal(got[name], param)
    teacher = engine_of(Stack(), 3)
    before = teacher.module_state_dict()
    with ds_zero.Init():  # a module that belongs to an engine stays with it

        class Pair(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.teacher = teacher.module
                self.student = Stack()

        pair = Pair()
    assert all(newborn_of(param) is None for param in pair.teacher.parameters())
    assert all(newborn_of(param) is not None for param in pair.student.parameters())
    close(teacher.module_state_dict(), before)


def test_an_existing_model_is_converted(ranks: Ranks) -> None:
    """``Init(module=model)``; parameters of an engine are left alone."""
    ranks(2, _converted)


def _edits() -> None:
    rank = torch.distributed.get_rank()
    with ds_zero.Init():
        model = Stack()
        with ds_zero.GatheredParameters(model.inp.weight, modifier_rank=1):
            if rank == 1:
                nn.init.constant_(model.inp.weight, 2.0)
    with ds_zero.GatheredParameters(model.out.parameters(), modifier_rank=0):
        if rank == 0:
            nn.init.constant_(model.out.weight, 3.0)
            model.out.bias.data = torch.full((3,), 4.0)
    with (
        pytest.raises(EditError, match=r"Linear\.bias.*modifier_rank"),
        ds_zero.GatheredParameters(model.inp),
    ):
        if rank == 0:
            model.inp.bias.data.fill_(7.0)
    with pytest.raises(ValueError, match="stop"), ds_zero.GatheredParameters(model.inp, 0):
        model.inp.bias.data.fill_(7.0)
        raise ValueError("stop")
    with ds_zero.GatheredParameters(model.parameters()):
        assert bool((model.inp.weight == 2).all() and (model.out.weight == 3).all())
        assert bool((model.out.bias == 4).all()) and not bool((model.inp.bias == 7).any())
    state = engine_of(model, 3).module_state_dict()
    assert bool((state["inp.weight"] == 2).all() and (state["out.weight"] == 3).all())
    assert bool((state["out.bias"] == 4).all()) and not bool((state["inp.bias"] == 7).any())


def test_edits_before_initialize(ranks: Ranks) -> None:
    """Through ``GatheredParameters`` with an owner; without one they are an error."""
    ranks(2, _edits)


def _raw_model() -> nn.Module:
    with ds_zero.Init():
        return Stack()


def test_a_raw_model_never_yields_placeholders() -> None:
    """Running, storing, loading and copying name what to do instead."""
    model = _raw_model()
    with pytest.raises(EngineError, match="ds_zero.initialize"):
        model(torch.zeros(2, 4))
    with pytest.raises(EngineError, match="GatheredParameters"):
        model.state_dict()
    with pytest.raises(EngineError, match="load_module_state_dict"):
        model.load_state_dict(Stack().state_dict())
    with pytest.raises(EngineError, match="GatheredParameters"):
        copy.deepcopy(model)
    with ds_zero.GatheredParameters(model.parameters()):
        wanted = model(torch.ones(2, 4)).detach()
        twin = copy.deepcopy(model)
        state = model.state_dict()
    assert torch.equal(twin(torch.ones(2, 4)), wanted)
    assert torch.equal(state["out.weight"], twin.state_dict()["out.weight"])
    engine_of(model, 3)
    assert type(twin.inp._parameters) is dict


@pytest.mark.parametrize(
    "edit",
    [
        lambda model: model.inp.weight.data.fill_(1.0),
        lambda model: model.to(torch.bfloat16),
        lambda model: setattr(model.inp.weight, "data", torch.ones(4, 4)),
    ],
)
def test_an_edit_that_would_be_lost_is_an_error(edit: Callable[[nn.Module], object]) -> None:
    model = _raw_model()
    edit(model)
    with pytest.raises(EditError, match=r"Linear\.weight"):
        engine_of(model, 3)


def _untouched() -> bool:
    hooks = [
        torch_modules._global_parameter_registration_hooks,
        torch_modules._global_module_registration_hooks,
    ]
    return not any(hooks) and torch.get_default_dtype() == torch.float32


def test_torch_is_left_as_it_was() -> None:
    """After the context, nested ones, and an exception in a constructor."""

    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)
            raise RuntimeError("no such file")

    functions = (nn.Linear.__init__, nn.Module.__init__, torch.empty, nn.functional.linear)
    with ds_zero.Init(dtype=torch.bfloat16), ds_zero.Init():
        model = nn.Linear(4, 4)
    assert _untouched() and model.weight.dtype == torch.bfloat16
    with pytest.raises(RuntimeError, match="no such file"), ds_zero.Init(dtype=torch.float16):
        Broken()
    assert _untouched()
    assert functions == (nn.Linear.__init__, nn.Module.__init__, torch.empty, nn.functional.linear)
    plain = nn.Linear(4, 4)
    assert newborn_of(plain.weight) is None and plain.weight.dtype == torch.float32
    with ds_zero.Init(enabled=False, dtype=torch.bfloat16):
        plain = nn.Linear(4, 4)
    assert newborn_of(plain.weight) is None and plain.weight.dtype == torch.float32


def test_nested_contexts_shard_once() -> None:
    """What the inner one builds belongs to the outer one, which goes on after it."""
    with ds_zero.Init():
        with ds_zero.Init():
            first = nn.Linear(4, 4)
        second = nn.Linear(4, 4)
    assert newborn_of(first.weight) is not None and newborn_of(second.weight) is not None


def test_a_write_through_shared_memory_is_not_lost() -> None:
    """A tensor that aliases a weight is written to after the next module was built."""
    with ds_zero.Init():
        first = nn.Linear(4, 4)
        alias = first.weight.data
        second = nn.Linear(4, 4)
        third = nn.Linear(4, 4)
        alias.fill_(2.0)
        second.weight.data.copy_(third.weight.data)
    with ds_zero.GatheredParameters([first.weight, second.weight, third.weight]):
        assert bool((first.weight == 2).all())
        assert torch.equal(second.weight, third.weight)


def _over_a_group() -> None:
    group = Group.world()
    with ds_zero.Init(data_parallel_group=group.handle):
        by_handle = nn.Linear(5, 7)
    with ds_zero.Init(data_parallel_group=group):
        nn.Linear(5, 7)
    known = newborn_of(by_handle.weight)
    assert known is not None and known.shard.numel() == 18  # 35 elements on two ranks


def test_groups(ranks: Ranks) -> None:
    ranks(2, _over_a_group)


@pytest.mark.parametrize(
    "arguments",
    [
        {"remote_device": "nvme"},
        {"zero_quantized_weights": True},
        {"dtype": torch.int8},
        {"data_parallel_group": Group.solo(), "mpu": object()},
    ],
)
def test_what_is_not_available_is_refused(arguments: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        ds_zero.Init(**arguments)  # type: ignore[arg-type]
