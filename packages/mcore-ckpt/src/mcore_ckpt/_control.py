# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Agreement between the ranks of a save or load: every step succeeds on all of them or fails on all of them."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_ckpt._errors import CheckpointingException
from mcore_ckpt._storage import num_cores, tensor_bytes

__all__ = ["Control", "LostContact", "threads_each"]

_MAX_THREADS = 8


def threads_each(hosts: Sequence[str], place: int) -> int:
    """Threads for the rank at ``place``, when the ranks on each of ``hosts`` share its cores; at most 8."""
    return max(1, min(_MAX_THREADS, num_cores() // sum(host == hosts[place] for host in hosts)))


class LostContact(CheckpointingException):
    """A rank went away, so nobody here knows how far the others came."""


class Control:
    """The ranks that act together; JSON text is all that travels between them.

    Args:
        group: None for the default process group, or for this process alone where there is none.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group: dist.ProcessGroup | None = None
        self.rank, self.ranks, self._device = 0, [0], torch.device("cpu")
        if group is not None or (dist.is_available() and dist.is_initialized()):
            self._group = dist.group.WORLD if group is None else group
            assert self._group is not None
            self.rank = dist.get_rank(self._group)
            if self.rank < 0:
                raise ValueError("this rank is not in group; call only on the group's ranks")
            self.ranks = dist.get_process_group_ranks(self._group)
            if "cpu:" not in dist.get_backend_config(self._group):
                self._device = torch.device("cuda", torch.cuda.current_device())

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def run(self, what: str, step: Callable[[], Any]) -> list[Any]:
        """Do ``step`` on every rank and return the JSON-able results of all, in rank order.

        Raises:
            CheckpointingException: it failed somewhere; the same error on every rank, naming the first rank and its cause.
            LostContact: the ranks could not tell each other.
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

    def share(self, what: str, mine: str, lengths: Mapping[int, int]) -> list[str]:
        """The texts of some ranks, on every rank, one after another: memory holds those texts and no more.

        Args:
            what: for messages.
            mine: this rank's text, where it is one of them.
            lengths: for each place in the group whose text is wanted, the number of its bytes.

        Raises:
            LostContact: the ranks could not tell each other.
        """
        if self._group is None or self.size == 1:
            return [mine for _ in lengths]
        texts = []
        try:
            for place, length in lengths.items():
                content = mine.encode() if place == self.rank else bytes(length)
                row = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(self._device)
                dist.broadcast(row, src=self.ranks[place], group=self._group)
                texts.append(bytes(tensor_bytes(row.cpu())).decode())
        except RuntimeError as error:
            raise LostContact(f"{what}: rank {self.ranks[self.rank]} lost contact with the other ranks: {error}") from error
        return texts

    def _exchange(self, what: str, message: dict[str, Any]) -> list[dict[str, Any]]:
        if self._group is None or self.size == 1:
            return [json.loads(json.dumps(message))]
        text = json.dumps(message, separators=(",", ":")).encode()
        try:
            lengths = self._gather(torch.tensor([len(text)], device=self._device))
            longest = max(int(length) for length in lengths)
            padded = torch.frombuffer(bytearray(text.ljust(longest)), dtype=torch.uint8).to(self._device)
            rows = self._gather(padded)
        except RuntimeError as error:
            raise LostContact(f"{what}: rank {self.ranks[self.rank]} lost contact with the other ranks: {error}") from error
        return [json.loads(bytes(tensor_bytes(row.cpu()))) for row in rows]

    def _gather(self, mine: Tensor) -> list[Tensor]:
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(rows, mine, group=self._group)
        return rows
