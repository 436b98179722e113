"""Muon with an auxiliary Adam (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon).

Momentum is kept in shards.  The direction of a matrix is orthogonalised whole, by its owner
([Note: owners] in ``owners``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ds_comm.errors import ConfigError
from ds_zero.layout import ParamSpec
from ds_zero.optim.adam import adam_stretch
from ds_zero.optim.base import StepGradients
from ds_zero.optim.checks import check_betas, check_not_negative
from ds_zero.optim.flat import FlatOptimizer
from ds_zero.optim.owners import OwnerExchange, Whole
from ds_zero.optim.rooms import Room, Stretch, scaled, widened

__all__ = ["FlatMuon", "muon_groups", "orthogonalize"]

ROUND_NUMEL = 1 << 25
"""Elements that travel to their owners at a time."""

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_METHODS = ("gram", "standard")
_MUON_DEFAULTS: dict[str, Any] = {
    "lr": 0.02,
    "momentum": 0.95,
    "nesterov": True,
    "weight_decay": 0.0,
    "ns_steps": 5,
    "ns_method": "gram",
}
_ADAM_DEFAULTS: dict[str, Any] = {
    "lr": 3e-4,
    "betas": (0.9, 0.95),
    "eps": 1e-10,
    "weight_decay": 0.0,
    "bias_correction": True,
    "adam_w_mode": True,
}


class FlatMuon(FlatOptimizer):
    """Orthogonalised momentum for groups with ``use_muon``, AdamW for the others.

    Weights of more than three dimensions (convolutions) count as matrices of their first dimension
    by all others, weights of three as stacks of matrices (experts).
    """

    family = "muon"

    def __init__(self, param_groups: Sequence[dict[str, Any]]) -> None:
        """Register the parameter groups.

        Args:
            param_groups: Dictionaries with ``params``, ``use_muon``, and hyper-parameters of their
                kind: ``lr`` 0.02, ``momentum`` 0.95, ``nesterov`` True, ``weight_decay`` 0,
                ``ns_steps`` 5, ``ns_method`` "gram" with ``use_muon``; ``lr`` 3e-4, ``betas``
                (0.9, 0.95), ``eps`` 1e-10, ``weight_decay`` 0 without.

        Raises:
            ConfigError: A group says not which kind it is, has unknown keys or wrong values, or a
                parameter with ``use_muon`` is no matrix.
        """
        groups = list(param_groups)
        if not groups or not all(isinstance(group, dict) for group in groups):
            raise ConfigError(
                "Muon needs parameter groups: dictionaries with 'params' and 'use_muon'"
            )
        for group in groups:
            _complete_group(group)
        super().__init__(groups, {})
        self._exchange: OwnerExchange | None = None

    def state_kinds(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """See :meth:`FlatOptimizer.state_kinds`."""
        return ("momentum_buffer",) if group["use_muon"] else ("exp_avg", "exp_avg_sq")

    def apply(self, gradients: StepGradients) -> None:
        """Update all rooms; collective."""
        moves: list[tuple[Room, Stretch]] = []
        directions = list(gradients.grads)
        for room in self._rooms:
            group = self.param_groups[room.group]
            grad = directions[room.run]
            if group["use_muon"] and grad is not None:
                wide = torch.promote_types(self._run(room).master.dtype, torch.float32)
                directions[room.run] = scaled(grad, 1.0, wide)
        gradients = StepGradients(directions, gradients.used, gradients.scale)
        for room in self._rooms:
            group = self.param_groups[room.group]
            for segment, stretch in self.stretches(room, gradients):
                if group["use_muon"]:
                    _blend(group, stretch, gradients.scale)
                    moves.append((room, stretch))
                else:
                    adam_stretch(group, segment, stretch, gradients.scale)
        self._orthogonalize(gradients)
        for room, stretch in moves:
            _move(self.param_groups[room.group], stretch, stretch.grad)

    def _orthogonalize(self, gradients: StepGradients) -> None:
        """Replace the directions of all matrices by orthogonalised ones."""
        assert self._runs is not None and self._collectives is not None
        if self._exchange is None:
            groups = self.param_groups
            self._exchange = OwnerExchange(
                self._runs,
                self._collectives,
                wanted=lambda spec: bool(groups[spec.group]["use_muon"]),
                cost=_cost,
            )
        flats = [
            grad if grad is not None else run.master[:0]
            for grad, run in zip(gradients.grads, self._runs, strict=True)
        ]
        for wholes in _rounds(self._exchange.active(gradients.used), self._collectives.group.size):
            values = self._exchange.collect(wholes, flats)
            results = {}
            for whole in self._exchange.owned(wholes):
                group, spec = self.param_groups[whole.spec.group], whole.spec
                matrix = as_matrices(values.pop(spec.name).view(spec.shape))
                results[spec.name] = _direction(group, matrix).reshape(-1)
            self._exchange.spread(results, wholes, flats)

    def update_alone(self, group: Mapping[str, Any], param: nn.Parameter) -> None:
        """See :meth:`FlatOptimizer.update_alone`."""
        segment, stretch = self.stretch_alone(group, param)
        if group["use_muon"]:
            wide = torch.promote_types(stretch.grad.dtype, torch.float32)
            stretch = stretch._replace(grad=stretch.grad.to(wide))
            _blend(group, stretch, 1.0)
            direction = _direction(group, as_matrices(stretch.grad.view(param.shape)))
            _move(group, stretch, direction.reshape(-1))
        else:
            adam_stretch(group, segment, stretch, 1.0)
        self.finish_alone(param, stretch)


def _complete_group(group: dict[str, Any]) -> None:
    """Check one group and fill in the defaults of its kind."""
    if not isinstance(group.get("use_muon"), bool):
        raise ConfigError(f"a group of Muon needs use_muon, True or False; got {sorted(group)}")
    defaults = _MUON_DEFAULTS if group["use_muon"] else _ADAM_DEFAULTS
    kind = "Muon" if group["use_muon"] else "Muon's auxiliary Adam"
    known = {"params", "use_muon", "initial_lr", "name", *defaults}
    unknown = sorted(group.keys() - known)
    if unknown:
        raise ConfigError(f"a group of {kind} has unknown keys {unknown}; known: {sorted(known)}")
    for key, value in defaults.items():
        group.setdefault(key, value)
    check_not_negative(kind, lr=group["lr"], weight_decay=group["weight_decay"])
    params = group["params"]
    group["params"] = [params] if isinstance(params, Tensor) else list(params)
    if not group["use_muon"]:
        group["betas"] = check_betas(kind, group["betas"])
        check_not_negative(kind, eps=group["eps"])
        return
    shapes = [tuple(param.shape) for param in group["params"] if param.dim() < 2]
    if shapes:
        raise ConfigError(f"use_muon needs matrices, but there are parameters of shapes {shapes}")
    if (
        not 0 <= group["momentum"] < 1
        or group["ns_steps"] < 1
        or group["ns_method"] not in _METHODS
    ):
        raise ConfigError(
            f"Muon needs momentum in [0, 1), ns_steps >= 1 and ns_method of {_METHODS}; got "
            f"{group['momentum']}, {group['ns_steps']} and {group['ns_method']!r}"
        )


def _blend(group: Mapping[str, Any], stretch: Stretch, grad_scale: float) -> None:
    """Update the momentum; leave the direction before orthogonalisation in the gradient."""
    with widened(stretch) as wide:
        momentum = wide.states["momentum_buffer"]
        grad = scaled(stretch.grad, grad_scale, stretch.grad.dtype)
        momentum.lerp_(grad, 1 - group["momentum"])
        if group["nesterov"]:
            grad.lerp_(momentum, group["momentum"])
        else:
            grad.copy_(momentum)


def _direction(group: Mapping[str, Any], matrices: Tensor) -> Tensor:
    """Orthogonalised ``[..., rows, columns]``, scaled so that its size suits any shape."""
    rows, columns = matrices.shape[-2:]
    direction = orthogonalize(matrices, group["ns_steps"], group["ns_method"])
    return direction.mul_(math.sqrt(max(1.0, rows / columns)))


def _move(group: Mapping[str, Any], stretch: Stretch, direction: Tensor) -> None:
    lr = float(group["lr"])
    with widened(stretch) as wide:
        wide.param.mul_(1 - lr * group["weight_decay"]).add_(direction, alpha=-lr)
    if stretch.copy is not None:
        stretch.copy.copy_(stretch.param)


def as_matrices(values: Tensor) -> Tensor:
    """A weight as ``[..., rows, columns]``; more than three dimensions are one matrix."""
    return values.flatten(1) if values.dim() > 3 else values


def _cost(spec: ParamSpec) -> float:
    """Operations of the iteration, up to a factor."""
    rows = spec.shape[-2] if len(spec.shape) <= 3 else spec.shape[0]
    columns = spec.shape[-1] if len(spec.shape) <= 3 else spec.numel // rows
    return float(spec.numel) * min(rows, columns)


def _rounds(wholes: Sequence[Whole], num_ranks: int) -> Iterator[list[Whole]]:
    """Parts of bounded size with work for every rank."""
    current: list[Whole] = []
    for whole in wholes:
        current.append(whole)
        if len(current) >= num_ranks and sum(w.spec.numel for w in current) >= ROUND_NUMEL:
            yield current
            current = []
    if current:
        yield current


def orthogonalize(matrices: Tensor, steps: int = 5, method: str = "gram") -> Tensor:
    """Bring the singular values of matrices near 1 by a quintic Newton-Schulz iteration.

    Args:
        matrices: ``[..., rows, columns]``, fp32 or fp64.
        steps: Iterations.
        method: "standard" iterates on the matrix; "gram" on the smaller Gram matrix, which is
            cheaper for long matrices, and starts anew from the matrix after two steps.

    Returns:
        The same shape; singular values between about 0.7 and 1.2.
    """
    rows, columns = matrices.shape[-2:]
    x = matrices if rows <= columns else matrices.mT
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp_min(1e-7)
    a, b, c = _COEFFICIENTS
    if method == "standard":
        for _ in range(steps):
            gram = x @ x.mT
            x = a * x + (b * gram + c * gram @ gram) @ x
    else:
        for count in [2] * (steps > 2) + [steps - 2 * (steps > 2)]:
            x = _gram_steps(x, count)
    return (x if rows <= columns else x.mT).contiguous()


def _gram_steps(x: Tensor, steps: int) -> Tensor:
    """``steps`` iterations of ``x -> (aI + bG + cG^2) x`` with ``G = x x^T``, on ``G`` alone."""
    a, b, c = _COEFFICIENTS
    gram = x @ x.mT
    identity = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    total = identity
    for step in range(steps):
        factor = a * identity + b * gram + c * gram @ gram
        total = factor @ total
        if step + 1 < steps:
            gram = factor @ gram @ factor
    return total @ x


def muon_groups(
    groups: Any, names: Mapping[int, str], embeddings: set[int], params: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Divide parameters into those that Muon updates and those that Adam does.

    A matrix is Muon's unless its name contains ``embed`` or ``lm_head`` or it belongs to an
    embedding.  Groups that have ``use_muon`` already stay as they are.

    Args:
        groups: Parameters, or group dictionaries.
        names: Name of each parameter by ``id``.
        embeddings: ``id`` of each parameter of an embedding.
        params: ``optimizer.params``: ``lr`` for both or ``muon_lr`` and ``adam_lr``, and
            ``momentum``, ``nesterov``, ``ns_steps``, ``ns_method`` for Muon, ``betas``, ``eps`` for
            Adam, ``weight_decay`` for both.

    Returns:
        Groups for :class:`FlatMuon`.

    Raises:
        ConfigError: A parameter of the configuration is unknown.
    """
    known = {"muon_lr", "adam_lr", *_MUON_DEFAULTS, *_ADAM_DEFAULTS}
    unknown = sorted(params.keys() - known)
    if unknown:
        raise ConfigError(
            f"optimizer.params of 'Muon' has unknown keys {unknown}; known: {sorted(known)}"
        )
    chosen = {use: _params_of(use, params) for use in (True, False)}
    items = list(groups)
    if not items or not isinstance(items[0], dict):
        items = [{"params": items}]
    found: list[dict[str, Any]] = []
    for group in items:
        if "use_muon" in group:
            for key, value in chosen[group["use_muon"] is True].items():
                group.setdefault(key, value)
            found.append(group)
        else:
            found += _divided(group, chosen, names, embeddings)
    return found


def _params_of(use_muon: bool, params: Mapping[str, Any]) -> dict[str, Any]:
    """What of ``optimizer.params`` concerns groups of one kind."""
    defaults = _MUON_DEFAULTS if use_muon else _ADAM_DEFAULTS
    own = {key: params[key] for key in defaults if key in params}
    rate = "muon_lr" if use_muon else "adam_lr"
    return {**own, "lr": params[rate]} if rate in params else own


def _divided(
    group: dict[str, Any],
    chosen: Mapping[bool, Mapping[str, Any]],
    names: Mapping[int, str],
    embeddings: set[int],
) -> list[dict[str, Any]]:
    """A group as one or two with ``use_muon``; the first is the same object."""
    members = {use: [] for use in (True, False)}  # type: dict[bool, list[Tensor]]
    for param in group["params"]:
        members[_suits_muon(param, names, embeddings)].append(param)
    foreign = {
        True: _ADAM_DEFAULTS.keys() - _MUON_DEFAULTS,
        False: _MUON_DEFAULTS.keys() - _ADAM_DEFAULTS,
    }
    given = dict(group)
    found: list[dict[str, Any]] = []
    for use, params in members.items():
        if params:
            target = {} if found else group
            target.clear()
            target.update(chosen[use])
            target.update({k: v for k, v in given.items() if k not in foreign[use]})
            target.update(params=params, use_muon=use)
            found.append(target)
    return found


def _suits_muon(param: Tensor, names: Mapping[int, str], embeddings: set[int]) -> bool:
    name = names.get(id(param), "").lower()
    named = "embed" in name or "lm_head" in name
    return param.dim() >= 2 and not named and id(param) not in embeddings
