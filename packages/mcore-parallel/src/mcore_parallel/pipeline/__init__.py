# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Pipeline schedules as data, a simulator that checks them, and the loop that runs one."""

from mcore_parallel.pipeline._partition import partition_layers
from mcore_parallel.pipeline._plan import Exchange, exchanges
from mcore_parallel.pipeline._run import StageForward, run_schedule
from mcore_parallel.pipeline._schedule import Action, forward_only, one_f_one_b
from mcore_parallel.pipeline._simulate import DeadlockError, Simulation, simulate

__all__ = [
    "Action",
    "DeadlockError",
    "Exchange",
    "Simulation",
    "StageForward",
    "exchanges",
    "forward_only",
    "one_f_one_b",
    "partition_layers",
    "run_schedule",
    "simulate",
]
