# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Runs the schedules of all stages without a device."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mcore_parallel.pipeline._plan import Exchange, exchanges
from mcore_parallel.pipeline._schedule import Action

# (kind, micro-batch, sender, receiver)
_Message = tuple[str, int, int, int]


class DeadlockError(RuntimeError):
    """Stages wait for each other; the message names each with what it waits for."""


@dataclass(frozen=True)
class Simulation:
    """What a run of the schedules looks like.

    ``bubble_fraction`` is idle time over working time, (p - 1) / m for 1F1B with p stages and m micro-batches.
    """

    bubble_fraction: float
    peak_live: tuple[int, ...]
    """Most micro-batches a stage holds at once between their forward and their backward, by stage."""
    makespan: float
    """Time from the first to the last action."""


def simulate(tables: Sequence[Sequence[Action]], *, forward_time: float = 1.0, backward_time: float = 2.0) -> Simulation:
    """Run one list of actions a stage the way ``run_schedule`` does and report.

    A transfer needs both sides: an exchange ends when for each of its messages the neighbour has come to the exchange
    that holds the other end. That is stricter than buffered sends, so a schedule that passes runs on any transport.
    Transfers take no time.

    Raises:
        ValueError: a stage does not run every micro-batch once forward, then (if at all) once backward.
        DeadlockError: the stages cannot all finish.
    """
    for stage, table in enumerate(tables):
        _check_table(stage, table)
    stages = [_Stage(stage, table, exchanges(table, len(tables), stage)) for stage, table in enumerate(tables)]
    durations = {"F": forward_time, "B": backward_time}
    moved = True
    while moved:
        moved = False
        for stage in stages:
            moved |= stage.advance(stages, durations)
    if stuck := [stage for stage in stages if not stage.finished]:
        raise DeadlockError("; ".join(stage.describe(stages) for stage in stuck))
    makespan = max(stage.clock for stage in stages)
    work = sum(durations[action.kind] for table in tables for action in table)
    return Simulation(makespan * len(tables) / work - 1.0 if work else 0.0, tuple(_peak_live(table) for table in tables), makespan)


class _Stage:
    """One stage at its current exchange."""

    def __init__(self, number: int, table: Sequence[Action], plan: list[Exchange]) -> None:
        self.number, self.table, self.plan = number, table, plan
        self.position = 0
        self.clock = 0.0
        self.ended: dict[_Message, float] = {}
        """Messages whose exchange this stage has reached, and when."""
        self._reach()

    @property
    def finished(self) -> bool:
        return self.position == len(self.plan)

    def advance(self, stages: "list[_Stage]", durations: dict[str, float]) -> bool:
        """Complete the current exchange and run the action behind it, if the neighbours are there."""
        if self.finished or self._missing(stages):
            return False
        for message in self._messages():
            if message[3] == self.number:
                self.clock = max(self.clock, stages[message[2]].ended[message])
        if self.position < len(self.table):
            self.clock += durations[self.table[self.position].kind]
        self.position += 1
        if not self.finished:
            self._reach()
        return True

    def describe(self, stages: "list[_Stage]") -> str:
        waits = [
            f"to send {kind} {microbatch} to stage {receiver}" if sender == self.number else f"for {kind} {microbatch} of stage {sender}"
            for kind, microbatch, sender, receiver in self._missing(stages)
        ]
        due = self.table[self.position] if self.position < len(self.table) else "its end"
        return f"stage {self.number} before {due} waits {' and '.join(waits)}"

    def _reach(self) -> None:
        for message in self._messages():
            self.ended[message] = self.clock

    def _missing(self, stages: "list[_Stage]") -> list[_Message]:
        return [m for m in self._messages() if m not in stages[m[2] if m[3] == self.number else m[3]].ended]

    def _messages(self) -> Iterator[_Message]:
        now, here = self.plan[self.position], self.number
        for kind, microbatch, sender, receiver in (
            ("activation", now.recv_activation, here - 1, here),
            ("activation", now.send_activation, here, here + 1),
            ("gradient", now.recv_grad, here + 1, here),
            ("gradient", now.send_grad, here, here - 1),
        ):
            if microbatch is not None:
                yield kind, microbatch, sender, receiver


def _check_table(stage: int, table: Sequence[Action]) -> None:
    forwards = [action.microbatch for action in table if action.kind == "F"]
    backwards = [action.microbatch for action in table if action.kind == "B"]
    repeated = [number for numbers in (forwards, backwards) for number, count in Counter(numbers).items() if count > 1]
    if repeated:
        raise ValueError(f"stage {stage} runs micro-batch {repeated[0]} twice")
    if backwards and set(backwards) != set(forwards):
        raise ValueError(f"stage {stage} runs {sorted(set(forwards) ^ set(backwards))} in one direction only")
    done: set[int] = set()
    for action in table:
        if action.kind == "F":
            done.add(action.microbatch)
        elif action.microbatch not in done:
            raise ValueError(f"stage {stage} runs B{action.microbatch} before F{action.microbatch}")


def _peak_live(table: Sequence[Action]) -> int:
    live = peak = 0
    for action in table:
        live += 1 if action.kind == "F" else -1
        peak = max(peak, live)
    return peak
