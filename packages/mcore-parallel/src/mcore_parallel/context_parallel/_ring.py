# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Attention over a ring of ranks: keys and values travel, queries stay, partial results are merged by their log-sum-exp."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mcore_parallel.comm import Arrival, P2PCommunicator, TensorSpec
from mcore_parallel.context_parallel._partial import PartialAttention
from mcore_parallel.context_parallel._tiles import Spans, Tile, Window, plan_tiles
from mcore_parallel.context_parallel._zigzag import segments
from mcore_parallel.groups import Group


# T rows of this rank, A heads, K key-value heads, d width of a head.
@dataclass(frozen=True)
class Round:
    """What a rank computes while it holds the keys and values of the rank ``distance`` places before it."""

    distance: int
    tiles: tuple[Tile, ...]


def plan_ring(lengths: Sequence[int], size: int, rank: int, window: Window) -> tuple[Round, ...]:
    """The rounds of a rank; a distance at which the window leaves no rank anything to compute has none.

    Args:
        lengths: of the whole sequences.
        size: ranks of the ring.
        rank: of them.
        window: as of ``plan_tiles``.

    Raises:
        SequenceSplitError: 2 ``size`` does not divide a length.
    """
    held = [segments(lengths, size, number) for number in range(size)]

    def tiles(rank: int, distance: int) -> list[Tile]:
        return plan_tiles(held[rank], held[(rank - distance) % size], window)

    # Without a limit on the left the last rank needs what every rank holds.
    wanted = [
        distance for distance in range(size) if window[0] < 0 or distance == 0 or any(tiles(other, distance) for other in range(size))
    ]
    return tuple(Round(distance, tuple(tiles(rank, distance))) for distance in wanted)


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    rounds: Sequence[Round],
    group: Group,
    kernel: PartialAttention,
    scale: float,
) -> Tensor:
    """Attention of this rank's queries to the keys and values of all ranks.

    The transfer of a round runs while the one before it is computed. The backward sends keys and values round again, and
    their gradients (in float32, or float64) behind them.

    Args:
        q: [T, A, d].
        k: [T', K, d].
        v: [T', K, d].
        sink: [A] logits of a key without a value, or None.
        rounds: by ``plan_ring``, or of keys that lie here.
        group: the ring; equally many rows on every rank.
        kernel: computes the tiles.
        scale: of the scores.

    Returns:
        [T, A, d].
    """
    return _RingAttention.apply(q, k, v, sink, tuple(rounds), group, kernel, scale)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        rounds: tuple[Round, ...],
        group: Group,
        kernel: PartialAttention,
        scale: float,
    ) -> Tensor:
        width = k.shape[-1]
        kv = own = torch.cat((k, v), dim=-1)
        ring = _Ring(group)
        merged = _Merged(q, v.shape[-1])
        for number, round_ in enumerate(rounds):
            coming = ring.pass_on(kv, rounds[number + 1].distance - round_.distance) if number + 1 < len(rounds) else None
            for tile in round_.tiles:
                merged.add(tile.queries, *kernel.forward(q, kv[..., :width], kv[..., width:], tile, scale))
            kv = kv if coming is None else coming()
        ring.finish()
        out, lse = merged.finish(sink)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, own, sink, out, lse)
        ctx.plan = rounds, group, kernel, scale, width
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, kv, sink, out, lse = ctx.saved_tensors
        rounds, _, kernel, scale, width = ctx.plan
        (grad,) = grads
        grad = grad.contiguous()
        tile = _only_tile(rounds, q, kv)
        if tile is not None:
            dq, dk, dv = kernel.backward(grad, q, kv[..., :width], kv[..., width:], out, lse, tile, scale)
        else:
            dq, dk, dv = _add_up(grad, q, kv, out, lse, *ctx.plan)
        dsink = None
        if sink is not None:
            share = (sink.to(lse.dtype) - lse).exp()
            dsink = -(share * (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1)).sum(0).to(sink.dtype)
        return dq.to(q.dtype), dk.to(kv.dtype), dv.to(kv.dtype), dsink, None, None, None, None


def _only_tile(rounds: Sequence[Round], q: Tensor, kv: Tensor) -> Tile | None:
    """The tile that is all there is to compute, over all rows in their order: a kernel's results need not be added to anything."""
    if len(rounds) != 1 or len(rounds[0].tiles) != 1:
        return None
    (tile,) = rounds[0].tiles
    return tile if sum(tile.queries.lengths) == len(q) and sum(tile.keys.lengths) == len(kv) else None


def _add_up(
    grad: Tensor,
    q: Tensor,
    kv: Tensor,
    out: Tensor,
    lse: Tensor,
    rounds: Sequence[Round],
    group: Group,
    kernel: PartialAttention,
    scale: float,
    width: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v over all rounds, in the dtype of ``lse``."""
    ring = _Ring(group)
    dq, travelling = torch.zeros_like(q, dtype=lse.dtype), None
    for number, round_ in enumerate(rounds):
        ahead = rounds[number + 1].distance if number + 1 < len(rounds) else None
        coming = None if ahead is None else ring.pass_on(kv, ahead - round_.distance)
        dkv = torch.zeros_like(kv, dtype=lse.dtype)
        for tile in round_.tiles:
            parts = kernel.backward(grad, q, kv[..., :width], kv[..., width:], out, lse, tile, scale)
            _add(dq, tile.queries, parts[0])
            _add(dkv, tile.keys, torch.cat(parts[1:], dim=-1))
        # Gradients follow their keys: they come with what the ranks before this one added, and from the last one go home.
        total = dkv if travelling is None else dkv.add_(travelling())
        travelling = ring.pass_on(total, (group.size if ahead is None else ahead) - round_.distance)
        kv = kv if coming is None else coming()
    assert travelling is not None
    dkv = travelling()
    ring.finish()
    return dq, dkv[..., :width], dkv[..., width:]


class _Ring:
    """Transfers along a ring of ranks."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self._transfers = P2PCommunicator(group)

    def pass_on(self, x: Tensor, places: int) -> Callable[[], Tensor]:
        """Send ``x`` so many places on; returns what waits for the one that comes from as many places back."""
        size = self.group.size
        if places % size == 0:
            return lambda: x
        source = TensorSpec(shape=x.shape, dtype=x.dtype, device=x.device)
        arrival: Arrival
        (arrival,) = self._transfers.transfer([(x, (self.group.rank + places) % size)], [(source, (self.group.rank - places) % size)])
        return arrival.wait

    def finish(self) -> None:
        self._transfers.finish()


class _Merged:
    """Outputs over the keys seen so far, and the log-sum-exp of their scores."""

    def __init__(self, q: Tensor, width: int) -> None:
        self.dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        self._q, self._width = q, width
        self._found: tuple[Tensor, Tensor] | None = None

    def add(self, rows: Spans, out: Tensor, lse: Tensor) -> None:
        """Merge the result over further keys for some of the rows."""
        if self._found is None and sum(rows.lengths) == len(self._q):
            # All rows in order: often the only tile, which then needs no rounding twice.
            self._found = out, lse
            return
        total, norms = self._so_far()
        total = total.to(self.dtype)
        if rows.stride is not None:
            old_out, old_lse = rows.view(total), rows.view(norms)
            merged, both = _merge(old_out, old_lse, out.view(old_out.shape), lse.reshape(old_lse.shape))
            old_out.copy_(merged)
            old_lse.copy_(both)
        else:
            index = rows.rows(out.device)
            merged, both = _merge(total.index_select(0, index), norms.index_select(0, index), out, lse)
            total.index_copy_(0, index, merged)
            norms.index_copy_(0, index, both)
        self._found = total, norms

    def finish(self, sink: Tensor | None) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of all keys, the sink among them once."""
        out, norms = self._so_far()
        if sink is None:
            return out, norms
        lse = torch.logaddexp(norms, sink.to(norms.dtype))
        return out * (norms - lse).exp()[..., None], lse

    def _so_far(self) -> tuple[Tensor, Tensor]:
        if self._found is not None:
            return self._found
        q = self._q
        return q.new_zeros((*q.shape[:-1], self._width), dtype=self.dtype), q.new_full(q.shape[:-1], float("-inf"), dtype=self.dtype)


def _merge(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    both = torch.logaddexp(lse, other_lse)
    return out * (lse - both).exp()[..., None] + other_out * (other_lse - both).exp()[..., None], both


def _add(total: Tensor, rows: Spans, part: Tensor) -> None:
    """Add rows; none of them comes twice."""
    if rows.stride is not None:
        view = rows.view(total)
        view += part.view(view.shape)
    else:
        index = rows.rows(total.device)
        total.index_copy_(0, index, total.index_select(0, index) + part)
