# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Point-to-point transfers, single and between neighbouring pipeline stages."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_parallel.groups import Group


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """What a receiver allocates before the data comes.

    Example:
        >>> TensorSpec(shape=(2, 3)).empty().shape
        torch.Size([2, 3])
    """

    shape: Sequence[int]
    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"

    def empty(self) -> Tensor:
        return torch.empty(tuple(self.shape), dtype=self.dtype, device=self.device)


def send(tensor: Tensor, peer_group: Group, to_index: int) -> None:
    """Send to the rank at position ``to_index`` of the group; returns when the buffer may be reused.

    Raises:
        ValueError: ``to_index`` is this rank or outside the group.
    """
    dist.send(tensor.detach().contiguous(), dst=_peer(peer_group, to_index), group=peer_group.pg)


def recv(spec: TensorSpec, peer_group: Group, from_index: int) -> Tensor:
    """Receive a tensor of known shape from the rank at position ``from_index`` of the group.

    Raises:
        ValueError: ``from_index`` is this rank or outside the group.
    """
    buffer = spec.empty()
    dist.recv(buffer, src=_peer(peer_group, from_index), group=peer_group.pg)
    return buffer


@dataclass
class Arrival:
    """A tensor on its way; ``wait`` returns it once it is usable on the compute stream (the host never waits for a device)."""

    tensor: Tensor
    works: Sequence[dist.Work]

    def wait(self) -> Tensor:
        works, self.works = self.works, ()
        for work in works:
            work.wait()
        return self.tensor


class P2PCommunicator:
    """Transfers between neighbours of a chain of ranks (pipeline stages).

    Activations travel to the next rank, gradients to the previous one. Nothing is exchanged beside the data: the
    receiver knows shape and dtype. A call returns once what it receives is usable on the compute stream; what it
    sends stays referenced until the transfer is over. The host never waits for a device.

    The transfers of one ``exchange`` are one batch, so two neighbours that each send and receive in the same call
    cannot block one another. A call may wait until the neighbours have come to the calls that hold the other ends
    of its and of earlier transfers: ``mcore_parallel.pipeline.simulate`` checks a schedule for that.

    Args:
        group: the stages in order; the end ranks have one neighbour only.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self._pending: list[tuple[list[dist.Work], list[Tensor]]] = []

    def send_forward(self, output: Tensor) -> None:
        """Send an activation to the next stage."""
        self.exchange(send_next=output)

    def send_backward(self, input_grad: Tensor) -> None:
        """Send a gradient to the previous stage."""
        self.exchange(send_previous=input_grad)

    def recv_forward(self, spec: TensorSpec) -> Tensor:
        """Receive an activation from the previous stage."""
        received, _ = self.exchange(recv_previous=spec)
        assert received is not None
        return received

    def recv_backward(self, spec: TensorSpec) -> Tensor:
        """Receive a gradient from the next stage."""
        _, received = self.exchange(recv_next=spec)
        assert received is not None
        return received

    def send_forward_recv_backward(self, output: Tensor, spec: TensorSpec) -> Tensor:
        """Send an activation to the next stage while its gradient of an earlier one comes back."""
        _, received = self.exchange(send_next=output, recv_next=spec)
        assert received is not None
        return received

    def send_backward_recv_forward(self, input_grad: Tensor, spec: TensorSpec) -> Tensor:
        """Send a gradient to the previous stage while its next activation comes."""
        received, _ = self.exchange(send_previous=input_grad, recv_previous=spec)
        assert received is not None
        return received

    def exchange(
        self,
        *,
        send_previous: Tensor | None = None,
        recv_previous: TensorSpec | None = None,
        send_next: Tensor | None = None,
        recv_next: TensorSpec | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Any transfers with both neighbours, as one batch.

        Returns:
            What came from the previous and from the next stage.

        Raises:
            ValueError: a transfer with a neighbour that an end rank does not have.
        """
        # One order on every rank: what flows forward, then what flows backward.
        sends = [(x, self._neighbour(step)) for x, step in ((send_next, 1), (send_previous, -1)) if x is not None]
        receives = [(spec, self._neighbour(step)) for spec, step in ((recv_previous, -1), (recv_next, 1)) if spec is not None]
        came = iter([arrival.wait() for arrival in self.transfer(sends, receives)])
        return next(came) if recv_previous else None, next(came) if recv_next else None

    def transfer(self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[TensorSpec, int]]) -> list[Arrival]:
        """Start transfers with any ranks of the group, as one batch.

        Tensors that one rank sends another, in this batch and those after it, must be received in the same order.

        Args:
            sends: tensors and the positions of their receivers in the group.
            receives: what comes, and the positions of the senders.

        Returns:
            What comes, in the order of ``receives``.

        Raises:
            ValueError: a position that is this rank's or outside the group.
        """
        out = [x.detach().contiguous() for x, _ in sends]
        buffers = [spec.empty() for spec, _ in receives]
        group, pg = self.group, self.group.pg
        batch = [dist.P2POp(dist.irecv, x, _peer(group, index), pg) for x, (_, index) in zip(buffers, receives, strict=True)]
        batch += [dist.P2POp(dist.isend, x, _peer(group, index), pg) for x, (_, index) in zip(out, sends, strict=True)]
        if not batch:
            return []
        works = list(dist.batch_isend_irecv(batch))
        self._release()
        if len(works) == len(batch):
            # One handle a transfer.
            arrivals = [Arrival(x, (work,)) for x, work in zip(buffers, works, strict=False)]
            works = works[len(buffers) :]
        else:
            # One handle for the whole batch.
            arrivals = [Arrival(x, works) for x in buffers]
        if out:
            self._pending.append((works, out))
        return arrivals

    def _release(self) -> None:
        """Let go of what was sent in earlier exchanges."""
        still = []
        for works, sent in self._pending:
            if sent[0].device.type == "cpu":
                # A host transfer tells that it is over only to who waits; its receiver is posted or about to be.
                for work in works:
                    work.wait()
            elif not all(work.is_completed() for work in works):
                still.append((works, sent))
        self._pending = still

    def finish(self) -> None:
        """Wait for all sends (on the compute stream, when there is one) and let go of their buffers."""
        for works, _ in self._pending:
            for work in works:
                work.wait()
        self._pending.clear()

    def _neighbour(self, step: int) -> int:
        index = self.group.rank + step
        if not 0 <= index < self.group.size:
            raise ValueError(f"stage {self.group.rank} of {self.group.size} has no {'next' if step > 0 else 'previous'} stage")
        return index


def _peer(group: Group, index: int) -> int:
    if not 0 <= index < group.size or index == group.rank:
        raise ValueError(f"peer index {index} must name another of the {group.size} ranks of the group (this is {group.rank})")
    return group.ranks[index]
