"""Names inside a checkpoint directory: tags, the ``latest`` pointer, staging, durable renames.

```
<directory>/latest                      text: the tag of the newest whole checkpoint
<directory>/<tag>/index.json            present exactly when the checkpoint is whole
<directory>/<tag>.tmp-<32 hex digits>/  staging folder of a save that is running or was killed
```
"""

from __future__ import annotations

import logging
import numbers
import os
import re
import shutil
from pathlib import Path

from ds_comm.errors import CheckpointError, CheckpointNotFoundError

__all__ = [
    "INDEX_NAME",
    "LATEST_NAME",
    "SHARD_NAME",
    "fsync_path",
    "list_tags",
    "normalise_tag",
    "read_latest",
    "remove_leftovers",
    "staging_name",
    "write_durably",
    "write_latest",
]

INDEX_NAME = "index.json"
LATEST_NAME = "latest"
SHARD_NAME = re.compile(r"rank-\d{5,}-of-\d{5,}(-part\d+)?(-[0-9a-f]{8})?\.safetensors")
_STAGING = re.compile(r".+\.tmp-[0-9a-f]{32}")
_MAX_TAG_BYTES = 200  # a name is at most 255 bytes, and staging adds 37

logger = logging.getLogger(__name__)


def normalise_tag(tag: str | int) -> str:
    """Return the tag as text after checking that it can be the name of one folder.

    Raises:
        CheckpointError: It is empty, not a single path component, reserved, or too long.
    """
    if isinstance(tag, bool) or not isinstance(tag, (str, numbers.Integral)):
        raise CheckpointError(f"a checkpoint tag is text or an integer, not {tag!r}")
    text = str(tag)
    problem = ""
    if not text or text != text.strip() or not text.isprintable():
        problem = "is empty, starts or ends with a space, or holds control characters"
    elif "/" in text or "\\" in text or text in (".", ".."):
        problem = "is a path; give the name of one folder, and the path as the directory"
    elif text == LATEST_NAME or _STAGING.fullmatch(text):
        problem = "is reserved for the checkpoint code"
    elif len(os.fsencode(text)) > _MAX_TAG_BYTES:
        problem = f"is longer than {_MAX_TAG_BYTES} bytes"
    if problem:
        raise CheckpointError(f"checkpoint tag {text!r} {problem}")
    return text


def staging_name(name: str, save_id: str) -> str:
    """Return the name under which ``name`` is prepared before its rename."""
    return f"{name}.tmp-{save_id}"


def remove_leftovers(directory: Path) -> None:
    """Delete what killed saves left behind; what cannot be deleted is logged and ignored."""
    for entry in sorted(directory.iterdir()):
        if not _STAGING.fullmatch(entry.name):
            continue
        try:
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
            logger.info("removed %s, left behind by an interrupted save", entry)
        except OSError as error:
            logger.warning("could not remove the leftover %s: %s", entry, error)


def list_tags(directory: str | os.PathLike[str]) -> list[str]:
    """Return the tags of all checkpoints in a directory, oldest first by modification time."""
    root = Path(directory)
    if not root.is_dir():
        return []
    found = [
        (index.stat().st_mtime_ns, index.parent.name)
        for index in root.glob(f"*/{INDEX_NAME}")
        if not _STAGING.fullmatch(index.parent.name)
    ]
    return [tag for _, tag in sorted(found)]


def read_latest(directory: Path) -> str:
    """Return the tag named in ``latest``.

    Raises:
        CheckpointNotFoundError: The directory or the file does not exist.
        CheckpointError: The file cannot be read or does not hold a tag.
    """
    path = directory / LATEST_NAME
    if not directory.is_dir():
        raise CheckpointNotFoundError(f"checkpoint directory {directory} does not exist")
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise CheckpointNotFoundError(
            f"{path} does not exist, so there is no newest checkpoint to load; give a tag, "
            f"one of: {_listed(directory)}"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot read {path}: {error}; give a tag") from error
    try:
        return normalise_tag(text.removesuffix("\n"))
    except CheckpointError as error:
        raise CheckpointError(
            f"{path} does not hold a tag: {error}; give one of: {_listed(directory)}"
        ) from None


def _listed(directory: Path) -> str:
    return ", ".join(repr(tag) for tag in list_tags(directory)[-20:]) or "(no checkpoints here)"


def write_latest(directory: Path, tag: str, save_id: str) -> None:
    """Point ``latest`` at a tag, atomically and durably."""
    staged = directory / staging_name(LATEST_NAME, save_id)
    write_durably(staged, f"{tag}\n".encode())
    os.replace(staged, directory / LATEST_NAME)
    fsync_path(directory)


def write_durably(path: Path, data: bytes) -> None:
    """Create a file that must not exist yet, write it and force it to disk."""
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def fsync_path(path: Path) -> None:
    """Force a file, or the entries of a directory, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
