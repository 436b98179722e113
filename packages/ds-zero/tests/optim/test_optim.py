"""Optimisers on shards against ``torch.optim`` on whole parameters, in one process.

A cut into N shards is played by N optimisers, each in a thread with the masters of its shard.
"""

from __future__ import annotations

import copy
import inspect
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ds_comm.collectives import Done, LocalCollectives
from ds_comm.errors import CheckpointError, ConfigError, EngineError
from ds_comm.group import Group
from ds_zero.flat import build_units
from ds_zero.layout import ModelLayout, ParamSpec
from ds_zero.optim import (
    Adam8bit,
    DeepSpeedCPUAdam,
    FlatAdagrad,
    FlatAdam,
    FlatLamb,
    FlatLion,
    FlatMuon,
    FlatSGD,
    OptimizedRun,
    ShardOptimizer,
    StepGradients,
    TorchAdapter,
    attach_optimizer,
    granularity_of,
)
from ds_zero.optim.table import ELEMENT_WISE
from ds_zero.stages import STAGES
from ds_zero.units import UnitRules, param_names, plan_units

Groups = list[dict[str, Any]]
Make = Callable[[Any], torch.optim.Optimizer]

ALONE = LocalCollectives(Group.solo())
SHAPES = {
    "a": (7, 5),
    "b": (40,),
    "c": (),
    "d": (0, 3),
    "e": (3, 11),
    "f": (64,),
    "g": (5,),
    "h": (2, 6, 4),
    "i": (3, 2, 2, 3),
}
FROZEN = "b"
IDLE = "e"
"""Gets a gradient only in every third step, see ``_grads``."""
NEVER = "g"
"""Never gets one."""


def _model(dtype: torch.dtype = torch.float32) -> nn.Module:
    model = nn.Module()
    torch.manual_seed(4)
    for name, shape in SHAPES.items():
        model.register_parameter(name, nn.Parameter(torch.randn(shape).to(dtype)))
    model.get_parameter(FROZEN).requires_grad_(False)
    return model


def _groups(model: nn.Module) -> Groups:
    """Two groups that interleave in the model's order."""
    members = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [p for n, p in members if n not in "af"], "weight_decay": 0.0},
        {"params": [p for n, p in members if n in "af"], "lr": 0.03, "weight_decay": 0.2},
    ]


def _grads(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    found = {n: torch.randn(s, generator=generator) for n, s in SHAPES.items() if n != FROZEN}
    del found[NEVER]
    if step % 3 != 1:
        del found[IDLE]
    return found


class Threads:
    """Collectives of ranks that are threads; only what optimisers use."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, slots: list[Any]) -> None:
        self.group = Group(tuple(range(size)), rank)
        self._barrier = barrier
        self._slots = slots
        self.calls = 0

    def _swap(self, value: Any) -> list[Any]:
        self.calls += 1
        self._slots[self.group.rank] = value
        self._barrier.wait(60)
        found = list(self._slots)
        self._barrier.wait(60)
        return found

    def exchange(self, row: Tensor) -> Tensor:
        return torch.stack(self._swap(row.clone()))

    def all_to_all(self, send: Sequence[Tensor], receive: Sequence[Tensor], label: str) -> Done:
        sent = self._swap((label, [part.clone() for part in send]))
        assert {name for name, _ in sent} == {label}
        for target, (_, parts) in zip(receive, sent, strict=True):
            target.copy_(parts[self.group.rank])
        return Done()


class Shards:
    """``num_shards`` optimisers that together update one model, as ranks at ``stage`` would."""

    def __init__(
        self, make: Make, num_shards: int, stage: int, dtype: torch.dtype = torch.float32
    ) -> None:
        self.optimizers: list[ShardOptimizer] = []
        self.runs: list[tuple[OptimizedRun, ...]] = []
        self.models: list[nn.Module] = []
        barrier, slots = threading.Barrier(num_shards), [None] * num_shards
        self.collectives = [Threads(r, num_shards, barrier, slots) for r in range(num_shards)]
        for shard in range(num_shards):
            model = _model(dtype)
            optimizer = make(_groups(model))
            blocks = granularity_of(optimizer)
            runs = _runs(model, optimizer.param_groups, num_shards, stage, shard, blocks)
            self.models.append(model)
            self.runs.append(runs)
            self.optimizers.append(
                attach_optimizer(
                    optimizer,
                    runs,
                    self.collectives[shard],
                    sharded=stage > 0,
                    allow_untested=True,
                )
            )

    def update(self, step: int) -> None:
        """Hand every shard its part of the gradients."""
        grads = _grads(step)
        work = []
        for runs, optimizer in zip(self.runs, self.optimizers, strict=True):
            flats, masks = [], []
            for run in runs:
                flat = torch.zeros(run.run.layout.numel)
                for slot in run.run.layout.slots:
                    if slot.spec.name in grads:
                        flat[slot.start : slot.stop] = grads[slot.spec.name].reshape(-1)
                flats.append(flat[slice(*run.run.master_range)].clone())
                masks.append([s.spec.name in grads for s in run.run.layout.slots])
            work.append((optimizer, StepGradients([4 * flat for flat in flats], masks, 0.25)))
        with ThreadPoolExecutor(len(work)) as pool:
            list(pool.map(lambda pair: pair[0].update(pair[1]), work))

    def values(self) -> dict[str, Tensor]:
        """Whole parameters, put together from the masters of all shards."""
        found = {n: torch.full(s, torch.nan) for n, s in SHAPES.items() if n != FROZEN}
        for runs in self.runs:
            for run in runs:
                for piece in run.pieces():
                    part = run.master[piece.shard_start : piece.shard_start + piece.numel]
                    whole = found[piece.spec.name].view(-1)
                    whole[piece.param_start : piece.param_start + piece.numel] = part
        return found

    def set_lr(self, index: int, lr: float) -> None:
        for optimizer in self.optimizers:
            optimizer.optimizer.param_groups[index]["lr"] = lr


def _runs(
    model: nn.Module,
    groups: Sequence[Mapping[str, Any]],
    num_shards: int,
    stage: int,
    shard: int,
    granularity: int = 1,
) -> tuple[OptimizedRun, ...]:
    group_of = {id(p): i for i, group in enumerate(groups) for p in group["params"]}
    params, _ = param_names(model)
    specs = {
        id(p): ParamSpec(name, tuple(p.shape), p.dtype, id(p) in group_of, group_of.get(id(p), 0))
        for name, p in params.items()
    }
    plans = plan_units(model, specs, UnitRules(persistence_numel=20))
    layout = ModelLayout.build([plan.spec for plan in plans], num_shards, granularity)
    units = build_units(layout, plans, params, STAGES[stage], shard, lambda tensor: None)
    return tuple(OptimizedRun(run) for u in units for run in u.runs if run.layout.trainable)


class Plain:
    """The same with ``torch.optim`` on whole parameters."""

    def __init__(self, make: Make, dtype: torch.dtype = torch.float32) -> None:
        self.model = _model(dtype)
        self.optimizer = make(_groups(self.model))

    def update(self, step: int) -> None:
        self.optimizer.zero_grad()
        for name, grad in _grads(step).items():
            param = self.model.get_parameter(name)
            if param.numel():  # torch's Adafactor divides by the size
                param.grad = grad.to(param.dtype)
        self.optimizer.step()

    def values(self) -> dict[str, Tensor]:
        return {n: p.detach() for n, p in self.model.named_parameters() if n != FROZEN}


def _same(got: Mapping[str, Tensor], wanted: Mapping[str, Tensor], tolerance: float = 1e-6) -> None:
    assert got.keys() == wanted.keys()
    for name, value in got.items():
        torch.testing.assert_close(
            value.to(wanted[name].dtype), wanted[name], rtol=tolerance, atol=tolerance, msg=name
        )


# ---- published update rules, written for one parameter at a time in its own dtype --------------


class Rule(torch.optim.Optimizer):
    """A rule ``update(group, state, param, grad)``, with states that begin empty."""

    def __init__(self, groups: Any, update: Callable[..., None], **defaults: Any) -> None:
        super().__init__(groups, defaults)
        self._update = update

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    state["t"] = state.get("t", 0) + 1
                    self._update(group, state, param, param.grad)


def lion_rule(group: Any, state: Any, param: Tensor, grad: Tensor) -> None:
    """Chen et al. 2023, algorithm 2."""
    m = state.get("m", torch.zeros_like(param))
    c = group["b1"] * m + (1 - group["b1"]) * grad
    param -= group["lr"] * (c.sign() + group["weight_decay"] * param)
    state["m"] = group["b2"] * m + (1 - group["b2"]) * grad


def lamb_rule(group: Any, state: Any, param: Tensor, grad: Tensor) -> None:
    """You et al. 2020, algorithm 2, with phi(z) = z and ratios within bounds."""
    b1, b2 = group["b1"], group["b2"]
    m = b1 * state.get("m", torch.zeros_like(param)) + (1 - b1) * grad
    v = b2 * state.get("v", torch.zeros_like(param)) + (1 - b2) * grad**2
    state.update(m=m, v=v)
    r = (m / (1 - b1 ** state["t"])) / ((v / (1 - b2 ** state["t"])).sqrt() + group["eps"])
    u = r + group["weight_decay"] * param
    sizes = param.norm(), u.norm()
    ratio = (sizes[0] / sizes[1]).clamp(0.05, 1.5) if sizes[0] > 0 and sizes[1] > 0 else 1.0
    param -= group["lr"] * ratio * u


def muon_rule(group: Any, state: Any, param: Tensor, grad: Tensor) -> None:
    """Jordan et al. 2024 for matrices, AdamW for the rest."""
    if not group["use_muon"]:
        b1, b2 = 0.9, 0.95
        m = b1 * state.get("m", torch.zeros_like(param)) + (1 - b1) * grad
        v = b2 * state.get("v", torch.zeros_like(param)) + (1 - b2) * grad**2
        state.update(m=m, v=v)
        root = (v / (1 - b2 ** state["t"])).sqrt() + 1e-10
        param *= 1 - group["lr"] * group["weight_decay"]
        param -= group["lr"] * (m / (1 - b1 ** state["t"])) / root
        return
    m = state.get("m", torch.zeros_like(param))
    m = state["m"] = m + (1 - 0.95) * (grad - m)
    g = grad + 0.95 * (m - grad)
    stack = g if g.dim() == 3 else g.reshape(1, g.shape[0], -1)
    found = []
    for x in stack:
        tall = x.shape[0] > x.shape[1]
        scale = max(1.0, x.shape[0] / x.shape[1]) ** 0.5
        x = x.T if tall else x
        x = x / x.norm()
        for _ in range(5):
            a = x @ x.T
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
        found.append(scale * (x.T if tall else x))
    param *= 1 - group["lr"] * group["weight_decay"]
    param -= group["lr"] * torch.stack(found).view(param.shape)


def tree_values(signed: bool) -> Tensor:
    """Dettmers et al. 2022, section 1.3: a power of ten, then a linear fraction with the rest."""
    found = {0.0, 1.0}
    for zeros in range(7):
        count = 2 ** (6 - zeros) * (1 if signed else 2)
        for k in range(count):
            fraction = 0.1 + 0.9 * (k + 0.5) / count
            found.add(10.0**-zeros * fraction)
            if signed:
                found.add(-(10.0**-zeros) * fraction)
    assert len(found) == 256
    return torch.tensor(sorted(found), dtype=torch.float64)


def in_8_bits(values: Tensor, signed: bool) -> Tensor:
    """Every block of 256 elements by its nearest values."""
    flat, table = values.flatten(), tree_values(signed)
    for start in range(0, flat.numel(), 256):
        part = flat[start : start + 256]
        largest = part[part.abs().argmax()]
        largest = largest if largest != 0 else torch.ones_like(largest)
        nearest = (part[:, None] / largest - table).abs().argmin(dim=1)
        flat[start : start + 256] = table[nearest] * largest
    return flat.view(values.shape)


def adam8bit_rule(group: Any, state: Any, param: Tensor, grad: Tensor) -> None:
    """AdamW whose moments go through 8 bits after each step."""
    b1, b2 = 0.9, 0.999
    m = b1 * state.get("m", torch.zeros_like(param)) + (1 - b1) * grad
    v = b2 * state.get("v", torch.zeros_like(param)) + (1 - b2) * grad**2
    root = (v / (1 - b2 ** state["t"])).sqrt() + 1e-8
    param *= 1 - group["lr"] * group["weight_decay"]
    param -= group["lr"] * (m / (1 - b1 ** state["t"])) / root
    state["m"], state["v"] = in_8_bits(m, True), in_8_bits(v, False)


def _by_use(groups: Groups) -> Groups:
    """Each group as one for Muon and one for Adam."""
    return [
        {**group, "params": members, "use_muon": use, "lr": group.get("lr", 0.05)}
        for group in groups
        for use in (True, False)
        if (members := [p for p in group["params"] if (p.dim() >= 2 and p.numel() > 0) == use])
    ]


PAIRS: list[tuple[str, Make, Make]] = [
    (
        "adamw",
        lambda g: FlatAdam(g, lr=0.1, weight_decay=0.1),
        lambda g: torch.optim.AdamW(g, lr=0.1),
    ),
    (
        "adam",
        lambda g: FlatAdam(g, lr=0.1, betas=(0.7, 0.9), eps=1e-3, adam_w_mode=False),
        lambda g: torch.optim.Adam(g, lr=0.1, betas=(0.7, 0.9), eps=1e-3),
    ),
    (
        "adagrad",
        lambda g: FlatAdagrad(g, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.3),
        lambda g: torch.optim.Adagrad(g, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.3),
    ),
    (
        "lion",
        lambda g: FlatLion(g, lr=0.01, betas=(0.8, 0.9)),
        lambda g: Rule(g, lion_rule, lr=0.01, b1=0.8, b2=0.9),
    ),
    (
        "lamb",
        lambda g: FlatLamb(g, lr=0.1, betas=(0.8, 0.9), eps=1e-6, min_coeff=0.05, max_coeff=1.5),
        lambda g: Rule(g, lamb_rule, lr=0.1, b1=0.8, b2=0.9, eps=1e-6),
    ),
    (
        "muon",
        lambda g: FlatMuon(_by_use(g)),
        lambda g: Rule(_by_use(g), muon_rule),
    ),
    ("adam8bit", lambda g: Adam8bit(g, lr=0.1), lambda g: Rule(g, adam8bit_rule, lr=0.1)),
    ("sgd", lambda g: FlatSGD(g, lr=0.1), lambda g: torch.optim.SGD(g, lr=0.1)),
    (
        "momentum",
        lambda g: FlatSGD(g, lr=0.1, momentum=0.9, dampening=0.3),
        lambda g: torch.optim.SGD(g, lr=0.1, momentum=0.9, dampening=0.3),
    ),
    (
        "nesterov",
        lambda g: FlatSGD(g, lr=0.1, momentum=0.8, nesterov=True),
        lambda g: torch.optim.SGD(g, lr=0.1, momentum=0.8, nesterov=True),
    ),
]
TOLERANCE = {"adam8bit": 1e-5, "adam": 2e-6, "adamw": 2e-6, "lamb": 2e-6, "muon": 5e-6}
"""fp32 states against a float64 reference after 7 steps of size 0.1; 1e-6 for the others."""
CUTS = [(1, 0), (1, 3), (2, 1), (3, 3), (3, 0), (5, 2)]


@pytest.mark.parametrize(("num_shards", "stage"), CUTS)
@pytest.mark.parametrize(("name", "ours", "torchs"), PAIRS, ids=[p[0] for p in PAIRS])
def test_flat_segments_equal_torch(
    name: str, ours: Make, torchs: Make, num_shards: int, stage: int
) -> None:
    """Groups, frozen, late and unused parameters, a changed rate; for every cut."""
    shards, plain = Shards(ours, num_shards, stage), Plain(torchs, torch.float64)
    for step in range(7):
        if step == 4:
            shards.set_lr(0, 0.01)
            plain.optimizer.param_groups[0]["lr"] = 0.01
        shards.update(step)
        plain.update(step)
        _same(shards.values(), plain.values(), TOLERANCE.get(name, 1e-6))
    # Steps 1 and 4 had a gradient of the late parameter; nobody ever had one of NEVER.
    counts: dict[str, float] = {}
    for optimizer in shards.optimizers:
        counts.update({key: value["step"] for key, value in optimizer.scalars().items()})
    assert counts == {"a": 7, "c": 7, "f": 7, "h": 7, "i": 7, IDLE: 2}
    untouched = _model().get_parameter(NEVER)
    assert torch.equal(shards.values()[NEVER], untouched.detach())


@pytest.mark.parametrize("name", [pair[0] for pair in PAIRS])
def test_bits_do_not_depend_on_the_cut(name: str) -> None:
    """No element is updated by a kernel's scalar tail in one cut and its vector body in another."""
    ours = next(pair[1] for pair in PAIRS if pair[0] == name)
    results = []
    for num_shards, stage in CUTS:
        shards = Shards(ours, num_shards, stage)
        for step in range(5):
            shards.update(step)
        results.append(shards.values())
    first: dict[int, dict[str, Tensor]] = {}
    for (num_shards, _), found in zip(CUTS, results, strict=True):
        # The norms of LAMB are sums over shards: equal bits need equal shards.
        same = first.setdefault(num_shards if name == "lamb" else 0, found)
        assert all(torch.equal(found[key], same[key]) for key in found)


@pytest.mark.parametrize(("name", "ours", "torchs"), PAIRS, ids=[p[0] for p in PAIRS])
def test_without_an_engine(name: str, ours: Make, torchs: Make) -> None:
    """An ordinary optimiser on plain parameters, with a state dict; non-contiguous ones too."""
    alone, plain = Plain(ours), Plain(torchs, torch.float64)
    matrix = alone.model.get_parameter("a")
    matrix.data = matrix.data.t().contiguous().t()
    assert not matrix.is_contiguous()
    for step in range(7):
        if step == 4:
            resumed = Plain(ours)
            resumed.model.load_state_dict(alone.model.state_dict())
            resumed.optimizer.load_state_dict(copy.deepcopy(alone.optimizer.state_dict()))
            alone = resumed
        alone.update(step)
        plain.update(step)
        _same(alone.values(), plain.values(), TOLERANCE.get(name, 1e-6))


def test_closures_and_sparse_gradients_without_an_engine() -> None:
    """The closure's loss comes back; a sparse gradient counts as a dense one."""
    table = nn.Embedding(5, 3, sparse=True)
    dense = nn.Embedding(5, 3, _weight=table.weight.detach().clone())
    found = []
    for module in (table, dense):
        optimizer = FlatAdam(module.parameters(), lr=0.1)

        def closure(module: nn.Module = module, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = module(torch.tensor([1, 1, 4])).square().sum()
            loss.backward()
            return loss

        losses = [optimizer.step(closure).item() for _ in range(3)]
        assert losses[2] < losses[0]
        found.append(losses)
    assert found[0] == pytest.approx(found[1], rel=1e-6)
    assert torch.equal(table.weight, dense.weight)


@pytest.mark.parametrize("wide", [True, False])
def test_16_bit_parameters_without_an_engine(wide: bool) -> None:
    """States in fp32 unless the caller wants those of the parameters."""
    param = nn.Parameter(torch.ones(33, dtype=torch.bfloat16))
    optimizer = DeepSpeedCPUAdam([param], lr=0.5, fp32_optimizer_states=wide)
    for _ in range(2):
        param.grad = torch.full_like(param, 0.25)
        optimizer.step()
    wanted = torch.float32 if wide else torch.bfloat16
    assert {optimizer.state[param][k].dtype for k in ("exp_avg", "exp_avg_sq")} == {wanted}
    # A constant gradient: every step has the length of the rate.
    assert (param - (1 - 2 * 0.5)).abs().max() < 2**-7


def test_padding_stays_zero() -> None:
    """Decay, momentum and eps leave no trace between the slots."""
    shards = Shards(lambda g: FlatAdam(g, lr=0.1), 3, 3)
    for step in range(3):
        shards.update(step)
    for runs in shards.runs:
        for run in runs:
            mask = torch.ones(run.master.numel(), dtype=torch.bool)
            for piece in run.pieces():
                mask[piece.shard_start : piece.shard_start + piece.numel] = False
            assert not run.master[mask].any()


@pytest.mark.parametrize(("num_shards", "stage"), [(1, 0), (2, 1), (3, 3)])
def test_float64_parameters(num_shards: int, stage: int) -> None:
    """Slots of fp64 runs start at multiples of 8 elements: no neighbour may be updated twice."""
    shards = Shards(lambda g: FlatSGD(g, lr=0.1), num_shards, stage, torch.float64)
    plain = Plain(lambda g: torch.optim.SGD(g, lr=0.1), torch.float64)
    for step in range(3):
        shards.update(step)
        plain.update(step)
    _same(shards.values(), plain.values(), 1e-5)


def test_momentum_that_a_schedule_switches_on() -> None:
    """OneCycle writes ``group["momentum"]``: torch's SGD takes it up at once."""
    shards = Shards(lambda g: FlatSGD(g, lr=0.1), 2, 1)
    plain = Plain(lambda g: torch.optim.SGD(g, lr=0.1))
    for step in range(4):
        if step == 1:
            for optimizer in (*(s.optimizer for s in shards.optimizers), plain.optimizer):
                for group in optimizer.param_groups:
                    group["momentum"] = 0.9
        shards.update(step)
        plain.update(step)
    _same(shards.values(), plain.values())


def test_a_run_without_gradients() -> None:
    """``None`` instead of a gradient: nothing moves and no step is counted."""
    shards = Shards(lambda g: FlatAdam(g, lr=0.1), 1, 0)
    before = {k: v.clone() for k, v in shards.values().items()}
    runs = shards.runs[0]
    masks = [[False] * len(run.run.layout.slots) for run in runs]
    shards.optimizers[0].update(StepGradients([None for _ in runs], masks))
    _same(shards.values(), before, 0.0)
    assert shards.optimizers[0].scalars() == {}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (FlatAdam, {"lr": -1.0}),
        (FlatAdam, {"betas": (0.9, 1.0)}),
        (FlatAdam, {"betas": (-0.1, 0.9)}),
        (FlatAdam, {"eps": -1e-8}),
        (FlatAdam, {"weight_decay": -0.1}),
        (FlatSGD, {"lr": -1.0}),
        (FlatSGD, {"momentum": -0.5}),
        (FlatSGD, {"weight_decay": -0.5}),
        (FlatSGD, {"nesterov": True}),
        (FlatSGD, {"nesterov": True, "momentum": 0.9, "dampening": 0.1}),
    ],
)
def test_values_out_of_range(kind: Any, options: dict[str, Any]) -> None:
    """An error that says what was given."""
    with pytest.raises(
        ConfigError, match=str(next(iter(options.values())))[:4].replace("(", r"\(")
    ):
        kind([nn.Parameter(torch.zeros(3))], **options)


# ---- torch.optim on pieces ---------------------------------------------------------------------

ADAPTED: dict[str, dict[str, Any]] = {
    "Adagrad": {"initial_accumulator_value": 0.5},
    "Rprop": {},
    "SGD": {"momentum": 0.9},
    "Adam": {"amsgrad": True},
    "RMSprop": {"centered": True, "momentum": 0.5},
}


def _adapted(name: str) -> Make:
    kind = getattr(torch.optim, name)
    takes_decay = "weight_decay" in inspect.signature(kind).parameters

    def make(groups: Any) -> torch.optim.Optimizer:
        if not takes_decay:
            groups = [{k: v for k, v in group.items() if k != "weight_decay"} for group in groups]
        made: torch.optim.Optimizer = kind(groups, lr=0.02, **ADAPTED.get(name, {}))
        return made

    return make


@pytest.mark.parametrize(("num_shards", "stage"), [(1, 0), (1, 3), (3, 2)])
@pytest.mark.parametrize("name", sorted(ELEMENT_WISE))
def test_adapted_optimizers_equal_torch(name: str, num_shards: int, stage: int) -> None:
    """Every class of the table, on pieces as on whole parameters, unused ones included."""
    shards, plain = Shards(_adapted(name), num_shards, stage), Plain(_adapted(name))
    for step in range(5):
        shards.update(step)
        plain.update(step)
    _same(shards.values(), plain.values(), 1e-5)


def test_the_adapter_guards_step_and_keeps_groups() -> None:
    """A direct ``step()`` raises; groups list the model's parameters before and after."""
    model = _model()
    optimizer = torch.optim.Adam(_groups(model), lr=0.1)
    groups = optimizer.param_groups
    listed = [list(group["params"]) for group in groups]
    adapter = attach_optimizer(
        optimizer, _runs(model, groups, 1, 0, 0), ALONE, sharded=False, allow_untested=False
    )
    assert isinstance(adapter, TorchAdapter) and adapter.optimizer is optimizer
    with pytest.raises(EngineError, match=r"Adam\.step\(\).*engine\.step"):
        optimizer.step()
    for flat in (FlatAdam(_groups(model), lr=0.1), FlatSGD(_groups(model), lr=0.1)):
        attach_optimizer(flat, (), ALONE, sharded=False, allow_untested=False)
        with pytest.raises(EngineError, match=r"engine\.step"):
            flat.step()
    assert optimizer.param_groups is groups
    for group, params in zip(groups, listed, strict=True):
        assert all(a is b for a, b in zip(group["params"], params, strict=True))


class Broken(torch.optim.SGD):
    """Fails in the middle of a step."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for hook in self._optimizer_step_pre_hooks.values():
            hook(self, (), {})
        raise RuntimeError("in the middle")


def test_the_adapter_recovers_from_an_error() -> None:
    """Groups are the user's again, pieces keep no gradient, and the guard is armed."""
    model = _model()
    optimizer = Broken(_groups(model), lr=0.1)
    runs = _runs(model, optimizer.param_groups, 1, 0, 0)
    adapter = attach_optimizer(optimizer, runs, ALONE, sharded=False, allow_untested=True)
    grads = [torch.ones_like(run.master) for run in runs]
    masks = [[True] * len(run.run.layout.slots) for run in runs]
    with pytest.raises(RuntimeError, match="in the middle"):
        adapter.update(StepGradients(grads, masks))
    members = {id(p) for p in model.parameters()}
    assert all(id(p) in members for group in optimizer.param_groups for p in group["params"])
    with pytest.raises(EngineError):
        optimizer.step()


class Foreign(torch.optim.Optimizer):
    """Scales by the norm of the whole gradient, in fp32; nobody knows this class."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for hook in self._optimizer_step_pre_hooks.values():
            hook(self, (), {})
        for group in self.param_groups:
            for param in (p for p in group["params"] if p.grad is not None):
                state = self.state[param]
                row = state.setdefault("row", torch.zeros(param.shape[:1]))
                row += param.grad.flatten(1).sum(1) if param.dim() > 1 else param.grad
                param -= group["lr"] * param.grad / (param.grad.norm() + row.norm())


WHOLES: dict[str, Make] = {
    "Adafactor": lambda g: torch.optim.Adafactor(g, lr=0.03),
    "Foreign": Foreign,
}


@pytest.mark.parametrize(("num_shards", "stage"), CUTS)
@pytest.mark.parametrize("name", WHOLES)
def test_whole_parameter_optimizers_equal_torch(name: str, num_shards: int, stage: int) -> None:
    """Each parameter by its owner: the same bits as on whole parameters, for every cut."""
    shards, plain = Shards(WHOLES[name], num_shards, stage), Plain(WHOLES[name])
    for step in range(5):
        shards.update(step)
        plain.update(step)
    _same(shards.values(), plain.values(), 0.0)


# ---- checkpoints -------------------------------------------------------------------------------


class Memory:
    """States in memory, put together from all shards; a ``StateSource``."""

    def __init__(self, optimizers: Sequence[ShardOptimizer]) -> None:
        self.tensors: dict[tuple[str, str], Tensor] = {}
        self.numbers: dict[str, dict[str, float]] = {}
        self.shapes: dict[str, dict[str, tuple[int, ...]]] = {}
        for optimizer in optimizers:
            for name, shapes in optimizer.state_shapes().items():
                self.shapes.setdefault(name, {}).update(shapes)
            for item in optimizer.state_ranges():
                key = item.kind, item.name
                numel = math.prod(self.shape(item.kind, item.name))
                whole = self.tensors.setdefault(key, torch.full((numel,), torch.nan))
                assert whole[item.start : item.start + item.data.numel()].isnan().all(), "twice"
                whole[item.start : item.start + item.data.numel()] = item.data
            self.numbers.update(copy.deepcopy(optimizer.scalars()))

    def kinds(self, name: str) -> set[str]:
        return {kind for kind, owner in self.tensors if owner == name}

    def shape(self, kind: str, name: str) -> tuple[int, ...]:
        return self.shapes.get(name, {}).get(kind, SHAPES[name])

    def read(self, kind: str, name: str, start: int, out: Tensor) -> None:
        out.copy_(self.tensors[kind, name][start : start + out.numel()])

    def scalars(self, name: str) -> Mapping[str, float]:
        return self.numbers.get(name, {})


RESUMED: list[tuple[str, Make]] = [
    *((f"flat {name}", ours) for name, ours, _ in PAIRS),
    *WHOLES.items(),
    *((name, _adapted(name)) for name in sorted(ELEMENT_WISE)),
]


@pytest.mark.parametrize(("name", "make"), RESUMED, ids=[item[0] for item in RESUMED])
def test_states_move_between_cuts(name: str, make: Make) -> None:
    """Saved by 3 shards, loaded by 2, by stage 0, and by 1: training goes on as if uncut."""
    straight = Shards(make, 3, 2)
    for step in range(3):
        straight.update(step)
    source = Memory(straight.optimizers)
    assert not any(values.isnan().any() for values in source.tensors.values())
    values = {key: value.clone() for key, value in straight.values().items()}
    for step in range(3, 6):
        straight.update(step)
    for num_shards, stage in ((2, 3), (2, 0), (1, 1)):
        resumed = Shards(make, num_shards, stage)
        resumed.update(9)  # what it did before the load must not matter
        for runs in resumed.runs:
            for run in runs:
                for piece in run.pieces():
                    flat = values[piece.spec.name].reshape(-1)
                    part = flat[piece.param_start : piece.param_start + piece.numel]
                    run.master[piece.shard_start : piece.shard_start + piece.numel] = part
        for optimizer in resumed.optimizers:
            optimizer.load(source)
        for step in range(3, 6):
            resumed.update(step)
        _same(resumed.values(), straight.values(), 2e-6 if "lamb" in name else 1e-6)


def test_adam_reads_8_bit_states_and_back() -> None:
    """Stored as fp32 values: plain Adam takes them over exactly, 8-bit Adam to its precision."""
    narrow = Shards(lambda g: Adam8bit(g, lr=0.1), 3, 2)
    for step in range(3):
        narrow.update(step)
    source = Memory(narrow.optimizers)
    wide = Shards(lambda g: FlatAdam(g, lr=0.1), 2, 3)
    for optimizer in wide.optimizers:
        optimizer.load(source)
    found = Memory(wide.optimizers)
    assert found.numbers == source.numbers and found.tensors.keys() == source.tensors.keys()
    assert all(torch.equal(found.tensors[key], value) for key, value in source.tensors.items())
    wide.update(3)
    back = Shards(lambda g: Adam8bit(g, lr=0.1), 1, 0)
    source = Memory(wide.optimizers)
    for optimizer in back.optimizers:
        optimizer.load(source)
    for key, value in Memory(back.optimizers).tensors.items():
        # Half of the tables' widest gap, of the block's largest element.
        assert (value - source.tensors[key]).abs().max() <= 0.0071 * source.tensors[key].abs().max()


def test_ranges_of_all_shards_tile_each_state_once() -> None:
    """Also at stage 0, where every rank has everything; nothing of unused parameters."""
    for num_shards, stage in ((3, 0), (3, 1), (4, 3)):
        shards = Shards(PAIRS[0][1], num_shards, stage)
        for step in range(2):
            shards.update(step)
        source = Memory(shards.optimizers)
        assert {name for _, name in source.tensors} == {"a", "c", "f", "h", "i", IDLE}
        assert {kind for kind, _ in source.tensors} == {"exp_avg", "exp_avg_sq"}
        assert not any(values.isnan().any() for values in source.tensors.values())


class RowNorms(torch.optim.SGD):
    """Keeps a state per row, which no cut of the parameter has."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for hook in self._optimizer_step_pre_hooks.values():
            hook(self, (), {})
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.state[param]["rows"] = torch.ones(3)


def test_states_that_cannot_be_stored() -> None:
    """Three numbers for a piece of a parameter: an error that names state and parameter."""
    model = _model()
    optimizer = RowNorms(_groups(model), lr=0.1)
    runs = _runs(model, optimizer.param_groups, 2, 1, 0)
    adapter = TorchAdapter(optimizer, runs)
    masks = [[True] * len(run.run.layout.slots) for run in runs]
    adapter.update(StepGradients([torch.ones_like(run.master) for run in runs], masks))
    with pytest.raises(CheckpointError, match="'rows' of"):
        list(adapter.state_ranges())


def test_rows_of_whole_parameters_are_stored() -> None:
    """At stage 0 a state may have any shape, also of a class that nobody knows."""

    def make(groups: Any) -> torch.optim.Optimizer:
        return RowNorms(groups, lr=0.1)

    shards = Shards(make, 2, 0)
    shards.update(0)
    source = Memory(shards.optimizers)
    assert source.shapes["a"] == {"rows": (3,)} and source.tensors["rows", "a"].tolist() == [1] * 3
    fresh = Shards(make, 1, 0)
    fresh.optimizers[0].load(source)
    assert Memory(fresh.optimizers).tensors["rows", "a"].tolist() == [1] * 3
