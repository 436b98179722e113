"""Joins what the ranks report into one description, and checks that it is complete. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from ds_comm.errors import CheckpointError
from ds_zero.checkpoint.dtypes import dtype_name
from ds_zero.checkpoint.index import Range, by_tensor, encode_manifest
from ds_zero.checkpoint.types import Manifest, TensorInfo

__all__ = ["check_coverage", "merge_manifests"]

K = TypeVar("K")
V = TypeVar("V")


def merge_manifests(manifests: Sequence[Manifest]) -> Manifest:
    """Return the union of the ranks' manifests, in rank order.

    Args:
        manifests: One per rank, or one for all ranks when they are the same.

    Raises:
        CheckpointError: Two of them say different things about one tensor, counter or state.
    """
    first = manifests[0]
    parameters, buffers = _infos(first.parameters), _infos(first.buffers)
    merged = replace(first, parameters=(), buffers=())
    for other in manifests[1:]:
        for key in ("mesh", "counters", "schedule", "data", "optimizer"):
            if encode_manifest(first)[key] != encode_manifest(other)[key]:
                raise CheckpointError(f"the ranks disagree about {key!r}; it must be the same")
        parameters = _union(parameters, _infos(other.parameters), "parameter")
        buffers = _union(buffers, _infos(other.buffers), "buffer")
        merged = replace(
            merged,
            aliases=_union(merged.aliases, other.aliases, "alias"),
            scalars=_union(merged.scalars, other.scalars, "scalars of"),
            state_shapes=_union(merged.state_shapes, other.state_shapes, "state shapes of"),
            excluded=tuple(dict.fromkeys((*merged.excluded, *other.excluded))),
        )
    merged = replace(merged, parameters=tuple(parameters.values()), buffers=tuple(buffers.values()))
    for alias, owner in merged.aliases.items():
        if owner not in parameters and owner not in buffers:
            raise CheckpointError(f"{alias!r} is tied to {owner!r}, which is not in the manifest")
        if alias in parameters or alias in buffers:
            raise CheckpointError(f"{alias!r} is both tied to {owner!r} and stored itself")
    return merged


def _infos(infos: Iterable[TensorInfo]) -> dict[str, TensorInfo]:
    named: dict[str, TensorInfo] = {}
    for info in infos:
        if info.name in named:
            raise CheckpointError(f"{info.name!r} is in the manifest twice")
        named[info.name] = info
    return named


def _union(left: Mapping[K, V], right: Mapping[K, V], what: str) -> dict[K, V]:
    joined = dict(left)
    for key, value in right.items():
        if joined.setdefault(key, value) != value:
            raise CheckpointError(
                f"the ranks disagree about {what} {key!r}: {joined[key]!r} and {value!r}"
            )
    return joined


def check_coverage(manifest: Manifest, written: Sequence[Sequence[Range]]) -> tuple[Range, ...]:
    """Return all ranges worth listing after checking that they tile every tensor exactly.

    Args:
        manifest: The merged manifest.
        written: Ranges per rank.

    Returns:
        The ranges without empty ones, except one per zero-size tensor.

    Raises:
        CheckpointError: Elements are missing or written twice, or one tensor has two dtypes.
    """
    expected = manifest.expected_numel()
    sizes = {info.name: info.numel for info in (*manifest.parameters, *manifest.buffers)}
    state_numel = manifest.state_numel()
    kept: list[Range] = []
    found = by_tensor(item for ranges in written for item in ranges)
    for (kind, name), ranges in found.items():
        numel = state_numel.get((kind, name), sizes.get(name))
        filled = [item for item in ranges if item.extent.numel]
        if numel is not None:
            _check_tiling(f"{kind!r} of {name!r}", numel, filled)
        kept.extend(filled or ranges[:1])
    for (kind, name), numel in expected.items():
        if numel and (kind, name) not in found:
            raise CheckpointError(f"no rank wrote {kind!r} of {name!r} ({numel} elements)")
    return tuple(kept)


def _check_tiling(what: str, numel: int, ranges: Sequence[Range]) -> None:
    dtypes = sorted({dtype_name(item.extent.dtype) for item in ranges})
    if len(dtypes) > 1:
        raise CheckpointError(f"{what} was written in several dtypes: {', '.join(dtypes)}")
    position = 0
    for item in ranges:
        if item.start < position:
            raise CheckpointError(
                f"{what}: elements [{item.start}, {min(position, item.stop)}) were written twice, "
                f"the second time in {item.extent.file}"
            )
        if item.start > position:
            break
        position = item.stop
    if position != numel:
        upto = next((item.start for item in ranges if item.start > position), numel)
        raise CheckpointError(f"{what}: no rank wrote elements [{position}, {upto})")
