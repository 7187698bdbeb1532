# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Layers split over the tensor-parallel group, and the loss over a split vocabulary."""

from mcore_parallel.tensor_parallel._batch_invariant import (
    BatchInvariantMatmul,
    BatchInvariantProducts,
    aligned_rows,
    batch_invariant_grouped_linear,
    batch_invariant_log_norms,
    batch_invariant_losses,
    each_row,
    has_row_kernels,
    one_by_one,
)
from mcore_parallel.tensor_parallel._cross_entropy import vocab_parallel_cross_entropy, vocab_parallel_log_probs
from mcore_parallel.tensor_parallel._embedding import VocabParallelEmbedding
from mcore_parallel.tensor_parallel._fused_linear import Labels, early_chunk, fused_linear_cross_entropy, join_rows, token_chunks
from mcore_parallel.tensor_parallel._init import normal_shard_
from mcore_parallel.tensor_parallel._invariant import InvariantProducts, make_tp_invariant
from mcore_parallel.tensor_parallel._linear import ColumnParallelLinear, RowParallelLinear
from mcore_parallel.tensor_parallel._lora import (
    LoraTarget,
    QuantizableLoraTarget,
    RecomputedModel,
    adapted_layers,
    add_lora,
    is_adapter,
    merge_lora,
)
from mcore_parallel.tensor_parallel._lora_adapter import LoraAdapter, LoraConfig
from mcore_parallel.tensor_parallel._product import (
    GroupedProducts,
    LinearProducts,
    LossProducts,
    ProductLayer,
    Route,
    column_product,
    row_product,
)
from mcore_parallel.tensor_parallel._replicated import ReplicatedLinear
from mcore_parallel.tensor_parallel._row_maths import RowMaths
from mcore_parallel.tensor_parallel._rows import combine, row_statistics, to_narrow_gradient
from mcore_parallel.tensor_parallel._vocab import pad_vocab_size
from mcore_parallel.tensor_parallel._weight_gradient import (
    BorrowedGradBuffer,
    DeferredWeightGrads,
    MainGradient,
    WeightCopyHolder,
    WeightGradientQueue,
    WeightGradientSink,
)

__all__ = [
    "BatchInvariantMatmul",
    "BatchInvariantProducts",
    "BorrowedGradBuffer",
    "ColumnParallelLinear",
    "DeferredWeightGrads",
    "GroupedProducts",
    "InvariantProducts",
    "Labels",
    "LinearProducts",
    "LoraAdapter",
    "LoraConfig",
    "LoraTarget",
    "LossProducts",
    "MainGradient",
    "ProductLayer",
    "QuantizableLoraTarget",
    "RecomputedModel",
    "ReplicatedLinear",
    "Route",
    "RowMaths",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "WeightCopyHolder",
    "WeightGradientQueue",
    "WeightGradientSink",
    "adapted_layers",
    "add_lora",
    "aligned_rows",
    "batch_invariant_grouped_linear",
    "batch_invariant_log_norms",
    "batch_invariant_losses",
    "column_product",
    "combine",
    "each_row",
    "early_chunk",
    "fused_linear_cross_entropy",
    "has_row_kernels",
    "is_adapter",
    "join_rows",
    "make_tp_invariant",
    "merge_lora",
    "normal_shard_",
    "one_by_one",
    "pad_vocab_size",
    "row_product",
    "row_statistics",
    "to_narrow_gradient",
    "token_chunks",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_log_probs",
]
