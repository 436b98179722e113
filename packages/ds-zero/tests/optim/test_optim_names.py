"""Names of the configuration, and which optimisers may be sharded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ds_comm.collectives import LocalCollectives
from ds_comm.errors import ConfigError
from ds_comm.group import Group
from ds_zero.config.optim import OptimizerSection
from ds_zero.optim import (
    FlatAdagrad,
    FlatAdam,
    FlatLamb,
    FlatLion,
    FlatMuon,
    FlatSGD,
    OwnerAdapter,
    TorchAdapter,
    attach_optimizer,
    optimizer_from_config,
)
from ds_zero.optim.table import NOT_YET

ALONE = LocalCollectives(Group.solo())


def _section(kind: str, **params: Any) -> OptimizerSection:
    # Without validation: some names are refused by the schema already.
    return OptimizerSection.model_construct(type=kind, params=params)


def test_names_of_the_configuration() -> None:
    """Case does not matter; ``Adam`` decays decoupled unless ``adam_w_mode`` is false."""
    params = [nn.Parameter(torch.zeros(3))]
    for kind, given, wanted in (
        ("adam", {}, True),
        ("Adam", {"adam_w_mode": False, "torch_adam": True}, False),
        ("AdamW", {"adam_w_mode": False}, True),
    ):
        built = optimizer_from_config(_section(kind, **given), params)
        assert isinstance(built, FlatAdam)
        assert built.param_groups[0]["adam_w_mode"] is wanted
    built = optimizer_from_config(_section("ADAM", betas=[0.5, 0.6], lr=0.25), params)
    assert built.param_groups[0]["betas"] == (0.5, 0.6) and built.param_groups[0]["lr"] == 0.25
    assert isinstance(optimizer_from_config(_section("sgd", lr=0.1), params), FlatSGD)
    assert type(optimizer_from_config(_section("rmsprop"), params)) is torch.optim.RMSprop
    assert type(optimizer_from_config(_section("RAdam", lr=0.1), params)) is torch.optim.RAdam


@pytest.mark.parametrize("name", sorted(NOT_YET))
def test_names_that_come_with_another_package(name: str) -> None:
    """Each names the package, and an alternative that exists."""
    with pytest.raises(ConfigError, match="ds-compress.*'(AdamW|Lamb)'"):
        optimizer_from_config(_section(name), [nn.Parameter(torch.zeros(3))])


@pytest.mark.parametrize(
    ("kind", "params", "wanted"),
    [
        ("LION", {"lr": 0.1, "betas": [0.9, 0.99], "weight_decay": 0.1}, FlatLion),
        ("adagrad", {"eps": 1e-8, "fp32_optimizer_states": True}, FlatAdagrad),
        ("Lamb", {"max_coeff": 5, "eps_inside_sqrt": False, "amsgrad": False}, FlatLamb),
        ("Adam", {"amsgrad": False, "set_grad_none": True, "fused": True}, FlatAdam),
        ("Adam", {"amsgrad": True, "torch_adam": True}, torch.optim.AdamW),
        ("Adam", {"amsgrad": True, "adam_w_mode": False}, torch.optim.Adam),
        ("AdamW", {"amsgrad": True, "adam_w_mode": False}, torch.optim.AdamW),
        ("adafactor", {"eps": [None, 1e-3]}, torch.optim.Adafactor),
    ],
)
def test_parameters_of_predecessors(kind: str, params: dict[str, Any], wanted: type) -> None:
    """What changes nothing is taken; amsgrad is torch's."""
    built = optimizer_from_config(_section(kind, **params), [nn.Parameter(torch.zeros(3))])
    assert type(built) is wanted


def test_states_in_the_dtype_of_the_parameters() -> None:
    """``fp32_optimizer_states`` false."""
    section = _section("Adam", fp32_optimizer_states=False)
    built = optimizer_from_config(section, [nn.Parameter(torch.zeros(3))])
    assert isinstance(built, FlatAdam) and not built.fp32_optimizer_states


@pytest.mark.parametrize(
    ("kind", "params", "match"),
    [
        ("AdamX", {}, "unknown; did you mean 'Adam"),
        ("Optimizer", {}, "unknown"),
        ("lr_scheduler", {}, "unknown"),
        ("SGD", {"momentun": 0.9}, "did you mean 'momentum'"),
        ("Adam", {"params": []}, "'params'"),
        ("RMSprop", {"lr": -1}, "Invalid learning rate"),
        ("Adam", {"betas": [0.9]}, "betas"),
        ("Adam", {"betas": 0.9}, "betas"),
        ("Adam", {"lr": "fast"}, "lr"),
        ("Adam", {"lr": float("nan")}, "finite"),
        ("Lion", {"betas": [0.9, 1.0]}, "betas"),
        ("Lion", {"momentum": 0.9}, "momentum"),
        ("Lamb", {"eps_inside_sqrt": True}, "eps_inside_sqrt"),
        ("Lamb", {"min_coeff": 2.0, "max_coeff": 1.0}, "max_coeff >= min_coeff"),
        ("Adagrad", {"lr_decay": -1.0}, "lr_decay=-1"),
        ("Muon", {"lr_muon": 0.1}, "lr_muon"),
        ("Muon", {"ns_method": "exact"}, "ns_method"),
        ("Muon", {"momentum": 1.0}, "momentum"),
        ("MuAdam", {}, "set_base_shapes"),
    ],
)
def test_wrong_names_and_values(kind: str, params: dict[str, Any], match: str) -> None:
    """Always a ConfigError that names the optimiser or the value."""
    with pytest.raises(ConfigError, match=match):
        section = OptimizerSection.model_construct(type=kind, params=params)
        optimizer_from_config(section, [nn.Parameter(torch.zeros(3, 3))])


@pytest.mark.parametrize("name", ["LBFGS", "SparseAdam"])
def test_algorithms_that_no_stage_supports(name: str) -> None:
    """Also with ``zero_allow_untested_optimizer``."""
    optimizer = getattr(torch.optim, name)([nn.Parameter(torch.zeros(3, 3))])
    for sharded in (False, True):
        with pytest.raises(ConfigError, match=name):
            attach_optimizer(optimizer, (), ALONE, sharded=sharded, allow_untested=True)


class Own(torch.optim.SGD):
    """A class of the user's."""


def test_unknown_classes_need_a_word_when_sharded() -> None:
    """Refused, unless the user says that each parameter is treated by itself."""
    params = [nn.Parameter(torch.zeros(3, 3))]
    with pytest.raises(ConfigError, match="Own.*zero_allow_untested_optimizer"):
        attach_optimizer(Own(params), (), ALONE, sharded=True, allow_untested=False)
    attached = attach_optimizer(Own(params), (), ALONE, sharded=True, allow_untested=True)
    assert isinstance(attached, OwnerAdapter)
    attached = attach_optimizer(Own(params), (), ALONE, sharded=False, allow_untested=False)
    assert isinstance(attached, TorchAdapter)


# ---- Muon's choice of parameters ---------------------------------------------------------------


class Decoder(nn.Module):
    """Names as in published models: ``wte`` is an embedding by class, ``embed_proj`` by name."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(5, 4)
        self.embed_proj = nn.Linear(4, 4)
        self.mlp = nn.Linear(4, 8)
        self.conv = nn.Conv1d(4, 4, 3)
        self.norm = nn.LayerNorm(4)
        self.lm_head = nn.Linear(4, 5, bias=False)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.wte.weight


def _named(model: nn.Module, group: dict[str, Any]) -> set[str]:
    names = {id(param): name for name, param in model.named_parameters()}
    return {names[id(param)] for param in group["params"]}


def test_muon_takes_matrices_outside_of_embedding_and_head() -> None:
    """By name and by class, tied weights with their embedding."""
    model = Decoder()
    section = _section("muon", lr=0.1, adam_lr=0.01, weight_decay=0.2, momentum=0.9)
    built = optimizer_from_config(section, list(model.parameters()), model)
    assert isinstance(built, FlatMuon)
    first, second = built.param_groups
    assert first["use_muon"] and _named(model, first) == {"mlp.weight", "conv.weight"}
    assert not second["use_muon"] and "wte.weight" in _named(model, second)
    assert (first["lr"], first["momentum"], first["weight_decay"]) == (0.1, 0.9, 0.2)
    assert (second["lr"], second["betas"], second["weight_decay"]) == (0.01, (0.9, 0.95), 0.2)
    assert (first["ns_steps"], second["eps"]) == (5, 1e-10)


def test_muon_keeps_groups_that_chose() -> None:
    """``use_muon`` in a group wins, with its object; other groups are divided, keeping theirs."""
    model = Decoder()
    chosen = {"params": [model.lm_head.weight], "use_muon": True, "lr": 0.5}
    mixed = {"params": [model.mlp.weight, model.mlp.bias], "weight_decay": 0.3, "betas": (0.5, 0.6)}
    built = optimizer_from_config(_section("Muon", muon_lr=0.1), [chosen, mixed], model)
    assert built.param_groups[0] is chosen and built.param_groups[1] is mixed
    assert chosen["lr"] == 0.5 and mixed["lr"] == 0.1 and "betas" not in mixed
    last = built.param_groups[2]
    assert _named(model, last) == {"mlp.bias"} and last["betas"] == (0.5, 0.6)
    assert all(group["weight_decay"] == 0.3 for group in built.param_groups[1:])


@pytest.mark.parametrize(
    ("group", "match"),
    [
        ({}, "use_muon"),
        ({"use_muon": 1}, "use_muon"),
        ({"use_muon": True, "betas": (0.9, 0.9)}, "betas"),
        ({"use_muon": False, "momentum": 0.9}, "momentum"),
        ({"use_muon": True, "ns_steps": 0}, "ns_steps"),
        ({"use_muon": True, "lr": -0.1}, "lr=-0.1"),
    ],
)
def test_groups_that_muon_refuses(group: dict[str, Any], match: str) -> None:
    """A group says what it is, and has only keys of its kind."""
    with pytest.raises(ConfigError, match=match):
        FlatMuon([{"params": [nn.Parameter(torch.zeros(3, 3))], **group}])


def test_muon_refuses_vectors() -> None:
    """With their shape."""
    with pytest.raises(ConfigError, match=r"\(7,\)"):
        FlatMuon([{"params": [nn.Parameter(torch.zeros(7))], "use_muon": True}])


# ---- muP ---------------------------------------------------------------------------------------


class Shape:
    """What ``mup`` notes on a parameter, worked out by hand here."""

    def __init__(self, growing: int, width: float = 1.0, ratio: float = 1.0) -> None:
        self._values = growing, width, ratio

    def ninf(self) -> int:
        return self._values[0]

    def width_mult(self) -> float:
        return self._values[1]

    def fanin_fanout_mult_ratio(self) -> float:
        return self._values[2]


def _shaped(shape: Shape) -> Tensor:
    param = nn.Parameter(torch.zeros(2, 2))
    param.infshape = shape  # type: ignore[attr-defined]
    return param


def test_mup_scales_rates_by_width() -> None:
    """Table 8 of arXiv:2203.03466: hidden weights by 1/width under Adam; vectors too under SGD."""
    members = [_shaped(Shape(2, 4.0, 8.0)), _shaped(Shape(1, 4.0)), _shaped(Shape(0))]
    adam = optimizer_from_config(_section("MuAdamW", lr=0.8, weight_decay=0.1), members)
    assert isinstance(adam, FlatAdam)
    found = {id(g["params"][0]): (g["lr"], g["weight_decay"]) for g in adam.param_groups}
    assert found[id(members[0])] == (0.2, 0.4) and found[id(members[1])] == (0.8, 0.1)
    assert len(adam.param_groups) == 2 and all(g["adam_w_mode"] for g in adam.param_groups)
    plain = optimizer_from_config(_section("muadam"), members)
    assert not any(g["adam_w_mode"] for g in plain.param_groups)
    sgd = optimizer_from_config(_section("muSGD", lr=0.8, decoupled_wd=True), members)
    assert isinstance(sgd, FlatSGD)
    assert [g["lr"] for g in sgd.param_groups] == [0.1, 3.2, 0.8]
    with pytest.raises(ConfigError, match="3 dimensions"):
        optimizer_from_config(_section("musgd"), [_shaped(Shape(3))])
