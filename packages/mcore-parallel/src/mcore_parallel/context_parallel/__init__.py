# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Context parallelism: sequences split over ranks, and attention across them."""

from mcore_parallel.context_parallel._ahead import tokens_ahead
from mcore_parallel.context_parallel._core import ContextParallelAttention, LayeredAttention, SequenceStep
from mcore_parallel.context_parallel._errors import HeadSplitError, SequenceSplitError
from mcore_parallel.context_parallel._factory import CP_COMM_TYPES, context_parallel_attention, exchange_size
from mcore_parallel.context_parallel._zigzag import sequence_lengths, zigzag_indices, zigzag_inverse

__all__ = [
    "CP_COMM_TYPES",
    "ContextParallelAttention",
    "HeadSplitError",
    "LayeredAttention",
    "SequenceSplitError",
    "SequenceStep",
    "context_parallel_attention",
    "exchange_size",
    "sequence_lengths",
    "tokens_ahead",
    "zigzag_indices",
    "zigzag_inverse",
]
