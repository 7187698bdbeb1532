# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Proposals by heads that read the served model's states, with keys and values of their own."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mcore_inference._capability import check_cores, reads_rows
from mcore_inference.attention import PagedAttention, PageFormat
from mcore_inference.context import DynamicInferenceContext, HostStep, StepBuilder
from mcore_inference.engine._active_request import ActiveRequest
from mcore_inference.engine._draft_graphs import DraftGraphs
from mcore_inference.engine._draft_passes import DraftInputs, DraftPass, DraftRunner
from mcore_inference.engine._mixed_graphs import proposal_sizes
from mcore_inference.engine._recording_pool import RecordingPool
from mcore_inference.sampling import SamplingParams, SamplingRows
from mcore_inference.speculation import DraftHeads, EagleHeads, EagleSpeculation, MtpHeads, MtpSpeculation
from mcore_parallel.backends import TorchBackend
from mcore_parallel.models import GPTModel
from mcore_parallel.nn import LatentSelfAttention

_NOBODYS_PLACES_41 = np.array([[0], [-1], [0], [-1]])
"""Of ``DraftPass.places_4S``, a request without proposal or kept state."""


@dataclass(kw_only=True)
class _Trail:
    """How far the heads have followed a request; a row is the place of a token whose state they read."""

    first: int
    """The first row that they can read: what lies before came from the cache."""
    end: int
    """Rows [first, end) are done by head 0. Of head k the state of row ``end - k - 1``, the next head's first one next time, is kept."""


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
        recorded: numbers of requests whose passes are recorded, where they can be, and the pool of these recordings; None for none.

    Raises:
        ValueError: heads that do not fit, a layout with pp, a batch-invariant backend.
    """

    def __init__(
        self,
        model: GPTModel,
        context: DynamicInferenceContext,
        speculation: MtpSpeculation | EagleSpeculation,
        vocab_size: int,
        recorded: tuple[Sequence[int], RecordingPool] | None = None,
    ) -> None:
        _check(model, type(speculation).__name__)
        heads: DraftHeads = EagleHeads(speculation.head, model) if isinstance(speculation, EagleSpeculation) else MtpHeads(model)
        self.num_tokens = speculation.num_tokens or heads.num_heads
        self.modules = heads.modules
        """Of the model, whose outputs the heads read."""
        self._heads, self._context, self._vocab_size = heads, context, vocab_size
        self._builder = builder = _builder(heads, context, model.dtype, self.num_tokens)
        self._runner = DraftRunner(
            heads,
            builder,
            max_requests=context.max_requests,
            max_tokens=context.max_tokens,
            hidden_size=model.config.hidden_size,
            dtype=model.dtype,
            vocab_size=vocab_size,
        )
        self.graphs: DraftGraphs | None = None
        if recorded is not None and not _cuts_on_host(builder) and (model.mtp is None or not reads_rows(model.mtp)):
            rows, pool = recorded
            if sizes := proposal_sizes(rows, 1 + self.num_tokens, context.max_tokens):
                counts = {"num_heads": heads.num_heads, "num_tokens": self.num_tokens}
                self.graphs = DraftGraphs(self._runner.run, builder, sizes, **counts, pool=pool)
        self._fresh: list[_Segment] = []
        self._trails: dict[ActiveRequest, _Trail] = {}

    def count(self, entry: ActiveRequest, limit: int) -> int:
        """Tokens that can be proposed for a request that decodes, at most ``limit``."""
        return min(self.num_tokens, limit) if entry.grammar is None else 0

    def take_states(self, states: Mapping[str, Tensor]) -> None:
        """Take the outputs [T, D] of ``modules`` of a step."""
        self._runner.take_states([states[name] for name in self.modules])

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
        drawn = self._run(self._plan(segments, counts), segments).tolist()
        for place, segment in enumerate(segments):
            trails[segment.entry].end = segment.end
            segment.entry.drafts = [row[place] for row in drawn[: counts[segment.entry]]]

    def _run(self, passes: Sequence[DraftPass], segments: Sequence[_Segment]) -> Tensor:
        """As of ``DraftRunner.run``."""
        entries = [segment.entry for segment in segments]
        settings = [entry.params for entry in entries], [entry.seed for entry in entries], [entry.position for entry in entries]
        if self.graphs is not None:
            tokens_NS = self.graphs.run(passes, SamplingRows.of(*settings, self._vocab_size))
            if tokens_NS is not None:
                return tokens_NS
        return self._launch(passes, SamplingRows.of(*settings, self._vocab_size, self._context.device))

    def warm_up(self, lengths: Sequence[int], cached: Sequence[int]) -> None:
        """Run all passes behind a step of no request, launched kernel by kernel, with draws of every kind.

        Args:
            lengths, cached: as of ``StepBuilder.sink_step``.
        """
        num_rows, passes = len(lengths), list[DraftPass]()
        places_4S = np.repeat(_NOBODYS_PLACES_41, num_rows, axis=1)
        for number in range(1, max(self._heads.num_heads, self.num_tokens) + 1):
            sizes = lengths if number <= self._heads.num_heads else [1] * num_rows
            host, sources_T = self._builder.sink_step(sizes, cached), np.zeros(sum(sizes), dtype=np.int64)
            passes.append(DraftPass(host=host, sources_T=sources_T, places_4S=places_4S, draws=number <= self.num_tokens))
        for kind in (SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_k=40, top_p=0.9, min_p=0.01)):
            zeros = [0] * num_rows
            self._launch(passes, SamplingRows.of([kind] * num_rows, zeros, zeros, self._vocab_size, self._context.device))

    def _launch(self, passes: Sequence[DraftPass], settings: SamplingRows) -> Tensor:
        """As of ``DraftRunner.run``, without a recording."""
        send, build = self._builder.send, self._builder.build
        inputs = [
            DraftInputs(
                step=functools.partial(build, one.host), sources_T=send(one.sources_T), places_4S=send(one.places_4S), draws=one.draws
            )
            for one in passes
        ]
        return self._runner.run(inputs, settings)

    def _plan(self, known: Sequence[_Segment], counts: Mapping[ActiveRequest, int]) -> list[DraftPass]:
        """The passes behind the step in which these segments were computed."""
        passes, before = list[DraftPass](), {segment.entry: segment for segment in known}
        for number in range(1, max(self._heads.num_heads, *counts.values()) + 1):
            segments = [
                _Segment(entry=segment.entry, begin=rows[0], end=rows[1], offset=0)
                for segment in known
                if (rows := self._rows(number, segment, counts[segment.entry])) is not None
            ]
            if not segments:
                break
            # Rows of one token come first, as in every step.
            segments.sort(key=lambda segment: segment.end - segment.begin > 1)
            sources_T = self._sources(number, segments, before)
            before = {segment.entry: segment for segment in segments}
            places_4S = self._places(number, known, before, counts)
            draws = any(count >= number for count in counts.values())
            passes.append(DraftPass(host=self._step(number, segments, known), sources_T=sources_T, places_4S=places_4S, draws=draws))
        return passes

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

    def _sources(self, number: int, segments: Sequence[_Segment], before: Mapping[ActiveRequest, _Segment]) -> np.ndarray:
        """As of ``DraftPass``, from the pass before or what was kept; the segments get their offsets."""
        further, num_kept = number > self._heads.num_heads, self._context.max_requests + 1 if 1 < number <= self._heads.num_heads else 0
        places: list[int] = []
        for segment in segments:
            source, segment.offset = before[segment.entry], len(places)
            if further:
                places.append(source.place(source.end - 1))
                continue
            if segment.begin < source.begin:
                places.append(self._line(segment.entry))
            places += range(num_kept + source.place(max(segment.begin, source.begin)), num_kept + source.place(segment.end))
        return np.array(places)

    def _places(
        self, number: int, known: Sequence[_Segment], segments: Mapping[ActiveRequest, _Segment], counts: Mapping[ActiveRequest, int]
    ) -> np.ndarray:
        """As of ``DraftPass``."""
        places_4S = np.repeat(_NOBODYS_PLACES_41, len(known), axis=1)
        for column, own in zip(places_4S.T, known, strict=True):
            segment, line = segments.get(own.entry), self._line(own.entry)
            if segment is None:
                continue
            if counts[own.entry] >= number:
                column[:2] = segment.place(segment.end - 1), self._draw_place(number, line)
            row = own.end - number
            if number < self._heads.num_heads and segment.begin <= row < segment.end:
                column[2:] = segment.place(row), line
        return places_4S

    def _step(self, number: int, segments: Sequence[_Segment], known: Sequence[_Segment]) -> HostStep:
        """Of pass ``number``."""
        head, ends = min(number, self._heads.num_heads), {segment.entry: segment.end for segment in known}
        work: list[tuple[int, int, list[int]]] = []
        for segment in segments:
            begin, end, last, line = segment.begin + head, segment.end + head, ends[segment.entry], self._line(segment.entry)
            tokens = segment.entry.known_tokens(begin, min(end, last + 1))
            # Tokens behind the last known one are proposals, which only the device knows.
            tokens += [-1 - self._draw_place(place - last, line) for place in range(max(begin, last + 1), end)]
            work.append((segment.entry.record.request_id, segment.begin, tokens))
        return self._context.step_from(work)

    def _draw_place(self, number: int, line: int) -> int:
        """Where pass ``number`` leaves the token of a line."""
        return (number - 1) * self._context.max_requests + line

    def _line(self, entry: ActiveRequest) -> int:
        return self._context.line(entry.record.request_id)


def _check(model: GPTModel, name: str) -> None:
    if (stages := model.groups.pp.size) > 1:
        raise ValueError(f"{name} reads states of one stage, found pp={stages}; serve with pp=1, use NgramSpeculation, or none")
    if isinstance(model.backend, TorchBackend) and model.backend.batch_invariant:
        raise ValueError(f"{name} and batch_invariant=True of the backend exclude each other; use NgramSpeculation, or none")


def _cuts_on_host(builder: StepBuilder) -> bool:
    """Whether steps over the heads' pages with rows of several tokens are cut by numbers of the host, so that no graph can hold one."""
    return not builder.has_kernel or builder.cache.attention_backend not in (None, "triton")


def _builder(heads: DraftHeads, context: DynamicInferenceContext, dtype: torch.dtype, num_tokens: int) -> StepBuilder:
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
    pages = context.allocate_draft_pages(
        num_layers=len(heads.mixers),
        num_kv_heads=kv_heads,
        head_dim=width,
        dtype=dtype,
        parts=parts,
        layers=tuple(mixer.layer for mixer in heads.mixers),
        latent_rank=rank,
        attention_backend=backends.pop(),
    )
    group = 1 if isinstance(first, LatentSelfAttention) else first.spec.num_heads // kv_heads
    return StepBuilder(
        pages,
        max_requests=context.max_requests,
        max_blocks=context.max_blocks_per_request,
        group=group,
        dtype=dtype,
        num_last_tokens=num_tokens * context.max_requests + 1,
    )
