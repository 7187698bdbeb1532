# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Shapes of the tensors that cross a bridge between two grids, exchanged between hosts."""

from collections import deque
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_parallel.comm._bridge_plan import BridgeBatch, BridgeEnd

_DIMS = {"s": 1, "b": 0, "h": 2}


class ShapeExchange:
    """Tells the destination the micro-batch of a tensor that the source sends, and holds it for the gradient on its way back.

    Replicas whose rows meet in one replica of the other side send equal shapes. Shapes travel between hosts (gloo), so that nothing
    waits for a GPU.

    Args:
        source: last stage of the first grid, without context parallelism.
        destination: first stage of the second.
        rank: this process.
        pg: a gloo group with the ranks of both; None for the default one.
        dim_mapping: dimension of the tensors that is the sequence "s", the batch "b" and the hidden size "h"; None for
            ``{"s": 1, "b": 0, "h": 2}``.
        dtype: of all tensors.
        device: where tensors are received.
        tensor_ndim: 3, or 2 for [rows, hidden] with the batch folded into the rows.

    Raises:
        ValueError: a dimension map that is none, another number of dimensions, context parallelism.
    """

    def __init__(
        self,
        source: BridgeEnd,
        destination: BridgeEnd,
        *,
        rank: int,
        pg: dist.ProcessGroup | None,
        dim_mapping: Mapping[str, int] | None,
        dtype: torch.dtype,
        device: torch.device,
        tensor_ndim: int,
    ) -> None:
        mapping = dict(_DIMS if dim_mapping is None else dim_mapping)
        if sorted(mapping) != ["b", "h", "s"] or sorted(mapping.values()) != [0, 1, 2]:
            raise ValueError(f"dim_mapping={mapping} must map 's', 'b' and 'h' to 0, 1 and 2, each once")
        if tensor_ndim not in (2, 3):
            raise ValueError(f"tensor_ndim={tensor_ndim} must be 3, or 2 for [rows, hidden]")
        for name, end in (("source", source), ("destination", destination)):
            if len(end.ranks[0]) > 1:
                raise ValueError(f"cp={len(end.ranks[0])} of the {name}: to split sequences, build from BridgeEnd and pass a BridgeBatch")
        self.source, self.destination, self.rank, self.pg = source, destination, rank, pg
        self.dtype, self.device = dtype, device
        self._order = tuple(mapping[name] for name in "bsh") if tensor_ndim == 3 else None
        # Micro-batches whose gradient has yet to come back: of this rank as source, and as destination.
        self._sent: deque[BridgeBatch] = deque()
        self._received: deque[BridgeBatch] = deque()
        self._own_shapes: deque[Tensor] = deque()
        self._pending: list[tuple[dist.Work, Tensor]] = []

    def rows(self, x: Tensor) -> Tensor:
        """A tensor as [rows, H], sequence by sequence."""
        return (x if self._order is None else x.permute(self._order)).reshape(-1, x.shape[-1 if self._order is None else self._order[2]])

    def tensor(self, rows: Tensor, batch: BridgeBatch) -> Tensor:
        """The reverse of ``rows``: contiguous, a leaf of its own."""
        rows = rows.detach()
        if self._order is None:
            return rows
        x = rows.view(-1, batch.sequence_lengths[0], batch.hidden_size)
        return x.permute([self._order.index(dim) for dim in range(3)]).contiguous()

    def announce(self, x: Tensor) -> BridgeBatch:
        """From the source: the micro-batch of what it is about to send; its leader tells those that receive."""
        ndim = 2 if self._order is None else 3
        if x.ndim != ndim or x.dtype != self.dtype:
            raise ValueError(f"rank {self.rank} sends {tuple(x.shape)} {x.dtype}; the bridge is for {ndim} dimensions of {self.dtype}")
        shape = torch.tensor([x.shape[0], 1, x.shape[1]] if self._order is None else [x.shape[dim] for dim in self._order])
        batch = self._batch(shape)
        replica = _replica(self.source, self.rank)
        if self.source.ranks[replica][0][0] == self.rank:
            for other in _overlapping(replica, len(self.source.ranks), len(self.destination.ranks)):
                for receiver in self.destination.ranks[other][0]:
                    if receiver == self.rank:
                        self._own_shapes.append(shape)
                    elif (work := dist.isend(shape, receiver, group=self.pg)) is not None:
                        self._pending.append((work, shape))
        self._pending = [entry for entry in self._pending if not entry[0].is_completed()]
        self._sent.append(batch)
        return batch

    def learn(self) -> BridgeBatch:
        """To the destination: the micro-batch of what it is about to receive."""
        replica = _replica(self.destination, self.rank)
        leaders = [self.source.ranks[d][0][0] for d in _overlapping(replica, len(self.destination.ranks), len(self.source.ranks))]
        shapes: dict[int, Tensor] = {}
        for leader in leaders:
            if leader != self.rank:
                shapes[leader] = torch.empty(3, dtype=torch.int64)
                dist.recv(shapes[leader], leader, group=self.pg)
            elif self._own_shapes:
                shapes[leader] = self._own_shapes.popleft()
            else:
                raise ValueError(f"rank {self.rank} is in both grids and has sent nothing yet; call send_forward first")
        if len({tuple(shape.tolist()) for shape in shapes.values()}) > 1:
            sizes = {leader: tuple(shape.tolist()) for leader, shape in shapes.items()}
            raise ValueError(f"ranks send batch, sequence, hidden size {sizes} to one replica; make them equal or pass a BridgeBatch")
        batch = self._batch(shapes[leaders[0]])
        self._received.append(batch)
        return batch

    def batch_of_gradient(self, *, sends: bool) -> BridgeBatch:
        """The micro-batch whose gradient the destination sends next, or the source receives next: the oldest one outstanding."""
        outstanding = self._received if sends else self._sent
        if not outstanding:
            raise ValueError(f"rank {self.rank} has {'received' if sends else 'sent'} no tensor that waits for its gradient")
        return outstanding.popleft()

    def finish(self) -> None:
        """Wait for all shapes that were sent."""
        for work, _ in self._pending:
            work.wait()
        self._pending.clear()

    def _batch(self, shape: Tensor) -> BridgeBatch:
        size, length, hidden = (int(number) for number in shape)
        sources, destinations = len(self.source.ranks), len(self.destination.ranks)
        if size * sources % destinations:
            raise ValueError(
                f"a batch of {size} in each of {sources} source replicas does not divide among {destinations} of the destination; "
                "change the batch size or pass a BridgeBatch"
            )
        return BridgeBatch(
            sequence_lengths=(length,) * (size * sources),
            hidden_size=hidden,
            dtype=self.dtype,
            device=self.device,
            source_sequences=(size,) * sources,
            destination_sequences=(size * sources // destinations,) * destinations,
        )


def _replica(end: BridgeEnd, rank: int) -> int:
    return next(number for number, replica in enumerate(end.ranks) if rank in replica[0])


def _overlapping(replica: int, here: int, there: int) -> range:
    """Replicas of the other side, of ``there``, that hold rows of one replica of ``here``."""
    return range(replica * there // here, -(-(replica + 1) * there // here))
