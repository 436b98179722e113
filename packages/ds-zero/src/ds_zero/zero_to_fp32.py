"""Turns a sharded checkpoint into plain float32 weights, without a GPU and without growing memory.

As a command: ``python -m ds_zero.zero_to_fp32 <checkpoint_dir> <output_dir>``.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypeVar, overload

import torch
from torch import Tensor
from torch.nn import Module
from tqdm import tqdm

from ds_comm.errors import CheckpointError, ConfigError, DSError
from ds_zero.checkpoint.export import Weight, export_weights, parse_size, select_weights
from ds_zero.checkpoint.folders import INDEX_NAME
from ds_zero.checkpoint.load import Checkpoint, open_checkpoint

__all__ = [
    "LazyTensor",
    "convert_zero_checkpoint_to_fp32_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "load_state_dict_from_zero_checkpoint",
    "main",
]

PathLike = str | os.PathLike[str]
M = TypeVar("M", bound=Module)
T = TypeVar("T")


class LazyTensor:
    """Stands for a whole tensor of a checkpoint that is read when `contiguous` is called.

    Args:
        checkpoint: Where to read.
        weight: What to read, and as which dtype.

    Attributes:
        shape: Shape of the whole tensor.
        dtype: Dtype that it will have.
    """

    def __init__(self, checkpoint: Checkpoint, weight: Weight) -> None:
        self.shape = torch.Size(weight.shape)
        self.dtype = weight.dtype
        self._checkpoint = checkpoint
        self._weight = weight

    def numel(self) -> int:
        """Return the number of elements."""
        return self._weight.numel

    def contiguous(self) -> Tensor:
        """Read and return the tensor, on the CPU; a new one at each call.

        Raises:
            CheckpointError: Its data is missing or damaged.
        """
        whole = torch.empty(self.shape, dtype=self.dtype)
        self._checkpoint.read(self._weight.kind, self._weight.name, 0, whole.view(-1))
        return whole


def _open(checkpoint_dir: PathLike, tag: str | int | None) -> Checkpoint:
    """Open a directory of checkpoints, or the folder of one."""
    folder = Path(checkpoint_dir)
    if tag is None and (folder / INDEX_NAME).is_file():
        folder = folder.resolve()
        return open_checkpoint(folder.parent, folder.name)
    return open_checkpoint(folder, tag)


def _with_aliases(checkpoint: Checkpoint, state: dict[str, T]) -> dict[str, T]:
    for alias, owner in checkpoint.manifest.aliases.items():
        if owner in state:
            state[alias] = state[owner]
    return state


@overload
def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: PathLike,
    tag: str | int | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: Literal[False] = False,
) -> dict[str, Tensor]: ...
@overload
def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: PathLike,
    tag: str | int | None = None,
    exclude_frozen_parameters: bool = False,
    *,
    lazy_mode: Literal[True],
) -> dict[str, LazyTensor]: ...
def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: PathLike,
    tag: str | int | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Tensor] | dict[str, LazyTensor]:
    """Return the whole weights of a checkpoint as a state dict on the CPU.

    Floating-point tensors are float32; others keep their dtype.  Tied weights appear under all
    their names as the same object.

    Args:
        checkpoint_dir: Directory of checkpoints, or the folder of one.
        tag: Which one; ``None`` takes the one named in ``latest``.
        exclude_frozen_parameters: Leave out parameters that were not trained.
        lazy_mode: Return `LazyTensor` objects, read one by one when wanted.

    Raises:
        CheckpointNotFoundError: There is no such checkpoint.
        CheckpointError: It is damaged, or holds no frozen parameters although they are wanted.
    """
    checkpoint = _open(checkpoint_dir, tag)
    weights = select_weights(checkpoint, exclude_frozen=exclude_frozen_parameters)
    lazy = {weight.name: LazyTensor(checkpoint, weight) for weight in weights}
    if lazy_mode:
        return _with_aliases(checkpoint, lazy)
    with checkpoint:
        whole = {name: tensor.contiguous() for name, tensor in lazy.items()}
    return _with_aliases(checkpoint, whole)


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: PathLike,
    output_dir: PathLike,
    max_shard_size: str | int = "5GB",
    safe_serialization: bool = True,
    tag: str | int | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the whole weights of a checkpoint as float32 files that other libraries read.

    Writes ``model.safetensors``, or ``model-00001-of-0000N.safetensors`` and
    ``model.safetensors.index.json``; without ``safe_serialization`` the same with
    ``pytorch_model`` and ``.bin``.  Streams: memory does not grow with the model.

    Args:
        checkpoint_dir: Directory of checkpoints, or the folder of one.
        output_dir: Folder to write into; made if missing.
        max_shard_size: Most bytes of a file (``5GB``, ``500MiB``, a number); a tensor that alone
            exceeds it gets a file of its own.
        safe_serialization: Write safetensors; otherwise pickled files.
        tag: Which checkpoint; ``None`` takes the one named in ``latest``.
        exclude_frozen_parameters: Leave out parameters that were not trained.

    Raises:
        ConfigError: ``max_shard_size`` is no size.
        CheckpointNotFoundError: There is no such checkpoint.
        CheckpointError: It is damaged, or the folder cannot take the export.
    """
    limit = parse_size(max_shard_size)
    with _open(checkpoint_dir, tag) as checkpoint:
        export_weights(
            checkpoint,
            Path(output_dir),
            max_shard_bytes=limit,
            safe_serialization=safe_serialization,
            exclude_frozen=exclude_frozen_parameters,
        )


def load_state_dict_from_zero_checkpoint(
    model: M, checkpoint_dir: PathLike, tag: str | int | None = None
) -> M:
    """Load the whole float32 weights of a checkpoint into a plain model.

    Args:
        model: A model of the architecture that was trained; moved to the CPU.
        checkpoint_dir: Directory of checkpoints, or the folder of one.
        tag: Which one; ``None`` takes the one named in ``latest``.

    Returns:
        The same model, on the CPU.

    Raises:
        CheckpointError: There is no such checkpoint, it is damaged, or names or shapes differ.
    """
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    model.cpu()
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise CheckpointError(
            f"the checkpoint in {checkpoint_dir} does not fit the model: {error}"
        ) from error
    return model


_EXAMPLES = """\
examples:
  python -m ds_zero.zero_to_fp32 runs/llama out
      the newest checkpoint of runs/llama as out/model.safetensors
  python -m ds_zero.zero_to_fp32 runs/llama out --tag step500 --max_shard_size 2GB
      checkpoint step500 in files of at most 2 GB, with an index
  python -m ds_zero.zero_to_fp32 runs/lora out --exclude_frozen_parameters
      only what was trained

The output loads with transformers (put config.json beside it) or safetensors.torch.load_file.
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ds_zero.zero_to_fp32",
        description="Write the whole weights of a ZeRO checkpoint as plain float32 files.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoint_dir", help="directory of checkpoints, or the folder of one")
    parser.add_argument("output_dir", help="folder to write into; made if missing")
    parser.add_argument(
        "--max_shard_size",
        default="5GB",
        metavar="SIZE",
        help="most bytes of a file, such as 5GB, 500MiB or a number (default: 5GB); a tensor that "
        "alone exceeds it gets a file of its own",
    )
    parser.add_argument(
        "--safe_serialization",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="write safetensors (the default; DeepSpeed's script wrote pickled .bin files unless "
        "told otherwise); --no-safe_serialization writes pytorch_model*.bin",
    )
    parser.add_argument(
        "-t", "--tag", help="which checkpoint (default: the one named in the file `latest`)"
    )
    parser.add_argument(
        "--exclude_frozen_parameters",
        action="store_true",
        help="leave out parameters that were not trained",
    )
    parser.add_argument("-d", "--debug", action="store_true", help="log more; show tracebacks")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    options = _parser().parse_args(argv)
    logging.basicConfig(level=logging.DEBUG if options.debug else logging.INFO)
    try:
        files = _convert(options)
    except DSError as error:
        if options.debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    for file in files:
        print(file)
    return 0


def _convert(options: argparse.Namespace) -> list[Path]:
    limit = parse_size(options.max_shard_size)
    with _open(options.checkpoint_dir, options.tag) as checkpoint:
        weights = select_weights(checkpoint, exclude_frozen=options.exclude_frozen_parameters)
        total = sum(weight.size_bytes for weight in weights)
        with tqdm(total=total, unit="B", unit_scale=True, desc=checkpoint.tag) as bar:
            return export_weights(
                checkpoint,
                Path(options.output_dir),
                max_shard_bytes=limit,
                safe_serialization=options.safe_serialization,
                exclude_frozen=options.exclude_frozen_parameters,
                progress=bar.update,
            )


if __name__ == "__main__":
    sys.exit(main())
