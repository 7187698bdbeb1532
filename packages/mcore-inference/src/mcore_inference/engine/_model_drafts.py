# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Proposals by heads that read the served model's states, with keys and values of their own."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from mcore_inference._capability import check_cores
from mcore_inference.attention import PagedAttention, PageFormat
from mcore_inference.cache import PagedKVCache
from mcore_inference.context import DynamicInferenceContext, StepBuilder
from mcore_inference.engine._active_request import ActiveRequest
from mcore_inference.sampling import DrawRows, Draws, Sampler
from mcore_inference.speculation import DraftHeads, EagleHeads, EagleSpeculation, MtpHeads, MtpSpeculation
from mcore_parallel.backends import TorchBackend
from mcore_parallel.models import GPTModel
from mcore_parallel.nn import LatentSelfAttention
from mcore_parallel.training.distill import HiddenCapture


@dataclass(kw_only=True)
class _Trail:
    """How far the heads have followed a request; a row is the place of a token whose state they read."""

    first: int
    """The first row that they can read: what lies before came from the cache."""
    end: int
    """Rows [first, end) are done by head 0."""
    states: dict[int, Tensor] = field(default_factory=dict)
    """Of head k its state [1, D] of row ``end - k - 1``, the next head's first one next time."""
    following: dict[int, Tensor] = field(default_factory=dict)
    """Those of the pass in progress, which still reads ``states``."""


@dataclass(kw_only=True)
class _Segment:
    """Rows of one request in a tensor of states."""

    entry: ActiveRequest
    begin: int
    """The first row."""
    end: int
    """Behind the last one."""
    offset: int
    """Where the first one lies in the tensor."""

    def place(self, row: int) -> int:
        return self.offset + row - self.begin


class ModelDrafts:
    """Runs draft heads over the tokens that the model computed, and beyond them.

    Pass i (from 1) reads the token i places behind each row: head i, or the last head with states of its own once all were used. A row's
    keys and values lie in the slot of its token, in pages beside the model's with the same block tables; those of refused proposals are
    written again with the tokens that were drawn instead. Proposals are drawn by the settings and the random numbers of the request, from
    the heads' distributions, so that they are likely what the model will draw.

    Args:
        model: the served one.
        context: its memory; pages of the heads join it.
        speculation: which heads.
        vocab_size: ids that exist.

    Raises:
        ValueError: heads that do not fit, a layout with pp, a batch-invariant backend.
    """

    def __init__(
        self, model: GPTModel, context: DynamicInferenceContext, speculation: MtpSpeculation | EagleSpeculation, vocab_size: int
    ) -> None:
        _check(model, type(speculation).__name__)
        heads: DraftHeads = EagleHeads(speculation.head, model) if isinstance(speculation, EagleSpeculation) else MtpHeads(model)
        self.num_tokens = speculation.num_tokens or heads.num_heads
        self.capture = HiddenCapture(model, heads.modules)
        self._heads, self._context, self._vocab_size = heads, context, vocab_size
        self._builder = _builder(heads, context, model.dtype)
        self._sampler = Sampler(self._builder.last_tokens, vocab_size)
        self._hidden: Tensor | None = None
        self._fresh: list[_Segment] = []
        self._trails: dict[ActiveRequest, _Trail] = {}

    def count(self, entry: ActiveRequest, limit: int) -> int:
        """Tokens that can be proposed for a request that decodes, at most ``limit``."""
        return min(self.num_tokens, limit) if entry.grammar is None else 0

    def take_states(self) -> None:
        """Take what was captured of a step, while ``capture`` is open."""
        states = self.capture.take()
        self._hidden = self._heads.begin([states[name] for name in self._heads.modules])

    def observe(self, rows: Sequence[tuple[ActiveRequest, int]]) -> None:
        """The requests of that step in order, each with its tokens there, before they count as cached."""
        self._fresh, offset = [], 0
        for entry, count in rows:
            begin = self._context.num_cached(entry.record.request_id)
            if entry.grammar is None:
                self._fresh.append(_Segment(entry=entry, begin=begin, end=begin + count, offset=offset))
            offset += count

    def fill(self, running: Sequence[ActiveRequest], granted: Mapping[int, int]) -> None:
        """Follow what was computed since the last time, and propose.

        Args:
            running: requests that run since then; of others nothing is known.
            granted: tokens to propose for some of them, for which the plan has room.
        """
        fresh, self._fresh = self._fresh, []
        known = set(running)
        trails = self._trails = {entry: trail for entry, trail in self._trails.items() if entry in known}
        segments: list[_Segment] = []
        for segment in fresh:
            number = segment.entry.record.request_id
            if segment.entry not in known or (end := min(self._context.num_cached(number), segment.end)) <= segment.begin:
                continue
            segments.append(dataclasses.replace(segment, end=end))
            trail = trails.get(segment.entry)
            if trail is None or trail.end != segment.begin:
                trail = _Trail(first=segment.begin, end=segment.begin)
            trails[segment.entry] = trail
        if not segments:
            return
        counts = {segment.entry: granted.get(segment.entry.record.request_id, 0) for segment in segments}
        for entry, count in counts.items():
            if count:
                # Rows beyond the last known token have slots in the blocks of the step that follows.
                self._context.extend(entry.record.request_id, 1 + count)
        draws = self._passes(segments, counts)
        for segment in segments:
            trail = trails[segment.entry]
            trail.end, trail.states, trail.following = segment.end, {**trail.states, **trail.following}, {}
        for entries, drawn in draws:
            for entry, (token, _, _) in zip(entries, drawn.wait(), strict=True):
                entry.drafts.append(max(token, 0))

    def _passes(self, known: list[_Segment], counts: Mapping[ActiveRequest, int]) -> list[tuple[list[ActiveRequest], Draws]]:
        """What each pass drew, and for whom."""
        assert self._hidden is not None, "a step was observed"
        num_heads, ends = self._heads.num_heads, {segment.entry: segment.end for segment in known}
        hidden, segments, drawn, draws = self._hidden, known, list[Tensor](), list[tuple[list[ActiveRequest], Draws]]()
        for number in range(1, max(num_heads, *counts.values()) + 1):
            sources = {segment.entry: segment for segment in segments}
            segments = [
                _Segment(entry=segment.entry, begin=rows[0], end=rows[1], offset=0)
                for segment in known
                if (rows := self._rows(number, segment, counts[segment.entry])) is not None
            ]
            if not segments:
                break
            # Rows of one token come first, as in every step.
            segments.sort(key=lambda segment: segment.end - segment.begin > 1)
            hidden = self._gather(hidden, number, segments, sources)
            hidden = self._advance(number, hidden, segments, ends, drawn)
            if number < num_heads:
                self._keep(number - 1, hidden, segments, ends)
            proposing = [segment for segment in segments if counts[segment.entry] >= number]
            if proposing:
                last = self._builder.send([segment.place(segment.end - 1) for segment in proposing])
                draws.append(([segment.entry for segment in proposing], self._draw(number, hidden[last], proposing)))
                drawn.append(self._builder.last_tokens.clone())
        return draws

    def _rows(self, number: int, segment: _Segment, count: int) -> tuple[int, int] | None:
        """Of a request that was computed anew in ``segment``: the rows of pass ``number``, or None."""
        num_heads = self._heads.num_heads
        if number > num_heads:
            row = segment.end - 1 + number - num_heads
            return (row, row + 1) if number <= count else None
        # Each head lags one token behind the one before: its last rows were proposals' or none at all.
        begin = max(segment.begin - number + 1, self._trails[segment.entry].first)
        end = segment.end if number <= count else segment.end - number + 1
        return (begin, end) if begin < end else None

    def _gather(self, hidden: Tensor, number: int, segments: Sequence[_Segment], sources: Mapping[ActiveRequest, _Segment]) -> Tensor:
        """[T, D] that these segments read, from the states of the pass before and what was kept; their offsets are set."""
        places: list[int] = []
        extra: list[Tensor] = []
        for segment in segments:
            source, segment.offset = sources[segment.entry], len(places)
            if number > self._heads.num_heads:
                places.append(source.place(source.end - 1))
                continue
            if segment.begin < source.begin:
                places.append(len(hidden) + len(extra))
                extra.append(self._trails[segment.entry].states[number - 2])
            places += range(source.place(max(segment.begin, source.begin)), source.place(segment.end))
        if extra:
            hidden = torch.cat([hidden, *extra])
        return hidden if places == list(range(len(hidden))) else hidden[self._builder.send(places)]

    def _advance(
        self, number: int, hidden: Tensor, segments: Sequence[_Segment], ends: Mapping[ActiveRequest, int], drawn: Sequence[Tensor]
    ) -> Tensor:
        """[T, D] of pass ``number``."""
        head = min(number, self._heads.num_heads)
        work: list[tuple[int, int, list[int]]] = []
        patches: list[tuple[int, int, int]] = []
        for segment in segments:
            begin, end, last = segment.begin + head, segment.end + head, ends[segment.entry]
            # Tokens behind the last known one are proposals, which only the device knows.
            tokens = segment.entry.known_tokens(begin, min(end, last + 1))
            line = self._context.line(segment.entry.record.request_id)
            patches += [(segment.offset + place - begin, place - last - 1, line) for place in range(max(begin, last + 1), end)]
            work.append((segment.entry.record.request_id, segment.begin, tokens + [0] * (end - begin - len(tokens))))
        inputs = self._builder.build(self._context.step_from(work))
        tokens_T = inputs.tokens_T
        if patches:
            places, passes, lines = self._builder.send(np.array(patches).T)
            tokens_T = tokens_T.index_copy(0, places, torch.stack(list(drawn))[passes, lines])
        return self._heads.advance(head - 1, hidden, tokens_T, inputs.step)

    def _keep(self, head: int, hidden: Tensor, segments: Sequence[_Segment], ends: Mapping[ActiveRequest, int]) -> None:
        """Of each request the state of this head that the next one reads first in the next step."""
        for segment in segments:
            row = ends[segment.entry] - head - 1
            if segment.begin <= row < segment.end:
                place = segment.place(row)
                self._trails[segment.entry].following[head] = hidden[place : place + 1].clone()

    def _draw(self, number: int, hidden: Tensor, segments: Sequence[_Segment]) -> Draws:
        """A token for each request, by the random number of its place."""
        entries = [segment.entry for segment in segments]
        lines = [self._context.line(entry.record.request_id) for entry in entries]
        positions, seeds = [entry.position + number - 1 for entry in entries], [entry.seed for entry in entries]
        rows = DrawRows.of([entry.params for entry in entries], seeds, positions, lines, self._vocab_size, self._context.device)
        rows = dataclasses.replace(rows, top_n=(0,) * len(entries), wants_log_probs=False)
        return self._sampler.draw(self._heads.logits(hidden), rows)


def _check(model: GPTModel, name: str) -> None:
    if (stages := model.groups.pp.size) > 1:
        raise ValueError(f"{name} reads states of one stage, found pp={stages}; serve with pp=1, use NgramSpeculation, or none")
    if isinstance(model.backend, TorchBackend) and model.backend.batch_invariant:
        raise ValueError(f"{name} and batch_invariant=True of the backend exclude each other; use NgramSpeculation, or none")


def _builder(heads: DraftHeads, context: DynamicInferenceContext, dtype: torch.dtype) -> StepBuilder:
    """Pages of the heads in the context's memory, and the steps over them.

    Raises:
        ValueError: layers whose attention reads no pages, or of different sizes.
    """
    for mixer in heads.mixers:
        if type(mixer.core) is not PagedAttention:
            kind = getattr(mixer.core, "__name__", type(mixer.core).__name__)
            raise ValueError(f"the attention core of a draft head is {kind}; build it with attention_core=PagedAttention()")
    sizes = {
        (1, mixer.latent.cache_width, 1) if isinstance(mixer, LatentSelfAttention) else (mixer.local_kv_heads, mixer.head_dim, 2)
        for mixer in heads.mixers
    }
    if len(sizes) > 1:
        raise ValueError(f"the layers of a draft head have keys of different sizes {sorted(sizes)}; one size serves all")
    kv_heads, width, parts = sizes.pop()
    first = heads.mixers[0]
    backends = {mixer.core.backend for mixer in heads.mixers if isinstance(mixer.core, PagedAttention)}
    if len(backends) > 1:
        raise ValueError(
            f"the layers of a draft head have attention backends {sorted(map(str, backends))}; build it with one PagedAttention()"
        )
    rank = first.latent.kv_lora_rank if isinstance(first, LatentSelfAttention) else None
    latent = None if rank is None else (rank, width)
    head_dim = None if latent is not None else width
    form = PageFormat(dtype=dtype, device=context.device, block_size=context.block_size, latent=latent, head_dim=head_dim)
    check_cores([(f"layer {number} of the heads", mixer) for number, mixer in enumerate(heads.mixers)], form, dtype)
    pages = PagedKVCache.allocate(
        num_layers=len(heads.mixers),
        num_blocks=context.cache.pages.shape[2],
        block_size=context.block_size,
        num_kv_heads=kv_heads,
        head_dim=width,
        dtype=dtype,
        device=context.device,
        parts=parts,
        layers=tuple(mixer.layer for mixer in heads.mixers),
        memory=context.memory,
        latent_rank=rank,
        attention_backend=backends.pop(),
    )
    group = 1 if isinstance(first, LatentSelfAttention) else first.spec.num_heads // kv_heads
    return StepBuilder(pages, max_requests=context.max_requests, max_blocks=context.max_blocks_per_request, group=group, dtype=dtype)
