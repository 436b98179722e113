"""Interprets an ``index.json`` without trusting it: every value is checked where it stands."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from ds_comm.errors import CheckpointError
from ds_zero.checkpoint.codec import decode
from ds_zero.checkpoint.dtypes import dtype_from_name
from ds_zero.checkpoint.folders import SHARD_NAME
from ds_zero.checkpoint.index import VERSION, Index, Range, looks_like_index
from ds_zero.checkpoint.reader import Extent
from ds_zero.checkpoint.types import Json, Manifest, Scalar, TensorInfo
from ds_zero.checkpoint.writer import FileRecord

__all__ = ["parse_index"]

_FIRST_LINE = re.compile(
    rb'\{"format": "ds-zero-checkpoint", "version": (\d{1,9}), "crc32": "([0-9a-f]{8})",\n'
)
_SAVE_ID = re.compile(r"[0-9a-f]{32}")

T = TypeVar("T")


def parse_index(data: bytes, source: str) -> Index:
    """Interpret the bytes of an ``index.json``.

    Args:
        data: The whole file.
        source: Its path, for messages.

    Raises:
        CheckpointError: It is not an index, is damaged, or was written by a newer format.
    """
    match = _FIRST_LINE.match(data)
    if match is None:
        known = looks_like_index(data)
        problem = "is damaged: its first line is malformed" if known else "is no ds-zero index"
        raise CheckpointError(f"{source} {problem}; load another tag")
    version = int(match.group(1))
    if version != VERSION:
        raise CheckpointError(
            f"{source} has format version {version}, and this ds-zero reads version {VERSION}; "
            "install the ds-zero that wrote it, or a newer one"
        )
    if zlib.crc32(data[match.end() :]) != int(match.group(2), 16):
        raise CheckpointError(
            f"{source} is damaged: it does not match its own checksum. Copy it again from where "
            "it was saved, or load another tag"
        )
    try:
        return _index(_Node(json.loads(data), source))
    except RecursionError:
        raise CheckpointError(f"{source} is nested too deeply") from None
    except ValueError as error:
        raise CheckpointError(f"{source} is not valid JSON: {error}") from error


@dataclass(frozen=True)
class _Node:
    """A JSON value together with its place, so that a wrong type is reported where it is."""

    value: Json
    where: str

    def get(self, key: str, *default: Json) -> _Node:
        """A member; ``default`` is for keys that the first writers of the format did not have."""
        if not isinstance(self.value, dict) or (key not in self.value and not default):
            raise self._wrong(f"an object with {key!r}")
        return _Node(self.value.get(key, *default), f"{self.where}: {key}")

    def items(self) -> list[tuple[str, _Node]]:
        if not isinstance(self.value, dict):
            raise self._wrong("an object")
        return [(key, _Node(item, f"{self.where}.{key}")) for key, item in self.value.items()]

    def list(self, read: Callable[[_Node], T]) -> tuple[T, ...]:
        if not isinstance(self.value, list):
            raise self._wrong("a list")
        return tuple(read(_Node(v, f"{self.where}[{i}]")) for i, v in enumerate(self.value))

    def map(self, read: Callable[[_Node], T]) -> dict[str, T]:
        return {key: read(node) for key, node in self.items()}

    def text(self) -> str:
        if not isinstance(self.value, str):
            raise self._wrong("text")
        return self.value

    def flag(self) -> bool:
        if not isinstance(self.value, bool):
            raise self._wrong("true or false")
        return self.value

    def integer(self) -> int:
        if not isinstance(self.value, int) or isinstance(self.value, bool):
            raise self._wrong("an integer")
        return self.value

    def count(self) -> int:
        number = self.integer()
        if number < 0:
            raise self._wrong("an integer of at least 0")
        return number

    def crc32(self) -> int:
        if not re.fullmatch("[0-9a-f]{8}", self.text()):
            raise self._wrong("8 hex digits")
        return int(self.text(), 16)

    def plain(self) -> object:
        def no_tensor(key: str, shape: tuple[int, ...]) -> Tensor:
            raise self._wrong("a value without tensors")

        return decode(self.value, self.where, no_tensor)

    def scalar(self) -> Scalar:
        value = self.plain()
        if not isinstance(value, (bool, int, float, str)):
            raise self._wrong("a number, text or truth value")
        return value

    def shape(self) -> tuple[int, ...]:
        return self.list(_Node.count)

    def _wrong(self, expected: str) -> CheckpointError:
        return CheckpointError(f"{self.where} should be {expected}; the index is malformed")


def _index(root: _Node) -> Index:
    save_id = root.get("save_id").text()
    block_bytes = root.get("block_bytes").count()
    if not _SAVE_ID.fullmatch(save_id) or block_bytes == 0 or block_bytes % 16:
        raise CheckpointError(f"{root.where} has a malformed save_id or block_bytes")
    files = root.get("files").list(_file)
    by_name = {file.name: file for file in files}
    return Index(
        save_id=save_id,
        block_bytes=block_bytes,
        written_by=root.get("written_by").map(_Node.text),
        manifest=_manifest(root),
        client_state=root.get("client_state").value,
        files=files,
        ranges=root.get("ranges").list(lambda node: _range(node, by_name, block_bytes)),
    )


def _manifest(root: _Node) -> Manifest:
    return Manifest(
        parameters=root.get("parameters").list(_info),
        buffers=root.get("buffers").list(_info),
        aliases=root.get("aliases").map(_Node.text),
        mesh=root.get("mesh").map(_Node.integer),
        counters=root.get("counters").map(_Node.integer),
        scalars=root.get("scalars").map(lambda node: node.map(_Node.scalar)),
        schedule=root.get("schedule").plain(),
        loss_scale=root.get("loss_scale", None).plain(),
        data=root.get("data").plain(),
        optimizer=root.get("optimizer").plain(),
        excluded=root.get("excluded").list(_Node.text),
        state_shapes=root.get("state_shapes").map(lambda node: node.map(_Node.shape)),
    )


def _info(node: _Node) -> TensorInfo:
    return TensorInfo(
        name=node.get("name").text(),
        shape=node.get("shape").shape(),
        dtype=node.get("dtype").text(),
        trainable=node.get("trainable").flag(),
        group=node.get("group").integer(),
    )


def _file(node: _Node) -> FileRecord:
    name = node.get("name").text()
    if not SHARD_NAME.fullmatch(name):  # never a path that leaves the folder
        raise CheckpointError(f"{node.where} has a malformed file name {name!r}")
    return FileRecord(
        name=name,
        size=node.get("size").count(),
        data_offset=node.get("data_offset").count(),
        header_crc32=node.get("header_crc32").crc32(),
    )


def _range(node: _Node, files: Mapping[str, FileRecord], block_bytes: int) -> Range:
    kind, name = node.get("kind").text(), node.get("name").text()
    dtype = dtype_from_name(node.get("dtype").text())
    extent = Extent(
        file=node.get("file").text(),
        offset=node.get("offset").count(),
        numel=node.get("numel").count(),
        dtype=dtype,
        crc32=node.get("crc32").list(_Node.crc32),
        label=f"{kind} of {name}",
    )
    size = extent.numel * dtype.itemsize
    file = files.get(extent.file)
    if file is None or not file.data_offset <= extent.offset <= file.size - size:
        raise CheckpointError(f"{node.where} lies outside the checkpoint's files")
    if len(extent.crc32) != -(-size // block_bytes):
        raise CheckpointError(f"{node.where} has {len(extent.crc32)} checksums for {size} bytes")
    return Range(kind, name, node.get("start").count(), extent)
