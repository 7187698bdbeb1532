# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Runs the schedules of all stages without a device."""

from collections.abc import Sequence
from dataclasses import dataclass

from mcore_parallel.pipeline._clock import ActionSpan, Costs, DeadlockError, Table, Transfer, clock, count_chunks, transfers_to
from mcore_parallel.pipeline._plan import Exchange, exchanges
from mcore_parallel.pipeline._schedule import Action, parts


@dataclass(frozen=True)
class Simulation:
    """What a run of the schedules looks like; ``str`` draws it.

    ``bubble_fraction`` is idle time over working time, (p - 1) / m for 1F1B with p stages and m micro-batches.
    """

    bubble_fraction: float
    peak_live: tuple[int, ...]
    """Most forwards a stage holds at once whose backward (with weight gradients) is not over, by stage. With several
    chunks each counts for a part of the stage's layers."""
    makespan: float
    """Time from the first to the last action."""
    peak_received: tuple[int, ...]
    """Most tensors that a stage has taken in, or stands ready to take in, ahead of the action that uses them, by stage."""
    tables: tuple[Table, ...]
    spans: tuple[tuple[ActionSpan, ...], ...]
    """When the actions begin and end, by stage."""

    def __str__(self) -> str:
        """A line a stage, a column a unit of time; an action is its kind and micro-batch, every second chunk in lower case."""
        lines = []
        for stage, (table, spans) in enumerate(zip(self.tables, self.spans, strict=True)):
            cells = ["."] * round(self.makespan)
            for entry, span in zip(table, spans, strict=True):
                marks = [_mark(action) for action in parts(entry)]
                width = round(span.end) - round(span.start)
                # The parts of a pair are drawn behind each other.
                cells[round(span.start) : round(span.end)] = marks[:width] + marks[-1:] * (width - len(marks))
            lines.append(f"stage {stage} " + " ".join(f"{cell:<2}" for cell in cells).rstrip())
        peak = ", ".join(map(str, self.peak_live))
        return "\n".join([*lines, f"bubble {self.bubble_fraction:.1%} of the work, peak live {peak}"])


def simulate(
    tables: Sequence[Table],
    *,
    forward_time: float = 1.0,
    backward_time: float = 2.0,
    weight_time: float | None = None,
    hidden_time: float = 0.0,
) -> Simulation:
    """Run one table a stage the way ``run_schedule`` does and report.

    Two things are shown. The actions are timed as if sends were buffered and transfers took no time. And the plan of
    transfers (``exchanges``) is run under the strictest rule a transport can have, in which an exchange ends only when
    for each of its transfers the other stage has come to the exchange with the other end: a schedule that passes runs
    on any transport.

    Args:
        tables: one a stage.
        forward_time: of one chunk.
        backward_time: of one chunk, whole.
        weight_time: the weight gradients' part of ``backward_time``; None for half.
        hidden_time: what a pair (``Combined``) saves by overlap.

    Raises:
        ValueError: a stage does not run every micro-batch once forward, then (if at all) once backward; times that are not positive.
        DeadlockError: the stages cannot all finish.
    """
    weight = backward_time / 2 if weight_time is None else weight_time
    costs = Costs(forward=forward_time, backward=backward_time, weight=weight, hidden=hidden_time)
    spans = clock(tables, costs)
    plans = exchanges(tables)
    _run_strictly(tables, plans)
    makespan = max((row[-1].end for row in spans if row), default=0.0)
    work = sum(costs.of(entry) for table in tables for entry in table)
    return Simulation(
        bubble_fraction=makespan * len(tables) / work - 1.0 if work else 0.0,
        peak_live=tuple(_peak_live(table) for table in tables),
        makespan=makespan,
        peak_received=tuple(_peak_received(tables, plan, stage) for stage, plan in enumerate(plans)),
        tables=tuple(tables),
        spans=tuple(tuple(row) for row in spans),
    )


def _run_strictly(tables: Sequence[Table], plans: list[list[Exchange]]) -> None:
    sent_in = {transfer: slot for plan in plans for slot, exchange in enumerate(plan) for transfer in exchange.sends}
    received_in = {transfer: slot for plan in plans for slot, exchange in enumerate(plan) for transfer in exchange.receives}
    assert sent_in.keys() == received_in.keys()
    at = [0] * len(plans)

    def missing(stage: int) -> list[Transfer]:
        exchange = plans[stage][at[stage]]
        late = [transfer for transfer in exchange.sends if at[transfer.receiver] < received_in[transfer]]
        return late + [transfer for transfer in exchange.receives if at[transfer.sender] < sent_in[transfer]]

    moved = True
    while moved:
        moved = False
        for stage, plan in enumerate(plans):
            while at[stage] < len(plan) and not missing(stage):
                at[stage] += 1
                moved = True
    if stuck := [stage for stage, plan in enumerate(plans) if at[stage] < len(plan)]:
        raise DeadlockError("; ".join(f"stage {s} at exchange {at[s]} waits for {', '.join(map(str, missing(s)))}" for s in stuck))


def _peak_live(table: Table) -> int:
    live = peak = 0
    for entry in table:
        actions = list(parts(entry))
        live += sum(action.kind == "F" for action in actions)
        peak = max(peak, live)
        live -= sum(action.kind in "BW" for action in actions)
    return peak


def _peak_received(tables: Sequence[Table], plan: list[Exchange], stage: int) -> int:
    held = peak = 0
    num_chunks = count_chunks(tables)
    for entry, exchange in zip(tables[stage], plan, strict=False):
        held += len(exchange.receives)
        peak = max(peak, held)
        held -= sum(transfer.sender != stage for transfer in transfers_to(entry, stage, len(tables), num_chunks))
    return peak


def _mark(action: Action) -> str:
    return f"{action.kind.lower() if action.chunk % 2 else action.kind}{action.microbatch}"
