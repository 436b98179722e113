"""Importing a package is quiet and cheap: no output, no thread or process, no accelerator, no time.

One process imports torch and pydantic once; each measurement is a fork of it, so that what is
timed is the package alone. Processor time is compared, so that a busy machine changes little.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted(path.name for path in ROOT.glob("packages/*/src/*") if path.is_dir())
LIMIT_S = 0.050
REPEATS = 5
MEASURE = """
import importlib, json, os, sys, threading, time
import numpy, torch
# pydantic loads itself when it is first used: that cost is pydantic's, not the package's.
import pydantic
class Probe(pydantic.BaseModel): value: pydantic.PositiveInt = pydantic.Field(1)

def measure(name):
    start = time.process_time()
    importlib.import_module(name)
    seconds = time.process_time() - start
    print(json.dumps({
        "module": name,
        "seconds": seconds,
        "threads": threading.active_count(),
        "accelerator": torch.cuda.is_initialized(),
        "process_group": torch.distributed.is_initialized(),
    }), file=sys.stderr, flush=True)

for name in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        measure(name)
        os._exit(0)
    if os.waitpid(child, 0)[1] != 0:
        raise SystemExit(f"import {name} failed")
"""

pytestmark = pytest.mark.skipif(
    find_spec("torch") is None or find_spec("pydantic") is None,
    reason="measures what comes on top of torch and pydantic",
)


@pytest.fixture(scope="module")
def measurements(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, object]]]:
    """Several imports of every module; the first one writes the byte code of the next ones."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = str(tmp_path_factory.mktemp("pycache"))
    result = subprocess.run(
        [sys.executable, "-c", MEASURE, *MODULES * REPEATS],
        env=environment,
        check=False,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "", "a package printed something when it was imported"
    found: dict[str, list[dict[str, object]]] = {name: [] for name in MODULES}
    for line in result.stderr.splitlines():
        row = json.loads(line)
        found[row["module"]].append(row)
    return found


@pytest.mark.parametrize("module", MODULES)
def test_import_takes_under_50_ms_beyond_torch_and_pydantic(
    module: str, measurements: dict[str, list[dict[str, object]]]
) -> None:
    seconds = [float(str(row["seconds"])) for row in measurements[module]]
    assert min(seconds) < LIMIT_S, seconds


@pytest.mark.parametrize("module", MODULES)
def test_import_starts_nothing(
    module: str, measurements: dict[str, list[dict[str, object]]]
) -> None:
    for row in measurements[module]:
        assert row["threads"] == 1
        assert row["accelerator"] is False
        assert row["process_group"] is False
