# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Layers split over the tensor-parallel group, and the loss over a split vocabulary."""

from mcore_parallel.tensor_parallel._cross_entropy import vocab_parallel_cross_entropy, vocab_parallel_log_probs
from mcore_parallel.tensor_parallel._embedding import VocabParallelEmbedding
from mcore_parallel.tensor_parallel._fused_linear import fused_linear_cross_entropy
from mcore_parallel.tensor_parallel._invariant import InvariantProducts, make_tp_invariant
from mcore_parallel.tensor_parallel._linear import ColumnParallelLinear, RowParallelLinear
from mcore_parallel.tensor_parallel._product import LinearProducts, LossProducts, Route
from mcore_parallel.tensor_parallel._replicated import ReplicatedLinear
from mcore_parallel.tensor_parallel._vocab import pad_vocab_size
from mcore_parallel.tensor_parallel._weight_gradient import (
    LentGradient,
    MainGradient,
    WeightCopyHolder,
    WeightGradientQueue,
    WeightGradientSink,
)

__all__ = [
    "ColumnParallelLinear",
    "InvariantProducts",
    "LentGradient",
    "LinearProducts",
    "LossProducts",
    "MainGradient",
    "ReplicatedLinear",
    "Route",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "WeightCopyHolder",
    "WeightGradientQueue",
    "WeightGradientSink",
    "fused_linear_cross_entropy",
    "make_tp_invariant",
    "pad_vocab_size",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_log_probs",
]
