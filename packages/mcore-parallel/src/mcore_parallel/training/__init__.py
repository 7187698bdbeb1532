# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Training: batches and their sizes, objectives, the train step, evaluation, checkpoint state, the loop and what guards and reports it."""

from mcore_parallel.training._aux import AuxReport
from mcore_parallel.training._batch import Batch, real_tokens
from mcore_parallel.training._batch_size import (
    BatchRampUp,
    BatchSizeSchedule,
    BatchSizeSteps,
    ConstantBatchSize,
    check_batch_sizes,
    samples_after,
)
from mcore_parallel.training._communication import CommunicationReport, exposed_communication, read_trace
from mcore_parallel.training._dumps import DumpConfig, StepDumps
from mcore_parallel.training._objective import BertObjective, CrossEntropyObjective, LossReport
from mcore_parallel.training._profile import Annotation, NvtxRanges, ProfileConfig, ProfileWindow, RangeSink
from mcore_parallel.training._protocols import Checkpointer, GradSync, Objective, Optimizer, Schedule, UpdateResult, Writer
from mcore_parallel.training._rerun import (
    INVALID_EXIT_CODE,
    SUSPECT_EXIT_CODE,
    InvalidResultError,
    Rerun,
    RerunConfig,
    RerunReport,
    SuspectResultError,
)
from mcore_parallel.training._score import score, score_and_route
from mcore_parallel.training._signals import STOPPED_EXIT_CODE, StopSignals
from mcore_parallel.training._state import PlacedTensor, SlicedModel, StatefulOptimizer, TensorShard, model_state, optimizer_state
from mcore_parallel.training._step import TrainReport, evaluate, train_step
from mcore_parallel.training._stopwatch import Timer
from mcore_parallel.training._stragglers import StragglerProbe
from mcore_parallel.training._telemetry import TelemetrySpans
from mcore_parallel.training._throughput import Throughput
from mcore_parallel.training._timers import StartupStamps, Timers, TimeSpread
from mcore_parallel.training._trackio import TrackioWriter
from mcore_parallel.training._trainer import NonFiniteLossError, TrainableOptimizer, Trainer, TrainerConfig, TrainerState
from mcore_parallel.training._wandb import WandbWriter
from mcore_parallel.training._writers import JsonLinesWriter, RichProgress, TensorBoardWriter

__all__ = [
    "INVALID_EXIT_CODE",
    "STOPPED_EXIT_CODE",
    "SUSPECT_EXIT_CODE",
    "Annotation",
    "AuxReport",
    "Batch",
    "BatchRampUp",
    "BatchSizeSchedule",
    "BatchSizeSteps",
    "BertObjective",
    "Checkpointer",
    "CommunicationReport",
    "ConstantBatchSize",
    "CrossEntropyObjective",
    "DumpConfig",
    "GradSync",
    "InvalidResultError",
    "JsonLinesWriter",
    "LossReport",
    "NonFiniteLossError",
    "NvtxRanges",
    "Objective",
    "Optimizer",
    "PlacedTensor",
    "ProfileConfig",
    "ProfileWindow",
    "RangeSink",
    "Rerun",
    "RerunConfig",
    "RerunReport",
    "RichProgress",
    "Schedule",
    "SlicedModel",
    "StartupStamps",
    "StatefulOptimizer",
    "StepDumps",
    "StopSignals",
    "StragglerProbe",
    "SuspectResultError",
    "TelemetrySpans",
    "TensorBoardWriter",
    "TensorShard",
    "Throughput",
    "TimeSpread",
    "Timer",
    "Timers",
    "TrackioWriter",
    "TrainReport",
    "TrainableOptimizer",
    "Trainer",
    "TrainerConfig",
    "TrainerState",
    "UpdateResult",
    "WandbWriter",
    "Writer",
    "check_batch_sizes",
    "evaluate",
    "exposed_communication",
    "model_state",
    "optimizer_state",
    "read_trace",
    "real_tokens",
    "samples_after",
    "score",
    "score_and_route",
    "train_step",
]
