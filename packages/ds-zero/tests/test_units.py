"""Which parameters form a unit, for model trees of many shapes."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ds_comm.errors import ConfigError
from ds_zero.layout import ParamSpec
from ds_zero.units import UnitPlan, UnitRules, param_names, plan_units

NONE_RESIDENT = UnitRules(persistence_numel=0)


def _specs(model: nn.Module) -> dict[int, ParamSpec]:
    params, _ = param_names(model)
    return {
        id(p): ParamSpec(name, tuple(p.shape), p.dtype, p.requires_grad)
        for name, p in params.items()
    }


def _plan(model: nn.Module, rules: UnitRules = NONE_RESIDENT) -> tuple[UnitPlan, ...]:
    plans = plan_units(model, _specs(model), rules)
    _check_partition(model, plans)
    return plans


def _check_partition(model: nn.Module, plans: tuple[UnitPlan, ...]) -> None:
    """Every parameter in exactly one unit; every owner of a hooked one is covered by a module."""
    names = [spec.name for plan in plans for spec in plan.spec.params]
    assert sorted(names) == sorted(param_names(model)[0])
    assert all(plan.spec.params for plan in plans)
    assert len({plan.spec.name for plan in plans}) == len(plans)
    for plan in plans:
        assert bool(plan.modules) == (not plan.spec.resident)
        if plan.spec.resident:
            continue
        members = {spec.name for spec in plan.spec.params}
        covered = {id(inner) for module in plan.modules for inner in module.modules()}
        specs = _specs(model)
        for module in model.modules():
            mine = {specs[id(p)].name for p in module.parameters(recurse=False)}
            assert not mine & members or id(module) in covered, "an owner that no hook covers"


def _names(plans: tuple[UnitPlan, ...]) -> dict[str, list[str]]:
    return {plan.spec.name: [spec.name for spec in plan.spec.params] for plan in plans}


class Block(nn.Module):
    """A block that holds a repeated sequence of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


class Other(nn.Module):
    """Another class of block."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()


class Net(nn.Module):
    """Embedding, blocks, norm and head, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(10, 4)
        self.bias = nn.Parameter(torch.zeros(4))
        self.blocks = nn.ModuleList([Block(), Block(), Other()])
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 10, bias=False)


def test_names_and_aliases() -> None:
    """The first name counts; further ones point to it."""
    net = Net()
    net.head.weight = net.emb.weight
    net.blocks[1].mlp[0].weight = net.blocks[0].mlp[0].weight
    params, aliases = param_names(net)
    assert aliases == {
        "head.weight": "emb.weight",
        "blocks.1.mlp.0.weight": "blocks.0.mlp.0.weight",
    }
    assert list(params)[:2] == ["bias", "emb.weight"]
    assert params["emb.weight"] is net.head.weight and "head.weight" not in params


def test_repeated_classes_of_a_container() -> None:
    """Two Blocks in the list are units; the only Other is not, but its repeated Linears are."""
    plans = _plan(Net())
    names = _names(plans)
    assert names["blocks.0"] == [
        f"blocks.0.mlp.{i}.{k}" for i in (0, 2) for k in ("weight", "bias")
    ]
    assert "blocks.1" in names and "blocks.0.mlp.0" not in names
    assert "blocks.2.inner.mlp.0" in names and "blocks.2.inner.mlp.2" in names
    blocks = next(plan for plan in plans if plan.spec.name == "blocks.0")
    assert len(blocks.modules) == 1 and isinstance(blocks.modules[0], Block)
    # What is left is small: one bucket, whose owners all get hooks.
    rest = next(plan for plan in plans if "bias" in [s.name for s in plan.spec.params])
    assert {type(m).__name__ for m in rest.modules} == {"Net", "Embedding", "LayerNorm", "Linear"}


def test_no_split_modules_win_over_repetition() -> None:
    """What a Hugging Face model lists; of nested classes the outermost."""
    net: Any = Net()
    net._no_split_modules = ["Other", "Block"]
    names = _names(_plan(net))
    assert {n for n in names if n.startswith("blocks")} == {"blocks.0", "blocks.1", "blocks.2"}
    assert all(name.startswith("blocks.2.inner.") for name in names["blocks.2"])
    # The list may be a set, stand on an inner model, or be None on an outer one.
    outer: Any = nn.Module()
    outer.wrapped = Net()
    outer._no_split_modules = None
    outer.wrapped._no_split_modules = {"Other"}
    names = _names(_plan(outer))
    assert "wrapped.blocks.2" in names and "wrapped.blocks.0" not in names


def test_a_wrapper_around_the_model_changes_no_unit() -> None:
    """As PEFT does: names get longer, adapters join the block they sit in."""

    class Lora(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base_layer = base
            self.lora_A = nn.Linear(4, 2, bias=False)
            self.lora_B = nn.Linear(2, 4, bias=False)

    net: Any = Net()
    net._no_split_modules = ["Block"]
    for param in net.parameters():
        param.requires_grad_(False)
    for block in net.blocks[:2]:
        block.mlp[0] = Lora(block.mlp[0])
    wrapped = nn.ModuleDict({"base_model": nn.ModuleDict({"model": net})})
    names = _names(_plan(wrapped))
    prefix = "base_model.model.blocks.0"
    assert set(names[prefix]) == {
        f"{prefix}.mlp.0.base_layer.weight",
        f"{prefix}.mlp.0.base_layer.bias",
        f"{prefix}.mlp.0.lora_A.weight",
        f"{prefix}.mlp.0.lora_B.weight",
        f"{prefix}.mlp.2.weight",
        f"{prefix}.mlp.2.bias",
    }


@pytest.mark.slow
def test_real_peft_around_a_real_model() -> None:
    """LoRA on GPT-2 from a config: one unit a block, adapters inside."""
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    config = transformers.GPT2Config(vocab_size=32, n_embd=16, n_layer=3, n_head=2, n_positions=8)
    model = peft.get_peft_model(
        transformers.GPT2LMHeadModel(config),
        peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True),
    )
    names = _names(_plan(model))
    blocks = [name for name in names if name.endswith(tuple(f".h.{i}" for i in range(3)))]
    assert len(blocks) == 3
    for name in blocks:
        assert sum("lora_" in member for member in names[name]) == 2
        assert len(names[name]) == 12 + 2


def test_tied_across_blocks() -> None:
    """The first block holds it; the other owner inside the second block gets its hook too."""
    net = Net()
    net.blocks[1].mlp[0].weight = net.blocks[0].mlp[0].weight
    plans = {plan.spec.name: plan for plan in _plan(net)}
    assert "blocks.0.mlp.0.weight" in [s.name for s in plans["blocks.0"].spec.params]
    assert plans["blocks.0"].modules == (net.blocks[0], net.blocks[1].mlp[0])
    assert plans["blocks.1"].modules == (net.blocks[1],)


def test_blocks_that_share_everything() -> None:
    """ALBERT: one unit, and hooks on every owner."""
    net = Net()
    for mine, other in zip(net.blocks[0].mlp, net.blocks[1].mlp, strict=True):
        if isinstance(mine, nn.Linear):
            other.weight, other.bias = mine.weight, mine.bias
    plans = {plan.spec.name: plan for plan in _plan(net)}
    assert "blocks.1" not in plans
    owners = (net.blocks[0], net.blocks[1].mlp[0], net.blocks[1].mlp[2])
    assert plans["blocks.0"].modules == owners


def test_the_same_module_twice() -> None:
    """One module under two names is one unit with one hook."""
    block = Block()
    model = nn.ModuleList([block, block, Block()])
    plans = _plan(model)
    assert list(_names(plans)) == ["0", "2"]
    assert plans[0].modules == (block,)


def test_embedding_and_head() -> None:
    """Large ones are units of their own, a tied pair is one with both owners."""
    rules = UnitRules(persistence_numel=0, bucket_numel=64)
    net = Net()
    names = _names(_plan(net, rules))
    assert names["emb"] == ["emb.weight"] and names["head"] == ["head.weight"]
    net.head.weight = net.emb.weight
    plans = {plan.spec.name: plan for plan in _plan(net, rules)}
    assert "head" not in plans
    assert plans["emb"].modules == (net.emb, net.head)


def test_the_root_owns_parameters() -> None:
    """A bare parameter and the root's own large one: hooks on the root."""

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.zeros(40, 4))
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    root = Root()
    plans = {p.spec.name: p for p in _plan(root, UnitRules(persistence_numel=0, bucket_numel=64))}
    assert plans["root"].modules == (root,)
    assert [spec.name for spec in plans["root"].spec.params] == ["table"]


def test_order_is_that_of_the_first_parameter() -> None:
    """Units come in the order of the model's parameters, resident ones last."""
    net = Net()
    plans = _plan(net, UnitRules(persistence_numel=4, bucket_numel=64))
    order = [plan.spec.name for plan in plans if not plan.spec.resident]
    assert order.index("emb") < order.index("blocks.0") < order.index("blocks.1")
    assert order.index("blocks.1") < order.index("head")
    resident = [plan.spec.resident for plan in plans]
    assert resident == sorted(resident) and any(resident)


# ---- the user's choice -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rules",
    [
        UnitRules(block_classes=("Other", "Block"), persistence_numel=0),
        UnitRules(block_classes=(f"{__name__}.Block", f"{__name__}.Other"), persistence_numel=0),
        UnitRules(block_names=("blocks.0", "blocks.1", "blocks.2"), persistence_numel=0),
        UnitRules(block_suffixes=("s.0", "s.1", "s.2"), persistence_numel=0),
        UnitRules(block_classes=("Other",), block_suffixes=(".0", ".1"), persistence_numel=0),
    ],
)
def test_classes_names_and_suffixes_of_the_user(rules: UnitRules) -> None:
    """By class name, qualified class name, module name or ending; nested ones are left out."""
    names = _names(_plan(Net(), rules))
    assert {n for n in names if n.startswith("blocks")} == {"blocks.0", "blocks.1", "blocks.2"}


def test_the_user_wins_over_the_model() -> None:
    """``_no_split_modules`` is not looked at when the user names classes."""
    net: Any = Net()
    net._no_split_modules = ["Block"]
    names = _names(_plan(net, UnitRules(block_classes=("Other",), persistence_numel=0)))
    assert "blocks.2" in names and "blocks.0" not in names


@pytest.mark.parametrize(
    ("rules", "wrong"),
    [
        (UnitRules(block_classes=("Block", "Blok")), "Blok"),
        (UnitRules(block_names=("blocks.9",)), "blocks.9"),
        (UnitRules(block_suffixes=("mlp_typo",)), "mlp_typo"),
        (UnitRules(block_classes=("Block",), block_suffixes=("mlp_typo",)), "mlp_typo"),
    ],
)
def test_what_the_model_does_not_contain(rules: UnitRules, wrong: str) -> None:
    """An error that names it, for classes, names and suffixes alike."""
    with pytest.raises(ConfigError, match=wrong):
        net = Net()
        plan_units(net, _specs(net), rules)


# ---- residency ---------------------------------------------------------------------------------


def _resident(model: nn.Module, rules: UnitRules) -> set[str]:
    plans = _plan(model, rules)
    return {spec.name for plan in plans if plan.spec.resident for spec in plan.spec.params}


def test_persistence_threshold() -> None:
    """At most the threshold stays; 4-element biases and norms, not 16-element weights."""
    small = {name for name, p in Net().named_parameters() if p.numel() == 4}
    assert _resident(Net(), UnitRules(persistence_numel=15)) == small
    assert _resident(Net(), UnitRules(persistence_numel=4)) == small
    assert _resident(Net(), UnitRules(persistence_numel=3)) == set()
    assert len(_resident(Net(), UnitRules())) == len(list(Net().parameters()))


def test_total_of_the_resident() -> None:
    """The first ones stay as long as their sum fits: 3 biases of 4 elements in 13."""
    rules = UnitRules(persistence_numel=4, persistence_total_numel=13)
    found = _resident(Net(), rules)
    assert len(found) == 3 and all(
        p.numel() == 4 for n, p in Net().named_parameters() if n in found
    )


def test_what_has_no_placeholder_is_resident() -> None:
    """Scalars, one-element, zero-size and integer parameters, at any threshold."""
    model = nn.Module()
    model.scalar = nn.Parameter(torch.ones(()))
    model.one = nn.Parameter(torch.ones(1, 1))
    model.none = nn.Parameter(torch.ones(0, 3))
    model.whole = nn.Parameter(torch.ones(3, dtype=torch.int32), requires_grad=False)
    model.rest = nn.Parameter(torch.ones(3))
    rules = UnitRules(persistence_numel=0, persistence_total_numel=0)
    assert _resident(model, rules) == {"scalar", "one", "none", "whole"}


def test_buckets_of_small_leftovers() -> None:
    """At most ``bucket_numel`` elements each, in order, named by their first and last owner."""
    model = nn.ModuleDict({name: nn.LayerNorm(20, bias=False) for name in "abcde"})
    names = _names(_plan(model, UnitRules(persistence_numel=0, bucket_numel=100)))
    assert names == {"a..e": [f"{name}.weight" for name in "abcde"]}
    model = nn.ModuleDict({name: nn.LayerNorm(20, bias=False) for name in "abcdefg"})
    names = _names(_plan(model, UnitRules(persistence_numel=0, bucket_numel=100)))
    assert list(names) == ["a..e", "f..g"]


def test_no_parameters() -> None:
    """A model of functions alone has no units."""
    assert _plan(nn.Sequential(nn.ReLU(), nn.Tanh())) == ()


# ---- random trees ------------------------------------------------------------------------------


class Leaf(nn.Module):
    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        for index, size in enumerate(sizes):
            self.register_parameter(f"p{index}", nn.Parameter(torch.zeros(size)))


class Pair(nn.Module):
    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second


def _tree(rng: random.Random, depth: int, shared: list[nn.Module]) -> nn.Module:
    if shared and rng.random() < 0.15:
        return rng.choice(shared)
    kind = rng.choice(["leaf", "leaf", "list", "sequential", "pair"]) if depth else "leaf"
    if kind == "leaf":
        made: nn.Module = Leaf([rng.choice([0, 1, 3, 40]) for _ in range(rng.randint(0, 3))])
    elif kind == "pair":
        made = Pair(_tree(rng, depth - 1, shared), _tree(rng, depth - 1, shared))
    else:
        children = [_tree(rng, depth - 1, shared) for _ in range(rng.randint(0, 4))]
        made = nn.ModuleList(children) if kind == "list" else nn.Sequential(*children)
    shared.append(made)
    return made


def _tie(rng: random.Random, model: nn.Module) -> None:
    slots = [(m, n) for m in model.modules() for n, p in m._parameters.items() if p is not None]
    for _ in range(rng.randint(0, 3)):
        if len(slots) > 1:
            (to, name), (source, other) = rng.sample(slots, 2)
            to._parameters[name] = source._parameters[other]


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**9), st.sampled_from([0, 3, 100]), st.sampled_from([8, 64, 10**6]))
def test_every_parameter_is_in_exactly_one_unit(seed: int, threshold: int, bucket: int) -> None:
    """Random trees with shared modules and tied weights, any thresholds."""
    rng = random.Random(seed)
    model = Pair(_tree(rng, 3, []), _tree(rng, 2, []))
    _tie(rng, model)
    plans = _plan(model, UnitRules(persistence_numel=threshold, bucket_numel=bucket))
    order = [spec.name for plan in plans for spec in plan.spec.params if plan.spec.resident]
    assert all(isinstance(p, Tensor) for p in model.parameters()) and len(order) == len(set(order))
