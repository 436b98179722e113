"""Reading: any range of any stored tensor, whatever ranks and ranges it was written by."""

from __future__ import annotations

import difflib
import math
import os
from bisect import bisect_right
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from ds_comm.errors import CheckpointError, CheckpointNotFoundError
from ds_zero.checkpoint.codec import decode
from ds_zero.checkpoint.dtypes import dtype_name
from ds_zero.checkpoint.folders import INDEX_NAME, list_tags, normalise_tag, read_latest
from ds_zero.checkpoint.index import Index, Range, by_tensor
from ds_zero.checkpoint.index_parser import parse_index
from ds_zero.checkpoint.reader import FileReader
from ds_zero.checkpoint.types import BUFFER, CLIENT, PARAM, Manifest, TensorInfo

__all__ = ["Checkpoint", "open_checkpoint"]

_MAX_LISTED = 10


def open_checkpoint(directory: str | os.PathLike[str], tag: str | int | None = None) -> Checkpoint:
    """Open a checkpoint for reading.

    Not collective: each rank opens it and reads what it needs.

    Args:
        directory: Folder of checkpoints.
        tag: Which one; ``None`` takes the one named in ``latest``.

    Raises:
        CheckpointNotFoundError: The directory, ``latest``, the tag or one of its files is missing.
        CheckpointError: The index is damaged, malformed or newer, or a file has another length.
    """
    root = Path(directory)
    chosen = read_latest(root) if tag is None else normalise_tag(tag)
    folder = root / chosen
    try:
        data = (folder / INDEX_NAME).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointNotFoundError(_not_found(root, chosen, named=tag is None)) from None
    except OSError as error:
        raise CheckpointError(f"cannot read {folder / INDEX_NAME}: {error}") from error
    checkpoint = Checkpoint(folder, parse_index(data, str(folder / INDEX_NAME)))
    checkpoint.check_files()
    return checkpoint


def _not_found(root: Path, tag: str, *, named: bool) -> str:
    if not root.is_dir():
        return f"checkpoint directory {root} does not exist"
    found = ", ".join(repr(t) for t in list_tags(root)[-20:]) or "(none)"
    source = f", which {root / 'latest'} names," if named else ""
    if (root / tag).is_dir():
        return (
            f"{root / tag}{source} holds no {INDEX_NAME}, so it is no checkpoint of this format; "
            f"checkpoints in {root}: {found}"
        )
    return f"there is no checkpoint {tag!r}{source} in {root}; checkpoints there: {found}"


class Checkpoint:
    """An open checkpoint.

    Every block of data that is used is checked against its checksum.  An instance is not meant
    for several threads at once.  Closing is optional: files are opened when first read.

    Args:
        path: Folder of the checkpoint.
        index: Its parsed index.
    """

    def __init__(self, path: Path, index: Index) -> None:
        self.path = path
        self._index = index
        self._ranges = by_tensor(index.ranges)
        self._starts = {key: [r.start for r in ranges] for key, ranges in self._ranges.items()}
        manifest = index.manifest
        self._parameters = {info.name: info for info in manifest.parameters}
        self._buffers = {info.name: info for info in manifest.buffers}
        self._state_shapes = manifest.state_shapes
        files = {record.name: record for record in index.files}
        self._reader = FileReader(path, files, index.save_id, index.block_bytes)

    @property
    def tag(self) -> str:
        """Name of the checkpoint."""
        return self.path.name

    @property
    def index(self) -> Index:
        """The whole parsed index."""
        return self._index

    @property
    def manifest(self) -> Manifest:
        """Description of what is stored."""
        return self._index.manifest

    @property
    def client_state(self) -> dict[str, object]:
        """A new copy of the user's dictionary; its tensors are on the CPU."""
        state = decode(self._index.client_state, "client_state", self._client_tensor)
        if not isinstance(state, dict):
            raise CheckpointError(f"the client state of {self.path} is no dictionary")
        return state

    def kinds(self, name: str) -> set[str]:
        """Return what is stored for a parameter or buffer: ``param``, ``exp_avg``, and so on.

        An alias answers for the tensor that it is tied to.

        Raises:
            CheckpointError: There is no such parameter or buffer.
        """
        owner = self._owner(name)
        found = {kind for kind, stored in self._ranges if stored == owner and kind != CLIENT}
        if owner in self._parameters and owner not in self.manifest.excluded:
            found.add(PARAM)
        return found | ({BUFFER} if owner in self._buffers else set())

    def shape(self, kind: str, name: str) -> tuple[int, ...]:
        """Return the shape of a stored tensor.

        Raises:
            CheckpointError: It is not stored.
        """
        owner = self._owner(name)
        if kind not in self.kinds(owner):
            self._refuse(kind, owner)
        info = self._parameters.get(owner) or self._buffers[owner]
        return tuple(self._state_shapes.get(owner, {}).get(kind, info.shape))

    def dtype(self, kind: str, name: str) -> torch.dtype:
        """Return the dtype a tensor is stored in; float32 for a zero-size tensor never written.

        Raises:
            CheckpointError: It is not stored.
        """
        owner = self._owner(name)
        ranges = self._ranges.get((kind, owner))
        if not ranges:
            self.shape(kind, owner)
            return torch.float32
        return ranges[0].extent.dtype

    def read(self, kind: str, name: str, start: int, out: Tensor) -> None:
        """Fill ``out`` with elements [start, start + out.numel()) of a flattened tensor.

        Reads from as many files as needed and only the blocks that hold these elements.

        Args:
            kind: ``param``, ``buffer`` or an optimiser state key.
            name: Parameter or buffer name; an alias reads the tensor that it is tied to.
            start: First element in the flattened global tensor.
            out: 1-D, any device. Its dtype may differ from the stored one if both are
                floating-point.

        Raises:
            CheckpointError: Not stored, out of range, of an incompatible dtype, or damaged; the
                content of ``out`` is then undefined.
        """
        owner = self._owner(name)
        numel = math.prod(self.shape(kind, owner))
        stop = start + out.numel()
        if out.dim() != 1 or start < 0 or stop > numel:
            raise CheckpointError(
                f"elements [{start}, {stop}) of {kind!r} of {name!r} were asked for, into a tensor "
                f"of {out.dim()} dimensions; it has {numel} elements, and the target must be 1-D"
            )
        if out.numel() == 0:
            return
        stored = self.dtype(kind, owner)
        if stored != out.dtype and not (stored.is_floating_point and out.is_floating_point()):
            raise CheckpointError(
                f"{kind!r} of {name!r} is stored as {dtype_name(stored)} and cannot be read as "
                f"{dtype_name(out.dtype)}; only floating-point dtypes are converted"
            )
        self._fill((kind, owner), start, out.detach())

    def read_tensor(self, kind: str, name: str) -> Tensor:
        """Return a whole tensor in its stored dtype and shape, on the CPU.

        Raises:
            CheckpointError: As for `read`.
        """
        whole = torch.empty(self.shape(kind, name), dtype=self.dtype(kind, name))
        self.read(kind, name, 0, whole.view(-1))
        return whole

    def require(
        self,
        parameters: Iterable[TensorInfo],
        buffers: Iterable[TensorInfo] = (),
        *,
        strict: bool = True,
    ) -> None:
        """Check that a model's tensors are stored, with the same shapes, before reading any.

        Args:
            parameters: The model's parameters.
            buffers: The model's buffers.
            strict: Whether to refuse missing and surplus tensors too; other shapes always are.

        Raises:
            CheckpointError: Lists the differences.
        """
        stored = {**self._parameters, **self._buffers}
        wanted = [*parameters, *buffers]
        reshaped = [
            f"{info.name} {list(stored[owner].shape)} -> {list(info.shape)}"
            for info in wanted
            if (owner := self.manifest.aliases.get(info.name, info.name)) in stored
            and stored[owner].shape != info.shape
        ]
        excluded = set(self.manifest.excluded)
        owners = {self.manifest.aliases.get(info.name, info.name) for info in wanted}
        absent = [
            info.name
            for info in wanted
            if (owner := self.manifest.aliases.get(info.name, info.name)) not in stored
            or owner in excluded
        ]
        surplus = [name for name in stored if name not in owners]
        problems = _listed("stored with another shape (stored -> model)", reshaped)
        if strict:
            problems += _listed("in the model but not stored", absent)
            problems += _listed("stored but not in the model", surplus)
        if problems:
            raise CheckpointError(
                f"checkpoint {self.path} does not fit the model: {'; '.join(problems)}. Build the "
                "model as it was saved, or load non-strictly to skip missing and surplus tensors"
            )

    def verify(self) -> None:
        """Read every stored byte once and check it.

        Raises:
            CheckpointError: Names the first file and tensor that are damaged.
        """
        for item in self._index.ranges:
            step = max(1, self._index.block_bytes // item.extent.dtype.itemsize)
            for first in range(0, item.extent.numel, step):
                count = min(step, item.extent.numel - first)
                self._reader.read(item.extent, first, torch.empty(count, dtype=item.extent.dtype))

    def check_files(self) -> None:
        """Check that every file exists with its recorded length.

        Raises:
            CheckpointNotFoundError: A file is missing.
            CheckpointError: A file has another length.
        """
        self._reader.check_sizes()

    def close(self) -> None:
        """Close the files."""
        self._reader.close()

    def __enter__(self) -> Checkpoint:
        """Return the checkpoint itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the files."""
        self.close()

    def _owner(self, name: str) -> str:
        owner = self.manifest.aliases.get(name, name)
        if owner not in self._parameters and owner not in self._buffers:
            known = [*self._parameters, *self._buffers, *self.manifest.aliases]
            near = difflib.get_close_matches(name, known, n=3)
            hint = f"; similar: {', '.join(near)}" if near else ""
            raise CheckpointError(
                f"checkpoint {self.path} has no parameter or buffer {name!r}{hint}"
            )
        return owner

    def _refuse(self, kind: str, owner: str) -> None:
        reason = ""
        if kind == PARAM and owner in self.manifest.excluded:
            reason = " (it was saved without frozen parameters; load them from the base model)"
        raise CheckpointError(
            f"checkpoint {self.path} stores no {kind!r} of {owner!r}{reason}; stored: "
            f"{', '.join(sorted(self.kinds(owner))) or 'nothing'}"
        )

    def _fill(self, key: tuple[str, str], start: int, out: Tensor) -> None:
        ranges = self._ranges[key]
        position, stop = start, start + out.numel()
        index = max(0, bisect_right(self._starts[key], start) - 1)
        while position < stop:
            item = ranges[index] if index < len(ranges) else None
            if item is None or not item.start <= position < item.stop:
                raise CheckpointError(
                    f"checkpoint {self.path} is incomplete: its index has no element {position} "
                    f"of {key[0]!r} of {key[1]!r}; load another tag"
                )
            upto = min(stop, item.stop)
            target = out[position - start : upto - start]
            self._reader.read(item.extent, position - item.start, target)
            position, index = upto, index + 1

    def _client_tensor(self, key: str, shape: tuple[int, ...]) -> Tensor:
        ranges: list[Range] = self._ranges.get((CLIENT, key), [])
        if len(ranges) != 1 or ranges[0].extent.numel != math.prod(shape):
            raise CheckpointError(f"{self.path}: tensor {key} of the client state is missing")
        flat = torch.empty(ranges[0].extent.numel, dtype=ranges[0].extent.dtype)
        self._reader.read(ranges[0].extent, 0, flat)
        return flat.view(shape)


def _listed(what: str, names: list[str]) -> list[str]:
    if not names:
        return []
    more = f", and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return [f"{what}: {', '.join(names[:_MAX_LISTED])}{more}"]
