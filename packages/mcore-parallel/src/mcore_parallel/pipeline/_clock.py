# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""When the actions of all stages happen."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from mcore_parallel.pipeline._schedule import Action, Combined, Entry, parts

Table = Sequence[Entry]


class DeadlockError(RuntimeError):
    """Stages wait for each other; the message names each with what it waits for."""


class Transfer(NamedTuple):
    """A tensor that goes from one stage to another."""

    kind: Literal["activation", "gradient"]
    microbatch: int
    chunk: int
    """Chunk of the receiver that takes it in."""
    sender: int
    receiver: int

    def __str__(self) -> str:
        return f"{self.kind} {self.microbatch}" + (f".{self.chunk}" if self.chunk else "")


@dataclass(frozen=True, kw_only=True)
class Costs:
    """How long an action takes on one chunk.

    Raises:
        ValueError: a time that is not positive, also of what is left of a whole backward or a pair.
    """

    forward: float = 1.0
    backward: float = 2.0
    """Of a whole backward."""
    weight: float = 1.0
    """Of the weight gradients, a part of the whole backward."""
    hidden: float = 0.0
    """What a pair saves against its two parts in turn."""

    def __post_init__(self) -> None:
        if min(self.forward, self.weight, self.backward - self.weight) <= 0 or self.hidden < 0:
            raise ValueError(f"{self} needs positive times and weight < backward, or the order of the actions means nothing")
        if self.hidden >= self.forward + self.backward - self.weight:
            raise ValueError(f"hidden={self.hidden} must be less than the time of a pair, forward + backward - weight")

    def of(self, entry: Entry) -> float:
        if isinstance(entry, Combined):
            return self.of(entry.forward) + self.of(entry.backward) - self.hidden
        return {"F": self.forward, "B": self.backward, "I": self.backward - self.weight, "W": self.weight}[entry.kind]


@dataclass(frozen=True)
class ActionSpan:
    """When an action begins and ends."""

    start: float
    end: float


def count_chunks(tables: Sequence[Table]) -> int:
    """Model chunks a stage."""
    return 1 + max((action.chunk for table in tables for entry in table for action in parts(entry)), default=0)


def transfers_to(entry: Entry, stage: int, num_stages: int, num_chunks: int) -> Iterator[Transfer]:
    """What must have come from another chunk before the entry can begin."""
    for action in parts(entry):
        place = action.chunk * num_stages + stage
        if action.kind == "F" and place > 0:
            yield Transfer("activation", action.microbatch, action.chunk, (stage - 1) % num_stages, stage)
        elif action.kind in "BI" and place < num_stages * num_chunks - 1:
            yield Transfer("gradient", action.microbatch, action.chunk, (stage + 1) % num_stages, stage)


def transfers_from(entry: Entry, stage: int, num_stages: int, num_chunks: int) -> Iterator[Transfer]:
    """What the entry gives to another chunk."""
    for action in parts(entry):
        place = action.chunk * num_stages + stage
        if action.kind == "F" and place < num_stages * num_chunks - 1:
            yield Transfer("activation", action.microbatch, (place + 1) // num_stages, stage, (place + 1) % num_stages)
        elif action.kind in "BI" and place > 0:
            yield Transfer("gradient", action.microbatch, (place - 1) // num_stages, stage, (place - 1) % num_stages)


def clock(tables: Sequence[Table], costs: Costs) -> list[list[ActionSpan]]:
    """Spans of all actions when each begins as soon as its stage is free and its inputs are there; transfers take no time.

    Raises:
        ValueError: a table that does not run each of its micro-batches once, or in an impossible order.
        DeadlockError: an input never comes.
    """
    for stage, table in enumerate(tables):
        check_table(stage, table)
    num_stages, num_chunks = len(tables), count_chunks(tables)
    arrived: dict[Transfer, float] = {}
    spans: list[list[ActionSpan]] = [[] for _ in tables]
    moved = True
    while moved:
        moved = False
        for stage, table in enumerate(tables):
            done = spans[stage]
            while len(done) < len(table):
                entry = table[len(done)]
                inputs = [arrived.get(transfer) for transfer in transfers_to(entry, stage, num_stages, num_chunks)]
                if None in inputs:
                    break
                start = max([done[-1].end if done else 0.0, *(time for time in inputs if time is not None)])
                done.append(ActionSpan(start, start + costs.of(entry)))
                arrived |= dict.fromkeys(transfers_from(entry, stage, num_stages, num_chunks), done[-1].end)
                moved = True
    stuck = []
    for stage, (table, done) in enumerate(zip(tables, spans, strict=True)):
        if len(done) < len(table):
            entry = table[len(done)]
            missing = [transfer for transfer in transfers_to(entry, stage, num_stages, num_chunks) if transfer not in arrived]
            waits = " and ".join(f"for {transfer} of stage {transfer.sender}" for transfer in missing)
            stuck.append(f"stage {stage} before {entry} waits {waits}")
    if stuck:
        raise DeadlockError("; ".join(stuck))
    return spans


def check_table(stage: int, table: Table) -> None:
    """Each micro-batch of each chunk has one forward; then, if any has one, one backward, whole or in two parts.

    Raises:
        ValueError: it is not so.
    """
    done: dict[str, list[tuple[int, int]]] = {kind: [] for kind in "FBIW"}
    before = {"F": (), "B": ("F",), "I": ("F",), "W": ("I",)}
    for entry in table:
        for action in parts(entry):
            key = (action.microbatch, action.chunk)
            for earlier in before[action.kind]:
                if key not in done[earlier]:
                    raise ValueError(f"stage {stage} runs {action} before {Action(earlier, *key)}")
        for action in parts(entry):
            done[action.kind].append((action.microbatch, action.chunk))
    backwards = done["B"] + done["I"]
    for keys in (done["F"], backwards, done["W"]):
        if repeated := [key for key, count in Counter(keys).items() if count > 1]:
            raise ValueError(f"stage {stage} runs micro-batch {_name(repeated[0])} twice")
    if backwards and (odd := set(backwards) ^ set(done["F"])):
        raise ValueError(f"stage {stage} runs [{', '.join(map(_name, sorted(odd)))}] in one direction only")
    if odd := set(done["I"]) ^ set(done["W"]):
        raise ValueError(f"stage {stage} runs [{', '.join(map(_name, sorted(odd)))}] without weight gradients (W)")


def _name(key: tuple[int, int]) -> str:
    return str(Action("F", *key))[1:]
