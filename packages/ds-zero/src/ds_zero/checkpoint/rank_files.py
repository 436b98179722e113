"""What one rank writes during a save: its chunks, checked, as one or more safetensors files."""

from __future__ import annotations

import re
from pathlib import Path

from ds_comm.errors import CheckpointError
from ds_zero.checkpoint.dtypes import as_bytes
from ds_zero.checkpoint.index import Range
from ds_zero.checkpoint.reader import SAVE_ID_KEY, Extent
from ds_zero.checkpoint.types import BUFFER, CLIENT, PARAM, Chunk, Manifest
from ds_zero.checkpoint.writer import FileRecord, SafetensorsWriter, split_blocks

__all__ = ["BLOCK_BYTES", "ChunkCheck", "RankFiles"]

BLOCK_BYTES = 4 * 2**20
FIRST_HEADER_BYTES = 64 * 2**10  # each further file of a rank reserves four times as much
_KIND = re.compile(r"[A-Za-z0-9_.-]+")


class RankFiles:
    """The files of one rank: a chunk goes to the current one, a full header starts the next.

    Args:
        folder: Folder to write into.
        stem: Start of the file names, such as ``rank-00000-of-00002``.
        save_id: Identity of the save, repeated in each file.
        unique: Whether the names carry the save id, to stand beside the files of another save.

    Attributes:
        records: The files that are complete.
        ranges: What was written, in order.
    """

    def __init__(self, folder: Path, stem: str, save_id: str, unique: bool) -> None:
        self.records: list[FileRecord] = []
        self.ranges: list[Range] = []
        self._folder = folder
        self._stem = stem
        self._suffix = f"-{save_id[:8]}" if unique else ""
        self._metadata = {"format": "pt", SAVE_ID_KEY: save_id}
        self._reserve = FIRST_HEADER_BYTES
        self._name = ""
        self._writer: SafetensorsWriter | None = None

    def __enter__(self) -> RankFiles:
        """Return the object itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file that is being written."""
        if self._writer is not None:
            self._writer.close()

    def add(self, chunk: Chunk) -> None:
        """Write one chunk; the tensor is not referred to afterwards."""
        data = chunk.data.detach().cpu().resolve_conj().resolve_neg()
        key = f"{chunk.kind}:{chunk.name}:{chunk.start}"
        shape = (data.numel(),)
        writer = self._writer if self._writer is not None else self._next()
        while not writer.fits(key, shape):
            writer = self._next()
        stored = writer.append(key, data.dtype, shape, split_blocks(as_bytes(data), BLOCK_BYTES))
        label = f"{chunk.kind} of {chunk.name}"
        extent = Extent(self._name, stored.offset, data.numel(), data.dtype, stored.crc32, label)
        self.ranges.append(Range(chunk.kind, chunk.name, chunk.start, extent))

    def finish(self) -> None:
        """Complete the last file."""
        if self._writer is not None:
            self.records.append(self._writer.finish())

    def _next(self) -> SafetensorsWriter:
        self.finish()
        part = f"-part{len(self.records)}" if self.records else ""
        self._name = f"{self._stem}{part}{self._suffix}.safetensors"
        path = self._folder / self._name
        writer = SafetensorsWriter(path, metadata=self._metadata, reserve=self._reserve)
        self._writer = writer
        self._reserve *= 4
        return writer


class ChunkCheck:
    """Checks a rank's chunks against the manifest before they are written."""

    def __init__(self, manifest: Manifest) -> None:
        self._parameters = {info.name: info.numel for info in manifest.parameters}
        self._buffers = {info.name: info.numel for info in manifest.buffers}
        self._state_numel = manifest.state_numel()
        self._empty: set[tuple[str, str]] = set()

    def admit(self, chunk: Chunk) -> bool:
        """Return whether a chunk is to be written.

        Empty ones are not, since they would share their key with the next; but one chunk of a
        zero-size tensor is, so that its presence is known.

        Raises:
            CheckpointError: The chunk is no range of a tensor in the manifest.
        """
        what = f"chunk {chunk.kind!r} of {chunk.name!r} at {chunk.start}"
        if not _KIND.fullmatch(chunk.kind) or chunk.kind == CLIENT:
            raise CheckpointError(f"{what} has a reserved or malformed kind")
        tensors = self._buffers if chunk.kind == BUFFER else self._parameters
        if chunk.name not in tensors:
            raise CheckpointError(f"{what} is not in the manifest")
        if chunk.data.dim() != 1 or not chunk.data.is_contiguous():
            raise CheckpointError(f"{what} is not a contiguous 1-D tensor")
        numel = tensors[chunk.name]
        if chunk.kind not in (PARAM, BUFFER):
            numel = self._state_numel.get((chunk.kind, chunk.name), numel)
        if chunk.start < 0 or chunk.start + chunk.data.numel() > numel:
            raise CheckpointError(
                f"{what} with {chunk.data.numel()} elements lies outside the tensor's {numel}"
            )
        if chunk.data.numel():
            return True
        fresh = numel == 0 and (chunk.kind, chunk.name) not in self._empty
        self._empty.add((chunk.kind, chunk.name))
        return fresh
