# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Steps with rows of several tokens as CUDA graphs: those with prompts for a few numbers of tokens, those of proposals for some of rows."""

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mcore_inference.context import HostStep, StepBuilder, StepInputs
from mcore_inference.engine._decode_graphs import padding_step
from mcore_inference.engine._recording_pool import Recording, RecordingPool
from mcore_inference.scheduling import CUDAGraphBatchDimensionBuilder, InferenceBatchDimensions, match_graph_config

__all__ = ["MixedGraphs", "doubled_rows", "mixed_sizes", "proposal_sizes", "recorded_size"]

_MAX_TOKENS = 2048
"""Of a recorded step that may be padded: padding costs larger ones more than the host takes to launch them."""
_NUM_TOKEN_COUNTS = 5
_MOST_FULL_TOKENS = 8192
"""Of full steps that are recorded: their activations take memory of their own, and larger ones keep the device busy for far longer than a
host takes to launch them."""
_FULL = 7 / 8
"""Of the tokens of a step that counts as full."""
_MOST_STATES = 16
"""Prompts of a recorded step whose states are read and written: it does so for the places without a prompt too, in memory of its own."""


def mixed_sizes(
    max_requests: int, max_tokens: int, max_sequence_length: int, *, has_states: bool = False
) -> list[InferenceBatchDimensions]:
    """Sizes of steps with prompts that are recorded: full ones, and others each of half the tokens of the one before. With states those of
    few prompts alone.

    Example:
        >>> [str(size) for size in mixed_sizes(64, 8192, 4096)][:4]
        ['[8192]: 64 P + 0 D', '[8192]: 16 P + 48 D', '[2048]: 64 P + 0 D', '[2048]: 16 P + 48 D']
    """
    counts = [(_MAX_TOKENS, _NUM_TOKEN_COUNTS)]
    if _MAX_TOKENS < max_tokens <= _MOST_FULL_TOKENS:
        counts.insert(0, (max_tokens, 1))
    planned: list[InferenceBatchDimensions] = []
    for most, number in counts:
        builder = CUDAGraphBatchDimensionBuilder(
            max_requests=max_requests,
            max_tokens=max_tokens,
            max_sequence_length=max_sequence_length,
            num_cuda_graphs=number,
            cuda_graph_max_tokens=most,
            use_cuda_graphs_for_non_decode_steps=True,
        )
        planned += builder.generate_cuda_graph_batch_dimensions_list()[0]
    return [size for size in planned if size.prefill_req_count and not (has_states and size.prefill_req_count > _MOST_STATES)]


def recorded_size(real: InferenceBatchDimensions, sizes: Sequence[InferenceBatchDimensions]) -> InferenceBatchDimensions | None:
    """The smallest size that holds a step; None where none does, or where it would be a large one with much padding.

    Example:
        >>> sizes = mixed_sizes(64, 8192, 4096)
        >>> [str(recorded_size(InferenceBatchDimensions(tokens, 3, 40), sizes)) for tokens in (2000, 2100, 7500)]
        ['[2048]: 16 P + 48 D', 'None', '[8192]: 16 P + 48 D']
    """
    size = match_graph_config(real, sizes)
    is_loose = size is not None and size.token_count > _MAX_TOKENS and real.token_count < _FULL * size.token_count
    return None if is_loose else size


def doubled_rows(max_requests: int, num_graphs: int | None = None) -> list[int]:
    """Numbers of rows of several tokens that are recorded, rising: each is twice the one before.

    Args:
        max_requests: the last of them.
        num_graphs: at most so many, the largest; None for all.

    Example:
        >>> doubled_rows(20), doubled_rows(20, 2)
        ([1, 2, 4, 8, 16, 20], [16, 20])
    """
    rows = [*(1 << power for power in range((max_requests - 1).bit_length())), max_requests]
    return rows[-(num_graphs or len(rows)) :]


def proposal_sizes(rows: Sequence[int], num_tokens: int, max_tokens: int) -> list[InferenceBatchDimensions]:
    """Sizes of steps that verify proposals.

    Args:
        rows: of each size.
        num_tokens: of a row, the last one that is known among them.
        max_tokens: of a step.

    Example:
        >>> [str(size) for size in proposal_sizes([1, 2, 4], 5, 16)]
        ['[5]: 1 P + 0 D', '[10]: 2 P + 0 D', '[16]: 4 P + 0 D']
    """
    most = min(max_tokens, _MAX_TOKENS)
    return [InferenceBatchDimensions(min(count * num_tokens, most), count, 0) for count in rows if count <= most]


class MixedGraphs:
    """Recordings of a model's steps with rows of several tokens, made when they are first needed.

    Args:
        compute: logits [N, V] of N tokens of a step, or [T, V] of all for None; it neither waits for the device nor reads from it.
        builder: of the steps.
        sizes: that are recorded.
        pool: of the engine's recordings.
        reads_all: compute the logits of all tokens, as for proposals; False for one token of each row. These few tokens cost more with
            adapters: steps without any have recordings of their own.
    """

    def __init__(
        self,
        compute: Callable[[StepInputs, Tensor | None], Tensor],
        builder: StepBuilder,
        sizes: Sequence[InferenceBatchDimensions],
        pool: RecordingPool,
        *,
        reads_all: bool = False,
    ) -> None:
        self._compute, self._builder, self._sizes, self._pool = compute, builder, list(sizes), pool
        self._reads_all = reads_all
        self._recorded: dict[InferenceBatchDimensions, Recording] = {}
        self._adapted: dict[InferenceBatchDimensions, Recording] = {}
        """Of steps in which rows may have adapters."""
        most = max((builder.num_mixed_words(size) for size in self._sizes), default=0)
        self._words = torch.zeros(most, dtype=torch.int32, device=builder.device)
        self.step_counts: Counter[InferenceBatchDimensions] = Counter()
        """Recorded size to how often it was replayed."""

    def run(self, host: HostStep, rows: Sequence[int]) -> Tensor | None:
        """Logits [N, V] of N tokens of a step, overwritten by the engine's next replay; None where no recording holds it."""
        num_single = int((host.lengths_R == 1).sum())
        real = InferenceBatchDimensions(len(host.tokens_T), len(host.lengths_R) - num_single, num_single)
        size = recorded_size(real, self._sizes)
        # Log-probabilities of prompts take more.
        if size is None or (len(rows) > size.req_count and not self._reads_all):
            return None
        adapts = self._builder.adapts(host) if self._has_both else self._builder.has_adapters
        recorded = self._of(adapts)
        if size not in recorded:
            self._record(size, adapts=adapts)
        self._builder.send_mixed(self._words, host, () if self._reads_all else rows, size)
        replay, logits_NV = recorded[size]
        replay()
        self.step_counts[size] += 1
        if self._reads_all and len(rows) < real.token_count:
            return logits_NV[self._builder.send(rows)]
        return logits_NV[: len(rows)]

    def record_all(self) -> None:
        """Record the sizes that are not recorded yet, that of the most tokens first."""
        for size in sorted(self._sizes, reverse=True):
            for adapts in (True, False) if self._has_both else (self._builder.has_adapters,):
                if size not in self._of(adapts):
                    self._record(size, adapts=adapts)

    @property
    def _has_both(self) -> bool:
        """As of ``DecodeGraphs``."""
        return self._builder.has_adapters and self._reads_all

    def _of(self, adapts: bool) -> dict[InferenceBatchDimensions, Recording]:
        return self._adapted if adapts else self._recorded

    def _record(self, size: InferenceBatchDimensions, *, adapts: bool) -> None:
        """Record a step of padding: it is computed more than once, and states would go on."""
        self._builder.send_mixed(self._words, padding_step(self._builder), [], size)
        self._of(adapts)[size] = self._pool.record(lambda: self._logits(size, adapts=adapts))

    def clear(self) -> None:
        """As of ``DecodeGraphs``."""
        self._recorded.clear()
        self._adapted.clear()

    def _logits(self, size: InferenceBatchDimensions, *, adapts: bool) -> Tensor:
        inputs, rows_N = self._builder.mixed_inputs(self._words[: self._builder.num_mixed_words(size)], size, adapts=adapts)
        return self._compute(inputs, None if self._reads_all else rows_N)
