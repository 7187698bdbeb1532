# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""All passes of draft heads behind a step as one CUDA graph: a recording for some numbers of requests."""

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from mcore_inference.context import StepBuilder, StepInputs
from mcore_inference.engine._decode_graphs import padding_step
from mcore_inference.engine._draft_passes import DraftInputs, DraftPass
from mcore_inference.engine._recording_pool import Recording, RecordingPool
from mcore_inference.sampling import SamplingRows
from mcore_inference.scheduling import InferenceBatchDimensions

__all__ = ["DraftGraphs"]

_SETTINGS = ("temperature", "top_p", "min_p", "top_k", "seed", "position")
"""Of ``SamplingRows``; the first three are float64, the others int64."""


class DraftGraphs:
    """Recordings of the passes behind steps that verify proposals, made when they are first needed.

    Pass i (from 1) of ``num_heads`` reads what a step verified and i - 1 tokens before, the others one token of each request.

    Args:
        compute: as of ``DraftRunner.run``; it neither waits for the device nor reads from it.
        builder: of the passes' steps.
        sizes: of the recorded steps that verify proposals, their requests rising; behind each as many requests are recorded.
        num_heads: as of ``DraftHeads``.
        num_tokens: proposed for a request, at most.
        pool: of the engine's recordings.
    """

    def __init__(
        self,
        compute: Callable[[Sequence[DraftInputs], SamplingRows], Tensor],
        builder: StepBuilder,
        sizes: Sequence[InferenceBatchDimensions],
        *,
        num_heads: int,
        num_tokens: int,
        pool: RecordingPool,
    ) -> None:
        self._compute, self._builder, self._pool = compute, builder, pool
        self._step_tokens = {size.req_count: size.token_count for size in sizes}
        self._num_heads, self._num_tokens = num_heads, num_tokens
        self._recorded: dict[tuple[int, bool], Recording] = {}
        most = max(self._step_tokens)
        self._words = torch.zeros(sum(sum(self._layout(size)) for size in self._sizes(most)), dtype=torch.int32, device=builder.device)
        self._settings = torch.zeros(len(_SETTINGS) * most, dtype=torch.int64, device=builder.device)
        self.request_counts: Counter[int] = Counter()
        """Recorded number of requests to how often it was replayed."""

    def run(self, passes: Sequence[DraftPass], settings: SamplingRows) -> Tensor | None:
        """Proposals [N, S] of S requests, overwritten by the engine's next replay; None where no recording holds the passes.

        Args:
            passes: of a step.
            settings: of the S requests, on the host.
        """
        num_requests = len(settings.seed)
        rows = next((rows for rows in self._step_tokens if rows >= num_requests and self._holds(rows, passes)), None)
        if rows is None:
            return None
        key = rows, settings.has_ranks or settings.has_min_p
        if key not in self._recorded:
            self._record(*key)
        self._fill(rows, passes, settings)
        replay, tokens_NS = self._recorded[key]
        replay()
        self.request_counts[rows] += 1
        return tokens_NS[:, :num_requests]

    def record_all(self) -> None:
        """Record what is not recorded yet, that of the most requests first."""
        for rows in reversed(self._step_tokens):
            for ranked in (False, True):
                if (rows, ranked) not in self._recorded:
                    self._record(rows, ranked)

    def clear(self) -> None:
        """As of ``DecodeGraphs``."""
        self._recorded.clear()

    def _record(self, rows: int, ranked: bool) -> None:
        """From padding: the passes run more than once, and each overwrites the states that it read."""
        self._fill(rows, (), None)
        self._recorded[rows, ranked] = self._pool.record(lambda: self._compute(self._inputs(rows), self._static_settings(rows, ranked)))

    def _sizes(self, rows: int) -> list[InferenceBatchDimensions]:
        """Of each pass."""
        heads = [InferenceBatchDimensions(self._step_tokens[rows] + rows * before, rows, 0) for before in range(self._num_heads)]
        return heads + [InferenceBatchDimensions(rows, 0, rows)] * (self._num_tokens - self._num_heads)

    def _holds(self, rows: int, passes: Sequence[DraftPass]) -> bool:
        return all(len(one.host.tokens_T) <= size.token_count for one, size in zip(passes, self._sizes(rows), strict=False))

    def _layout(self, size: InferenceBatchDimensions) -> tuple[int, int, int]:
        """Words of a pass: of its step, of ``sources_T``, of ``places_4S``."""
        builder, rows = self._builder, size.req_count
        step = builder.num_mixed_words(size) if size.prefill_req_count else builder.num_decode_words(rows)
        return step, size.token_count, 4 * rows

    def _fill(self, rows: int, passes: Sequence[DraftPass], settings: SamplingRows | None) -> None:
        """The tensors that a recording reads; what is not given is padding."""
        builder, nothing = self._builder, padding_step(self._builder)
        parts: list[np.ndarray] = []
        for number, size in enumerate(self._sizes(rows)):
            one = passes[number] if number < len(passes) else None
            host = nothing if one is None else one.host
            parts.append(builder.mixed_words(host, (), size) if size.prefill_req_count else builder.decode_words(host, rows))
            sources = np.zeros(size.token_count, dtype=np.int32)
            # Places and lines that nobody reads are the last ones.
            places = np.repeat(np.array([[0], [-1], [0], [-1]], dtype=np.int32), rows, axis=1)
            if one is not None:
                sources[: len(one.sources_T)] = one.sources_T
                places[:, : one.places_4S.shape[1]] = one.places_4S
            parts += [sources, places.ravel()]
        builder.fill(self._words, np.concatenate(parts))
        numbers = np.zeros((len(_SETTINGS), rows), dtype=np.int64)
        if settings is not None:
            for row, name in zip(numbers, _SETTINGS, strict=True):
                values = getattr(settings, name)
                row[: len(values)] = values.view(torch.int64).numpy()
        builder.fill(self._settings, numbers.ravel())

    def _inputs(self, rows: int) -> list[DraftInputs]:
        inputs, begin = list[DraftInputs](), 0
        for number, size in enumerate(self._sizes(rows), 1):
            layout = self._layout(size)
            words, sources_T, places = self._words[begin : begin + sum(layout)].split(layout)
            begin += sum(layout)
            step = self._step_of(words, size)
            draws = number <= self._num_tokens
            inputs.append(DraftInputs(step=step, sources_T=sources_T.long(), places_4S=places.view(4, rows).long(), draws=draws))
        return inputs

    def _step_of(self, words: Tensor, size: InferenceBatchDimensions) -> Callable[[], StepInputs]:
        if size.prefill_req_count:
            return lambda: self._builder.mixed_inputs(words, size)[0]
        return lambda: self._builder.decode_inputs(size.req_count, words)

    def _static_settings(self, rows: int, ranked: bool) -> SamplingRows:
        numbers = self._settings[: len(_SETTINGS) * rows].view(-1, rows)
        values = dict(zip(_SETTINGS, [*numbers[:3].view(torch.float64), *numbers[3:]], strict=True))
        return SamplingRows(**values, all_greedy=False, has_ranks=ranked, has_min_p=ranked)
