# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Which sizes of steps are recorded as CUDA graphs."""

import math
from dataclasses import dataclass
from typing import Literal

from mcore_inference._fields import as_flag, as_integer
from mcore_inference._stability import experimental_api
from mcore_inference.scheduling._batch_dimensions import InferenceBatchDimensions

__all__ = ["CUDAGraphBatchDimensionBuilder"]

_LINEAR_UNIT, _EXPONENTIAL_UNIT = 8, 2


@experimental_api
@dataclass(frozen=True, kw_only=True)
class CUDAGraphBatchDimensionBuilder:
    """Chooses the sizes to record: decode steps, and steps with prompts where they are wanted.

    Example:
        >>> builder = CUDAGraphBatchDimensionBuilder(max_requests=16, max_tokens=32, max_sequence_length=64, num_cuda_graphs=2)
        >>> [str(size) for size in builder.generate_cuda_graph_batch_dimensions_list()[0]]
        ['[16]: 0 P + 16 D', '[8]: 0 P + 8 D']

    Raises:
        ValueError: a field is out of its range, or the strategy is unknown.
    """

    max_requests: int
    """Requests of a step."""
    max_tokens: int
    """Tokens of a step."""
    max_sequence_length: int
    """Longest prompt and output together."""
    num_cuda_graphs: int | None
    """Numbers of tokens to record, for decode steps and for others; None for no graph."""
    tp_size: int = 1
    """Ranks among which the tokens of a step are split; it divides every number of tokens."""
    cuda_graph_max_tokens: int | None = None
    """Largest number of tokens to record; None, or more than ``max_tokens``, for ``max_tokens``."""
    cuda_graph_mixed_prefill_count: int = 16
    """Prompts beside decoding requests in a recorded step; 0 for decode steps alone."""
    use_cuda_graphs_for_non_decode_steps: bool = False
    """Whether steps with prompts are recorded too."""
    strategy: Literal["exponential", "linear"] = "exponential"
    """Numbers of tokens halve from the largest on, or are evenly spaced."""

    def __post_init__(self) -> None:
        for name in ("max_requests", "max_tokens", "max_sequence_length", "tp_size", "num_cuda_graphs", "cuda_graph_max_tokens"):
            value = getattr(self, name)
            if value is not None or name not in ("num_cuda_graphs", "cuda_graph_max_tokens"):
                object.__setattr__(self, name, as_integer(name, value, 1, 2**48))
        as_integer("cuda_graph_mixed_prefill_count", self.cuda_graph_mixed_prefill_count, 0, 2**48)
        as_flag("use_cuda_graphs_for_non_decode_steps", self.use_cuda_graphs_for_non_decode_steps)
        if self.strategy not in ("exponential", "linear"):
            raise ValueError(f"strategy={self.strategy!r} is unknown; choose exponential or linear")

    def generate_cuda_graph_batch_dimensions_list(self) -> tuple[list[InferenceBatchDimensions], list[int] | None]:
        """The sizes to record, those with the most prompt tokens first, and the numbers of tokens that they were made from.

        Without graphs the list is empty and there are no numbers.
        """
        if self.num_cuda_graphs is None:
            return [], None
        largest = min(self.cuda_graph_max_tokens or self.max_tokens, self.max_tokens)
        token_counts = self.token_counts(largest)
        sizes = {InferenceBatchDimensions(count, 0, count) for count in self.token_counts(min(largest, self.max_requests))}
        if self.use_cuda_graphs_for_non_decode_steps and self.cuda_graph_mixed_prefill_count:
            for count in token_counts:
                sizes.update(self._with_prompts(count))
        valid = [size for size in sizes if size.is_valid(self.max_requests, self.max_sequence_length)]
        ordered = sorted(valid, key=lambda size: (size.token_count - size.decode_req_count, size.decode_req_count), reverse=True)
        return ordered, token_counts

    def token_counts(self, largest: int) -> list[int]:
        """Numbers of tokens up to the largest that ``tp_size`` divides, falling; empty where there is none.

        With ``linear`` no step of at most as many tokens is padded by more than the smallest of them.

        Example:
            >>> sizes = {"max_requests": 1000, "max_tokens": 1000, "max_sequence_length": 64}
            >>> CUDAGraphBatchDimensionBuilder(**sizes, num_cuda_graphs=4, tp_size=2, strategy="linear").token_counts(1000)
            [1000, 752, 504, 256]
        """
        number = min(self.num_cuda_graphs or 1, largest)
        last = largest // self.tp_size * self.tp_size
        if not last:
            return []
        if self.strategy == "linear":
            first = self._rounded(largest / number, _LINEAR_UNIT)
            between = [first + (last - first) * index / (number - 1) for index in range(number - 1)] if number > 1 else []
            rounded = {self._rounded(count, _LINEAR_UNIT) for count in between}
        else:
            rounded = {self._rounded(last / 2**index, _EXPONENTIAL_UNIT) for index in range(1, number)}
        return sorted({count for count in rounded if count < last} | {last}, reverse=True)

    def _with_prompts(self, count: int) -> list[InferenceBatchDimensions]:
        """Steps of so many tokens: prompts beside decoding requests, and prompts alone."""
        mixed = min(self.cuda_graph_mixed_prefill_count, self.max_requests)
        sizes = [InferenceBatchDimensions(count, mixed, min(count, self.max_requests) - mixed)]
        # No fewer prompts than it takes to have so many tokens.
        least = max(self.cuda_graph_mixed_prefill_count, math.ceil(count / max(1, self.max_sequence_length - 1)))
        if least < self.max_requests:
            sizes.append(InferenceBatchDimensions(count, max(least, min(self.max_requests, count)), 0))
        return sizes

    def _rounded(self, count: float, unit: int) -> int:
        """Up to a multiple of the unit, then of ``tp_size``."""
        return math.ceil(math.ceil(count / unit) * unit / self.tp_size) * self.tp_size
