# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Which samples each data-parallel rank reads, and their stacking into batches."""

from collections.abc import Iterator

import torch
from torch import Tensor

from mcore_parallel.data._errors import DataError
from mcore_parallel.data.datasets._blend import SampleSource


class PretrainingSampler:
    """Deals consecutive samples to data-parallel ranks, one micro-batch at a time.

    The only state is ``consumed``, samples dealt to all ranks together: a sampler made with that number continues the
    same global order under any micro-batch size and number of ranks. A last global batch that would be short is dropped.

    Args:
        total: samples of the dataset.
        consumed: samples already dealt, at an optimizer step's end.
        micro_batch_size: samples a rank processes at once.
        dp_rank: this rank's place.
        dp_size: ranks that share a global batch.
        global_batch: samples of one optimizer step over all ranks.

    Raises:
        DataError: sizes do not divide, or nothing is left to deal.

    Example:
        >>> list(PretrainingSampler(9, 0, 2, dp_rank=1, dp_size=2, global_batch=4))
        [[2, 3], [6, 7]]
    """

    def __init__(self, total: int, consumed: int, micro_batch_size: int, dp_rank: int, dp_size: int, global_batch: int) -> None:
        if micro_batch_size < 1 or not 0 <= dp_rank < dp_size:
            raise DataError(f"micro_batch_size={micro_batch_size} must be positive and dp_rank={dp_rank} in 0..{dp_size - 1}")
        stride = micro_batch_size * dp_size
        if global_batch < 1 or global_batch % stride:
            raise DataError(f"global_batch={global_batch} must be a multiple of micro_batch_size * dp_size = {stride}")
        if not 0 <= consumed <= total - global_batch:
            raise DataError(
                f"consumed={consumed} of total={total} samples leaves no global batch of {global_batch}; ask the dataset for more samples"
            )
        self.total = total
        self.consumed = consumed
        self.micro_batch_size = micro_batch_size
        self.global_batch = global_batch
        self._begin = dp_rank * micro_batch_size
        self._stride = stride
        self._end = total - (total - consumed) % global_batch

    def __len__(self) -> int:
        """Micro-batches left for this rank."""
        return (self._end - self.consumed) // self._stride

    def __iter__(self) -> Iterator[list[int]]:
        while self.consumed < self._end:
            first = self.consumed + self._begin
            self.consumed += self._stride
            yield list(range(first, first + self.micro_batch_size))


def batches(dataset: SampleSource, sampler: PretrainingSampler) -> Iterator[dict[str, Tensor]]:
    """One dict of stacked tensors [micro_batch_size, ...] for each list of sample numbers.

    ``cu_seqlens`` become one row of bounds over all micro_batch_size * S tokens, as `Batch` takes them.
    """
    for numbers in sampler:
        samples = [dataset[number] for number in numbers]
        stacked = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0] if name != "cu_seqlens"}
        if "cu_seqlens" in samples[0]:
            bounds, end = [samples[0]["cu_seqlens"][:1]], 0
            for sample in samples:
                bounds.append(sample["cu_seqlens"][1:] + end)
                end = int(bounds[-1][-1])
            stacked["cu_seqlens"] = torch.cat(bounds)
        yield stacked
