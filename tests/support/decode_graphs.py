# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Decode steps as graphs compute them, where there is no device to record them on."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_inference import PagedAttention
from mcore_inference.attention import TableRows
from mcore_inference.context import _step_builder
from mcore_inference.engine import _executor
from mcore_inference.engine._decode_graphs import DecodeGraphs
from mcore_inference.engine._recording_pool import RecordingPool
from mcore_inference.memory import _memory
from mcore_moe import MoELayer
from mcore_parallel.nn import LinearMixer, RecurrentRows, RecurrentState, Step


class EagerCapture:
    """Recording where there is no device; conforms to ``Capture``. A replay computes again, from the tensors that the recording read, and
    leaves NaN (-1 in integers) in the results of all others of its pool, where a graph may leave anything."""

    def __init__(self) -> None:
        self.pools: list[list[Tensor]] = []

    def pool(self) -> list[Tensor]:
        self.pools.append([])
        return self.pools[-1]

    def warm(self, work: Callable[[], Any]) -> Any:
        return work()

    def record(self, work: Callable[[], Any], pool: list[Tensor]) -> tuple[Any, Callable[[], None]]:
        result = work().clone()
        pool.append(result)

        def replay() -> None:
            for other in pool:
                other.fill_(torch.nan if other.is_floating_point() else -1)
            result.copy_(work())

        return result, replay


def record_eagerly() -> None:
    """From now on engines of this process record by an ``EagerCapture``, where they would record on a GPU."""
    _executor.RecordingPool = functools.partial(RecordingPool, EagerCapture)


def serve_as_on_a_gpu() -> list[tuple[int, int]]:
    """From now on engines of this process step on the CPU as on a GPU, in any dtype, recordings included: by block tables and static
    tensors, attention by a reference in place of the kernels.

    Returns:
        Of each replay from now on, those of dummy steps included, the recording's rows and those of requests.
    """
    record_eagerly()
    _step_builder.reads_tables = lambda *_: True
    # Nothing here holds an address.
    _memory.PlainMemory.keeps_addresses = True
    MoELayer.reads_device = property(lambda _: False)
    by_gather, latents_by_gather = PagedAttention.forward, PagedAttention.attend_latent

    def attend(core: PagedAttention, q: Tensor, k: Tensor, v: Tensor, layer: int, step: Step, *, sink: Tensor | None = None) -> Tensor:
        if step.attention is None or not isinstance(step.attention.rows, TableRows):
            return by_gather(core, q, k, v, layer, step, sink=sink)
        cached = step.attention.cache.layer(layer)
        cached.write(step.attention.slots_T, k, v)
        alone = None if core._invariant is None else core._invariant.attend_token
        return attend_tables(q, cached.keys, cached.values, step.attention.rows, alone=alone)

    def attend_latent(core: PagedAttention, queries: Tensor, entries: Tensor, scale: float, layer: int, step: Step) -> Tensor:
        if step.attention is None or not isinstance(step.attention.rows, TableRows):
            return latents_by_gather(core, queries, entries, scale, layer, step)
        cached, rank = step.attention.cache.layer(layer), step.attention.cache.latent_rank
        cached.write(step.attention.slots_T, entries[:, None], entries[:, None])
        return attend_tables(queries, cached.keys, cached.values[..., :rank], step.attention.rows, scale=scale)

    PagedAttention.forward, PagedAttention.attend_latent = attend, attend_latent
    LinearMixer.has_decode_kernel, LinearMixer._decode = property(lambda _: True), decode_by_torch
    replayed: list[tuple[int, int]] = []
    replay = DecodeGraphs._replay

    def note(graphs: DecodeGraphs, host: _step_builder.HostStep, size: int) -> Tensor:
        replayed.append((size, len(host.lengths_R)))
        return replay(graphs, host, size)

    DecodeGraphs._replay = note
    return replayed


def decode_by_torch(mixer: LinearMixer, channels: Tensor, numbers: Tensor, state: RecurrentState, rows: RecurrentRows) -> Tensor:
    """In place of the kernel of single tokens: 0 for rows of padding."""
    slots = rows.slots[: len(channels)]
    real = (slots >= 0).nonzero().flatten()
    y, behind = mixer._mix_tokens(channels[real], numbers[real], state.rows(slots[real]))
    state.write(slots[real], behind)
    return y.new_zeros(len(channels), *y.shape[1:]).index_copy_(0, real, y)


def attend_tables(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: TableRows,
    *,
    scale: float | None = None,
    alone: Callable[[Tensor, Tensor, Tensor, None], Tensor] | None = None,
) -> Tensor:
    """Causal attention [T, A, w] of the tokens of each row to its blocks; zeros for rows of padding.

    Args:
        q: [T, A, d].
        keys: [slots, K, d].
        values: [slots, K, w].
        rows: of the step.
        scale: of the scores; None for 1 / sqrt(d).
        alone: attention of one token, where each is computed by itself.
    """
    out = q.new_zeros(*q.shape[:2], values.shape[-1])
    offsets = torch.arange(rows.block_size)
    starts, contexts = rows.starts_R.tolist(), rows.contexts_R.tolist()
    for table_B, begin, end, context in zip(rows.tables_RB.long(), starts, starts[1:], contexts, strict=False):
        if context and end > begin:
            slots_L = (table_B[:, None] * rows.block_size + offsets).flatten()[:context]
            if alone is not None:
                for token in range(begin, end):
                    seen_L = slots_L[: context - (end - 1 - token)]
                    out[token] = alone(q[token], keys[seen_L], values[seen_L], None)
                continue
            visible = torch.arange(context) <= torch.arange(context - (end - begin), context)[:, None]
            k, v = (x[slots_L].transpose(0, 1) for x in (keys, values))
            row = F.scaled_dot_product_attention(q[begin:end].transpose(0, 1), k, v, attn_mask=visible, scale=scale, enable_gqa=True)
            out[begin:end] = row.transpose(0, 1)
    return out
