"""The index of a checkpoint: a versioned, checksummed JSON document.

Its first line is fixed to the byte and holds the version and the CRC-32 of all bytes after it, so
a damaged index is recognised before it is interpreted, and a newer one before it is misread.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ds_zero.checkpoint.codec import encode_plain
from ds_zero.checkpoint.dtypes import dtype_from_name, dtype_name
from ds_zero.checkpoint.reader import Extent
from ds_zero.checkpoint.types import Json, Manifest, TensorInfo
from ds_zero.checkpoint.writer import FileRecord

__all__ = [
    "FORMAT",
    "VERSION",
    "Index",
    "Range",
    "by_tensor",
    "dump_index",
    "encode_manifest",
    "looks_like_index",
]

FORMAT = "ds-zero-checkpoint"
VERSION = 1


@dataclass(frozen=True)
class Range:
    """One stored run of a tensor's flattened elements.

    Attributes:
        kind: ``param``, ``buffer``, ``client`` or an optimiser state key.
        name: Name of the parameter or buffer; a number for client tensors.
        start: First element in the flattened global tensor.
        extent: Where its bytes lie.
    """

    kind: str
    name: str
    start: int
    extent: Extent

    @property
    def stop(self) -> int:
        """One past the last element."""
        return self.start + self.extent.numel


@dataclass(frozen=True)
class Index:
    """Everything ``index.json`` holds.

    Attributes:
        save_id: 32 hex digits, repeated in every file of this save.
        block_bytes: Length of a checksummed block.
        written_by: Package versions of the writer; informative.
        manifest: Tensors, counters, schedule and optimiser description.
        client_state: The user's dictionary, encoded by `codec.encode`.
        files: All data files.
        ranges: All stored runs.
    """

    save_id: str
    block_bytes: int
    written_by: Mapping[str, str]
    manifest: Manifest
    client_state: Json
    files: tuple[FileRecord, ...]
    ranges: tuple[Range, ...]


def looks_like_index(head: bytes) -> bool:
    """Return whether bytes begin like an index of this format, of any version."""
    return head.startswith(b'{"format": "' + FORMAT.encode() + b'"')


def encode_manifest(manifest: Manifest) -> dict[str, Json]:
    """Return a manifest as JSON.

    Raises:
        CheckpointError: A value is neither a number, text nor a plain container of these.
    """
    return {
        "mesh": _each(manifest.mesh, "mesh"),
        "counters": _each(manifest.counters, "counters"),
        "schedule": encode_plain(manifest.schedule, "schedule"),
        "loss_scale": encode_plain(manifest.loss_scale, "loss_scale"),
        "data": encode_plain(manifest.data, "data"),
        "optimizer": encode_plain(manifest.optimizer, "optimizer"),
        "parameters": [_encode_info(info) for info in manifest.parameters],
        "buffers": [_encode_info(info) for info in manifest.buffers],
        "aliases": _each(manifest.aliases, "aliases"),
        "excluded": list(manifest.excluded),
        "state_shapes": {
            name: {kind: list(shape) for kind, shape in kinds.items()}
            for name, kinds in manifest.state_shapes.items()
        },
        "scalars": {
            name: _each(values, f"scalars.{name}") for name, values in manifest.scalars.items()
        },
    }


def _each(mapping: Mapping[str, object], where: str) -> dict[str, Json]:
    return {key: encode_plain(value, f"{where}.{key}") for key, value in mapping.items()}


def _encode_info(info: TensorInfo) -> Json:
    dtype_from_name(info.dtype)
    return {
        "name": info.name,
        "shape": list(info.shape),
        "dtype": info.dtype,
        "trainable": info.trainable,
        "group": info.group,
    }


def dump_index(index: Index) -> bytes:
    """Return the bytes of ``index.json``."""
    files: list[Json] = [
        {
            "name": f.name,
            "size": f.size,
            "data_offset": f.data_offset,
            "header_crc32": f"{f.header_crc32:08x}",
        }
        for f in index.files
    ]
    ranges: list[Json] = [
        {
            "kind": r.kind,
            "name": r.name,
            "start": r.start,
            "numel": r.extent.numel,
            "dtype": dtype_name(r.extent.dtype),
            "file": r.extent.file,
            "offset": r.extent.offset,
            "crc32": [f"{value:08x}" for value in r.extent.crc32],
        }
        for r in index.ranges
    ]
    document: dict[str, Json] = {
        "save_id": index.save_id,
        "block_bytes": index.block_bytes,
        "written_by": dict(index.written_by),
        **encode_manifest(index.manifest),
        "client_state": index.client_state,
        "files": files,
        "ranges": ranges,
    }
    body = ",\n".join(f"{json.dumps(k)}: {_layout(v)}" for k, v in document.items()) + "\n}\n"
    data = body.encode("ascii")
    first = f'{{"format": "{FORMAT}", "version": {VERSION}, "crc32": "{zlib.crc32(data):08x}",\n'
    return first.encode("ascii") + data


def _layout(value: Json) -> str:
    """Write a list of objects one per line, so that a person can read and compare indices."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n" + ",\n".join(json.dumps(item, allow_nan=False) for item in value) + "\n]"
    return json.dumps(value, allow_nan=False)


def by_tensor(ranges: Iterable[Range]) -> dict[tuple[str, str], list[Range]]:
    """Group ranges by (kind, name), each list ordered by first element."""
    grouped: dict[tuple[str, str], list[Range]] = {}
    for item in ranges:
        grouped.setdefault((item.kind, item.name), []).append(item)
    for items in grouped.values():
        items.sort(key=lambda r: (r.start, r.stop))
    return grouped
