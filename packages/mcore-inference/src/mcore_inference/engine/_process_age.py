# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""How long this process has run, the imports before this one included."""

import os
import time
from pathlib import Path

_IMPORTED = time.monotonic()
_STAT = Path("/proc/self/stat")
_START_FIELD = 19
"""Of those behind the name: ticks from the start of the machine to that of the process."""


def process_age_s() -> float:
    """Seconds since the process began; where the system does not tell, since this module was imported."""
    try:
        ticks = int(_STAT.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[_START_FIELD])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        return time.monotonic() - _IMPORTED
