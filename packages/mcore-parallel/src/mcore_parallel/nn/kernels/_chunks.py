# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Sequences cut into chunks: what a linear mixer computes side by side and what it hands from chunk to chunk."""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from mcore_parallel._stability import internal_api


# T tokens, B sequences, C chunks, Q places of a chunk.
@internal_api
@dataclass(frozen=True, eq=False)
class ChunkPlan:
    """Where B sequences that lie behind one another are cut. A chunk begins with its sequence or Q tokens after the one before it.

    Where the device alone knows the lengths (``BoundedSequences``), tokens of no sequence may lie before and behind them, and chunks
    without a token behind the others.
    """

    lengths: "tuple[int, ...] | BoundedSequences"
    chunk_size: int
    """Q."""
    positions: Tensor
    """[T] int32, of each token in its sequence."""
    tokens: Tensor
    """[B + 1] int32, first token of each sequence, and the end of the last."""
    bounds: Tensor
    """[C, 2] int32, first token of a chunk and the one behind its last."""
    first_chunk: Tensor
    """[B + 1] int32, first chunk of each sequence, and the end of the last's."""
    rows: Tensor
    """[C, Q] int64, token at each place of a chunk; T where there is none."""
    places: Tensor
    """[T] int64, place of each token among the C Q places."""
    going: tuple[int, ...] = ()
    """Of each step along the sequences side by side, how many still go on."""
    visits: Tensor | None = None
    """[C] int64, chunks in the order of these steps; None where the device alone knows the lengths."""
    order: Tensor | None = None
    """[B] int64, sequences in the order within a step: the longest first; None likewise."""
    inside: Tensor | None = None
    """[T] bool, tokens of a sequence; None for all."""

    @property
    def num_tokens(self) -> int:
        return len(self.places)

    @property
    def num_sequences(self) -> int:
        return len(self.tokens) - 1

    @property
    def num_chunks(self) -> int:
        return len(self.bounds)

    def recut(self, chunk_size: int) -> "ChunkPlan":
        """The same sequences in chunks of another size."""
        if isinstance(self.lengths, BoundedSequences):
            return self.lengths.plan(chunk_size, self.num_tokens)
        return plan_chunks(self.lengths, chunk_size, self.positions.device)

    def cut(self, x: Tensor) -> Tensor:
        """[T, ...] -> [C, Q, ...], zeros at places without a token."""
        if self.rows.numel() == self.num_tokens:
            return x.unflatten(0, self.rows.shape)
        return F.pad(x, (0, 0) * (x.dim() - 1) + (0, 1)).index_select(0, self.rows.flatten()).unflatten(0, self.rows.shape)

    def join(self, x: Tensor) -> Tensor:
        """[C, Q, ...] -> [T, ...]."""
        x = x.flatten(0, 1)
        return x if len(x) == self.num_tokens else x.index_select(0, self.places)

    def pass_states(self, initial: Tensor, advance: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Go through the chunks of all sequences side by side.

        Args:
            initial: [B, ...] state before each sequence.
            advance: from the states [n, ...] before chunks and the numbers [n] of these chunks to the states behind them.

        Returns:
            [C, ...] state before each chunk and [B, ...] state behind each sequence.
        """
        if self.visits is None or self.order is None:
            return self._pass_bounded(initial, advance)
        state = initial[self.order]
        before, behind, done = [initial[:0]], [], 0
        for going in (*self.going, 0):
            behind.append(state[going:])
            if not going:
                break
            state = state[:going]
            before.append(state)
            state = advance(state, self.visits[done : done + going])
            done += going
        return torch.cat(before)[self.visits.argsort()], torch.cat(behind[::-1])[self.order.argsort()]

    def _pass_bounded(self, initial: Tensor, advance: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """``pass_states`` in as many steps as the longest of sequences of so many tokens could have."""
        first, end = self.first_chunk.long().unfold(0, 2, 1).unbind(1)
        # Sequences that have come to their end leave their states behind the chunks.
        before, state = initial.new_zeros(self.num_chunks + 1, *initial.shape[1:]), initial
        for number in range(-(-self.num_tokens // self.chunk_size)):
            chunks = first + number
            goes_on = chunks < end
            before.index_copy_(0, torch.where(goes_on, chunks, self.num_chunks), state)
            further = advance(state, chunks.clamp(max=self.num_chunks - 1))
            state = torch.where(goes_on.view(-1, *[1] * (state.dim() - 1)), further, state)
        return before[:-1], state


@internal_api
class BoundedSequences:
    """Sequences of a step whose lengths the device alone knows, as in a recorded one; nothing is read from it.

    Args:
        tokens: [B + 1] int32, first token of each sequence, and the end of the last.
    """

    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens
        self._plans: dict[int, ChunkPlan] = {}

    def plan(self, chunk_size: int, num_tokens: int) -> ChunkPlan:
        """With chunks for any sequences in ``num_tokens`` tokens; made once for the layers of a step.

        Example:
            >>> BoundedSequences(torch.tensor([1, 4, 6])).plan(2, 7).bounds.tolist()
            [[1, 3], [3, 4], [4, 6], [0, 0], [0, 0]]
        """
        if chunk_size not in self._plans:
            self._plans[chunk_size] = self._plan(chunk_size, num_tokens)
        return self._plans[chunk_size]

    def _plan(self, chunk_size: int, num_tokens: int) -> ChunkPlan:
        starts, ends = self.tokens.long().unfold(0, 2, 1).unbind(1)
        first_chunk = F.pad(((ends - starts + chunk_size - 1) // chunk_size).cumsum(0), (1, 0))
        token_T = torch.arange(num_tokens, device=starts.device)
        chunk_C = torch.arange(num_tokens // chunk_size + len(starts), device=starts.device)

        def owners(limits_B: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
            """Sequences of tokens or chunks, and whether they have one."""
            sequence = torch.searchsorted(limits_B.contiguous(), numbers, right=True)
            return sequence.clamp(max=len(starts) - 1), sequence < len(starts)

        sequence_C, exists_C = owners(first_chunk[1:], chunk_C)
        begins = torch.where(exists_C, starts[sequence_C] + (chunk_C - first_chunk[sequence_C]) * chunk_size, 0)
        limits = torch.where(exists_C, torch.minimum(begins + chunk_size, ends[sequence_C]), 0)
        rows = begins[:, None] + torch.arange(chunk_size, device=starts.device)
        sequence_T, inside = owners(ends, token_T)
        inside = inside & (token_T >= starts[0])
        position_T = torch.where(inside, token_T - starts[sequence_T], 0)
        place_T = first_chunk[sequence_T] * chunk_size + position_T
        return ChunkPlan(
            lengths=self,
            chunk_size=chunk_size,
            positions=position_T.to(torch.int32),
            tokens=self.tokens,
            bounds=torch.stack((begins, limits), dim=1).to(torch.int32),
            first_chunk=first_chunk.to(torch.int32),
            rows=torch.where(rows < limits[:, None], rows, num_tokens),
            places=torch.where(inside, place_T, 0),
            inside=inside,
        )


# Kept: all layers of a step, and most steps, have the same lengths. A plan is a function of the arguments alone.
@internal_api
@functools.lru_cache(maxsize=16)
def plan_chunks(lengths: tuple[int, ...], chunk_size: int, device: torch.device) -> ChunkPlan:
    """The plan of sequences of these lengths.

    Example:
        >>> plan_chunks((3, 4), 2, torch.device("cpu")).bounds.tolist()
        [[0, 2], [2, 3], [3, 5], [5, 7]]
    """
    counts = tuple(-(-length // chunk_size) for length in lengths)
    starts = _starts(lengths)
    begins = torch.tensor([start + chunk_size * n for start, count in zip(starts, counts, strict=False) for n in range(count)])
    begins = begins.to(torch.int64)
    ends = torch.tensor([end for end, count in zip(starts[1:], counts, strict=True) for _ in range(count)]).to(torch.int64)
    ends = torch.minimum(begins + chunk_size, ends)
    rows = begins[:, None] + torch.arange(chunk_size)
    inside = rows < ends[:, None]
    parts = [torch.arange(length) for length in lengths]
    order = sorted(range(len(counts)), key=lambda sequence: -counts[sequence])
    first_chunk = _starts(counts)
    numbers = range(max(counts, default=0))
    steps = [[first_chunk[sequence] + number for sequence in order if counts[sequence] > number] for number in numbers]
    tables = {
        "positions": torch.cat([torch.empty(0, dtype=torch.int64), *parts]).to(torch.int32),
        "tokens": torch.tensor(starts, dtype=torch.int32),
        "bounds": torch.stack((begins, ends), dim=1).to(torch.int32),
        "first_chunk": torch.tensor(first_chunk, dtype=torch.int32),
        "rows": rows.masked_fill(~inside, starts[-1]),
        "places": inside.flatten().nonzero().flatten(),
        "visits": torch.tensor([chunk for step in steps for chunk in step], dtype=torch.int64),
        "order": torch.tensor(order, dtype=torch.int64),
    }
    going = tuple(len(step) for step in steps)
    return ChunkPlan(lengths, chunk_size, going=going, **{name: table.to(device) for name, table in tables.items()})


def _starts(sizes: Sequence[int]) -> list[int]:
    return [0, *itertools.accumulate(sizes)]
