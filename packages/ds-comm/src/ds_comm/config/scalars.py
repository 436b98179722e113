"""Field types of configuration sections, strict where JSON authors slip."""

from __future__ import annotations

import math
import numbers
import re
import sys
from typing import Annotated, Any

from pydantic import BeforeValidator, Strict

__all__ = ["DTypeName", "Flag", "Number", "Strings", "Whole"]

_MAX_WHOLE = sys.maxsize
_DIGITS = re.compile(r"[+-]?[0-9]{1,30}")
_DTYPES = {
    "fp32": "float32",
    "float32": "float32",
    "float": "float32",
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "float16",
    "float16": "float16",
    "half": "float16",
}


def _to_number(value: Any) -> Any:
    """A finite int or float out of a JSON number, its text or a number of numpy."""
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        value = int(value)
    elif isinstance(value, numbers.Real) and not isinstance(value, bool):
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("a number is expected")
    number: int | float
    if isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            raise ValueError("a number is expected") from None
        # Digits alone are kept exact: a float has only 53 bits.
        if _DIGITS.fullmatch(value.strip()):
            number = int(value)
    else:
        number = value
    if isinstance(number, float) and not math.isfinite(number):
        raise ValueError("a finite number is expected")
    return number


def _to_whole(value: Any) -> int:
    try:
        number = _to_number(value)
    except ValueError:
        raise ValueError("a whole number is expected") from None
    if number != int(number):
        raise ValueError("a whole number is expected")
    if abs(number) > _MAX_WHOLE:
        raise ValueError(f"a whole number up to {_MAX_WHOLE} is expected")
    return int(number)


def _to_float(value: Any) -> float:
    try:
        return float(_to_number(value))
    except OverflowError:
        raise ValueError("a finite number is expected") from None


def _to_strings(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(v, str) for v in value):
        raise ValueError("a list of strings is expected")
    return tuple(value)


def _to_dtype(value: Any) -> str:
    name = value.lower().removeprefix("torch.") if isinstance(value, str) else None
    if name not in _DTYPES:
        raise ValueError('one of "fp32", "bf16", "fp16" is expected')
    return _DTYPES[name]


Whole = Annotated[int, BeforeValidator(_to_whole)]
"""An integer; ``5e8`` and ``"5e8"`` are 500000000, ``1.5`` and ``true`` are errors."""

Number = Annotated[float, BeforeValidator(_to_float)]
"""A finite float; numeric text such as ``"1e-4"`` is read, ``true`` is an error."""

Flag = Annotated[bool, Strict()]
"""``true`` or ``false``; when a document is read, the text "true" is coerced with a warning."""

Strings = Annotated[tuple[str, ...], BeforeValidator(_to_strings)]
"""A list of strings, kept as a tuple."""

DTypeName = Annotated[str, BeforeValidator(_to_dtype)]
"""A torch dtype name (``"float32"``, ``"bfloat16"``, ``"float16"``), also given as ``"fp32"``,
``"bf16"``, ``"fp16"``."""
