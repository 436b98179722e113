"""Makes ``support/`` importable for the tests of ds-zero, on every rank."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "support"))
