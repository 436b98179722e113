"""Text as numbers: one symbol per character, cut into windows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

__all__ = ["Corpus", "Windows"]

_VALID_SHARE = 0.03


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of ``context`` symbols that follow each other, and the symbols one further on.

    Args:
        symbols: uint8 of shape (length,).
        context: symbols per window.
    """

    def __init__(self, symbols: Tensor, context: int) -> None:
        self._symbols = symbols
        self._context = context

    def __len__(self) -> int:
        """Return how many whole windows there are."""
        return max(0, (self._symbols.numel() - 1) // self._context)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return input and target, both int64 of shape (context,)."""
        start = index * self._context
        window = self._symbols[start : start + self._context + 1].long()
        return window[:-1], window[1:]


@dataclass(frozen=True)
class Corpus:
    """A text split into a part to train on and a part at its end to validate on.

    Attributes:
        alphabet: every character of the text, sorted; a symbol is an index into it.
        train: uint8 of shape (length,).
        valid: uint8 of shape (length,).
    """

    alphabet: str
    train: Tensor
    valid: Tensor

    @classmethod
    def read(cls, path: Path) -> Corpus:
        """Read a text file in UTF-8.

        Raises:
            ValueError: it is too short to learn from, or has more than 256 different characters.
        """
        text = path.read_text(encoding="utf-8")
        alphabet = "".join(sorted(set(text)))
        if len(text) < 1000 or len(alphabet) > 256:
            raise ValueError(
                f"{path}: {len(text)} characters, {len(alphabet)} different ones; at least 1000 "
                "and at most 256 different ones are needed"
            )
        table = {ord(character): number for number, character in enumerate(alphabet)}
        # The numbers are below 256, so each becomes one byte of this encoding.
        symbols = torch.frombuffer(
            bytearray(text.translate(table).encode("latin-1")), dtype=torch.uint8
        )
        split = int(len(text) * (1 - _VALID_SHARE))
        return cls(alphabet, symbols[:split], symbols[split:])

    def validation_batch(self, context: int, windows: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of shape (windows, context), spread over the valid part."""
        available = Windows(self.valid, context)
        chosen = torch.linspace(0, len(available) - 1, min(windows, len(available))).long()
        inputs, targets = zip(*(available[index] for index in chosen.tolist()), strict=True)
        return torch.stack(inputs), torch.stack(targets)
