"""Flat buffers: an address that stays, pages that come and go."""

from __future__ import annotations

import mmap
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ds_zero.memory
from ds_zero.memory import FlatBuffer, MappedBuffer, StorageBuffer, flat_buffer

CPU = torch.device("cpu")
PAGE = mmap.PAGESIZE
MIB = 1 << 20

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="mappings are used on Linux only")


def _rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@on_linux
@pytest.mark.parametrize("make", [MappedBuffer, lambda n, t: StorageBuffer(n, t, CPU)])
def test_deflating_gives_the_pages_back(make: Any) -> None:
    """64 MiB come and go three times, at one address."""
    buffer: FlatBuffer = make(16 * MIB, torch.float32)
    address = buffer.tensor.data_ptr()
    buffer.deflate()
    for _ in range(3):
        empty = _rss_bytes()
        buffer.inflate()
        buffer.tensor.fill_(1.5)
        full = _rss_bytes()
        assert full - empty > 60 * MIB
        buffer.deflate()
        assert full - _rss_bytes() > 60 * MIB
    buffer.inflate()
    if isinstance(buffer, MappedBuffer):
        assert buffer.tensor.data_ptr() == address


@on_linux
def test_nothing_is_touched_before_it_is_written() -> None:
    """A mapping of 1 GiB costs nothing by itself."""
    before = _rss_bytes()
    buffer = flat_buffer(256 * MIB, torch.float32, CPU)
    assert _rss_bytes() - before < 8 * MIB
    assert buffer.tensor.numel() == 256 * MIB


@on_linux
@pytest.mark.parametrize("numel", [1, 3, 16, 1023, PAGE, MIB // 2, MIB, 3 * MIB + 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.int64])
def test_sizes_alignment_and_zeros(numel: int, dtype: torch.dtype) -> None:
    """All elements can be used; small buffers start on a page, large ones on a huge page."""
    buffer = flat_buffer(numel, dtype, CPU)
    flat = buffer.tensor
    assert isinstance(buffer, MappedBuffer)
    assert (flat.shape, flat.dtype, flat.is_contiguous()) == ((numel,), dtype, True)
    assert flat.data_ptr() % (2 * MIB if numel * dtype.itemsize >= 2 * MIB else PAGE) == 0
    assert not flat.any()
    flat.fill_(3)
    assert bool((flat == 3).all())
    buffer.deflate()
    assert not flat.any()
    buffer.deflate()
    buffer.inflate()
    flat[-1] = 7
    assert flat[-1] == 7 and flat.count_nonzero() == 1


@pytest.mark.parametrize("make", [lambda: flat_buffer(0, torch.float32, CPU)])
def test_no_elements(make: Any) -> None:
    """Zero elements inflate and deflate."""
    buffer = make()
    for _ in range(2):
        buffer.deflate()
        buffer.inflate()
    assert buffer.tensor.numel() == 0 and buffer.tensor.view(0, 4).shape == (0, 4)


@pytest.mark.parametrize("numel", [100, 3 * MIB])
@pytest.mark.parametrize("kind", ["mapped", "storage"])
def test_views_are_valid_again(numel: int, kind: str) -> None:
    """Views made before, also those that autograd saved of a parameter, read the next values."""
    if kind == "mapped":
        if sys.platform != "linux":
            pytest.skip("mappings are used on Linux only")
        buffer: FlatBuffer = MappedBuffer(numel, torch.float32)
    else:
        buffer = StorageBuffer(numel, torch.float32, CPU)
    matrix = buffer.tensor[:100].view(10, 10)
    turned = matrix.t()
    matrix.copy_(torch.arange(100.0).view(10, 10))
    # ``param.data = view`` keeps the parameter's own version counter, so that filling the buffer
    # is no in-place edit of what autograd saved.
    param = nn.Parameter(torch.zeros(10, 10))
    param.data = matrix
    x = torch.randn(10, 10, requires_grad=True)
    product = x @ param.t()
    buffer.deflate()
    buffer.inflate()
    buffer.tensor[:100] = torch.arange(100.0)
    assert torch.equal(turned, torch.arange(100.0).view(10, 10).t())
    product.sum().backward()
    assert x.grad is not None
    assert torch.allclose(x.grad, torch.arange(100.0).view(10, 10).sum(0).expand(10, 10))
    assert param.grad is not None


@on_linux
def test_a_stray_read_gives_zeros() -> None:
    """A view that is read while deflated is zero, and the process lives."""
    buffer = MappedBuffer(2 * MIB, torch.float32)
    view = buffer.tensor[5:]
    view.fill_(9)
    buffer.deflate()
    assert view.sum() == 0


def test_the_tensor_keeps_the_memory() -> None:
    """Callers may keep the tensor alone."""
    tensors: list[Tensor] = []
    for index in range(20):
        tensors.append(flat_buffer(MIB, torch.float32, CPU).tensor.fill_(index))
    assert [int(t[-1]) for t in tensors] == list(range(20))
    assert len({t.data_ptr() for t in tensors}) == 20


@on_linux
def test_memory_ends_with_the_tensor() -> None:
    """No reference cycle: 20 buffers of 64 MiB one after another need the space of one."""
    before = _rss_bytes()
    for _ in range(20):
        flat_buffer(16 * MIB, torch.float32, CPU).tensor.fill_(1)
    assert _rss_bytes() - before < 140 * MIB


@on_linux
def test_a_kernel_without_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """MADV_HUGEPAGE is advice: where the kernel does not know it, buffers work all the same."""

    class NoHuge(mmap.mmap):
        def madvise(self, option: int, *args: int) -> None:
            if option == mmap.MADV_HUGEPAGE:
                raise OSError(22, "Invalid argument")
            super().madvise(option, *args)

    monkeypatch.setattr(ds_zero.memory.mmap, "mmap", NoHuge)
    buffer = flat_buffer(2 * MIB, torch.float32, CPU)
    buffer.tensor.fill_(1)
    buffer.deflate()
    assert not buffer.tensor.any()
