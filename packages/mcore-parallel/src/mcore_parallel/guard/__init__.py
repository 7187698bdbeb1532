# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What watches over a distributed run: configurations compared before it, a watchdog beside it."""

from mcore_parallel.guard._attempt import Attempt, AttemptAbortedError, Fault
from mcore_parallel.guard._fields import config_fields
from mcore_parallel.guard._preflight import ConfigMismatchError, MissingRanksError, preflight
from mcore_parallel.guard._restart import RankFailedError, RanksLostError, RestartConfig, run_with_restarts
from mcore_parallel.guard._watchdog import STALLED_EXIT_CODE, StallReport, Watchdog, WatchdogConfig, exit_process

__all__ = [
    "STALLED_EXIT_CODE",
    "Attempt",
    "AttemptAbortedError",
    "ConfigMismatchError",
    "Fault",
    "MissingRanksError",
    "RankFailedError",
    "RanksLostError",
    "RestartConfig",
    "StallReport",
    "Watchdog",
    "WatchdogConfig",
    "config_fields",
    "exit_process",
    "preflight",
    "run_with_restarts",
]
