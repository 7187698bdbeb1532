# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The API gate, taken apart: read two surfaces, compare them, judge the version."""

from tools.checks._api._accept import read_acceptances
from tools.checks._api._baseline import Baseline, find_baseline, record_baseline
from tools.checks._api._finding import KINDS, Bump, CheckError, Finding
from tools.checks._api._gate import check_trees, check_wheel, compare_surfaces
from tools.checks._api._listing import listing
from tools.checks._api._metadata import Metadata, compare_metadata, read_metadata
from tools.checks._api._render import FORMATS, additions
from tools.checks._api._surface import Surface, load
from tools.checks._api._verdict import Report, given_bump
from tools.checks._api._witness import Checker

__all__ = [
    "FORMATS",
    "KINDS",
    "Baseline",
    "Bump",
    "CheckError",
    "Checker",
    "Finding",
    "Metadata",
    "Report",
    "Surface",
    "additions",
    "check_trees",
    "check_wheel",
    "compare_metadata",
    "compare_surfaces",
    "find_baseline",
    "given_bump",
    "listing",
    "load",
    "read_acceptances",
    "read_metadata",
    "record_baseline",
]
