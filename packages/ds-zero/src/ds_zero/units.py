"""Which parameters form a unit: read from the module tree, before any buffer exists.

[Note: choosing units]
Blocks come from the classes the user names (``zero_optimization.leaf_module``), else from those
the model names (``_no_split_modules`` of Hugging Face models), else from classes that occur more
than once in a ``ModuleList`` or ``Sequential``; modules marked as leaves join them (see
[Note: leaf modules]).  Of nested candidates the outermost counts.  What is left is cut by owner: a
module whose own parameters are large (an embedding, an output projection) is a unit of its own,
small ones share buckets.  Parameters that are tiny, or that have no NaN, are *resident*: they stay
whole at every stage and form units without hooks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from ds_comm.errors import ConfigError
from ds_zero.layout import ParamSpec, UnitSpec
from ds_zero.leaf_modules import get_z3_leaf_modules, z3_leaf_module

__all__ = ["UnitPlan", "UnitRules", "model_blocks", "param_names", "plan_units"]


@dataclass(frozen=True)
class UnitRules:
    """What decides the units of a model."""

    block_classes: tuple[str, ...] = ()
    """Class names of modules that are units, named by the user."""
    block_names: tuple[str, ...] = ()
    """Full names of modules that are units, named by the user."""
    block_suffixes: tuple[str, ...] = ()
    """Endings of names of modules that are units, named by the user."""
    persistence_numel: int = 100_000
    """Parameters of at most this many elements are resident …"""
    persistence_total_numel: int = (1 << 63) - 1
    """… as long as all resident parameters together have at most this many."""
    bucket_numel: int = 1 << 22
    """Small parameters outside of blocks share units of about this many elements."""


@dataclass(frozen=True)
class UnitPlan:
    """A unit and the modules whose forward uses it."""

    spec: UnitSpec
    modules: tuple[nn.Module, ...]
    """Modules that get hooks: the block itself, or each module that owns a parameter of it."""


def param_names(model: nn.Module) -> tuple[dict[str, nn.Parameter], dict[str, str]]:
    """Name every parameter once.

    Args:
        model: Any module tree.

    Returns:
        The parameters by their first fully-qualified name, and for each further name (tied
        weights) the first one.
    """
    params: dict[str, nn.Parameter] = {}
    aliases: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        owner = first.setdefault(id(param), name)
        if owner == name:
            params[name] = param
        else:
            aliases[name] = owner
    return params, aliases


def plan_units(
    model: nn.Module, specs: Mapping[int, ParamSpec], rules: UnitRules
) -> tuple[UnitPlan, ...]:
    """Divide the parameters of ``model`` into units.  See [Note: choosing units].

    Args:
        model: The module tree.
        specs: The description of each parameter, by ``id(parameter)``.
        rules: Thresholds and the user's choices.

    Returns:
        Plans with disjoint parameters that together hold all of them, resident ones last.

    Raises:
        ConfigError: A class or name that the user gave does not occur in the model.
    """
    resident = _resident(specs.values(), rules)
    blocks = model_blocks(model, rules)
    taken: set[str] = set(resident)
    plans: list[UnitPlan] = []
    for name, block in blocks:
        own = tuple(s for s in _unique_specs(block.parameters(), specs) if s.name not in taken)
        taken.update(spec.name for spec in own)
        if own:
            modules = (block, *_outside_owners(model, block, own, specs))
            plans.append(UnitPlan(UnitSpec(name, own), modules))
    plans += _leftover_plans(model, specs, taken, rules)
    order = {spec.name: index for index, spec in enumerate(specs.values())}
    plans.sort(key=lambda plan: min(order[spec.name] for spec in plan.spec.params))
    kept = [spec for spec in specs.values() if spec.name in resident]
    plans += [
        UnitPlan(UnitSpec(f"resident.{index}", bucket, resident=True), ())
        for index, bucket in enumerate(_buckets(kept, rules.bucket_numel))
    ]
    return tuple(plans)


def _unique_specs(
    params: Iterable[nn.Parameter], specs: Mapping[int, ParamSpec]
) -> Iterator[ParamSpec]:
    seen: set[int] = set()
    for param in params:
        if id(param) not in seen:
            seen.add(id(param))
            yield specs[id(param)]


def _resident(specs: Iterable[ParamSpec], rules: UnitRules) -> set[str]:
    """Names of the parameters that stay whole at every stage."""
    names: set[str] = set()
    total = 0
    for spec in specs:
        if spec.numel <= 1 or not spec.dtype.is_floating_point:
            names.add(spec.name)
        elif (
            spec.numel <= rules.persistence_numel
            and total + spec.numel <= rules.persistence_total_numel
        ):
            names.add(spec.name)
            total += spec.numel
    return names


def model_blocks(model: nn.Module, rules: UnitRules) -> list[tuple[str, nn.Module]]:
    """Modules that are units by name or class, without those inside another one.

    Args:
        model: The module tree.
        rules: The user's choices.

    Returns:
        Full names and modules, in the order of the tree.

    Raises:
        ConfigError: A class or name that the user gave does not occur in the model.
    """
    if z3_leaf_module(model):
        return [("root", model)]
    matches = _user_blocks(model, rules) or _declared_blocks(model) or _repeated_blocks(model)
    wanted = {id(module) for _, module in matches} | set(map(id, get_z3_leaf_modules(model)))
    matches = [(name, module) for name, module in model.named_modules() if id(module) in wanted]
    chosen: list[tuple[str, nn.Module]] = []
    seen: set[int] = set()
    for name, module in matches:
        inside = any(name.startswith(outer + ".") for outer, _ in chosen)
        if name and not inside and id(module) not in seen:
            seen.add(id(module))
            chosen.append((name, module))
    return chosen


def _user_blocks(model: nn.Module, rules: UnitRules) -> list[tuple[str, nn.Module]]:
    modules = list(model.named_modules())
    classes = {type(module).__name__ for _, module in modules}
    qualified = {f"{type(m).__module__}.{type(m).__qualname__}" for _, m in modules}
    missing = [c for c in rules.block_classes if c not in classes | qualified]
    missing += [n for n in rules.block_names if n not in {name for name, _ in modules}]
    missing += [s for s in rules.block_suffixes if not any(n.endswith(s) for n, _ in modules)]
    if missing:
        raise ConfigError(
            f"zero_optimization.leaf_module names {missing}, which the model does not contain; "
            f"its module classes are {sorted(classes)}"
        )
    return [
        (name, module)
        for name, module in modules
        if type(module).__name__ in rules.block_classes
        or f"{type(module).__module__}.{type(module).__qualname__}" in rules.block_classes
        or name in rules.block_names
        or name.endswith(rules.block_suffixes or ("\0",))
    ]


def _declared_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Modules whose class a Hugging Face model lists as never to be split."""
    wanted: set[str] = set()
    for module in model.modules():
        wanted.update(getattr(module, "_no_split_modules", None) or ())
    return [(n, m) for n, m in model.named_modules() if type(m).__name__ in wanted]


def _repeated_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Children of containers whose class occurs there more than once."""
    found: list[tuple[str, nn.Module]] = []
    for prefix, container in model.named_modules():
        if isinstance(container, nn.ModuleList | nn.Sequential):
            counts = Counter(
                type(child) for child in container if any(True for _ in child.parameters())
            )
            found += [
                (f"{prefix}.{name}" if prefix else name, child)
                for name, child in container.named_children()
                if counts[type(child)] > 1
            ]
    return found


def _outside_owners(
    model: nn.Module,
    block: nn.Module,
    own: Sequence[ParamSpec],
    specs: Mapping[int, ParamSpec],
) -> Iterator[nn.Module]:
    """Modules outside of ``block`` that hold one of its parameters (tied weights)."""
    inside = {id(module) for module in block.modules()}
    names = {spec.name for spec in own}
    for module in model.modules():
        if id(module) not in inside and any(
            specs[id(param)].name in names for param in module.parameters(recurse=False)
        ):
            yield module


def _leftover_plans(
    model: nn.Module, specs: Mapping[int, ParamSpec], taken: set[str], rules: UnitRules
) -> Iterator[UnitPlan]:
    """Units for the parameters outside of blocks: large owners alone, small ones in buckets."""
    owners: dict[str, list[nn.Module]] = {}
    direct: list[tuple[str, tuple[ParamSpec, ...]]] = []
    claimed: set[str] = set(taken)
    for name, module in model.named_modules():
        mine = tuple(_unique_specs(module.parameters(recurse=False), specs))
        for spec in mine:
            owners.setdefault(spec.name, []).append(module)
        fresh = tuple(spec for spec in mine if spec.name not in claimed)
        claimed.update(spec.name for spec in fresh)
        if fresh:
            direct.append((name or "root", fresh))
    small: list[tuple[str, ParamSpec]] = []
    for name, fresh in direct:
        if sum(spec.numel for spec in fresh) >= rules.bucket_numel // 4:
            yield UnitPlan(UnitSpec(name, fresh), _owners_of(fresh, owners))
        else:
            small += [(name, spec) for spec in fresh]
    names = {spec.name: name for name, spec in small}
    for bucket in _buckets([spec for _, spec in small], rules.bucket_numel):
        first, last = names[bucket[0].name], names[bucket[-1].name]
        label = first if first == last else f"{first}..{last}"
        yield UnitPlan(UnitSpec(label, bucket), _owners_of(bucket, owners))


def _owners_of(
    specs: Iterable[ParamSpec], owners: Mapping[str, list[nn.Module]]
) -> tuple[nn.Module, ...]:
    modules = {id(module): module for spec in specs for module in owners[spec.name]}
    return tuple(modules.values())


def _buckets(specs: Sequence[ParamSpec], limit: int) -> Iterator[tuple[ParamSpec, ...]]:
    """Cut ``specs`` into consecutive parts of at most ``limit`` elements (or one parameter)."""
    bucket: list[ParamSpec] = []
    total = 0
    for spec in specs:
        if bucket and total + spec.numel > limit:
            yield tuple(bucket)
            bucket, total = [], 0
        bucket.append(spec)
        total += spec.numel
    if bucket:
        yield tuple(bucket)
