"""Pure-torch references of the ops: the oracle of the tests and the fallback at run time."""

from __future__ import annotations
