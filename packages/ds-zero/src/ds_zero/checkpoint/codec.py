"""Plain containers, numbers, text and tensors to strict JSON and back, with no pickle.

JSON has no tuples, no non-text keys, no NaN and no tensors, so each is a one-key object whose key
starts with ``$``: ``{"$tuple": [...]}``, ``{"$dict": [[key, value], ...]}``, ``{"$float": "nan"}``,
``{"$tensor": "0", "shape": [...], "dtype": "float32"}``.  A user's dictionary with a key that
starts with ``$`` is written in the ``$dict`` form, so nothing is ambiguous.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ds_comm.errors import CheckpointError
from ds_zero.checkpoint.dtypes import dtype_name, safetensors_code
from ds_zero.checkpoint.types import Json

__all__ = ["Encoded", "decode", "encode", "encode_plain"]

_MAX_DEPTH = 64


@dataclass
class Encoded:
    """Result of `encode`: JSON, and the tensors that it refers to by key."""

    document: Json
    tensors: dict[str, Tensor] = field(default_factory=dict)


def encode(value: object, where: str) -> Encoded:
    """Encode a value made of dict, list, tuple, str, bool, int, float, None and tensors.

    Subclasses of these are stored as the plain type (``OrderedDict`` as dict, ``numpy.float64``
    as float).  Tensors are referred to, not copied.

    Args:
        value: What to encode.
        where: What the value is called in errors, such as ``client_state``.

    Raises:
        CheckpointError: Anything else was found; the message names the path of keys.
    """
    encoded = Encoded(None)
    encoded.document = _encode(value, where, encoded.tensors, 0)
    return encoded


def encode_plain(value: object, where: str) -> Json:
    """Encode as `encode` does, but refuse tensors too."""
    encoded = encode(value, where)
    if encoded.tensors:
        raise CheckpointError(
            f"{where} holds a tensor, and only numbers, text and plain containers are stored "
            "there; convert it with .item() or .tolist()"
        )
    return encoded.document


def _encode(value: object, where: str, tensors: dict[str, Tensor], depth: int) -> Json:
    if depth > _MAX_DEPTH:
        raise CheckpointError(f"{where} is nested deeper than {_MAX_DEPTH} levels, or in itself")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, list):
        return [_encode(v, f"{where}[{i}]", tensors, depth + 1) for i, v in enumerate(value)]
    if isinstance(value, tuple):
        items = [_encode(v, f"{where}[{i}]", tensors, depth + 1) for i, v in enumerate(value)]
        return {"$tuple": items}
    if isinstance(value, Mapping):
        return _encode_mapping(value, where, tensors, depth)
    if isinstance(value, Tensor):
        return _encode_tensor(value, where, tensors)
    kind = type(value)
    raise CheckpointError(
        f"{where} is a {kind.__module__}.{kind.__qualname__}, which cannot be stored: "
        "a checkpoint holds dict, list, tuple, str, bool, int, float, None and tensors, and never "
        "a pickle. Store its state in one of these (torch.from_numpy for numpy arrays)"
    )


def _encode_mapping(
    value: Mapping[object, object], where: str, tensors: dict[str, Tensor], depth: int
) -> Json:
    plain: dict[str, Json] = {}
    pairs: list[Json] = []
    for key, item in value.items():
        if not isinstance(key, (str, int, float, bool, tuple)) and key is not None:
            raise CheckpointError(
                f"{where} has a key of type {type(key).__qualname__}; keys may be text or numbers"
            )
        encoded = _encode(item, f"{where}.{key}", tensors, depth + 1)
        if isinstance(key, str):
            plain[str.__str__(key)] = encoded
        pairs.append([_encode(key, f"key {key!r} of {where}", tensors, depth + 1), encoded])
    if len(plain) == len(pairs) and not any(key.startswith("$") for key in plain):
        return plain
    return {"$dict": pairs}


def _encode_tensor(value: Tensor, where: str, tensors: dict[str, Tensor]) -> Json:
    if value.layout is not torch.strided or value.is_quantized or value.is_meta:
        raise CheckpointError(
            f"{where} is a sparse, quantised or meta tensor; only dense tensors can be stored"
        )
    try:
        safetensors_code(value.dtype)
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from None
    key = str(len(tensors))
    tensors[key] = value.detach()
    return {"$tensor": key, "shape": list(value.shape), "dtype": dtype_name(value.dtype)}


def decode(document: Json, where: str, tensor: Callable[[str, tuple[int, ...]], Tensor]) -> object:
    """Rebuild what `encode` was given.

    Args:
        document: The JSON.
        where: What the value is called in errors.
        tensor: Returns the stored tensor of a key, in the given shape.

    Raises:
        CheckpointError: The document was not made by `encode`.
    """
    if isinstance(document, list):
        return [decode(item, where, tensor) for item in document]
    if not isinstance(document, dict):
        return document
    if not any(key.startswith("$") for key in document):
        return {key: decode(item, f"{where}.{key}", tensor) for key, item in document.items()}
    match document:
        case {"$tuple": list(items)}:
            return tuple(decode(item, where, tensor) for item in items)
        case {"$dict": list(pairs)}:
            return dict(_decode_pair(pair, where, tensor) for pair in pairs)
        case {"$float": "nan" | "inf" | "-inf" as text}:
            return float(text)
        case {"$tensor": str(key), "shape": list(shape)}:
            return tensor(key, tuple(size for size in shape if isinstance(size, int)))
    raise CheckpointError(f"{where} holds an object with unknown keys {sorted(document)}")


def _decode_pair(
    pair: Json, where: str, tensor: Callable[[str, tuple[int, ...]], Tensor]
) -> tuple[object, object]:
    if not isinstance(pair, list) or len(pair) != 2:
        raise CheckpointError(f"{where} holds a malformed dictionary entry")
    return decode(pair[0], where, tensor), decode(pair[1], where, tensor)
