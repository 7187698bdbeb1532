# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Knowledge distillation: a student learns the distributions and hidden states of a teacher, which runs beside it or was written down."""

from mcore_parallel.training.distill._balance import FixedBalancer, LossBalancer, LossParts, RatioBalancer
from mcore_parallel.training.distill._capture import HiddenCapture
from mcore_parallel.training.distill._divergence import (
    vocab_parallel_kl_divergence,
    vocab_parallel_sparse_kl_divergence,
    vocab_parallel_top_k,
)
from mcore_parallel.training.distill._hidden import HiddenPair, HiddenProjection, hidden_cosine_loss, hidden_mse_loss
from mcore_parallel.training.distill._modelopt import ModeloptMissingError, quantize_student
from mcore_parallel.training.distill._modelopt_plugin import ModeloptBalancer, modelopt_distillation
from mcore_parallel.training.distill._objective import DistillationConfig, DistillationObjective
from mcore_parallel.training.distill._shards import Shard, StoreLayout, StoreWriter, open_shards, read_settings
from mcore_parallel.training.distill._store import (
    LogProbStore,
    LogProbStoreConfig,
    LogProbStoreError,
    LogProbStoreWriter,
    record,
    run_missing,
    writes,
)
from mcore_parallel.training.distill._teacher import TEACHER_HIDDEN, Teacher

__all__ = [
    "TEACHER_HIDDEN",
    "DistillationConfig",
    "DistillationObjective",
    "FixedBalancer",
    "HiddenCapture",
    "HiddenPair",
    "HiddenProjection",
    "LogProbStore",
    "LogProbStoreConfig",
    "LogProbStoreError",
    "LogProbStoreWriter",
    "LossBalancer",
    "LossParts",
    "ModeloptBalancer",
    "ModeloptMissingError",
    "RatioBalancer",
    "Shard",
    "StoreLayout",
    "StoreWriter",
    "Teacher",
    "hidden_cosine_loss",
    "hidden_mse_loss",
    "modelopt_distillation",
    "open_shards",
    "quantize_student",
    "read_settings",
    "record",
    "run_missing",
    "vocab_parallel_kl_divergence",
    "vocab_parallel_sparse_kl_divergence",
    "vocab_parallel_top_k",
    "writes",
]
