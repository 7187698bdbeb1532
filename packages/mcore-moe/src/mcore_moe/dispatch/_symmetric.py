# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Exchange of tokens by direct stores in the memory of the other GPUs of a host."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor

from mcore_moe._stability import experimental_api
from mcore_moe.dispatch import _peer_slots
from mcore_moe.dispatch._arrival import gather_numbers
from mcore_moe.dispatch._flex import FlexPicks
from mcore_moe.dispatch._peer_slots import Slot, SlotLayout
from mcore_moe.dispatch._places import place_rows, spread_rows
from mcore_parallel import Group

if TYPE_CHECKING:
    from mcore_parallel.graphs import Recording

# G ranks, T tokens of this rank, A places for tokens of all ranks, K experts a token, N experts of a rank, R rows, D model.

_TOKENS, _SUMS = _SLOTS = range(2)
_ROOM_STEP = 16


class PeerMemory(Protocol):
    """Equally many bytes of each rank, which all ranks store in (``mcore_parallel.comm.SymmetricBuffer``)."""

    peers: Sequence[Tensor]
    """uint8, of each rank, as this one addresses it."""
    addresses: Tensor
    """int64 [G] on the device, where they begin."""

    def barrier(self) -> None:
        """What any rank stored before it is there behind it."""
        ...


@dataclass(frozen=True)
class ExchangePlan:
    """Where the tokens of one exchange went."""

    layout: SlotLayout
    experts_TK: Tensor
    """int32, of this rank's tokens."""
    places_AK: Tensor
    """int32, the row of each pick of all ranks' tokens; -1 where it is not this rank's."""
    num_rows: int
    has_gradient: bool
    """Of tokens or weights: sums come back in the backward."""


@experimental_api
class SymmetricExchange:
    """Tokens by kernels that store them in the other ranks' memory, once for each rank that holds some of their experts; conforms to
    ``TokenExchange``. No pick is dropped, whatever the routing, and the host waits for the device at the first exchange only.

    Every exchange is: store, barrier, read one's own memory. Memory has a slot for tokens and one for sums. Neither is stored in before all
    ranks have read it: between two exchanges of a kind lies the barrier of the other kind, or one more. All ranks make the same exchanges
    in the same order, on one stream.

    CUDA graphs hold exchanges, a dispatch and its combine, or the backward of both, together; without ``exact_rows``, for it makes the host
    wait. Other ranks may record theirs at other times, or none. Graphs fix the memory, and how many tokens it has room for, until the last
    of them is dropped; those that others than ``mcore_parallel.graphs.CudaCapture`` record do so for good. A recording that fails does not.

    The rows of the experts are a tensor for the worst routing, G * T * min(K, N) rows, of which those behind the last expert are neither
    written nor read. With ``exact_rows`` the host waits for their number, and the tensor holds no others.

    Args:
        group: ranks that exchange.
        num_local_experts: N.
        width: of the tokens that travel.
        connect: makes memory of so many bytes, on all ranks together.
        timeout_s: how long to wait for the other ranks when memory is made.
        max_tokens: T at most, equal on all ranks; None for the most of any rank at the first exchange. Later exchanges may have fewer on
            any rank, and more where all ranks have more, unless a graph has been recorded.
        exact_rows: as above.
    """

    def __init__(
        self,
        group: Group,
        num_local_experts: int,
        width: int,
        *,
        connect: Callable[[int], PeerMemory],
        timeout_s: float,
        max_tokens: int | None = None,
        exact_rows: bool = False,
    ) -> None:
        self._group, self._num_local_experts, self._width = group, num_local_experts, width
        self._connect, self._timeout_s, self._exact_rows = connect, timeout_s, exact_rows
        self._room, self._slot_bytes = max_tokens or 0, 0
        self._memory: PeerMemory | None = None
        # What was stored last: of all that has run, and with what has been recorded behind it.
        self._last = self._last_recorded = _SUMS
        self._recordings: WeakSet[Recording] = WeakSet()
        self._recorded_for_good = False

    def dispatch(self, x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> FlexPicks:
        """As of ``TokenExchange``.

        Raises:
            TimeoutError: this rank has more tokens than fit, and ranks that it names have not.
            ValueError: more tokens than fit, and graphs hold the memory.
        """
        wide = torch.promote_types(torch.float32, x_TD.dtype)
        layout = self._make_room(len(x_TD), experts_TK.shape[1], x_TD, wide)
        rows_RD, weights_R, ends_N, plan = _Dispatch.apply(x_TD, weights_TK.to(wide), experts_TK.to(torch.int32).contiguous(), layout, self)
        return FlexPicks(rows_RD, ends_N, weights_R, plan, len(x_TD))

    def combine(self, rows_RD: Tensor, picks: FlexPicks) -> Tensor:
        """As of ``TokenExchange``; each rank's part of a sum is rounded to the dtype of the tokens."""
        return _Combine.apply(rows_RD, picks.handle, self)

    def send(
        self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, layout: SlotLayout, *, has_gradient: bool
    ) -> tuple[Tensor, Tensor | None, Tensor, ExchangePlan]:
        """Rows in expert order, their weights, the ends of the experts, and the plan."""
        rank, N = self._group.rank, self._num_local_experts
        slot = self._store_tokens(layout, x_TD, experts_TK, weights_TK)
        places_AK, ends_N = place_rows(slot.experts_AK, rank * N, N)
        num_rows = int(ends_N[-1]) if self._exact_rows else layout.most_rows
        plan = ExchangePlan(layout, experts_TK, places_AK, num_rows, has_gradient)
        rows_RD, weights_R = spread_rows(slot.x_AD, slot.weights_AK, places_AK, num_rows)
        return rows_RD, weights_R, ends_N, plan

    def send_again(self, x_TD: Tensor, plan: ExchangePlan) -> Tensor:
        """Other values of the same tokens, [R, D]."""
        slot = self._store_tokens(plan.layout, x_TD, plan.experts_TK, None)
        rows_RD = spread_rows(slot.x_AD, None, plan.places_AK, plan.num_rows)[0]
        if not plan.has_gradient:
            # No sums follow these tokens, and a graph that begins with others was recorded behind sums.
            assert self._memory is not None
            self._memory.barrier()
            self._set_last(_SUMS, recorded=_is_recording(x_TD))
        return rows_RD

    def add_up(self, rows_RD: Tensor, grad_R: Tensor | None, plan: ExchangePlan) -> tuple[Tensor, Tensor | None]:
        """[T, D], each token's sum over its rows, and [T, K], the values in ``grad_R`` of its picks."""
        layout, rank = plan.layout, self._group.rank
        memory, begin = self._slot(_SUMS, rows_RD)
        grad_R = None if grad_R is None else grad_R.to(layout.weights_dtype).contiguous()
        values = rows_RD.to(layout.dtype).contiguous(), plan.places_AK, grad_R
        if rows_RD.is_cuda:
            from mcore_moe.dispatch import _triton_symmetric

            _triton_symmetric.push_sums(layout, memory.addresses, begin, rank, *values)
        else:
            _peer_slots.push_sums(layout, [layout.slot(peer, begin) for peer in memory.peers], rank, *values)
        memory.barrier()
        slot = layout.slot(memory.peers[rank], begin)
        return _moves(rows_RD).add_sums(layout, slot, plan.experts_TK, weighted=grad_R is not None)

    def _store_tokens(self, layout: SlotLayout, x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor | None) -> Slot:
        """This rank's memory with the tokens of all."""
        memory, begin = self._slot(_TOKENS, x_TD)
        rank = self._group.rank
        values = x_TD.to(layout.dtype).contiguous(), experts_TK, None if weights_TK is None else weights_TK.contiguous()
        if x_TD.is_cuda:
            from mcore_moe.dispatch import _triton_symmetric

            _triton_symmetric.push_tokens(layout, memory.addresses, begin, rank, *values)
        else:
            _peer_slots.push_tokens(layout, [layout.slot(peer, begin) for peer in memory.peers], rank, *values)
        memory.barrier()
        return layout.slot(memory.peers[rank], begin)

    def _slot(self, kind: int, values: Tensor) -> tuple[PeerMemory, int]:
        """Where to store, as soon as all ranks have read what lay there. No replay of a graph changes what comes last, tokens or sums."""
        assert self._memory is not None
        recorded = _is_recording(values)
        if recorded:
            self._join_recordings()
        if kind == (self._last_recorded if recorded else self._last):
            self._memory.barrier()
        self._set_last(kind, recorded=recorded)
        return self._memory, kind * self._slot_bytes

    def _set_last(self, kind: int, *, recorded: bool) -> None:
        self._last_recorded = kind
        if not recorded:
            self._last = kind

    def _join_recordings(self) -> None:
        """The memory is theirs from now on; a new one begins behind what has run, whatever one that failed has left."""
        from mcore_parallel.graphs import recordings_under_way

        recordings = recordings_under_way()
        if recordings and self._recordings.isdisjoint(recordings):
            self._last_recorded = self._last
        self._recordings.update(recordings)
        self._recorded_for_good |= not recordings

    def _make_room(self, num_tokens: int, topk: int, x_TD: Tensor, weights_dtype: torch.dtype) -> SlotLayout:
        """Memory for as many tokens, which no rank is still reading; without a wait where they fit."""
        layout = self._layout(self._room, topk, x_TD.dtype, weights_dtype)
        if self._memory is not None and num_tokens <= self._room and layout.num_bytes <= self._slot_bytes:
            return layout
        if self._recorded_for_good or self._recordings or _is_recording(x_TD):
            raise ValueError(
                f"this rank has {num_tokens} tokens, there is room for {self._room if self._memory else 0}, and graphs hold that memory; "
                "set moe_symmetric_max_tokens, or begin with the largest batch, which runs once before a graph is made"
            )
        if x_TD.is_cuda:
            # Behind the numbers of all ranks lie their last stores and reads.
            torch.cuda.synchronize(x_TD.device)
        purpose = (
            f"a larger exchange of tokens (this rank has {num_tokens}, there is room for {self._room}; set moe_symmetric_max_tokens where "
            "ranks have different numbers of tokens)"
        )
        numbers = [num_tokens, self._room, topk]
        everyone = gather_numbers(numbers, self._group, device=x_TD.device, timeout_s=self._timeout_s, purpose=purpose)
        tokens, rooms, topks = (max(column) for column in zip(*everyone, strict=True))
        self._room = -(-max(tokens, rooms, 1) // _ROOM_STEP) * _ROOM_STEP
        layout = self._layout(self._room, max(topks, topk), x_TD.dtype, weights_dtype)
        self._slot_bytes = max(layout.num_bytes, self._slot_bytes)
        self._memory = None
        self._memory = self._connect(len(_SLOTS) * self._slot_bytes)
        return self._layout(self._room, topk, x_TD.dtype, weights_dtype)

    def _layout(self, room: int, topk: int, dtype: torch.dtype, weights_dtype: torch.dtype) -> SlotLayout:
        return SlotLayout(self._group.size, room, self._width, topk, self._num_local_experts, dtype, weights_dtype)


def _is_recording(values: Tensor) -> bool:
    """Whether what is computed of these is not computed now, but recorded in a graph."""
    return values.is_cuda and torch.cuda.is_current_stream_capturing()


def _moves(values: Tensor) -> Any:
    """Who moves, where the values are."""
    if not values.is_cuda:
        return _peer_slots
    from mcore_moe.dispatch import _triton_symmetric

    return _triton_symmetric


class _Dispatch(torch.autograd.Function):
    """Its gradient is a sum over the rows of a token."""

    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, layout: SlotLayout, exchange: SymmetricExchange
    ) -> tuple[Tensor, Tensor | None, Tensor, ExchangePlan]:
        rows_RD, weights_R, ends_N, plan = exchange.send(x_TD, weights_TK, experts_TK, layout, has_gradient=any(ctx.needs_input_grad[:2]))
        ctx.mark_non_differentiable(ends_N)
        ctx.exchange, ctx.plan = exchange, plan
        return rows_RD, weights_R, ends_N, plan

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return *ctx.exchange.add_up(grads[0], grads[1], ctx.plan), None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, plan: ExchangePlan, exchange: SymmetricExchange) -> Tensor:
        ctx.exchange, ctx.plan = exchange, plan
        return exchange.add_up(rows_RD, None, plan)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.exchange.send_again(grads[0], ctx.plan), None, None
