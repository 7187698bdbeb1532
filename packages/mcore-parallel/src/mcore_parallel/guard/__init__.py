# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What watches over a distributed run: configurations compared before it, a watchdog beside it."""

from mcore_parallel.guard._attempt import Attempt, AttemptAbortedError, Fault
from mcore_parallel.guard._liveness import ProcessMark
from mcore_parallel.guard._network import NetworkFinding, check_network, inspect_network
from mcore_parallel.guard._preflight import ConfigMismatchError, MissingRanksError, config_fields, preflight
from mcore_parallel.guard._restart import RankFailedError, RanksLostError, RestartConfig, run_with_restarts
from mcore_parallel.guard._watchdog import STALLED_EXIT_CODE, StallReport, Watchdog, WatchdogConfig, exit_process

__all__ = [
    "STALLED_EXIT_CODE",
    "Attempt",
    "AttemptAbortedError",
    "ConfigMismatchError",
    "Fault",
    "MissingRanksError",
    "NetworkFinding",
    "ProcessMark",
    "RankFailedError",
    "RanksLostError",
    "RestartConfig",
    "StallReport",
    "Watchdog",
    "WatchdogConfig",
    "check_network",
    "config_fields",
    "exit_process",
    "inspect_network",
    "preflight",
    "run_with_restarts",
]
