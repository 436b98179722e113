"""Exports the weights of a checkpoint as whole tensors in the layout of the Hugging Face hub.

Weights stream from the checkpoint's files to the export's, a block at a time: memory does not grow
with the model.  Tied tensors are written once, under the name that owns them.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ds_comm.errors import CheckpointError, ConfigError
from ds_zero.checkpoint.dtypes import as_bytes
from ds_zero.checkpoint.folders import (
    fsync_path,
    remove_leftovers,
    staging_name,
    write_durably,
)
from ds_zero.checkpoint.load import Checkpoint
from ds_zero.checkpoint.types import BUFFER, PARAM
from ds_zero.checkpoint.writer import SafetensorsWriter, header_bytes

__all__ = ["Weight", "export_weights", "parse_size", "plan_shards", "select_weights"]

Progress = Callable[[int], object]
"""Called with the number of bytes just written."""

_PIECE_NUMEL = 2**20
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", re.IGNORECASE)
_WEIGHT_FILES = re.compile(
    r"(model|pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?"
)
_ZIP_BYTES = 8192  # generous bounds on what torch.save adds, per file and per tensor
_ZIP_ENTRY_BYTES = 1024


@dataclass(frozen=True)
class Weight:
    """One tensor of an export.

    Attributes:
        kind: ``param`` or ``buffer``.
        name: Name under which it is stored and exported.
        shape: Its shape.
        dtype: Dtype in the export.
    """

    kind: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes of its data in the export."""
        return self.numel * self.dtype.itemsize


def parse_size(size: str | int) -> int:
    """Return a size in bytes: ``5GB`` is 5e9, ``5GiB`` is 5 * 2**30, a plain number is bytes.

    Raises:
        ConfigError: It is no size, or not positive.
    """
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    if match is not None:
        base = 1024 if match.group(3) else 1000
        result = float(match.group(1)) * base ** " KMGT".index(match.group(2).upper() or " ")
    elif isinstance(size, int) and not isinstance(size, bool):
        result = size
    else:
        raise ConfigError(f"{size!r} is no size; write it as 500MB, 5GB, 5GiB or in bytes")
    if result < 1:
        raise ConfigError(f"a shard of {size!r} can hold nothing; give at least one byte")
    return int(result)


def select_weights(checkpoint: Checkpoint, *, exclude_frozen: bool) -> list[Weight]:
    """Return what an export of a checkpoint holds: parameters, then buffers, in module order.

    Floating-point tensors become float32, others keep their dtype.

    Raises:
        CheckpointError: Frozen parameters are wanted but were left out when saving.
    """
    manifest = checkpoint.manifest
    wanted = [i for i in manifest.parameters if i.trainable or not exclude_frozen]
    missing = [info.name for info in wanted if info.name in set(manifest.excluded)]
    if missing:
        raise CheckpointError(
            f"checkpoint {checkpoint.path} was saved without {len(missing)} frozen parameters "
            f"({', '.join(missing[:5])}, ...); export with exclude_frozen_parameters, and take "
            "them from the base model"
        )
    weights: list[Weight] = []
    for kind, infos in ((PARAM, wanted), (BUFFER, manifest.buffers)):
        for info in infos:
            stored = checkpoint.dtype(kind, info.name)
            dtype = torch.float32 if stored.is_floating_point else stored
            weights.append(Weight(kind, info.name, info.shape, dtype))
    return weights


def plan_shards(
    weights: Sequence[Weight],
    limit_bytes: int,
    fixed_bytes: int,
    entry_bytes: Callable[[Weight], int],
) -> list[list[Weight]]:
    """Divide tensors over files in order, none longer than the limit where that is possible.

    A tensor that exceeds the limit by itself is alone in its file.

    Args:
        weights: Tensors in order.
        limit_bytes: Most bytes of a file.
        fixed_bytes: Bytes of a file without tensors.
        entry_bytes: Bytes that a tensor adds to a file besides its data.
    """
    shards: list[list[Weight]] = [[]]
    filled = fixed_bytes
    for weight in weights:
        needed = weight.size_bytes + entry_bytes(weight)
        if shards[-1] and filled + needed > limit_bytes:
            shards.append([])
            filled = fixed_bytes
        shards[-1].append(weight)
        filled += needed
    return shards


def export_weights(
    checkpoint: Checkpoint,
    output_dir: Path,
    *,
    max_shard_bytes: int,
    safe_serialization: bool = True,
    exclude_frozen: bool = False,
    progress: Progress = lambda _: None,
) -> list[Path]:
    """Write the weights of a checkpoint into a folder; whole files only, the index last.

    Args:
        checkpoint: Where to read.
        output_dir: Folder to write into; made if missing. Files of the same names are replaced.
        max_shard_bytes: Most bytes of a file, unless one tensor alone exceeds it.
        safe_serialization: safetensors files if true, else pickled ``.bin`` files.
        exclude_frozen: Leave out parameters that were not trained.
        progress: Told of the bytes written.

    Returns:
        The files written; with several, the index is the last.

    Raises:
        CheckpointError: The checkpoint is damaged, the folder holds weights that would be mixed
            with the new ones, or it cannot be written.
    """
    weights = select_weights(checkpoint, exclude_frozen=exclude_frozen)
    form = _Safetensors(checkpoint) if safe_serialization else _Bin(checkpoint)
    shards = plan_shards(weights, max_shard_bytes, form.fixed_bytes, form.entry_bytes)
    names = _file_names(form.stem, form.suffix, len(shards))
    index_name = f"{form.stem}{form.suffix}.index.json" if len(shards) > 1 else ""
    try:
        return _write_all(form, shards, names, index_name, output_dir, progress)
    except OSError as error:
        raise CheckpointError(
            f"cannot export to {output_dir}: {error}; free space or fix permissions, or choose "
            "another folder"
        ) from error


def _write_all(
    form: _Safetensors | _Bin,
    shards: list[list[Weight]],
    names: list[str],
    index_name: str,
    output_dir: Path,
    progress: Progress,
) -> list[Path]:
    output_dir.mkdir(parents=True, exist_ok=True)
    written = [*names, index_name] if index_name else names
    _refuse_mixture(output_dir, written)
    remove_leftovers(output_dir)
    staging = output_dir / staging_name("export", uuid.uuid4().hex)
    staging.mkdir()
    try:
        for name, shard in zip(names, shards, strict=True):
            form.write(staging / name, shard, progress)
        if index_name:
            write_durably(staging / index_name, form.index(names, shards))
        for name in written:
            os.replace(staging / name, output_dir / name)
        fsync_path(output_dir)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return [output_dir / name for name in written]


def _file_names(stem: str, suffix: str, count: int) -> list[str]:
    if count == 1:
        return [f"{stem}{suffix}"]
    return [f"{stem}-{i + 1:05d}-of-{count:05d}{suffix}" for i in range(count)]


def _refuse_mixture(output_dir: Path, names: Iterable[str]) -> None:
    # Loaders prefer model.safetensors over an index, and an index over .bin files: a stale file
    # beside the new ones would be loaded instead of them.
    present = {e.name for e in output_dir.iterdir() if _WEIGHT_FILES.fullmatch(e.name)}
    stale = sorted(present - set(names))
    if stale:
        raise CheckpointError(
            f"{output_dir} already holds weights that this export would not replace and that "
            f"loaders might prefer: {', '.join(stale[:5])}. Move them away, or choose another "
            "folder"
        )


class _Safetensors:
    """The safetensors form: blocks are read, converted and written through one small buffer."""

    stem = "model"
    suffix = ".safetensors"

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        # The safetensors library writes tied names like this itself: removed name -> kept name.
        self._metadata = {**checkpoint.manifest.aliases, "format": "pt"}
        self.fixed_bytes = 16 + header_bytes(self._metadata, ())

    def entry_bytes(self, weight: Weight) -> int:
        return header_bytes({}, [(weight.name, weight.shape)])

    def write(self, path: Path, shard: Sequence[Weight], progress: Progress) -> None:
        reserve = header_bytes(self._metadata, [(w.name, w.shape) for w in shard])
        with SafetensorsWriter(path, metadata=self._metadata, reserve=reserve) as writer:
            for weight in sorted(shard, key=lambda w: -w.dtype.itemsize):
                blocks = (as_bytes(piece) for piece in _pieces(self._checkpoint, weight, progress))
                writer.append(weight.name, weight.dtype, weight.shape, blocks)
            writer.finish()

    def index(self, names: Sequence[str], shards: Sequence[Sequence[Weight]]) -> bytes:
        return _hub_index(self._checkpoint, names, shards, tied=False)


class _Bin:
    """The pickled form of ``torch.save``; it wants whole shards, which are staged in a file."""

    stem = "pytorch_model"
    suffix = ".bin"

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._tied: dict[str, list[str]] = {}
        for alias, owner in checkpoint.manifest.aliases.items():
            self._tied.setdefault(owner, []).append(alias)
        self.fixed_bytes = _ZIP_BYTES

    def entry_bytes(self, weight: Weight) -> int:
        names = [weight.name, *self._tied.get(weight.name, ())]
        return sum(_ZIP_ENTRY_BYTES + 4 * len(name) for name in names)

    def write(self, path: Path, shard: Sequence[Weight], progress: Progress) -> None:
        # A shared file mapping is not anonymous memory: the kernel may write it out and drop it.
        total = sum(-(-weight.size_bytes // 64) * 64 for weight in shard)
        scratch = path.with_suffix(".scratch")
        with open(scratch, "w+b") as file:
            file.truncate(max(total, 1))
            mapping = mmap.mmap(file.fileno(), max(total, 1))
        state: dict[str, Tensor] = {}
        offset = 0
        for weight in shard:
            tensor = torch.empty(weight.shape, dtype=weight.dtype)
            if weight.numel:
                flat = torch.frombuffer(
                    mapping, dtype=weight.dtype, count=weight.numel, offset=offset
                )
                tensor = flat.view(weight.shape)
                self._checkpoint.read(weight.kind, weight.name, 0, flat)
            offset += -(-weight.size_bytes // 64) * 64
            progress(weight.size_bytes)
            for name in (weight.name, *self._tied.get(weight.name, ())):
                state[name] = tensor
        torch.save(state, path)
        fsync_path(path)
        scratch.unlink()

    def index(self, names: Sequence[str], shards: Sequence[Sequence[Weight]]) -> bytes:
        return _hub_index(self._checkpoint, names, shards, tied=True)


def _pieces(checkpoint: Checkpoint, weight: Weight, progress: Progress) -> Iterator[Tensor]:
    buffer = torch.empty(min(_PIECE_NUMEL, weight.numel), dtype=weight.dtype)
    for start in range(0, weight.numel, _PIECE_NUMEL):
        piece = buffer[: min(_PIECE_NUMEL, weight.numel - start)]
        checkpoint.read(weight.kind, weight.name, start, piece)
        yield piece
        progress(piece.numel() * piece.element_size())


def _hub_index(
    checkpoint: Checkpoint,
    names: Sequence[str],
    shards: Sequence[Sequence[Weight]],
    *,
    tied: bool,
) -> bytes:
    weight_map = {w.name: name for name, shard in zip(names, shards, strict=True) for w in shard}
    if tied:
        for alias, owner in checkpoint.manifest.aliases.items():
            if owner in weight_map:
                weight_map[alias] = weight_map[owner]
    total = sum(weight.size_bytes for shard in shards for weight in shard)
    metadata: dict[str, object] = {"total_size": total, "format": "pt"}
    if checkpoint.manifest.aliases:
        metadata["tied_weights"] = dict(checkpoint.manifest.aliases)
    document = {"metadata": metadata, "weight_map": weight_map}
    return (json.dumps(document, indent=2) + "\n").encode()
