# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What a run shows: its history, plots, and pages that follow it."""

from mcore_tools.reports._history import History
from mcore_tools.reports._live import EXAMPLES, LiveReport
from mcore_tools.reports._plot import Plot, svg
from mcore_tools.reports._report import Section, write_report

__all__ = [
    "EXAMPLES",
    "History",
    "LiveReport",
    "Plot",
    "Section",
    "svg",
    "write_report",
]
