"""Marks of leaf modules: who gets them, and what they do to the units."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import ds_zero
from ds_zero import leaf_modules
from ds_zero.layout import ParamSpec
from ds_zero.units import UnitRules, plan_units


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.b = nn.Linear(3, 3)


class Derived(Inner):
    pass


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Inner()
        self.second = Derived()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.last = nn.Linear(3, 3)


def _units(model: nn.Module) -> dict[str, set[str]]:
    specs = {
        id(p): ParamSpec(name, tuple(p.shape), torch.float32, True)
        for name, p in model.named_parameters()
    }
    plans = plan_units(model, specs, UnitRules(persistence_numel=0))
    return {plan.spec.name: {spec.name for spec in plan.spec.params} for plan in plans}


def test_by_class_name_and_suffix() -> None:
    model = Net()
    assert ds_zero.set_z3_leaf_modules(model, [Inner]) == [model.first, model.second]
    assert ds_zero.get_z3_leaf_modules(model) == [model.first, model.second]
    assert ds_zero.unset_z3_leaf_modules(model, ["Derived"]) == [model.second]
    assert ds_zero.z3_leaf_module(model.first) and not ds_zero.z3_leaf_module(model.second)
    assert ds_zero.z3_leaf_parameter(model.first.a.weight)
    assert not ds_zero.z3_leaf_parameter(model.last.weight)
    assert ds_zero.set_z3_leaf_modules_by_name(model, ["second"]) == [model.second]
    assert ds_zero.set_z3_leaf_modules_by_suffix(model, [".b", "layers"]) == [
        model.first.b,
        model.second.b,
        model.layers,
    ]
    ds_zero.unset_z3_leaf_modules_by_suffix(model, [".b"])
    ds_zero.unset_z3_leaf_modules_by_name(model, ["layers", "first", "second"])
    assert ds_zero.get_z3_leaf_modules(model) == []
    full = f"{Inner.__module__}.Inner"
    assert ds_zero.set_z3_leaf_modules(model, [full]) == [model.first]


def test_nothing_found() -> None:
    model = Net()
    with pytest.raises(ValueError, match=r"no module of Net matches \['Iner'\]; its classes are"):
        ds_zero.set_z3_leaf_modules(model, ["Iner"])
    assert ds_zero.set_z3_leaf_modules(model, ["Iner"], raise_if_not_found=False) == []


def test_a_leaf_is_a_unit_beside_the_automatic_ones() -> None:
    model = Net()
    plain = _units(model)
    assert not any(
        "first.a.weight" in names and "first.b.weight" in names and len(names) == 4
        for names in plain.values()
    )
    ds_zero.set_z3_leaf_modules_by_name(model, ["first"])
    units = _units(model)
    assert units["first"] == {f"first.{n}.{k}" for n in "ab" for k in ("weight", "bias")}
    assert units["layers.0"] == {"layers.0.weight", "layers.0.bias"}
    assert set().union(*units.values()) == {name for name, _ in model.named_parameters()}


def test_a_leaf_inside_of_a_leaf_and_a_whole_model() -> None:
    model = Net()
    ds_zero.set_z3_leaf_modules_by_name(model, ["layers", "layers.0"])
    assert _units(model)["layers"] == {f"layers.{i}.{k}" for i in "01" for k in ("weight", "bias")}
    ds_zero.set_z3_leaf_module(model, True)
    assert _units(model) == {"root": {name for name, _ in model.named_parameters()}}


def test_marks_are_of_one_object_and_keep_nothing_alive() -> None:
    model = Net()
    ds_zero.set_z3_leaf_module(model.first, True)
    assert not ds_zero.z3_leaf_module(copy.deepcopy(model).first)
    assert len(list(leaf_modules._MARKED)) >= 1
    gone = weakref.ref(model.first)
    del model
    gc.collect()
    assert gone() is None
