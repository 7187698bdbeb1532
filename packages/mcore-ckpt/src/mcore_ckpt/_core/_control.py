# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Agreement between the ranks of a save or load: every step succeeds on all of them or fails on all of them."""

import contextlib
import json
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_ckpt._errors import CheckpointingException
from mcore_ckpt._storage import num_cores, tensor_bytes

__all__ = ["Background", "Control", "LostContact", "threads_each"]

_MAX_THREADS = 8
_SHORT = 1016
"""Bytes of a message that go in the first round."""


def threads_each(hosts: Sequence[str], place: int) -> int:
    """Threads for the rank at ``place``, when the ranks on each of ``hosts`` share its cores; at most 8."""
    return max(1, min(_MAX_THREADS, num_cores() // sum(host == hosts[place] for host in hosts)))


class LostContact(CheckpointingException):
    """A rank went away; how far the others came is unknown."""


class Control:
    """The ranks of one save or load. They exchange JSON text only.

    Args:
        group: None for the default process group, or for this process alone where there is none.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group: dist.ProcessGroup | None = None
        self.rank, self.ranks, self.device = 0, [0], torch.device("cpu")
        if group is not None or (dist.is_available() and dist.is_initialized()):
            self.group = dist.group.WORLD if group is None else group
            assert self.group is not None
            self.rank = dist.get_rank(self.group)
            if self.rank < 0:
                raise ValueError("this rank is not in group; call only on the group's ranks")
            self.ranks = dist.get_process_group_ranks(self.group)
            if "cpu:" not in dist.get_backend_config(self.group):
                self.device = torch.device("cuda", torch.cuda.current_device())

    @classmethod
    def alone(cls) -> "Control":
        """This process by itself."""
        control = object.__new__(cls)
        control.group, control.rank, control.ranks, control.device = None, 0, [0], torch.device("cpu")
        return control

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def run(self, what: str, step: Callable[[], Any]) -> list[Any]:
        """Do ``step`` on every rank and return the JSON-able results of all, in rank order.

        Raises:
            CheckpointingException: it failed somewhere; the same error on every rank, naming the first rank and its cause.
            LostContact: a rank did not answer.
        """
        cause: Exception | None = None
        try:
            message: dict[str, Any] = {"result": step()}
        except Exception as error:
            cause = error
            text = str(error) if isinstance(error, CheckpointingException) else f"{type(error).__name__}: {error}"
            message = {"error": text}
        answers = self._exchange(what, message)
        failed = [place for place, answer in enumerate(answers) if "error" in answer]
        if failed:
            others = f" (and {len(failed) - 1} more ranks)" if len(failed) > 1 else ""
            raise CheckpointingException(f"{what} failed on rank {self.ranks[failed[0]]}{others}: {answers[failed[0]]['error']}") from cause
        return [answer["result"] for answer in answers]

    def collect(self, what: str, mine: str, lengths: Mapping[int, int]) -> list[str]:
        """The texts of some ranks, on the first rank; nothing on the others.

        Args:
            what: for messages.
            mine: this rank's text, where it is one of them.
            lengths: for each place in the group whose text is wanted, the number of its bytes.

        Raises:
            LostContact: a rank did not answer.
        """
        texts = []
        with self._contact(what):
            for place, length in lengths.items():
                if place == 0:
                    texts.append(mine)
                elif self.rank == 0:
                    texts.append(self._receive(place, length).decode())
                elif self.rank == place:
                    self._send(0, mine.encode())
        return texts if self.rank == 0 else []

    def scatter(self, what: str, texts: Iterable[str]) -> str:
        """Scatter one string per rank from rank 0; ``texts``, read on rank 0 only, yields them in rank order.

        Raises:
            LostContact: a rank did not answer.
        """
        with self._contact(what):
            if self.rank:
                (length,) = struct.unpack("<q", self._receive(0, 8))
                return self._receive(0, length).decode()
            mine = ""
            for place, text in enumerate(texts):
                if place == 0:
                    mine = text
                else:
                    content = text.encode()
                    self._send(place, struct.pack("<q", len(content)))
                    self._send(place, content)
            return mine

    def union(self, what: str, flags: bytes) -> bytes:
        """For each place in ``flags``, equally many on every rank, the largest byte that any rank has there.

        Raises:
            LostContact: a rank did not answer.
        """
        row = self._most(what, torch.frombuffer(bytearray(flags), dtype=torch.uint8)) if flags else torch.empty(0)
        return bytes(tensor_bytes(row))

    def largest(self, what: str, numbers: Sequence[int]) -> list[int]:
        """For each place in ``numbers``, equally many below 2**63 on every rank, the largest that any rank has there.

        Raises:
            LostContact: a rank did not answer.
        """
        return self._most(what, torch.tensor(numbers, dtype=torch.int64)).tolist() if numbers else []

    def _most(self, what: str, row: Tensor) -> Tensor:
        if self.group is None or self.size == 1:
            return row
        row = row.to(self.device)
        with self._contact(what):
            dist.all_reduce(row, op=dist.ReduceOp.MAX, group=self.group)
        return row.cpu()

    @contextlib.contextmanager
    def _contact(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise LostContact(f"{what}: rank {self.ranks[self.rank]} lost contact with the other ranks: {error}") from error

    def _send(self, place: int, content: bytes) -> None:
        if content:
            self._travel(dist.isend, torch.frombuffer(bytearray(content), dtype=torch.uint8).to(self.device), place)

    def _receive(self, place: int, length: int) -> bytes:
        row = torch.empty(length, dtype=torch.uint8, device=self.device)
        if length:
            self._travel(dist.irecv, row, place)
        return bytes(tensor_bytes(row.cpu()))

    def _travel(self, way: Callable[..., Any], row: Tensor, place: int) -> None:
        # Outside of a batch NCCL would make a communicator of these two ranks alone.
        for work in dist.batch_isend_irecv([dist.P2POp(way, row, self.ranks[place], self.group)]):
            work.wait()

    def _exchange(self, what: str, message: dict[str, Any]) -> list[dict[str, Any]]:
        if self.group is None or self.size == 1:
            return [json.loads(json.dumps(message))]
        text = json.dumps(message, separators=(",", ":")).encode()
        with self._contact(what):
            # Most messages are short: one round then does.
            rows = self._gather(len(text).to_bytes(8, "little") + text[:_SHORT].ljust(_SHORT))
            lengths = [int.from_bytes(row[:8], "little") for row in rows]
            if max(lengths) > _SHORT:
                rows = self._gather(bytes(8) + text.ljust(max(lengths)))
        return [json.loads(row[8 : 8 + length]) for row, length in zip(rows, lengths, strict=True)]

    def _gather(self, mine: bytes) -> list[bytes]:
        row = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(self.device)
        rows = [torch.empty_like(row) for _ in range(self.size)]
        dist.all_gather(rows, row, group=self.group)
        return [bytes(tensor_bytes(one.cpu())) for one in rows]


class Background:
    """A thread with a process group of its own, for collectives beside training.

    Collectives of two threads on one group may interleave in another order on each rank, so nothing else uses this group.

    Args:
        group: of the ranks; None as for `Control`.
        own: a gloo group of the same ranks; None makes one when it is first needed, where ``group`` is the whole world.
        timeout_s: how long a rank may be waited for in a group that is made here.
    """

    def __init__(self, group: dist.ProcessGroup | None, own: dist.ProcessGroup | None, timeout_s: float) -> None:
        self._group, self._own, self._timeout_s = group, own, timeout_s
        self._control: Control | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def control(self) -> Control:
        """The ranks, over the group of its own. The first call is collective.

        Raises:
            ValueError: no such group can be made, or the one that was given has other ranks.
        """
        if self._control is None:
            ranks = Control(self._group)
            own = self._own
            if own is None and ranks.size > 1:
                if ranks.size != dist.get_world_size():
                    raise ValueError(
                        f"group has {ranks.size} of {dist.get_world_size()} ranks; an asynchronous save needs background_group, "
                        'made by all ranks with torch.distributed.new_group(ranks, backend="gloo")'
                    )
                made = dist.new_group(backend="gloo", timeout=timedelta(seconds=self._timeout_s))
                assert isinstance(made, dist.ProcessGroup)
                own = made
            control = Control(own) if own is not None else ranks
            if control.ranks != ranks.ranks:
                raise ValueError(f"background_group has the ranks {control.ranks}, group has {ranks.ranks}; they must be the same")
            self._control = control
        return self._control

    def start(self, work: Callable[[], None]) -> None:
        """Start ``work``; the work before must have been waited for."""
        assert self._thread is None

        def run() -> None:
            try:
                work()
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=run, name="keep", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the work is done, and raise what it raised."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
