"""Reads byte ranges of a checkpoint's files, checking every block that is used against the index.

Plain positioned reads, not ``mmap``: a file that shrinks under a mapping kills the process with
SIGBUS, whereas a short read is an error that can name the file.
"""

from __future__ import annotations

import json
import os
import zlib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ds_comm.errors import CheckpointError, CheckpointNotFoundError
from ds_zero.checkpoint.dtypes import as_bytes, dtype_name
from ds_zero.checkpoint.writer import FileRecord

__all__ = ["Extent", "FileReader", "SAVE_ID_KEY"]

SAVE_ID_KEY = "save_id"
_MAX_OPEN_FILES = 64
_MAX_HEADER_BYTES = 100_000_000  # the safetensors library refuses longer headers


@dataclass(frozen=True)
class Extent:
    """Where one stored 1-D run of elements lies.

    Attributes:
        file: Name of the file.
        offset: Absolute position of the first byte in it.
        numel: Number of elements.
        dtype: Their dtype.
        crc32: CRC-32 of each block of ``block_bytes``; the last block may be shorter.
        label: What it holds, for messages.
    """

    file: str
    offset: int
    numel: int
    dtype: torch.dtype
    crc32: tuple[int, ...]
    label: str


class FileReader:
    """Opens files on first use, checks that they belong to the save, and reads verified ranges.

    Not safe for use from several threads at once (one scratch block is shared).

    Args:
        folder: The checkpoint's folder.
        files: File name -> record, from the index.
        save_id: Identity of the save, which each file repeats in its metadata.
        block_bytes: Length of a checksummed block; a multiple of 16.
    """

    def __init__(
        self, folder: Path, files: Mapping[str, FileRecord], save_id: str, block_bytes: int
    ) -> None:
        self._folder = folder
        self._files = files
        self._save_id = save_id
        self._block_bytes = block_bytes
        self._open: OrderedDict[str, int] = OrderedDict()
        self._identified: set[str] = set()
        self._verified: set[tuple[str, int]] = set()
        self._scratch: Tensor | None = None

    def check_sizes(self) -> None:
        """Check that every file exists with its recorded length.

        Raises:
            CheckpointNotFoundError: A file is missing.
            CheckpointError: A file is shorter or longer than recorded.
        """
        for record in self._files.values():
            path = self._folder / record.name
            try:
                size = path.stat().st_size
            except FileNotFoundError:
                raise _missing(path) from None
            except OSError as error:
                raise CheckpointError(f"cannot read {path}: {error}") from error
            if size != record.size:
                self._refuse_foreign(path)
                state = "truncated" if size < record.size else "too long"
                raise CheckpointError(
                    f"{path} is {state}: {size} bytes where its index says {record.size}. "
                    "Copy it again from where it was saved, or load another tag"
                )

    def read(self, extent: Extent, first: int, out: Tensor) -> None:
        """Fill ``out`` (1-D, any device) with elements [first, first + out.numel()) of an extent.

        Blocks not seen before are read whole and checked; later reads take only what they need.

        Raises:
            CheckpointError: The file is damaged, foreign or unreadable; ``out`` is then undefined.
        """
        itemsize = extent.dtype.itemsize
        block = self._block_bytes
        total = extent.numel * itemsize
        begin, end = first * itemsize, (first + out.numel()) * itemsize
        direct = out.dtype == extent.dtype and out.is_cpu and out.is_contiguous()
        for index in range(begin // block, -(-end // block)):
            low, high = index * block, min((index + 1) * block, total)
            want_low, want_high = max(low, begin), min(high, end)
            target = out[(want_low - begin) // itemsize : (want_high - begin) // itemsize]
            known = (extent.file, extent.offset + low) in self._verified
            whole = (low, high) == (want_low, want_high)
            if known or whole:
                low, high = want_low, want_high
            if direct and (known or whole):
                view = as_bytes(target)
                self._fetch(extent, index, low, view, known)
                continue
            scratch = self._scratch_bytes()[: high - low]
            self._fetch(extent, index, low, as_bytes(scratch), known)
            wanted = scratch[want_low - low : want_high - low]
            target.copy_(wanted.view(extent.dtype))

    def close(self) -> None:
        """Close all files; a later read opens them again."""
        while self._open:
            os.close(self._open.popitem()[1])

    def _scratch_bytes(self) -> Tensor:
        if self._scratch is None:
            self._scratch = torch.empty(self._block_bytes, dtype=torch.uint8)
        return self._scratch

    def _fetch(self, extent: Extent, index: int, low: int, view: memoryview, known: bool) -> None:
        self._pread(extent.file, extent.offset + low, view)
        if known:
            return
        if index >= len(extent.crc32) or zlib.crc32(view) != extent.crc32[index]:
            raise CheckpointError(
                f"{self._folder / extent.file} is damaged: {extent.label} ({extent.numel} x "
                f"{dtype_name(extent.dtype)}) does not match its checksum in bytes "
                f"[{extent.offset + low}, {extent.offset + low + len(view)}). Copy the file again "
                "from where it was saved, or load another tag"
            )
        self._verified.add((extent.file, extent.offset + low))

    def _pread(self, name: str, offset: int, view: memoryview) -> None:
        descriptor = self._descriptor(name)
        path = self._folder / name
        while view:
            try:
                count = os.preadv(descriptor, [view], offset)
            except OSError as error:
                raise CheckpointError(f"cannot read {path} at byte {offset}: {error}") from error
            if count == 0:
                raise CheckpointError(f"{path} is truncated: it ends at byte {offset}")
            view, offset = view[count:], offset + count

    def _descriptor(self, name: str) -> int:
        if name in self._open:
            self._open.move_to_end(name)
            return self._open[name]
        path = self._folder / name
        try:
            self._open[name] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise _missing(path) from None
        except OSError as error:
            raise CheckpointError(f"cannot open {path}: {error}") from error
        if len(self._open) > _MAX_OPEN_FILES:
            os.close(self._open.popitem(last=False)[1])
        if name not in self._identified:
            self._identify(self._files[name])
            self._identified.add(name)
        return self._open[name]

    def _identify(self, record: FileRecord) -> None:
        path = self._folder / record.name
        prefix, header = bytearray(8), bytearray(record.data_offset - 8)
        self._pread(record.name, 0, memoryview(prefix))
        self._pread(record.name, 8, memoryview(header))
        length = int.from_bytes(prefix, "little")
        if length == len(header) and zlib.crc32(header) == record.header_crc32:
            return
        self._refuse_foreign(path)
        raise CheckpointError(
            f"{path} is damaged: its header does not match its checksum. Copy the file again from "
            "where it was saved, or load another tag"
        )

    def _refuse_foreign(self, path: Path) -> None:
        other = _save_id_of(path)
        if other is not None and other != self._save_id:
            raise CheckpointError(
                f"{path} belongs to another save ({other}, not {self._save_id}): files of two "
                "checkpoints were mixed. Copy the whole folder again, or load another tag"
            )


def _missing(path: Path) -> CheckpointNotFoundError:
    return CheckpointNotFoundError(
        f"{path} is missing, though the checkpoint's index lists it. Copy it from where it was "
        "saved, or load another tag"
    )


def _save_id_of(path: Path) -> str | None:
    """Return the save that a file names itself, or None where it cannot be read."""
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            document = json.loads(file.read(min(length, _MAX_HEADER_BYTES)))
    except (OSError, ValueError):
        return None
    metadata = document.get("__metadata__") if isinstance(document, dict) else None
    found = metadata.get(SAVE_ID_KEY) if isinstance(metadata, dict) else None
    return found if isinstance(found, str) else None
