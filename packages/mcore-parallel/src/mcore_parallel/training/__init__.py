# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Training: batches, objectives, the train step, evaluation, checkpoint state and the loop."""

from mcore_parallel.training._batch import Batch
from mcore_parallel.training._objective import BertObjective, CrossEntropyObjective, LossReport
from mcore_parallel.training._protocols import Checkpointer, GradSync, Objective, Optimizer, Schedule, UpdateResult, Writer
from mcore_parallel.training._state import PlacedTensor, SlicedModel, StatefulOptimizer, TensorShard, model_state, optimizer_state
from mcore_parallel.training._step import TrainReport, evaluate, train_step
from mcore_parallel.training._trainer import NonFiniteLossError, TrainableOptimizer, Trainer, TrainerConfig, TrainerState
from mcore_parallel.training._writers import JsonLinesWriter, RichProgress, TensorBoardWriter

__all__ = [
    "Batch",
    "BertObjective",
    "Checkpointer",
    "CrossEntropyObjective",
    "GradSync",
    "JsonLinesWriter",
    "LossReport",
    "NonFiniteLossError",
    "Objective",
    "Optimizer",
    "PlacedTensor",
    "RichProgress",
    "Schedule",
    "SlicedModel",
    "StatefulOptimizer",
    "TensorBoardWriter",
    "TensorShard",
    "TrainReport",
    "TrainableOptimizer",
    "Trainer",
    "TrainerConfig",
    "TrainerState",
    "UpdateResult",
    "Writer",
    "evaluate",
    "model_state",
    "optimizer_state",
    "train_step",
]
