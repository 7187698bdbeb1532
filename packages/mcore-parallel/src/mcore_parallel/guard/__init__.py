# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What watches over a distributed run: configurations compared before it, a watchdog beside it."""

from mcore_parallel.guard._fields import config_fields
from mcore_parallel.guard._preflight import ConfigMismatchError, MissingRanksError, preflight
from mcore_parallel.guard._watchdog import STALLED_EXIT_CODE, StallReport, Watchdog, WatchdogConfig, exit_process

__all__ = [
    "STALLED_EXIT_CODE",
    "ConfigMismatchError",
    "MissingRanksError",
    "StallReport",
    "Watchdog",
    "WatchdogConfig",
    "config_fields",
    "exit_process",
    "preflight",
]
