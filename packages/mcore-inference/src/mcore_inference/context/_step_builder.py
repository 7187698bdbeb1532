# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The tensors of one step, sent to the device in one copy."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from mcore_inference._kernels import has_kernels
from mcore_inference._stability import experimental_api
from mcore_inference.attention import (
    ContinuedRows,
    DecodeContexts,
    DecodeRows,
    GatheredRows,
    HeadRotation,
    HostRows,
    PagedStep,
    PageFormat,
    PrefillRows,
    TableRows,
    prefill_tiles,
    reads_tables,
)
from mcore_inference.cache import PagedKVCache, RecurrentStateCache
from mcore_inference.sampling import PlainInputs, PlainRows
from mcore_inference.scheduling import InferenceBatchDimensions
from mcore_parallel.nn import RecurrentRows, Step

__all__ = ["HostStep", "StepBuilder", "StepInputs"]


# R rows (requests) of a step, T tokens, B blocks of the longest request, M requests that the engine can hold.
@experimental_api
@dataclass(frozen=True, kw_only=True)
class HostStep:
    """A step as the host knows it; rows of one token come first."""

    tokens_T: np.ndarray
    """[T] token ids; ``-1 - line`` for the token that was sampled last for a request line and may not have reached the host."""
    lengths_R: np.ndarray
    """[R] tokens of each row."""
    cached_R: np.ndarray
    """[R] tokens of each row that were in the cache before."""
    tables_RB: np.ndarray
    """[R, B] blocks of each row; -1 behind the last."""
    lines_R: np.ndarray
    """[R] line of each row, its slot in the states."""
    adapters_R: np.ndarray | None = None
    """[R] slot of each row's adapter, -1 for the base; None for all of the base."""
    contexts: DecodeContexts | None = None
    """Of the rows, all of one token; None for rows whose contexts are gathered from their blocks."""
    draws: PlainRows | None = None
    """That a recording of the step makes; None for none."""


@experimental_api
@dataclass(frozen=True, kw_only=True)
class StepInputs:
    """One forward pass."""

    tokens_T: Tensor
    """[T] int64."""
    step: Step
    adapters_T: Tensor | None = None
    """[T] int32, slot of each token's adapter, -1 for the base; None for a step that is computed without adapters."""
    draws: PlainInputs | None = None
    """Of the rows of a recorded decode step."""


@experimental_api
class StepBuilder:
    """Makes the tensors of steps over one cache.

    Args:
        cache: the pages.
        states: of recurrent layers; None for a model without.
        max_requests: M, lines of requests.
        max_blocks: B.
        group: query heads that share a key-value head.
        dtype: of the model's activations; None for that of the pages.
        rotation: in place of this package's kernel; None for that.
        num_last_tokens: that are left for later steps; None for one a line.
        has_adapters: whether rows may have adapters, so that recorded steps read which.
    """

    def __init__(
        self,
        cache: PagedKVCache,
        states: RecurrentStateCache | None = None,
        *,
        max_requests: int,
        max_blocks: int,
        group: int,
        dtype: torch.dtype | None = None,
        rotation: HeadRotation | None = None,
        num_last_tokens: int | None = None,
        has_adapters: bool = False,
    ) -> None:
        pages = cache.pages
        dtype = pages.dtype if dtype is None else dtype
        self.cache, self.states, self.block_size = cache, states, pages.shape[3]
        self.device, self.has_kernel = pages.device, reads_tables(cache.attention_backend, PageFormat.of(cache), dtype)
        self._rotation, self._dtype = rotation, dtype
        self.max_blocks, self._group = max_blocks, group
        self._sink, self.has_adapters = pages.shape[2] - 1, has_adapters
        self.last_tokens = torch.zeros(num_last_tokens or max_requests, dtype=torch.int64, device=self.device)
        """[M], the token that was sampled last for each request line; the sampler writes it."""
        # Decode steps that a graph replays read from here.
        most = self._draws_begin(max_requests) + PlainRows.num_words(max_requests)
        self._decode_words = torch.zeros(most, dtype=torch.int32, device=self.device)
        self._starts = torch.arange(max_requests + 1, dtype=torch.int32, device=self.device)
        self._finished = None
        # Counters that launches leave zero, at one address for recordings: of attention, and of recurrent layers.
        self._finished_heads = None
        if self.has_kernel and not cache.holds_latents:
            self._finished_heads = torch.zeros(max_requests * pages.shape[-2], dtype=torch.int32, device=self.device)
        if states is not None:
            groups = states.config.mamba_conv_states_shape[1]
            self._finished = torch.zeros(max_requests * groups, dtype=torch.int32, device=self.device)

    def build(self, host: HostStep) -> StepInputs:
        """A step of any rows."""
        lengths_R, num_decode = host.lengths_R, int((host.lengths_R == 1).sum())
        assert (lengths_R[:num_decode] == 1).all(), "rows of one token come first"
        starts_R = np.cumsum(lengths_R) - lengths_R
        positions_T, slots_T = self._places(host, starts_R)
        parts = [host.tokens_T, positions_T, slots_T]
        total = len(positions_T)
        # Without one, nothing of the base is computed otherwise.
        adapts = self.adapts(host)
        if adapts:
            parts.append(np.repeat(_adapters(host), lengths_R))
        num_places = sum(map(len, parts))
        if self.has_kernel:
            contexts_R, tables_RB = host.cached_R + lengths_R, host.tables_RB
            known = HostRows(lengths_R=lengths_R, contexts_R=contexts_R, tables_RB=tables_RB)
            if self.cache.attention_backend is not None:
                # A library may follow entries behind the last, and mask what it finds there.
                tables_RB = np.maximum(tables_RB, 0)
            parts += [starts_R, [total], contexts_R, tables_RB.ravel()]
            others = np.arange(num_decode, len(lengths_R))
            continued = host.cached_R[num_decode:] > 0
            tiles, whole_tiles = (prefill_tiles(lengths_R[rows], rows, self._group) for rows in (others[continued], others[~continued]))
            words = self.send_words(np.concatenate([*parts, *tiles, *whole_tiles]))
            head, rest = words[:num_places], words[num_places:]
            rows: TableRows | GatheredRows = self._table_rows(rest, known, num_decode, len(tiles[0]))
        else:
            head = self.send_words(np.concatenate(parts))
            rows = self._continued_rows(host, slots_T) or self._gathered_rows(host, num_decode)
        recurrent = None
        if self.states is not None:
            self._clear_fresh(host)
            recurrent = self._recurrent_rows(self.states, self.send(host.lines_R), num_decode, tuple(lengths_R[num_decode:].tolist()))
        return self._inputs(head[: 3 * total], rows, recurrent, head[3 * total :] if adapts else None)

    def sink_step(self, lengths: Sequence[int], cached: Sequence[int]) -> HostStep:
        """A step of no request: rows of these lengths behind so many tokens, which write to the sink.

        Args:
            lengths: tokens of each row, those of one first.
            cached: tokens before them, which are what the sink holds.
        """
        tables_RB = np.full((len(lengths), self.max_blocks), self._sink)
        return HostStep(
            tokens_T=np.zeros(sum(lengths), dtype=np.int64), lengths_R=np.array(lengths), cached_R=np.array(cached), tables_RB=tables_RB,
            lines_R=np.arange(len(lengths)), adapters_R=np.zeros(len(lengths), dtype=np.int64) if self.has_adapters else None,
        )  # fmt: skip

    def adapts(self, host: HostStep) -> bool:
        """Whether a row of a step has an adapter."""
        return self.has_adapters and host.adapters_R is not None and bool((host.adapters_R >= 0).any())

    def decode_inputs(self, num_rows: int, words: Tensor | None = None, *, adapts: bool = True) -> StepInputs:
        """Tensors of a step of ``num_rows`` rows of one token each.

        Args:
            num_rows: whatever the words say.
            words: of ``decode_words``, on the device; None for those that ``send_decode`` fills, whose addresses never change.
            adapts: whether rows may have adapters, where there are some.
        """
        draws = None
        if words is None:
            words, begin = self._decode_words[: self.num_decode_words(num_rows)], self._draws_begin(num_rows)
            draw_words = self._decode_words[begin : begin + PlainRows.num_words(num_rows)]
            draws = PlainInputs(words=draw_words, lines_R=words[4 * num_rows : 5 * num_rows])
        sizes = [num_rows, num_rows, num_rows * self.max_blocks]
        contexts, lines, tables, adapters = words[3 * num_rows :].split([*sizes, len(words) - 3 * num_rows - sum(sizes)])
        rows = TableRows(
            tables_RB=tables.view(num_rows, self.max_blocks),
            starts_R=self._starts[: num_rows + 1],
            contexts_R=contexts,
            num_decode=num_rows,
            tiles=None,
            whole_tiles=None,
            block_size=self.block_size,
            longest=self.max_blocks * self.block_size,
            longest_query=1,
        )
        recurrent = None if self.states is None else self._recurrent_rows(self.states, lines.long(), num_rows, ())
        inputs = self._inputs(words[: 3 * num_rows], rows, recurrent, adapters if self.has_adapters and adapts else None)
        return replace(inputs, draws=draws)

    def send_decode(self, host: HostStep, num_rows: int) -> None:
        """Fill the tensors of ``decode_inputs(num_rows)``, draws included, with a step of at most as many rows; the others are padding."""
        self._clear_fresh(host)
        begin = self._draws_begin(num_rows)
        words = np.zeros(begin + PlainRows.num_words(num_rows), dtype=np.int32)
        words[: self.num_decode_words(num_rows)] = self.decode_words(host, num_rows)
        if host.draws is not None:
            words[begin:] = host.draws.words(num_rows)
        self.fill(self._decode_words, words)

    def _draws_begin(self, num_rows: int) -> int:
        """Where settings of draws begin in the words of a recorded decode step: a multiple of 16 bytes, for one kernel of all sizes."""
        return -(-self.num_decode_words(num_rows) // 4) * 4

    def num_decode_words(self, num_rows: int) -> int:
        """Of ``decode_words``."""
        return num_rows * (5 + self.max_blocks + self.has_adapters)

    def decode_words(self, host: HostStep, num_rows: int) -> np.ndarray:
        """What ``decode_inputs(num_rows)`` reads, int32: a step of at most as many rows, and padding."""
        real, B = len(host.lengths_R), self.max_blocks
        words = np.zeros(self.num_decode_words(num_rows), dtype=np.int32)
        tokens, positions, slots, contexts, lines = words[: 5 * num_rows].reshape(5, num_rows)
        tokens[:real] = host.tokens_T
        positions[:real] = host.cached_R
        slots[real:] = self._sink * self.block_size
        slots[:real] = self._places(host, np.arange(real))[1]
        contexts[:real] = host.cached_R + 1
        # Rows of padding have no state.
        lines[:real], lines[real:] = host.lines_R, -1
        tables, adapters = np.split(words[5 * num_rows :], [num_rows * B])
        tables.reshape(num_rows, B)[:real] = np.maximum(host.tables_RB, 0)
        if self.has_adapters:
            adapters[:real], adapters[real:] = _adapters(host), -1
        return words

    def send_mixed(self, words: Tensor, host: HostStep, rows: Sequence[int], size: InferenceBatchDimensions) -> None:
        """Fill what ``mixed_inputs`` of the same size reads with a step that fits into it, and padding.

        Tokens of padding are a row behind the others, which attends to nothing and writes to the sink. Places of requests that are left
        over are rows without a token.

        Args:
            words: int32, at least ``num_mixed_words`` on the device.
            host: the step. Requests with one token may take places of prompts.
            rows: its tokens whose logits are read, at most as many as the size has requests.
            size: of the recording.
        """
        self._clear_fresh(host)
        self.fill(words, self.mixed_words(host, rows, size))

    def mixed_words(self, host: HostStep, rows: Sequence[int], size: InferenceBatchDimensions) -> np.ndarray:
        """What ``send_mixed`` fills in."""
        layout = self._mixed_layout(size)
        total, T, D = len(host.tokens_T), size.token_count, size.decode_req_count
        lengths_R, num_rows = host.lengths_R, len(host.lengths_R)
        num_decode = min(int((lengths_R == 1).sum()), D)
        starts_R = np.cumsum(lengths_R) - lengths_R
        place_R = np.arange(num_rows)
        place_R[num_decode:] += D - num_decode
        words = np.zeros(sum(layout.sizes), dtype=np.int32)
        head, starts, contexts, tables, tiles, read, lines, adapters = np.split(words, np.cumsum(layout.sizes)[:-1])
        tokens_T, positions_T, slots_T = head.reshape(3, T)
        tokens_T[:total] = host.tokens_T
        slots_T[total:] = self._sink * self.block_size
        positions_T[:total], slots_T[:total] = self._places(host, starts_R)
        padding, empty = layout.num_rows - 2, layout.num_rows - 1
        starts[:], starts[empty:] = total, T
        starts[num_decode:D] = num_decode
        starts[place_R] = starts_R
        contexts[place_R] = host.cached_R + lengths_R
        tables.reshape(layout.num_rows, self.max_blocks)[place_R] = host.tables_RB
        lengths = np.append(lengths_R[num_decode:], T - total)
        tile_rows, firsts = prefill_tiles(lengths, np.append(place_R[num_decode:], padding), self._group)
        both = tiles.reshape(2, layout.num_tiles)
        both[0], both[0, : len(tile_rows)], both[1, : len(firsts)] = empty, tile_rows, firsts
        read[: len(rows)] = rows
        if self.states is not None:
            # Places without a token have no state of their own: those of prompts name one that no row has, and leave it as it is.
            free = np.setdiff1d(np.arange(len(self.last_tokens)), host.lines_R)
            lines[:D], lines[D:] = -1, free[0] if len(free) else -1
            lines[place_R] = host.lines_R
        if self.has_adapters:
            adapters[:total], adapters[total:] = np.repeat(_adapters(host), lengths_R), -1
        return words

    def num_mixed_words(self, size: InferenceBatchDimensions) -> int:
        """Of ``send_mixed``."""
        return sum(self._mixed_layout(size).sizes)

    def mixed_inputs(self, words: Tensor, size: InferenceBatchDimensions, *, adapts: bool = True) -> tuple[StepInputs, Tensor]:
        """A step with prompts, and int64 [requests of the size], tokens whose logits are read.

        Args:
            words: of ``send_mixed``.
            size: whose shapes the tensors have, whatever the words say.
            adapts: as of ``decode_inputs``.
        """
        layout = self._mixed_layout(size)
        head, starts, contexts, tables, tiles, read, lines, adapters = words.split(layout.sizes)
        rows = TableRows(
            tables_RB=tables.view(layout.num_rows, self.max_blocks),
            starts_R=starts,
            contexts_R=contexts,
            num_decode=size.decode_req_count,
            tiles=_pair(tiles),
            whole_tiles=None,
            block_size=self.block_size,
            longest=self.max_blocks * self.block_size,
            longest_query=size.token_count,
        )
        recurrent = None
        if self.states is not None:
            places = starts[size.decode_req_count : size.req_count + 1]
            recurrent = self._recurrent_rows(self.states, lines.long(), size.decode_req_count, (), places)
        return self._inputs(head, rows, recurrent, adapters if self.has_adapters and adapts else None), read.long()

    def _mixed_layout(self, size: InferenceBatchDimensions) -> "_MixedLayout":
        return _MixedLayout.of(size, self._group, self.max_blocks, has_adapters=self.has_adapters)

    def _places(self, host: HostStep, starts_R: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Positions and slots [T]."""
        row_T = np.repeat(np.arange(len(host.lengths_R)), host.lengths_R)
        positions_T = host.cached_R[row_T] + np.arange(len(row_T)) - starts_R[row_T]
        return positions_T, self._slots(host.tables_RB[row_T, positions_T // self.block_size], positions_T)

    def _inputs(
        self, words: Tensor, rows: TableRows | GatheredRows, recurrent: RecurrentRows | None = None, adapters_T: Tensor | None = None
    ) -> StepInputs:
        """Of [3 T] tokens, positions and slots on the device."""
        if has_kernels(self.device, torch.float32):
            from mcore_inference.context._step_triton import enter_step

            tokens_T, positions_T, slots_T = enter_step(words, self.last_tokens)
        else:
            tokens_T, positions_T, slots_T = words.view(3, -1).long()
            tokens_T = torch.where(tokens_T < 0, self.last_tokens[(-1 - tokens_T).clamp(min=0)], tokens_T)
        paged = PagedStep(cache=self.cache, slots_T=slots_T, rows=rows, rotation=self._rotation, finished=self._finished_heads)
        step = Step(batch_size=1, seq_len=len(positions_T), positions=positions_T, attention=paged, states=recurrent)
        return StepInputs(tokens_T=tokens_T, step=step, adapters_T=adapters_T)

    def _table_rows(self, words: Tensor, host: HostRows, num_decode: int, num_tiles: int) -> TableRows:
        num_rows, num_blocks = host.tables_RB.shape
        sizes = [num_rows + 1, num_rows, num_rows * num_blocks, 2 * num_tiles]
        starts, contexts, tables, tiles, whole_tiles = words.split([*sizes, len(words) - sum(sizes)])
        return TableRows(
            tables_RB=tables.view(num_rows, num_blocks),
            starts_R=starts,
            contexts_R=contexts,
            num_decode=num_decode,
            tiles=_pair(tiles),
            whole_tiles=_pair(whole_tiles),
            block_size=self.block_size,
            longest=self.max_blocks * self.block_size,
            longest_query=int(host.lengths_R.max()),
            host=host,
        )

    def _recurrent_rows(
        self, states: RecurrentStateCache, slots_R: Tensor, num_decode: int, lengths: tuple[int, ...], starts: Tensor | None = None
    ) -> RecurrentRows:
        """Where the rows' states lie."""
        return RecurrentRows(
            layers=states.layers, slots=slots_R, num_decode=num_decode, lengths=lengths, starts=starts, finished=self._finished
        )

    def _clear_fresh(self, host: HostStep) -> None:
        """A row that begins here finds zeros."""
        fresh_N = host.lines_R[host.cached_R == 0]
        if self.states is not None and len(fresh_N):
            self.states.clear(self.send(fresh_N))

    def decode_contexts(self, num_rows: int) -> DecodeContexts | None:
        """For steps of the same rows, one token each; None where contexts are not gathered on a CPU in a dtype whose scores keep digits."""
        if self.has_kernel or self.device.type != "cpu" or self._dtype not in (torch.float32, torch.float64):
            return None
        layers, _, _, _, kv_heads, _ = self.cache.pages.shape
        return DecodeContexts(num_rows, layers * 2 * kv_heads * self.cache.width * self._dtype.itemsize)

    def _continued_rows(self, host: HostStep, slots_T: np.ndarray) -> GatheredRows | None:
        contexts, ends = host.contexts, host.cached_R + 1
        if contexts is None or not contexts.takes(int(ends.max())):
            return None
        rows = ContinuedRows(
            contexts=contexts,
            positions_R=self._tensor(host.cached_R),
            slots_R=self._tensor(slots_T),
            context_RL=self._tensor(self._context(host.tables_RB, ends)[0]) if contexts.is_empty else None,
            length=int(ends.max()),
            is_even=bool((ends == ends[0]).all()),
        )
        return GatheredRows(decode=rows, prefill=None)

    def _gathered_rows(self, host: HostStep, num_decode: int) -> GatheredRows:
        decode = prefill = None
        if num_decode:
            ends = host.cached_R[:num_decode] + 1
            context, visible = self._context(host.tables_RB[:num_decode], ends)
            decode = DecodeRows(context_RL=self._tensor(context), visible_RL=self._tensor(visible), positions_R=self._tensor(ends - 1))
        if num_decode < len(host.lengths_R):
            prefill = self._prefill_rows(host.tables_RB[num_decode:], host.cached_R[num_decode:], host.lengths_R[num_decode:], num_decode)
        return GatheredRows(decode=decode, prefill=prefill)

    def _prefill_rows(self, table_PB: np.ndarray, cached_P: np.ndarray, lengths_P: np.ndarray, first_token: int) -> PrefillRows:
        context_PL, valid_PL = self._context(table_PB, cached_P + lengths_P)
        starts_P = np.cumsum(lengths_P) - lengths_P
        query_PQ = np.minimum(np.arange(lengths_P.max())[None, :], lengths_P[:, None] - 1)
        row_T = np.repeat(np.arange(len(lengths_P)), lengths_P)
        place_T = np.arange(int(lengths_P.sum())) - starts_P[row_T]
        positions_PQ = cached_P[:, None] + query_PQ
        visible = None
        if cached_P.any():
            visible = (np.arange(context_PL.shape[1])[None, None, :] <= positions_PQ[:, :, None]) & valid_PL[:, None, :]
        return PrefillRows(
            first_token=first_token,
            tokens_PQ=self._tensor(starts_P[:, None] + query_PQ),
            rows_T=self._tensor(row_T * query_PQ.shape[1] + place_T),
            context_PL=self._tensor(context_PL),
            visible_PQL=None if visible is None else self._tensor(visible),
            positions_PQ=self._tensor(positions_PQ),
        )

    def _context(self, table_RB: np.ndarray, ends_R: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Slots of each row's first ``end`` tokens, padded to the longest, and which are not padding."""
        position_L = np.arange(int(ends_R.max()))
        valid_RL = position_L[None, :] < ends_R[:, None]
        position_RL = np.where(valid_RL, position_L[None, :], 0)
        blocks_RL = np.take_along_axis(table_RB, position_RL // self.block_size, axis=1)
        return self._slots(blocks_RL, position_RL), valid_RL

    def _slots(self, blocks: np.ndarray, positions: np.ndarray) -> np.ndarray:
        return blocks * self.block_size + positions % self.block_size

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    def send(self, numbers: Sequence[int] | np.ndarray) -> Tensor:
        """Numbers as int64 on the device; nobody waits."""
        return self._pinned(np.asarray(numbers, dtype=np.int64)).to(self.device, non_blocking=True)

    def fill(self, target: Tensor, words: np.ndarray) -> None:
        """Copy words to the beginning of a tensor of their dtype on the device; nobody waits."""
        target[: len(words)].copy_(self._pinned(words), non_blocking=True)

    def send_words(self, words: np.ndarray) -> Tensor:
        """An array as int32 on the device; nobody waits."""
        return self._pinned(words.astype(np.int32)).to(self.device, non_blocking=True)

    def _pinned(self, words: np.ndarray) -> Tensor:
        """On the host; a copy to a GPU from it runs beside the host."""
        tensor = torch.from_numpy(words)
        return tensor.pin_memory() if self.device.type == "cuda" else tensor


@dataclass(frozen=True)
class _MixedLayout:
    """Shapes of a recorded step with prompts: rows of one token, rows of several, one of padding and one without a token."""

    num_rows: int
    num_tiles: int
    sizes: list[int]
    """Words of tokens, positions and slots; starts; contexts; tables; tiles; tokens whose logits are read; lines; adapters."""

    @classmethod
    def of(cls, size: InferenceBatchDimensions, group: int, max_blocks: int, *, has_adapters: bool) -> "_MixedLayout":
        num_rows = size.req_count + 2
        # Each row may have a tile that is not full, the row of padding too.
        num_tiles = len(prefill_tiles(np.array([size.token_count]), np.zeros(1), group)[0]) + size.prefill_req_count + 1
        sizes = [3 * size.token_count, num_rows + 1, num_rows, num_rows * max_blocks, 2 * num_tiles]
        sizes += [size.req_count, size.req_count, size.token_count if has_adapters else 0]
        return cls(num_rows, num_tiles, sizes)


def _adapters(host: HostStep) -> np.ndarray:
    """[R]."""
    return np.full(len(host.lengths_R), -1) if host.adapters_R is None else host.adapters_R


def _pair(words: Tensor) -> tuple[Tensor, Tensor] | None:
    first, second = words.view(2, -1)
    return (first, second) if len(first) else None
