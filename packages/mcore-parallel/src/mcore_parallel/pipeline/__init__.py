# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Pipeline schedules as data, a simulator that checks them, and the loop that runs one."""

from mcore_parallel.pipeline._chain import ChainLink
from mcore_parallel.pipeline._chunks import ModelChunks
from mcore_parallel.pipeline._clock import DeadlockError, Transfer
from mcore_parallel.pipeline._config import PipelineConfig
from mcore_parallel.pipeline._layout import PipelineLayout, StageLayout
from mcore_parallel.pipeline._overlap import Overlap
from mcore_parallel.pipeline._partition import partition_layers
from mcore_parallel.pipeline._plan import Exchange, PipelinePlan, exchanges, plan_pipeline
from mcore_parallel.pipeline._run import Link, StageForward, run_schedule
from mcore_parallel.pipeline._schedule import (
    Action,
    Combined,
    Entry,
    Schedule,
    ScheduleError,
    combined_one_f_one_b,
    forward_only,
    interleaved_one_f_one_b,
    one_f_one_b,
    virtual_order,
    zero_bubble,
)
from mcore_parallel.pipeline._simulate import Simulation, simulate

__all__ = [
    "Action",
    "ChainLink",
    "Combined",
    "DeadlockError",
    "Entry",
    "Exchange",
    "Link",
    "ModelChunks",
    "Overlap",
    "PipelineConfig",
    "PipelineLayout",
    "PipelinePlan",
    "Schedule",
    "ScheduleError",
    "Simulation",
    "StageForward",
    "StageLayout",
    "Transfer",
    "combined_one_f_one_b",
    "exchanges",
    "forward_only",
    "interleaved_one_f_one_b",
    "one_f_one_b",
    "partition_layers",
    "plan_pipeline",
    "run_schedule",
    "simulate",
    "virtual_order",
    "zero_bubble",
]
