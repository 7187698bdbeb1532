# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Hidden states and gradients between the pipelines of two grids."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_parallel.comm._bridge_plan import BridgeBatch, BridgeEnd, RowTransfer, ShapeExchange, count_rows, plan_rows, plan_spread
from mcore_parallel.groups import HyperCommGrid, uses_nccl


class BridgeCommunicator:
    """Joins the last stage of one grid to the first stage of another that has other degrees, or other ranks, or some in common.

    With NCCL two ranks that meet for the first time connect both ways, when the hidden states of the micro-batch that brings them
    together cross over: both sides must send and receive hidden states in one order of micro-batches.

    Each row crosses over once; where tensor-parallel ranks all need it they then complete each other. Sends do not wait; what a call
    sends is let go by a later call or ``finish``.

    Built from two ``BridgeEnd``, nothing is exchanged beside the data: both sides know the micro-batch and pass it to each call.
    Built from two grids, as in Megatron-LM, calls take and return tensors in the layout of ``dim_mapping`` without a micro-batch: the
    source tells its shape with each one, the gradient comes back in the shape that went. Only ranks of the two joined stages call.

    A rank of both grids calls ``send_forward`` and then ``recv_forward`` (``send_backward``, then ``recv_backward``) of each
    micro-batch: what it sends leaves in one batch with what it receives.

    Args:
        source: last stage of the first grid, or the grid, of which the last stage is taken.
        destination: first stage of the second grid, or the grid.
        dim_mapping: of grids: which dimension is the sequence "s", the batch "b" and the hidden size "h"; None for
            ``{"s": 1, "b": 0, "h": 2}``.
        comm_dtype: of grids: of all tensors; None for torch's default.
        src_module_name: of the source, in messages.
        dest_module_name: of the destination, in messages.
        tensor_ndim: of grids: 3, or 2 for tensors [rows, hidden] with the batch folded into the rows.
        rank: this process; None asks torch.distributed.
        pg: a group with all ranks of both ends; None for the default one. With NCCL its communicator must exist before the
            first transfer, in which not all ranks take part (``init_process_group(device_id=...)``, or any collective before).
            From grids and with NCCL, every rank of the world builds the bridge: shapes have a gloo group of their own.

    Raises:
        ValueError: a call from a rank of the wrong grid, a tensor of another shape or dtype than the micro-batch says,
            and all that ``plan_rows`` raises.
    """

    def __init__(
        self,
        source: BridgeEnd | HyperCommGrid,
        destination: BridgeEnd | HyperCommGrid,
        dim_mapping: Mapping[str, int] | None = None,
        comm_dtype: torch.dtype | None = None,
        src_module_name: str = "source",
        dest_module_name: str = "destination",
        tensor_ndim: int = 3,
        *,
        rank: int | None = None,
        pg: dist.ProcessGroup | None = None,
    ) -> None:
        from_grids = isinstance(source, HyperCommGrid) and isinstance(destination, HyperCommGrid)
        source, destination = _end(source, last=True), _end(destination, last=False)
        self.source, self.destination, self.pg = source, destination, pg
        self._names = {"source": src_module_name, "destination": dest_module_name}
        self.rank = dist.get_rank() if rank is None else rank
        self.is_source, self.is_destination = self.rank in source.members, self.rank in destination.members
        # What a rank of both grids has yet to send, by direction.
        self._held: dict[bool, list[tuple[Tensor, BridgeBatch]]] = {False: [], True: []}
        self._pending: list[tuple[list[dist.Work], list[Tensor]]] = []
        # NCCL connects a pair on its first transfer in each direction, on the host, while later transfers queue up behind it; with
        # gloo all ranks of a group are connected from the start.
        self._connects = dist.is_initialized() and uses_nccl(pg)
        self._connected: set[int] = set()
        self._shapes: ShapeExchange | None = None
        if from_grids:
            shapes_pg: Any = dist.new_group(sorted(source.members | destination.members), backend="gloo") if self._connects else pg
            self._shapes = ShapeExchange(
                source,
                destination,
                rank=self.rank,
                pg=shapes_pg,
                dim_mapping=dim_mapping,
                dtype=comm_dtype or torch.get_default_dtype(),
                device=torch.device("cuda", torch.cuda.current_device()) if self._connects else torch.device("cpu"),
                tensor_ndim=tensor_ndim,
            )
        elif dim_mapping is not None or comm_dtype is not None or tensor_ndim != 3:
            raise ValueError("dim_mapping, comm_dtype and tensor_ndim are for a bridge built from two grids; pass two HyperCommGrid")
        # Plans are pure functions of the micro-batch, and few kinds of it occur.
        self._crossing = functools.lru_cache(maxsize=32)(self._plan_crossing)
        self._spread = functools.lru_cache(maxsize=32)(self._plan_spread)

    def send_forward(self, output: Tensor, batch: BridgeBatch | None = None) -> None:
        """From the source: hidden states of a micro-batch, [rows, D] with ``batch``."""
        self._need(self.is_source, "send_forward", "source")
        if batch is None:
            shapes = self._exchange("send_forward")
            batch, output = shapes.announce(output), shapes.rows(output)
        self._send(output, batch, backward=False)

    def recv_forward(self, batch: BridgeBatch | None = None) -> Tensor:
        """To the destination: hidden states, [rows, D] with ``batch``, which require a gradient."""
        self._need(self.is_destination, "recv_forward", "destination")
        if batch is None:
            shapes = self._exchange("recv_forward")
            batch = shapes.learn()
            return _leaf(shapes.tensor(self._receive(batch, backward=False), batch))
        return _leaf(self._receive(batch, backward=False))

    def send_backward(self, input_grad: Tensor, batch: BridgeBatch | None = None) -> None:
        """From the destination: the gradient of what ``recv_forward`` returned."""
        self._need(self.is_destination, "send_backward", "destination")
        if batch is None:
            shapes = self._exchange("send_backward")
            batch, input_grad = shapes.batch_of_gradient(sends=True), shapes.rows(input_grad)
        self._send(input_grad, batch, backward=True)

    def recv_backward(self, batch: BridgeBatch | None = None) -> Tensor:
        """To the source: the gradient of what ``send_forward`` sent."""
        self._need(self.is_source, "recv_backward", "source")
        if batch is None:
            shapes = self._exchange("recv_backward")
            batch = shapes.batch_of_gradient(sends=False)
            return shapes.tensor(self._receive(batch, backward=True), batch)
        return self._receive(batch, backward=True)

    def send_forward_recv_backward(self, output: Tensor, batch: BridgeBatch | None = None, grad_batch: BridgeBatch | None = None) -> Tensor:
        """From the source: hidden states of one micro-batch while the gradient of another (``grad_batch``) comes."""
        self._need(self.is_source, "send_forward_recv_backward", "source")
        if self.is_destination:
            self.send_forward(output, batch)
            return self.recv_backward(grad_batch)
        if batch is None or grad_batch is None:
            shapes = self._exchange("send_forward_recv_backward")
            batch, output = shapes.announce(output), shapes.rows(output)
            grad_batch = shapes.batch_of_gradient(sends=False)
            self._open(batch)
            return shapes.tensor(self._both(output, batch, grad_batch, backward=False), grad_batch)
        self._open(batch)
        return self._both(output, batch, grad_batch, backward=False)

    def send_backward_recv_forward(
        self, input_grad: Tensor, batch: BridgeBatch | None = None, next_batch: BridgeBatch | None = None
    ) -> Tensor:
        """From the destination: the gradient of one micro-batch while the hidden states of another (``next_batch``) come."""
        self._need(self.is_destination, "send_backward_recv_forward", "destination")
        if batch is None or next_batch is None or self.is_source or self._strangers(next_batch):
            # The gradient goes first: the other side may wait for it before it sends what would connect, or the shape.
            self.send_backward(input_grad, batch)
            return self.recv_forward(next_batch)
        return _leaf(self._both(input_grad, batch, next_batch, backward=True))

    def is_current_rank_in_grid(self, grid: HyperCommGrid) -> bool:
        """Whether this process is one of the ranks of a grid, in whichever stage."""
        return grid.rank_offset <= self.rank < grid.rank_offset + grid.size

    def finish(self) -> None:
        """Wait for all sends and let go of their buffers."""
        for works, _ in self._pending:
            for work in works:
                work.wait()
        self._pending.clear()
        if self._shapes is not None:
            self._shapes.finish()

    def _exchange(self, call: str) -> ShapeExchange:
        if self._shapes is None:
            raise ValueError(f"{call} needs the BridgeBatch of its micro-batch, since the bridge was built from two BridgeEnd")
        return self._shapes

    def _send(self, x: Tensor, batch: BridgeBatch, *, backward: bool) -> None:
        self._check(x, batch, self._rows(batch, sends=True, backward=backward))
        if self.is_source and self.is_destination:
            self._held[backward].append((x.detach(), batch))
        else:
            if not backward:
                self._open(batch)
            self._start(self._crossing(batch, backward), x.detach(), [], None)

    def _receive(self, batch: BridgeBatch, *, backward: bool) -> Tensor:
        out, plan = self._empty(batch, backward), self._crossing(batch, backward)
        mine = None
        if self.is_source and self.is_destination:
            if not self._held[backward]:
                call = "send_backward" if backward else "send_forward"
                raise ValueError(f"rank {self.rank} is in both grids and has sent nothing yet; call {call} first")
            mine, sent = self._held[backward].pop(0)
            if sent != batch:
                raise ValueError(f"rank {self.rank} is in both grids, has sent {sent} and would receive {batch}; keep one order")
        if not backward:
            self._open(batch)
        return self._complete(self._start(plan, mine, plan, out), out, batch, backward)

    def _strangers(self, batch: BridgeBatch) -> list[int]:
        """Ranks that this one has yet to connect with before the micro-batch can cross over, in order."""
        if not self._connects:
            return []
        return sorted(_peers(self._crossing(batch, False), self.rank) - self._connected)

    def _open(self, batch: BridgeBatch) -> None:
        """Connect both ways with all that this rank meets in the micro-batch; they do the same when they come to it."""
        strangers = self._strangers(batch)
        if not strangers:
            return
        token = torch.zeros(1, device=batch.device)
        operations = [dist.P2POp(dist.isend, token, peer, group=self.pg) for peer in strangers]
        operations += [dist.P2POp(dist.irecv, torch.empty_like(token), peer, group=self.pg) for peer in strangers]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        self._connected.update(strangers)

    def _both(self, x: Tensor, batch: BridgeBatch, coming: BridgeBatch, *, backward: bool) -> Tensor:
        self._check(x, batch, self._rows(batch, sends=True, backward=backward))
        out = self._empty(coming, not backward)
        works = self._start(self._crossing(batch, backward), x.detach(), self._crossing(coming, not backward), out)
        return self._complete(works, out, coming, not backward)

    def _complete(self, works: "list[_Coming]", out: Tensor, batch: BridgeBatch, backward: bool) -> Tensor:
        for coming in works:
            coming.store()
        spread = self._spread(batch, backward)
        for coming in self._start(spread, out, spread, out):
            coming.store()
        return out

    def _start(
        self, outgoing: Sequence[RowTransfer], x: Tensor | None, incoming: Sequence[RowTransfer], out: Tensor | None
    ) -> "list[_Coming]":
        """Start this rank's part of two plans as one batch; one message for each pair of ranks."""
        sent: list[Tensor] = []
        coming: list[_Coming] = []
        operations: list[dist.P2POp] = []
        if out is not None:
            for sender, parts in _by_peer(incoming, self.rank, receiving=True).items():
                where = [slice(part.receiver_row, part.receiver_row + part.num_rows) for part in parts]
                if sender == self.rank:
                    assert x is not None
                    for part, rows in zip(parts, where, strict=True):
                        out[rows] = x[part.sender_row : part.sender_row + part.num_rows]
                    continue
                buffer = out.new_empty((sum(part.num_rows for part in parts), *out.shape[1:]))
                coming.append(_Coming(buffer, out, where))
                operations.append(dist.P2POp(dist.irecv, buffer, sender, group=self.pg))
        if x is not None:
            for receiver, parts in _by_peer(outgoing, self.rank, receiving=False).items():
                if receiver != self.rank:
                    sent.append(torch.cat([x[part.sender_row : part.sender_row + part.num_rows] for part in parts]))
                    operations.append(dist.P2POp(dist.isend, sent[-1], receiver, group=self.pg))
        works = list(dist.batch_isend_irecv(operations)) if operations else []
        separate = len(works) == len(operations)
        for number, piece in enumerate(coming):
            piece.works = [works[number]] if separate else works
        self._release()
        if sent:
            self._pending.append((works[len(coming) :] if separate else works, sent))
        return coming

    def _release(self) -> None:
        # Transfers between hosts tell that they are over only to who waits; those go with finish().
        self._pending = [entry for entry in self._pending if not all(work.is_completed() for work in entry[0])]

    def _plan_crossing(self, batch: BridgeBatch, backward: bool) -> list[RowTransfer]:
        return plan_rows(self.source, self.destination, batch, backward=backward)

    def _plan_spread(self, batch: BridgeBatch, backward: bool) -> list[RowTransfer]:
        if backward:
            return plan_spread(self.source, batch, batch.source_sequences)
        return plan_spread(self.destination, batch, batch.destination_sequences)

    def _rows(self, batch: BridgeBatch, *, sends: bool, backward: bool) -> int:
        if sends != backward:
            return count_rows(self.source, batch, batch.source_sequences, self.rank)
        return count_rows(self.destination, batch, batch.destination_sequences, self.rank)

    def _empty(self, batch: BridgeBatch, backward: bool) -> Tensor:
        rows = self._rows(batch, sends=False, backward=backward)
        return torch.empty((rows, batch.hidden_size), dtype=batch.dtype, device=batch.device)

    def _check(self, x: Tensor, batch: BridgeBatch, rows: int) -> None:
        if tuple(x.shape) != (rows, batch.hidden_size) or x.dtype != batch.dtype:
            raise ValueError(
                f"rank {self.rank} sends {tuple(x.shape)} {x.dtype}, but its part of the micro-batch is "
                f"({rows}, {batch.hidden_size}) {batch.dtype}; make the batch say what is sent"
            )

    def _need(self, present: bool, call: str, name: str) -> None:
        if not present:
            members = sorted((self.source if name == "source" else self.destination).members)
            raise ValueError(f"{call} is for the ranks of the {self._names[name]} {members}; rank {self.rank} is not among them")


class _Coming:
    """A message on its way, and the rows it fills."""

    def __init__(self, buffer: Tensor, out: Tensor, where: list[slice]) -> None:
        self.buffer, self.out, self.where = buffer, out, where
        self.works: Sequence[dist.Work] = ()

    def store(self) -> None:
        for work in self.works:
            work.wait()
        row = 0
        for rows in self.where:
            size = rows.stop - rows.start
            self.out[rows] = self.buffer[row : row + size]
            row += size


def _peers(plan: Sequence[RowTransfer], rank: int) -> set[int]:
    """Ranks that a rank sends to or receives from."""
    met = {part.receiver for part in plan if part.sender == rank} | {part.sender for part in plan if part.receiver == rank}
    return met - {rank}


def _by_peer(plan: Sequence[RowTransfer], rank: int, *, receiving: bool) -> dict[int, list[RowTransfer]]:
    by_peer: dict[int, list[RowTransfer]] = {}
    for part in plan:
        if (part.receiver if receiving else part.sender) == rank:
            by_peer.setdefault(part.sender if receiving else part.receiver, []).append(part)
    return by_peer


def _end(side: BridgeEnd | HyperCommGrid, *, last: bool) -> BridgeEnd:
    return BridgeEnd.of(side, last=last) if isinstance(side, HyperCommGrid) else side


def _leaf(x: Tensor) -> Tensor:
    return x.requires_grad_(x.dtype.is_floating_point)
