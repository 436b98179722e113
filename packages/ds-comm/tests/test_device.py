"""The device API on the CPU, and its checks."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from ds_comm import ConfigError, MeshError, device

MIB = 1 << 20


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")


def pretend(monkeypatch: pytest.MonkeyPatch, kind: str | None, count: int = 2) -> None:
    """Let torch claim to have an accelerator."""
    found = None if kind is None else torch.device(kind)
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: found
    )
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)


def test_the_cpu_is_a_device() -> None:
    assert device.device_type() == "cpu"
    assert device.device_count() == 1
    assert device.current_device() == torch.device("cpu")
    assert device.set_device(7) == torch.device("cpu")
    assert device.backend_name() == "gloo"
    assert device.supports_bf16()
    device.synchronize()


def test_the_environment_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "xpu")
    assert device.device_type() == "cpu"
    monkeypatch.setenv("DS_ACCELERATOR", " XPU ")
    assert device.device_type() == "xpu"
    monkeypatch.delenv("DS_ACCELERATOR")
    assert device.device_type() == "xpu"
    assert device.device_count() == 2


def test_an_absent_accelerator_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")
    pretend(monkeypatch, None)
    with pytest.raises(ConfigError, match=r"DS_ACCELERATOR='cuda' is not available: .*: cpu\."):
        device.device_type()
    pretend(monkeypatch, "xpu")
    with pytest.raises(ConfigError, match="cpu, xpu"):
        device.device_type()


def test_more_ranks_than_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "xpu", count=2)
    monkeypatch.setenv("DS_ACCELERATOR", "xpu")
    for local_rank in (2, -1):
        with pytest.raises(MeshError, match=f"local rank {local_rank} has no device: 2 of"):
            device.set_device(local_rank)


def test_memory_follows_what_is_touched() -> None:
    before = device.memory()
    assert 0 < before.allocated_bytes <= before.peak_bytes
    block = mmap.mmap(-1, 64 * MIB)
    block.write(b"\1" * (64 * MIB))
    held = device.memory()
    assert held.allocated_bytes - before.allocated_bytes > 60 * MIB
    block.close()
    after = device.memory()
    assert held.allocated_bytes - after.allocated_bytes > 60 * MIB
    assert after.peak_bytes >= held.allocated_bytes


def test_peak_can_be_reset() -> None:
    clear_refs = Path("/proc/self/clear_refs")
    try:
        clear_refs.write_text("5")
    except OSError as error:
        pytest.skip(f"this system keeps the high-water mark: {error}")
    block = mmap.mmap(-1, 64 * MIB)
    block.write(b"\1" * (64 * MIB))
    block.close()
    high = device.memory()
    device.reset_peak_memory()
    low = device.memory()
    assert high.peak_bytes - low.peak_bytes > 50 * MIB
    assert low.peak_bytes >= low.allocated_bytes


def test_reset_that_is_forbidden_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(device, "_CLEAR_REFS", tmp_path / "absent" / "clear_refs")
    device.reset_peak_memory()
    device.reset_peak_memory()
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1 and "peak memory counts from the process start" in messages[0]


def test_random_states_of_the_device() -> None:
    device.manual_seed(3)
    before = device.rng_state()
    first = torch.rand(2)
    assert torch.equal(first, torch.rand(2, generator=torch.Generator().manual_seed(3)))
    device.set_rng_state(before)
    assert torch.equal(torch.rand(2), first)


def test_random_states_of_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are asked of torch's module for the device, not of the CPU."""
    monkeypatch.delenv("DS_ACCELERATOR")
    pretend(monkeypatch, "xpu")
    state = torch.ones(4, dtype=torch.uint8)
    heard: list[object] = []

    class Module:
        get_rng_state = staticmethod(lambda: state)
        set_rng_state = staticmethod(heard.append)
        manual_seed = staticmethod(heard.append)

    monkeypatch.setattr(torch, "get_device_module", lambda kind: Module)
    assert device.rng_state() is state
    device.set_rng_state(state)
    device.manual_seed(5)
    assert heard[0] is state and heard[1] == 5
