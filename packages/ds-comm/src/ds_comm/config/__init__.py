"""Reading configurations: one base for sections, one reader, all problems in one report.

A package defines its keys as ``Section`` classes.  ``load_document`` turns a mapping, a JSON file
or base64 text into a dictionary, and ``build`` turns that into a frozen section or raises one
``ConfigError`` with a line for every problem in it.
"""

from __future__ import annotations

from ds_comm.config.build import build, collect
from ds_comm.config.document import load_document, parse_document
from ds_comm.config.report import ConfigReportError, Problem, ProblemKind, Report
from ds_comm.config.rules import (
    Auto,
    Contradiction,
    Elsewhere,
    KeyRules,
    NoEffect,
    NotYet,
    Pending,
    Removed,
    Renamed,
    Shorthand,
)
from ds_comm.config.scalars import DTypeName, Flag, Number, Strings, Whole
from ds_comm.config.section import Section

__all__ = [
    "Auto",
    "ConfigReportError",
    "Contradiction",
    "DTypeName",
    "Elsewhere",
    "Flag",
    "KeyRules",
    "NoEffect",
    "NotYet",
    "Number",
    "Pending",
    "Problem",
    "ProblemKind",
    "Removed",
    "Renamed",
    "Report",
    "Section",
    "Shorthand",
    "Strings",
    "Whole",
    "build",
    "collect",
    "load_document",
    "parse_document",
]
