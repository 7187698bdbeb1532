# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Partners of a node: which files each keeps, which step is complete, and files passed between ranks in bounded memory."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mcore_ckpt._core import Control, LostContact
from mcore_ckpt._storage import tensor_bytes

__all__ = ["NodeRecord", "check_present", "choose_attempt", "explain_none", "partners", "pass_bytes"]

_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class NodeRecord:
    """A node's record of one rank's file."""

    step: int
    rank: int
    token: str
    """Of the attempt: files of two attempts at one step never mix."""
    layout: str
    """Digest of the parts that the rank held."""
    bytes: int
    sha256: str
    extra: dict[str, Any]
    values: dict[str, Any] | None = None
    """Of the state; None in records of before they had a place of their own."""

    @property
    def attempt(self) -> tuple[int, str]:
        return self.step, self.token

    @property
    def name(self) -> str:
        """Name of the record, without its suffix."""
        return f"step_{self.step:08d}-r{self.rank:05d}"

    @property
    def file(self) -> str:
        """Name of the file."""
        return f"{self.name}-{self.token}.safetensors"

    def is_sound(self) -> bool:
        """Whether its fields are well-formed."""
        numbers = (self.step, self.rank, self.bytes)
        texts = _DIGEST.fullmatch(self.sha256) and _DIGEST.fullmatch(self.layout) and re.fullmatch(r"[0-9a-f]{8}", self.token)
        objects = isinstance(self.extra, dict) and isinstance(self.values, dict | None)
        return all(type(number) is int and number >= 0 for number in numbers) and bool(texts) and objects


def choose_attempt(answers: list[Any], bad: set[tuple[int, int, str, int]], size: int) -> tuple[tuple[int, str] | None, list[int]]:
    """The newest complete attempt, and for each rank the rank that provides its file: itself where it can."""
    holders: dict[tuple[int, str], dict[int, list[int]]] = {}
    for place, answer in enumerate(answers):
        for step, token, rank, layout, _ in answer["held"]:
            if rank < size and layout == answers[rank]["layout"] and (place, step, token, rank) not in bad:
                holders.setdefault((step, token), {}).setdefault(rank, []).append(place)
    for attempt in sorted(holders, reverse=True):
        holders_by_rank = holders[attempt]
        if len(holders_by_rank) == size:
            return attempt, [rank if rank in holders_by_rank[rank] else min(holders_by_rank[rank]) for rank in range(size)]
    return None, []


def explain_none(answers: list[Any], control: Control, after: int | None = None) -> str:
    """Why no step, or none ``after`` one, is complete: the ranks whose files of the newest step are lost; empty where none is after it."""
    held = {(step, rank) for answer in answers for step, _, rank, *_ in answer["held"] if after is None or step > after}
    if not held:
        return "they keep none" if after is None else ""
    newest = max(step for step, _ in held)
    missing = [control.ranks[rank] for rank in range(control.size) if (newest, rank) not in held]
    if missing:
        return f"of step {newest} the files of ranks {missing} are gone"
    return f"of step {newest} files are damaged, of different attempts, or of another layout than the state"


_CHUNK_BYTES = 8 * 2**20


def partners(nodes: Sequence[str], copies: int) -> list[list[int]]:
    """For each place the places that keep its file: itself, then the ranks of its number on the next nodes, around the end.

    Args:
        nodes: of each place; equally many places on each.
        copies: on so many nodes.

    Raises:
        ValueError: fewer nodes than copies, or unequal numbers of ranks.

    Example:
        >>> partners(["a", "a", "b", "b"], 2)
        [[0, 2], [1, 3], [2, 0], [3, 1]]
    """
    members: dict[str, list[int]] = {}
    for place, node in enumerate(nodes):
        members.setdefault(node, []).append(place)
    rows = list(members.values())
    if copies > len(rows):
        raise ValueError(f"copies={copies} but the ranks run on {len(rows)} nodes; lower copies, a second one on a node goes with it")
    if len({len(row) for row in rows}) != 1:
        raise ValueError(f"nodes have {sorted(len(row) for row in rows)} ranks; they must have equally many")
    keepers: list[list[int]] = [[] for _ in nodes]
    for number, row in enumerate(rows):
        for seat, place in enumerate(row):
            keepers[place] = [rows[(number + step) % len(rows)][seat] for step in range(copies)]
    return keepers


def check_present(control: Control, what: str, timeout_s: float) -> None:
    """Wait until every rank is here.

    Raises:
        LostContact: some did not come in time; names them, where the group has gloo.
    """
    group = control.group
    if group is None or control.size == 1 or "gloo" not in dist.get_backend_config(group):
        return
    try:
        dist.monitored_barrier(group, timeout=timedelta(seconds=timeout_s), wait_all_ranks=True)
    except RuntimeError as error:
        raise LostContact(f"{what}: not all ranks came within {timeout_s:g} s: {error}") from error


def pass_bytes(
    control: Control, what: str, outgoing: tuple[int, memoryview] | None, incoming: tuple[int, int] | None, timeout_s: float
) -> Iterator[memoryview]:
    """Send bytes to one place and receive from another at the same time; to be run to its end even where what comes is of no use.

    Args:
        control: the ranks.
        what: for messages.
        outgoing: place and bytes; None for nothing.
        incoming: place and number of bytes; None for nothing.
        timeout_s: for each piece.

    Yields:
        What was received, piece by piece.

    Raises:
        LostContact: a rank did not answer in time; names it.
    """
    sent, limit = 0, timedelta(seconds=timeout_s)
    received = 0
    while (outgoing and sent < len(outgoing[1])) or (incoming and received < incoming[1]):
        places: list[int] = []
        operations: list[dist.P2POp] = []
        piece = None
        if incoming and received < incoming[1]:
            piece = torch.empty(min(_CHUNK_BYTES, incoming[1] - received), dtype=torch.uint8, device=control.device)
            places.append(control.ranks[incoming[0]])
            operations.append(dist.P2POp(dist.irecv, piece, places[-1], control.group))
            received += piece.numel()
        if outgoing and sent < len(outgoing[1]):
            part = outgoing[1][sent : sent + _CHUNK_BYTES]
            row = torch.frombuffer(bytearray(part), dtype=torch.uint8).to(control.device)
            places.append(control.ranks[outgoing[0]])
            operations.append(dist.P2POp(dist.isend, row, places[-1], control.group))
            sent += len(part)
        # Both begin before either is waited for, so that two partners that send to one another both go on. NCCL has one wait for both.
        works = dist.batch_isend_irecv(operations)
        for place, work in enumerate(works):
            try:
                work.wait(limit)
            except RuntimeError as error:
                who = f"rank {places[place]}" if len(works) == len(places) else f"one of ranks {sorted(set(places))}"
                raise LostContact(f"{what}: {who} did not answer rank {control.ranks[control.rank]} in {timeout_s:g} s") from error
        if piece is not None:
            yield tensor_bytes(piece.cpu())
