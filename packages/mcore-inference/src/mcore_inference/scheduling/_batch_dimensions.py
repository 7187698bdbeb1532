# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Sizes of a step, and which recorded size can hold a step."""

from collections.abc import Iterable
from dataclasses import dataclass

from mcore_inference._stability import experimental_api

__all__ = ["InferenceBatchDimensions", "match_graph_config"]


@experimental_api
@dataclass(frozen=True, order=True)
class InferenceBatchDimensions:
    """Tokens and requests of a step, real or recorded; ordered by its fields.

    Example:
        >>> str(InferenceBatchDimensions(32, 4, 12))
        '[32]: 4 P + 12 D'
    """

    token_count: int
    prefill_req_count: int
    """Requests with several tokens."""
    decode_req_count: int
    """Requests with one token."""
    has_explicit_chunked_prefill_req: bool = False
    """Whether a prompt in parts is among them that must be told from whole ones, as models with a state need it."""

    @property
    def req_count(self) -> int:
        return self.prefill_req_count + self.decode_req_count

    def __str__(self) -> str:
        chunked = " (chunked)" if self.has_explicit_chunked_prefill_req else ""
        return f"[{self.token_count}]: {self.prefill_req_count} P + {self.decode_req_count} D{chunked}"

    def is_valid(self, max_requests: int, max_sequence_length: int) -> bool:
        """Whether a step of these sizes can be: each request has a token, and none more than a sequence holds."""
        return (
            min(self.prefill_req_count, self.decode_req_count) >= 0
            and self.req_count <= max_requests
            and self.req_count <= self.token_count <= self.prefill_req_count * max_sequence_length + self.decode_req_count
            and not (self.has_explicit_chunked_prefill_req and self.prefill_req_count == 0)
        )

    def is_applicable_for_batch_dim(self, real: "InferenceBatchDimensions", strict: bool = False) -> bool:
        """Whether a recording of these sizes holds a real step.

        Args:
            real: the step.
            strict: whether a place for a prompt holds nothing but a prompt, as in models with a state; otherwise a request that decodes
                may take it.
        """
        if self.has_explicit_chunked_prefill_req != real.has_explicit_chunked_prefill_req or self.token_count < real.token_count:
            return False
        if not real.prefill_req_count:
            # Attention of a decode step is another one.
            return not self.prefill_req_count and self.decode_req_count >= real.decode_req_count
        if self.prefill_req_count < real.prefill_req_count:
            return False
        return self.decode_req_count >= real.decode_req_count if strict else self.req_count >= real.req_count


@experimental_api
def match_graph_config(
    real: InferenceBatchDimensions,
    recorded: Iterable[InferenceBatchDimensions],
    strict: bool = False,
    decode_only_cuda_graphs: bool = False,
) -> InferenceBatchDimensions | None:
    """The smallest recorded size that holds a step; None where none does, and the step runs without a graph.

    Args:
        real: the step.
        recorded: sizes in any order.
        strict: as for ``is_applicable_for_batch_dim``.
        decode_only_cuda_graphs: whether steps with prompts run without a graph.

    Example:
        >>> sizes = [InferenceBatchDimensions(16, 4, 12), InferenceBatchDimensions(8, 0, 8)]
        >>> str(match_graph_config(InferenceBatchDimensions(5, 0, 5), sizes))
        '[8]: 0 P + 8 D'
    """
    if decode_only_cuda_graphs and real.prefill_req_count:
        return None
    return min((size for size in recorded if size.is_applicable_for_batch_dim(real, strict)), default=None)
