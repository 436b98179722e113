"""Reads of parameters through their owner's table, and copies of it."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from ds_comm.errors import EngineError
from ds_zero.access import ParameterTable, watch_reads
from ds_zero.flat import Presence, Unit
from ds_zero.layout import UnitLayout


def _unit(presence: Presence = Presence.RELEASED) -> Unit:
    layout = UnitLayout("unit", False, ())
    return Unit(0, layout, (), (), releasable=True, presence=presence)


class Log:
    """Which units were reported."""

    def __init__(self) -> None:
        self.units: list[Unit] = []

    def __call__(self, unit: Unit) -> None:
        self.units.append(unit)


class Two(nn.Module):
    """Two layers, the second of which is tied to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.second = nn.Linear(2, 2, bias=False)
        self.free = nn.Linear(2, 2)


def test_reads_by_attribute_are_reported() -> None:
    """Each read of a watched parameter, before it is returned; of others none."""
    model, log = Two(), Log()
    unit = _unit()
    units = {id(model.first.weight): unit, id(model.second.weight): unit}
    stop = watch_reads(model, units, log)
    assert log.units == []
    weight = model.first.weight
    assert isinstance(weight, nn.Parameter) and log.units == [unit]
    _ = model.first.bias, model.free.weight
    assert log.units == [unit]
    torch.nn.functional.linear(torch.ones(2), model.second.weight)
    assert log.units == [unit] * 2
    assert model.get_parameter("second.weight") is not None
    reads = len(log.units)
    assert reads > 2
    # Only modules that own a watched parameter have a table of ours.
    kinds = [type(m._parameters) for m in (model, model.first, model.second, model.free)]
    assert kinds == [dict, ParameterTable, ParameterTable, dict]
    stop()
    assert type(model.first._parameters) is dict
    assert model.first.weight is weight and list(model.first._parameters) == ["weight", "bias"]
    assert len(log.units) == reads


def test_iteration_is_no_read() -> None:
    """Optimisers, counters and state dicts walk over parameters without gathering them."""
    model, log = Two(), Log()
    units = {id(p): _unit() for p in model.parameters()}
    watch_reads(model, units, log)
    assert sum(p.numel() for p in model.parameters()) == 4 + 2 + 4 + 4 + 2
    assert [name for name, _ in model.named_parameters()][0] == "first.weight"
    assert "weight" in model.first._parameters and len(model.first._parameters) == 2
    model.zero_grad()
    model.requires_grad_(False)
    assert log.units == []


def test_a_table_stays_a_dictionary() -> None:
    """Parameters are set, deleted and registered as in any module."""
    model, log = Two(), Log()
    watch_reads(model, {id(model.first.weight): _unit()}, log)
    with pytest.raises(AttributeError, match="absent"):
        _ = model.first.absent
    model.first.register_parameter("extra", nn.Parameter(torch.ones(1)))
    assert model.first.extra.item() == 1
    del model.first.extra
    assert not hasattr(model.first, "extra")
    model.first.register_parameter("nothing", None)
    assert model.first.nothing is None
    model.first.weight = nn.Parameter(torch.zeros(2, 2))
    log.units.clear()
    assert not model.first.weight.any() and log.units == []


def test_parameters_tied_under_two_owners() -> None:
    """Both tables report the same unit."""
    model, log = Two(), Log()
    model.second.weight = model.first.weight
    unit = _unit()
    watch_reads(model, {id(model.first.weight): unit}, log)
    _ = model.second.weight, model.first.weight
    assert log.units == [unit, unit]


@pytest.mark.parametrize("presence", [Presence.RELEASED, Presence.GATHERING])
def test_copies_of_released_modules_are_refused(presence: Presence) -> None:
    """The copy would hold NaN; the message names parameter and remedy."""
    model = Two()
    watch_reads(model, {id(model.second.weight): _unit(presence)}, Log())
    for module in (model, model.second):
        with pytest.raises(EngineError, match="'weight'.*GatheredParameters"):
            copy.deepcopy(module)
    copy.deepcopy(model.free)


def test_copies_of_gathered_modules_are_plain() -> None:
    """Own values, ordinary tables, no reports; ties within the copy are kept."""
    model, log = Two(), Log()
    model.second.weight = model.first.weight
    watch_reads(model, {id(model.first.weight): _unit(Presence.PRESENT)}, log)
    twin = copy.deepcopy(model)
    assert type(twin.first._parameters) is dict
    assert twin.first.weight is twin.second.weight is not model.first._parameters.get("weight")
    with torch.no_grad():
        twin.first.weight.fill_(3)
    assert log.units == []
    assert not bool((model.first.weight == 3).any())


def test_pickles_of_gathered_modules_are_plain() -> None:
    """``torch.save(model)`` stores ordinary tables."""
    model, log = Two(), Log()
    watch_reads(model, {id(model.first.weight): _unit(Presence.PRESENT)}, log)
    twin = pickle.loads(pickle.dumps(model))
    assert type(twin.first._parameters) is dict
    assert torch.equal(twin.first.weight, model.first.weight)


def test_pickles_of_released_modules_are_refused() -> None:
    """As copies are: the file would hold NaN."""
    model = Two()
    watch_reads(model, {id(model.first.weight): _unit()}, Log())
    with pytest.raises(EngineError, match="'weight'"):
        pickle.dumps(model)
