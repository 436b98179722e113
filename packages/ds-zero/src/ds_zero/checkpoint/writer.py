"""Writes one safetensors file as a stream: bytes go to the file as they come, the header last.

A safetensors file is an 8-byte little-endian header length, a JSON header, and the raw data
without holes.  Space for the header is reserved first (the format lets it end in blanks) and
filled in at the end, so no tensor has to be known, let alone held, before the previous is written.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

from ds_comm.errors import CheckpointError
from ds_zero.checkpoint.dtypes import safetensors_code

__all__ = ["FileRecord", "SafetensorsWriter", "StoredTensor", "header_bytes", "split_blocks"]

_PREFIX_BYTES = 8
_PAD_KEY = "padding:"
_ENTRY_SLACK_BYTES = 160  # more than an entry needs besides its key and shape, padding included


@dataclass(frozen=True)
class FileRecord:
    """What the index says about one file.

    Attributes:
        name: File name in the checkpoint's folder.
        size: Length in bytes.
        data_offset: Position of the first data byte; the header ends there.
        header_crc32: CRC-32 of the header's bytes, without the 8-byte length.
    """

    name: str
    size: int
    data_offset: int
    header_crc32: int


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: absolute file offset in bytes, and one CRC-32 per block."""

    offset: int
    crc32: tuple[int, ...]


def _entry(key: str, code: str, shape: tuple[int, ...], begin: int, end: int) -> str:
    body = {"dtype": code, "shape": list(shape), "data_offsets": [begin, end]}
    return f"{json.dumps(key)}:{json.dumps(body, separators=(',', ':'))}"


def header_bytes(
    metadata: Mapping[str, str], entries: Iterable[tuple[str, tuple[int, ...]]]
) -> int:
    """Return how many header bytes suffice for tensors of these (key, shape), a multiple of 8."""
    total = len(json.dumps({"__metadata__": dict(metadata)}))
    for key, shape in entries:
        total += len(json.dumps(key)) + len(str(list(shape))) + _ENTRY_SLACK_BYTES
    return -(-total // 8) * 8


def split_blocks(view: memoryview, block_bytes: int) -> Iterator[memoryview]:
    """Cut bytes into blocks of ``block_bytes``; the last one may be shorter."""
    for begin in range(0, len(view), block_bytes):
        yield view[begin : begin + block_bytes]


class SafetensorsWriter:
    """Appends tensors to one new file; use as a context manager and call `finish` last.

    Leaving the context without `finish` closes the file and leaves it unusable as it is; whoever
    made its folder removes it.

    Args:
        path: File to create; it must not exist.
        metadata: Text stored under ``__metadata__`` in the header.
        reserve: Header bytes to reserve, a multiple of 8 (see `header_bytes`).

    Raises:
        OSError: From any method, when the file cannot be created or written.
    """

    def __init__(self, path: Path, *, metadata: Mapping[str, str], reserve: int) -> None:
        self._path = path
        self._reserve = reserve
        self._entries = [f'"__metadata__":{json.dumps(dict(metadata), separators=(",", ":"))}']
        self._entry_bytes = len(self._entries[0])
        self._data_offset = _PREFIX_BYTES + reserve
        self._position = self._data_offset
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        os.lseek(self._fd, self._position, os.SEEK_SET)

    def fits(self, key: str, shape: tuple[int, ...]) -> bool:
        """Return whether the reserved header has room for one more tensor."""
        needed = len(json.dumps(key)) + len(str(list(shape))) + _ENTRY_SLACK_BYTES
        return self._entry_bytes + needed + len(self._entries) + 2 <= self._reserve

    def append(
        self, key: str, dtype: torch.dtype, shape: tuple[int, ...], blocks: Iterable[memoryview]
    ) -> StoredTensor:
        """Write one tensor.

        Args:
            key: Its key in the header, unique in this file.
            dtype: Its dtype.
            shape: Its shape.
            blocks: Its bytes in order; each block gets a checksum.

        Returns:
            Where it was written, with the CRC-32 of each block.

        Raises:
            CheckpointError: The dtype cannot be stored, or the header is full (see `fits`).
        """
        code = safetensors_code(dtype)
        if not self.fits(key, shape):
            raise CheckpointError(f"the header of {self._path} has no room for {key!r}")
        self._align(dtype.itemsize)
        begin = self._position
        checksums: list[int] = []
        for block in blocks:
            checksums.append(zlib.crc32(block))
            self._write(block)
        self._add_entry(key, code, shape, begin)
        return StoredTensor(begin, tuple(checksums))

    def finish(self) -> FileRecord:
        """Write the header, force the file to disk, close it and return its record."""
        header = ("{" + ",".join(self._entries) + "}").encode("ascii").ljust(self._reserve)
        size = self._position
        os.lseek(self._fd, 0, os.SEEK_SET)
        self._write(memoryview(self._reserve.to_bytes(_PREFIX_BYTES, "little") + header))
        os.fsync(self._fd)
        self.close()
        return FileRecord(self._path.name, size, self._data_offset, zlib.crc32(header))

    def close(self) -> None:
        """Close the file; further calls do nothing."""
        if self._fd >= 0:
            descriptor, self._fd = self._fd, -1
            os.close(descriptor)

    def __enter__(self) -> SafetensorsWriter:
        """Return the writer itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the file."""
        self.close()

    def _align(self, itemsize: int) -> None:
        # Readers view the data in place, so a tensor starts at a multiple of its item size; the
        # format allows no holes, hence a tiny tensor of zeros instead of one.
        missing = -self._position % itemsize
        if missing:
            begin = self._position
            self._write(memoryview(bytes(missing)))
            self._add_entry(f"{_PAD_KEY}{begin}", "U8", (missing,), begin)

    def _add_entry(self, key: str, code: str, shape: tuple[int, ...], begin: int) -> None:
        origin = self._data_offset
        entry = _entry(key, code, shape, begin - origin, self._position - origin)
        self._entries.append(entry)
        self._entry_bytes += len(entry)

    def _write(self, block: memoryview) -> None:
        # One write may take less than it was given (signals, quotas, the 2 GiB limit of Linux).
        while block:
            written = os.write(self._fd, block)
            self._position += written
            block = block[written:]
