# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A step whose loss cannot be right is run again before it updates anything."""

import json
import math
import socket
import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from mcore_parallel.comm import all_reduce
from mcore_parallel.training._evidence import find_evidence
from mcore_parallel.training._step import GradientPass
from mcore_parallel.training._totals import Totals

SUSPECT_EXIT_CODE = 16
"""Of a run that wants to be started again, best on other machines: it cannot tell whether a result is a fault of the hardware."""
INVALID_EXIT_CODE = 17
"""Of a run whose loss is not finite on other machines either: it is a matter of the data or the settings, and would come again."""

Verdict = Literal["transient", "suspect", "unstable", "hardware", "reproduced"]
_WORDS: Mapping[str, str] = {
    "transient": "another run of the same step gave {second}: a passing fault; the second result is used",
    "suspect": "another run of the same step gave the same: start again on other machines to tell a fault of these from a right result",
    "unstable": "another run of the same step gave {second}, which cannot be right either: start again on other machines",
    "hardware": "{second} here: the machines of the first run, {host}, are faulty",
    "reproduced": "the run on {host} gave the same: no fault of the hardware",
}


@dataclass(frozen=True, kw_only=True)
class RerunConfig:
    """When a step is run again.

    Raises:
        ValueError: an unknown mode, a number out of its range.
    """

    mode: Literal["disabled", "validate", "report"] = "disabled"
    """"disabled" looks at nothing and costs nothing; "validate" looks at each loss before the update, which is one more wait for the device
    a step, and runs the step again when it cannot be right; "report" runs every step twice and reports how far both differ."""
    spike_factor: float = 10.0
    """A loss above this many times the median of the last ``window`` ones cannot be right; nor can one that is not finite."""
    window: int = 32
    """Losses that are remembered, and needed before a spike can be told."""
    tolerance: float = 0.0
    """Relative difference up to which two losses of one step are the same; 0 for runs that are deterministic."""

    def __post_init__(self) -> None:
        if self.mode not in ("disabled", "validate", "report"):
            raise ValueError(f"mode={self.mode!r} must be disabled, validate or report")
        if not self.spike_factor > 1 or self.window < 1 or not self.tolerance >= 0:
            raise ValueError(
                f"spike_factor={self.spike_factor} must be above 1, window={self.window} at least 1 and tolerance={self.tolerance} "
                "not negative"
            )


@dataclass(frozen=True, kw_only=True)
class RerunReport:
    """What came of a loss that could not be right."""

    step: int
    verdict: Verdict
    """"transient", "suspect", "unstable"; after a start on other machines "hardware" or "reproduced"."""
    first: float
    second: float
    """Loss of the other run."""
    host: str
    """First rank's machine of the run in question."""
    evidence: tuple[str, ...] = ()
    """Rank, groups and tensor of every gradient and micro-batch loss that is not finite or differs between runs."""

    def __str__(self) -> str:
        words = _WORDS[self.verdict].format(second=self.second, host=self.host)
        return "\n  ".join([f"step {self.step}: loss={self.first} on {self.host}; {words}", *self.evidence])


class SuspectResultError(ArithmeticError):
    """A step whose result cannot be judged on these machines; the update was not made. End with ``SUSPECT_EXIT_CODE``."""

    def __init__(self, report: RerunReport) -> None:
        super().__init__(str(report))
        self.report = report


class InvalidResultError(ArithmeticError):
    """A loss that is not finite on other machines either. End with ``INVALID_EXIT_CODE``."""

    def __init__(self, report: RerunReport) -> None:
        super().__init__(f"{report}; look at the data of this step and at the learning rate")
        self.report = report


def print_report(report: RerunReport) -> None:
    """To the standard error of the first rank."""
    print(report, file=sys.stderr, flush=True)


class Rerun:
    """Judges the loss of each step; one for a run, on every rank.

    A loss that is not finite, or a spike, is computed again from the same micro-batches and random numbers. Another result is a
    passing fault. The same result is written to ``record`` and ends the run; the next start, on other machines, resumes from the
    checkpoint before the step, and finds either the same (then it is right, and training goes on if it is finite) or not (then
    the first machines are faulty).

    Args:
        config: when.
        record: a file all ranks see, which carries a result to the next start; None leaves the next start without it.
        notify: given each report, on the first rank only.
    """

    def __init__(self, config: RerunConfig, record: str | Path | None = None, notify: Callable[[RerunReport], None] = print_report) -> None:
        self.config, self.notify = config, notify
        self._record = None if record is None else Path(record)
        self._losses: deque[float] = deque(maxlen=config.window)
        self._suspect: tuple[int, float] | None = None
        self._looked = config.mode != "validate" or record is None
        self._values: dict[str, float] = {}

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"losses": list(self._losses)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue with what ``state`` returned."""
        self._losses = deque(state["losses"], maxlen=self.config.window)

    def pop_values(self) -> dict[str, float]:
        """Numbers of the last step for its line: ``rerun/difference`` in mode "report", ``rerun/repeated`` when it was run again."""
        values, self._values = self._values, {}
        return values

    def check(self, step: int, work: GradientPass) -> Totals:
        """The sums of the step, with the gradients that belong to them, from a run that can be right.

        Args:
            step: its number.
            work: its forwards and backwards.

        Raises:
            SuspectResultError: no run can be right.
            InvalidResultError: nor could that of other machines.
        """
        if self.config.mode == "disabled":
            return work()
        random = _random_state(work.stage.device)
        totals = work()
        if self.config.mode == "report":
            first = totals.mean
            _set_random_state(random, work.stage.device)
            totals = work()
            self._values["rerun/difference"] = _difference(first, totals.mean)
            return totals
        self._look(totals, work)
        loss, known = totals.mean, None
        if self._suspect is not None and self._suspect[0] == step:
            known, self._suspect = self._suspect[1], None
        if known is not None and self._same(known, loss):
            report = RerunReport(step=step, verdict="reproduced", first=loss, second=known, host=self._close(work))
            self._tell(report, work)
            if not math.isfinite(loss):
                raise InvalidResultError(report)
        elif self._is_wrong(loss):
            return self._again(step, loss, work, random)
        elif known is not None:
            self._tell(RerunReport(step=step, verdict="hardware", first=known, second=loss, host=self._close(work)), work)
        self._losses.append(loss)
        return totals

    def _again(self, step: int, first: float, work: GradientPass, random: Mapping[str, torch.Tensor]) -> Totals:
        """The step once more, with what the ranks can say about it."""

        def rewind() -> None:
            _set_random_state(random, work.stage.device)

        evidence = find_evidence(work, rewind)
        rewind()
        totals = work()
        second = totals.mean
        right = not self._is_wrong(second)
        same = self._same(first, second)
        verdict: Verdict = "suspect" if same else "transient" if right else "unstable"
        report = RerunReport(step=step, verdict=verdict, first=first, second=second, host=socket.gethostname(), evidence=evidence)
        self._values["rerun/repeated"] = 1.0
        self._tell(report, work)
        if verdict == "transient":
            self._losses.append(second)
            return totals
        if work.groups.world.is_first and self._record is not None:
            self._record.parent.mkdir(parents=True, exist_ok=True)
            # Text, since JSON knows no infinity.
            self._record.write_text(json.dumps({**asdict(report), "first": first.hex(), "second": second.hex()}), encoding="utf-8")
        raise SuspectResultError(report)

    def _is_wrong(self, loss: float) -> bool:
        if not math.isfinite(loss):
            return True
        if len(self._losses) < self.config.window:
            return False
        import statistics

        return loss > self.config.spike_factor * statistics.median(self._losses)

    def _same(self, one: float, other: float) -> bool:
        return _difference(one, other) <= self.config.tolerance

    def _look(self, totals: Totals, work: GradientPass) -> None:
        """Read the record of an earlier start; all ranks get what the first one reads."""
        if self._looked:
            return
        self._looked = True
        device, values = totals.vector.device, [0.0, 0.0]
        if work.groups.world.is_first and self._record is not None and self._record.exists():
            content = json.loads(self._record.read_text(encoding="utf-8"))
            values = [float(content["step"]), float.fromhex(content["first"])]
        step, loss = all_reduce(torch.tensor(values, dtype=torch.float64, device=device), work.groups.world).tolist()
        self._suspect = (int(step), loss) if step else None

    def _close(self, work: GradientPass) -> str:
        """The machine of the record, which is done with; known to the first rank only."""
        if not work.groups.world.is_first or self._record is None or not self._record.exists():
            return ""
        host = str(json.loads(self._record.read_text(encoding="utf-8"))["host"])
        self._record.unlink()
        return host

    def _tell(self, report: RerunReport, work: GradientPass) -> None:
        if work.groups.world.is_first:
            self.notify(report)


def _difference(one: float, other: float) -> float:
    """Relative; 0 for two that are both not a number, or equal."""
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    if not (math.isfinite(one) and math.isfinite(other)):
        return math.inf
    return abs(one - other) / max(abs(one), abs(other))


def _random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """Positions of the default generators that operators draw from."""
    state = {"cpu": torch.get_rng_state()}
    return {**state, "cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else state


def _set_random_state(state: Mapping[str, torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
