"""Triton versions: the ops' own cases in the interpreter, and machine code for three GPUs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from ds_kernels.registry import triton_interprets

OPS = Path(__file__).parent / "ops"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not find_spec("triton"), reason="the package triton is not installed"),
    pytest.mark.skipif(triton_interprets(), reason="this process interprets Triton already"),
]

# The interpreter takes milliseconds for each program: the small cases, each kind of input once.
CASES = {
    "test_grouped_matmul": "uneven or odd or bf16 or fp16 or one_by or one-by or empty or no-",
    "test_block_sparse_attention": "block-of-all or dim-1 or nothing or empty",
}


def _python(*arguments: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize("module", CASES)
def test_cases_in_the_interpreter(module: str) -> None:
    """In a process of its own: Triton decides at its import how kernels run."""
    report = _python(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", str(OPS / f"{module}.py"),
        "-k", f"triton and ({CASES[module]})", TRITON_INTERPRET="1",
    )  # fmt: skip
    passed = re.search(r"(\d+) passed", report)
    assert passed and int(passed[1]) >= 7, report
    assert "skipped" not in report


_COMPILE = """
import inspect
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ds_kernels.triton import block_sparse_attention, grouped_matmul

ALWAYS_FLOAT = {"lse", "delta", "bias"}
POINTERS = {"out", "x", "weight", "grad", "query", "key", "value", "key_out", "value_out"}
TILES = {"ROWS": 64, "COLUMNS": 64, "DEPTH": 32, "BLOCK": 64, "DIM": 64, "WIDE": False,
         "CAUSAL": True, "BIASED": True}


def signature(kernel, dtype):
    kinds = {}
    for name in kernel.arg_names:
        if name in TILES:
            kinds[name] = "constexpr"
        elif name in POINTERS:
            kinds[name] = f"*{dtype}"
        elif name in ALWAYS_FLOAT:
            kinds[name] = "*fp32"
        elif name == "layout":
            kinds[name] = "*u8"
        elif name == "bounds":
            kinds[name] = "*i64"
        else:
            kinds[name] = "fp32" if name == "scale" else "i32"
    return kinds


capability = int(sys.argv[1])
for module, names in (
    (grouped_matmul, ("_forward", "_weight_grad")),
    (block_sparse_attention, ("_forward", "_query_grad", "_key_grad")),
):
    for name in names:
        kernel = getattr(module, name)
        for dtype in ("fp32", "bf16"):
            kinds = signature(kernel, dtype)
            # float32 products are unrolled on the scalar units: large tiles compile for a minute.
            largest = 64 if dtype == "bf16" else 16
            constants = {n: TILES[n] for n, kind in kinds.items() if kind == "constexpr"}
            constants |= {n: min(v, largest) for n, v in constants.items() if type(v) is int}
            source = ASTSource(kernel, kinds, constants)
            made = triton.compile(source, target=GPUTarget("cuda", capability, 32))
            assert len(made.asm["cubin"]) > 1000
            print("made", name, dtype, "mma" in made.asm["ptx"])
"""


@pytest.mark.parametrize("capability", ["80", "90", "100"])
def test_machine_code_for_every_architecture(capability: str, tmp_path: Path) -> None:
    """Compiled without a GPU; products of bfloat16 use the tensor cores."""
    script = tmp_path / "compile.py"
    script.write_text(_COMPILE, encoding="utf-8")
    report = _python(str(script), capability, TRITON_CACHE_DIR=str(tmp_path))
    made = [line.split() for line in report.splitlines() if line.startswith("made")]
    assert len(made) == 10
    assert all(line[-1] == "True" for line in made if line[2] == "bf16"), report
