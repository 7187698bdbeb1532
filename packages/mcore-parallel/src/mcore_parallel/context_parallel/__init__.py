# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Context parallelism: sequences split over ranks, and attention across them."""

from mcore_parallel.context_parallel._core import ContextParallelAttention, LayeredAttention, SequenceStep, join_heads, split_heads
from mcore_parallel.context_parallel._factory import CP_COMM_TYPES, context_parallel_attention, exchange_size
from mcore_parallel.context_parallel._partial import (
    HEAD_DIM_MULTIPLE,
    FlashAttention,
    PartialAttention,
    TorchAttention,
    allowed,
    flash_can_run,
    together,
)
from mcore_parallel.context_parallel._prefixes import plan_prefixed, sequence_prefixes
from mcore_parallel.context_parallel._tiles import Tile, plan_tiles, sequence_of_tokens, to_device
from mcore_parallel.context_parallel._zigzag import (
    HeadSplitError,
    Segment,
    SequenceSplitError,
    inverse_permutation,
    segments,
    sequence_lengths,
    tokens_ahead,
    zigzag_indices,
    zigzag_inverse,
)

__all__ = [
    "CP_COMM_TYPES",
    "HEAD_DIM_MULTIPLE",
    "ContextParallelAttention",
    "FlashAttention",
    "HeadSplitError",
    "LayeredAttention",
    "PartialAttention",
    "Segment",
    "SequenceSplitError",
    "SequenceStep",
    "Tile",
    "TorchAttention",
    "allowed",
    "context_parallel_attention",
    "exchange_size",
    "flash_can_run",
    "inverse_permutation",
    "join_heads",
    "plan_prefixed",
    "plan_tiles",
    "segments",
    "sequence_lengths",
    "sequence_of_tokens",
    "sequence_prefixes",
    "split_heads",
    "to_device",
    "together",
    "tokens_ahead",
    "zigzag_indices",
    "zigzag_inverse",
]
