"""Saving: staged beside the target, checksummed while written, made visible by one rename.

[Note: commit point] A checkpoint exists from the moment its ``index.json`` is at its final place.
For a new tag that is the rename of the staging folder.  For a tag that is overwritten, the new
files (which carry the save id in their names) move into the folder first, and then the new index
replaces the old one; the old files go last.  A crash in between leaves the old or the new
checkpoint whole, and at most files that no index names.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from ds_comm.errors import CheckpointError
from ds_zero._version import __version__
from ds_zero.checkpoint.agreement import agree
from ds_zero.checkpoint.codec import Encoded, encode
from ds_zero.checkpoint.coordinator import Coordinator
from ds_zero.checkpoint.folders import (
    INDEX_NAME,
    LATEST_NAME,
    SHARD_NAME,
    fsync_path,
    normalise_tag,
    remove_leftovers,
    staging_name,
    write_durably,
    write_latest,
)
from ds_zero.checkpoint.index import (
    Index,
    Range,
    dump_index,
    encode_manifest,
    looks_like_index,
)
from ds_zero.checkpoint.index_parser import parse_index
from ds_zero.checkpoint.merge import check_coverage, merge_manifests
from ds_zero.checkpoint.rank_files import BLOCK_BYTES, ChunkCheck, RankFiles
from ds_zero.checkpoint.types import CLIENT, Chunk, Json, Manifest
from ds_zero.checkpoint.writer import FileRecord

__all__ = ["save_checkpoint"]


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Proposal:
    """What a rank wants to save, in brief."""

    tag: str
    manifest_digest: str


@dataclass(frozen=True)
class _Plan:
    """What rank 0 decided; the same on all ranks."""

    tag: str
    save_id: str
    replace: bool
    same_manifest: bool


@dataclass(frozen=True)
class _Report:
    """What a rank wrote."""

    files: tuple[FileRecord, ...]
    ranges: tuple[Range, ...]
    manifest: Manifest | None
    client_state: Json


def save_checkpoint(
    directory: str | os.PathLike[str],
    tag: str | int,
    manifest: Manifest,
    chunks: Iterable[Chunk],
    client_state: Mapping[str, object],
    coordinator: Coordinator,
    *,
    save_latest: bool = True,
) -> Path:
    """Write a checkpoint that is visible only when it is whole and on disk.

    Collective: every rank of the coordinator calls it, with its own chunks; together they must
    cover every tensor of the manifest exactly once.  Tensors in host memory are written without
    a copy; of tensors elsewhere, one chunk at a time is copied.  The directory must be one that
    all ranks share, and is written by one job at a time.

    Args:
        directory: Folder of checkpoints; made if missing.
        tag: Name of the new checkpoint, one path component. An existing one is replaced.
        manifest: Description of the whole state; ranks may describe different tensors, and must
            agree on everything that they both describe.
        chunks: This rank's ranges, consumed once, in order.
        client_state: Plain containers, numbers, text and tensors; rank 0's is stored.
        coordinator: Exchange between the ranks.
        save_latest: Whether ``latest`` will name the new checkpoint.

    Returns:
        The folder of the checkpoint.

    Raises:
        CheckpointError: The same on every rank. Except for a failure to update ``latest``, which
            says so, nothing became visible and earlier checkpoints are untouched.
    """
    root = Path(directory)
    try:
        plan = agree(
            coordinator,
            lambda: _propose(tag, manifest, client_state, coordinator.rank),
            lambda proposals: _prepare(root, proposals),
        )
        staging = root / staging_name(plan.tag, plan.save_id)
        return agree(
            coordinator,
            lambda: _write(staging, plan, manifest, chunks, client_state, coordinator),
            lambda reports: _commit(root, plan, reports, save_latest),
            undo=lambda: shutil.rmtree(staging) if staging.exists() else None,
        )
    except CheckpointError as error:
        raise CheckpointError(f"saving checkpoint {tag!r} in {root} failed {error}") from error


def _propose(
    tag: str | int, manifest: Manifest, client_state: Mapping[str, object], rank: int
) -> _Proposal:
    if rank == 0:
        encode(client_state, "client_state")  # refuse what cannot be stored before writing a byte
    text = json.dumps(encode_manifest(manifest), sort_keys=True)
    return _Proposal(normalise_tag(tag), hashlib.sha256(text.encode()).hexdigest())


def _prepare(root: Path, proposals: list[_Proposal]) -> _Plan:
    tags = [proposal.tag for proposal in proposals]
    if len(set(tags)) > 1:
        listed = ", ".join(f"rank {tags.index(t)}: {t!r}" for t in sorted(set(tags)))
        raise CheckpointError(f"the ranks gave different tags ({listed}); give all the same")
    same_manifest = len({proposal.manifest_digest for proposal in proposals}) == 1
    if not root.is_dir():
        root.mkdir(parents=True)
        fsync_path(root.parent)
    replace = _check_target(root / tags[0])
    remove_leftovers(root)
    plan = _Plan(tags[0], uuid.uuid4().hex, replace, same_manifest)
    (root / staging_name(plan.tag, plan.save_id)).mkdir()
    return plan


def _check_target(target: Path) -> bool:
    """Return whether there is a checkpoint to replace; refuse to touch anything else."""
    if not target.exists():
        return False
    if not target.is_dir():
        raise CheckpointError(f"{target} exists and is no folder; choose another tag")
    if not any(target.iterdir()):
        return False
    index = target / INDEX_NAME
    if index.is_file():
        with open(index, "rb") as file:
            if looks_like_index(file.read(64)):
                return True
    raise CheckpointError(
        f"{target} exists and is no checkpoint of this format, so it is not overwritten; choose "
        "another tag, or move it away"
    )


# ------------------------------------------------------------------------------------ writing


def _write(
    staging: Path,
    plan: _Plan,
    manifest: Manifest,
    chunks: Iterable[Chunk],
    client_state: Mapping[str, object],
    coordinator: Coordinator,
) -> _Report:
    if not staging.is_dir():
        raise CheckpointError(
            f"{staging}, made by rank 0, is not visible; all ranks must share the directory"
        )
    rank = coordinator.rank
    client = encode(client_state, "client_state") if rank == 0 else Encoded(None)
    stem = f"rank-{rank:05d}-of-{coordinator.size:05d}"
    with RankFiles(staging, stem, plan.save_id, plan.replace) as files:
        allowed = ChunkCheck(manifest)
        for chunk in chunks:
            if allowed.admit(chunk):
                files.add(chunk)
        for key, tensor in client.tensors.items():
            files.add(Chunk(CLIENT, key, 0, tensor.contiguous().reshape(-1)))
        files.finish()
        return _Report(
            tuple(files.records),
            tuple(files.ranges),
            None if plan.same_manifest and rank else manifest,
            client.document,
        )


# --------------------------------------------------------------------------------- committing


def _commit(root: Path, plan: _Plan, reports: list[_Report], save_latest: bool) -> Path:
    manifest = merge_manifests([r.manifest for r in reports if r.manifest is not None])
    ranges = check_coverage(manifest, [report.ranges for report in reports])
    index = Index(
        save_id=plan.save_id,
        block_bytes=BLOCK_BYTES,
        written_by={"ds_zero": __version__, "torch": torch.__version__},
        manifest=manifest,
        client_state=reports[0].client_state,
        files=tuple(record for report in reports for record in report.files),
        ranges=ranges,
    )
    data = dump_index(index)
    parse_index(data, INDEX_NAME)  # what cannot be read back must not be committed
    staging = root / staging_name(plan.tag, plan.save_id)
    write_durably(staging / INDEX_NAME, data)
    fsync_path(staging)
    target = root / plan.tag
    if plan.replace:
        _replace(staging, target, [record.name for record in index.files])
    else:
        os.rename(staging, target)
    fsync_path(root)
    if save_latest:
        try:
            write_latest(root, plan.tag, plan.save_id)
        except OSError as error:
            raise CheckpointError(
                f"{target} is saved and whole, but {root / LATEST_NAME} could not be updated: "
                f"{error}; load it by its tag"
            ) from error
    return target


def _replace(staging: Path, target: Path, names: list[str]) -> None:
    """Put a staged checkpoint in place of an existing one; see [Note: commit point]."""
    for name in names:
        os.rename(staging / name, target / name)
    fsync_path(target)
    os.replace(staging / INDEX_NAME, target / INDEX_NAME)
    fsync_path(target)
    try:
        for entry in target.iterdir():
            if SHARD_NAME.fullmatch(entry.name) and entry.name not in names:
                entry.unlink()
        staging.rmdir()
    except OSError as error:  # the new checkpoint is in place: what remains only takes space
        logger.warning("could not remove replaced files of %s: %s", target, error)
