"""The environment maker: which torch is kept, which pins give way, when nothing is done."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import dev_env
from dev_env import Torch, effective_constraints, in_range
from dev_steps import DevError

ROOT = Path(__file__).resolve().parents[2]
PINS = "# set\nnumpy==2.4.6\nsympy==1.14.0\ntorch==2.13.0\ntyping_extensions==4.16.0\n"


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("2.4.0", True),
        ("2.4", True),
        ("2.13.0+cpu", True),
        ("2.10.0a0+git1234", True),
        ("2.3.1", False),
        ("3.0.0", False),
        ("1.13.1", False),
        ("unknown", False),
    ],
)
def test_in_range_compares_numbers_not_text(version: str, expected: bool) -> None:
    assert in_range(version, ">=2.4,<3") is expected


def test_in_range_refuses_another_form() -> None:
    with pytest.raises(DevError, match="must have the form >=A,<B"):
        in_range("2.4", "~=2.4")


def test_pins_stay_when_no_torch_is_kept() -> None:
    assert effective_constraints(PINS, None) == PINS


def test_kept_torch_and_what_it_needs_override_the_pins() -> None:
    kept = Torch("2.7.1+cu126", "/somewhere", ("sympy>=1.13.3", "typing-extensions>=4.10"))
    assert effective_constraints(PINS, kept) == "# set\nnumpy==2.4.6\ntorch==2.7.1+cu126\n"


def _checkout(root: Path) -> Path:
    """The files that decide an installation, without a source."""
    for path in dev_env._decisive_files(ROOT):
        copy = root / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    return root


def test_digest_follows_content_and_place(tmp_path: Path) -> None:
    one, two = _checkout(tmp_path / "one"), _checkout(tmp_path / "two")
    before = dev_env._digest(one)
    assert dev_env._digest(one) == before
    assert dev_env._digest(two) != before
    (one / "packages" / "ds-kernels" / "csrc" / "module.cpp").write_text("// changed\n")
    assert dev_env._digest(one) != before


def test_partial_checkout_is_a_readable_error(tmp_path: Path) -> None:
    with pytest.raises(DevError, match="run from a full checkout"):
        dev_env.prepare(tmp_path)


def test_old_python_is_refused_with_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dev_env, "MIN_PYTHON", (99, 0))
    with pytest.raises(DevError, match="too old: run dev.py with Python 3.10 or newer"):
        dev_env.prepare(_checkout(tmp_path))


def test_python_without_ensurepip_names_the_debian_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dev_env.importlib.util, "find_spec", lambda name: None)
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    with pytest.raises(DevError, match=f"apt-get install python{version}-venv"):
        dev_env.prepare(_checkout(tmp_path))


def _fake_environment(root: Path, answer: dict[str, object]) -> None:
    """A `.venv` whose interpreter answers the probe and can do nothing else."""
    python = root / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(
        "#!/bin/sh\n"
        'if [ "$1" = -c ]; then\n'
        f"echo '{json.dumps(answer)}'\n"
        "else echo 'no network' && exit 3; fi\n"
    )
    python.chmod(0o755)


def _answer(root: Path, torch_version: str | None) -> dict[str, object]:
    torch = {"version": torch_version, "location": "/x", "requires": ["sympy>=1.13.3"]}
    return {
        "python": list(sys.version_info[:2]),
        "purelib": str(root),
        "torch": torch if torch_version else None,
    }


def test_second_call_does_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = _checkout(tmp_path)
    _fake_environment(root, _answer(root, "2.13.0+cpu"))
    installed: list[Path] = []
    monkeypatch.setattr(dev_env, "_install", lambda environment: installed.append(root))
    dev_env.prepare(root)
    dev_env.prepare(root)
    assert installed == [root]
    dev_env.prepare(root, again=True)
    assert installed == [root, root]
    (root / "constraints" / "dev.txt").write_text("torch==2.14.0\n")
    dev_env.prepare(root)
    assert installed == [root, root, root]


def test_failed_installation_shows_the_end_of_the_log_and_leaves_no_stamp(tmp_path: Path) -> None:
    root = _checkout(tmp_path)
    _fake_environment(root, _answer(root, "2.7.1+cu126"))
    with pytest.raises(DevError, match="(?s)failed with status 3.*no network"):
        dev_env.prepare(root)
    assert not (root / ".venv" / "dev-stamp.json").exists()
    constraints = (root / ".venv" / "dev-constraints.txt").read_text()
    assert "torch==2.7.1+cu126" in constraints
    assert "sympy" not in constraints


def test_torch_of_the_running_python_is_made_visible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "outer"
    (site / "torch-2.9.0.dist-info").mkdir(parents=True)
    (site / "torch-2.9.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torch\nVersion: 2.9.0\nRequires-Dist: sympy>=1.13.3\n"
    )
    distribution = dev_env.importlib.metadata.PathDistribution(site / "torch-2.9.0.dist-info")
    monkeypatch.setattr(dev_env.importlib.metadata, "distribution", lambda name: distribution)
    root = _checkout(tmp_path / "checkout")
    _fake_environment(root, _answer(root, None))
    with pytest.raises(DevError, match="failed with status 3"):
        dev_env.prepare(root)
    assert (root / "kept-torch.pth").read_text() == f"{site}\n"
    assert "torch==2.9.0" in (root / ".venv" / "dev-constraints.txt").read_text()


def test_broken_environment_names_the_folder_to_remove(tmp_path: Path) -> None:
    root = _checkout(tmp_path)
    python = root / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    with pytest.raises(DevError, match="Remove the folder"):
        dev_env.prepare(root)


def test_dev_runs_on_the_standard_library_alone() -> None:
    """`python -S -I` has no site-packages: every import of dev.py must still succeed."""
    command = [sys.executable, "-S", "-I", "-c"]
    command += [f"import sys; sys.path.insert(0, {str(ROOT / 'tools')!r}); import dev"]
    assert subprocess.run(command, check=False).returncode == 0
