# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What share of the steps in a trace waits for communication."""

import collections
import gzip
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# Parts of the names of kernels that send, receive or wait for other devices, in lower case.
_COMMUNICATION = ("nccl", "nvshmem", "deep_ep", "one_shot_all_reduce", "two_shot_all_reduce", "multimem_")
_STEP = re.compile(r"step \d+")
_COLLECTIVE = re.compile(r"nccl\w*?Kernel_([A-Za-z]+)")
Spans = list[tuple[float, float]]
"""Begins and ends, sorted and apart."""


@dataclass(frozen=True, kw_only=True)
class CommunicationReport:
    """Where the time of traced steps went on one device, in seconds of all of them together.

    A moment belongs to ``compute_s`` when a kernel that computes runs on any stream, to ``exposed_s`` when only kernels that communicate
    run, and to ``other_s`` when no kernel runs: the device copies, waits for the host, or has no work. The three add up to ``span_s``.
    A kernel that communicates also runs while it waits for a slower rank.
    """

    num_steps: int
    span_s: float
    """From the begin of the first step to the end of the last one and of its kernels."""
    compute_s: float
    communication_s: float
    """At least one kernel communicates, hidden behind others or not."""
    exposed_s: float
    other_s: float
    exposed_by_collective: Mapping[str, float]
    """Exposed seconds by collective and group, as "AllReduce tp", largest first. Of two that run at once each counts whole."""

    @property
    def exposed_share(self) -> float:
        """Of the step, in 0 to 1."""
        return self.exposed_s / self.span_s

    @property
    def hidden_share(self) -> float:
        """Of the communication, in 0 to 1; 1 when there is none."""
        return 1.0 - self.exposed_s / self.communication_s if self.communication_s else 1.0

    def values(self) -> dict[str, float]:
        """Numbers for a writer."""
        return {
            "communication/exposed_share": self.exposed_share,
            "communication/exposed_s": self.exposed_s / self.num_steps,
            "communication/s": self.communication_s / self.num_steps,
            "communication/compute_share": self.compute_s / self.span_s,
            "communication/other_share": self.other_s / self.span_s,
        }

    def to_json(self) -> dict[str, Any]:
        """Everything, for a file."""
        return {**asdict(self), "exposed_share": self.exposed_share, "hidden_share": self.hidden_share}

    def __str__(self) -> str:
        per_step = 1e3 / self.num_steps
        worst = [f"{name} {seconds * per_step:.2f} ms" for name, seconds in list(self.exposed_by_collective.items())[:3] if seconds > 0]
        return (
            f"exposed communication: {self.exposed_share:.1%} of a step, "
            f"{self.exposed_s * per_step:.2f} of {self.span_s * per_step:.2f} ms; "
            f"communication {self.communication_s * per_step:.2f} ms, {self.hidden_share:.0%} of it hidden; "
            f"compute {self.compute_s / self.span_s:.1%}, neither {self.other_s / self.span_s:.1%}"
            + (f"; most: {', '.join(worst)}" if worst else "")
        )


def exposed_communication(events: Iterable[Mapping[str, Any]]) -> CommunicationReport | None:
    """How much of the traced steps waits for communication; None for a trace without kernels of a device.

    Args:
        events: ``traceEvents`` of one rank's trace by ``torch.profiler``, times in microseconds. Steps are the annotations "step N" that
            ``ProfileWindow`` makes; without one, all of the trace is one step. The kernels are those of one device.

    Example:
        >>> kernel = {"ph": "X", "cat": "kernel"}
        >>> gemm = {**kernel, "name": "gemm", "ts": 0, "dur": 60}
        >>> report = exposed_communication([gemm, {**kernel, "name": "ncclDevKernel_AllReduce_Sum", "ts": 40, "dur": 60}])
        >>> report.exposed_share, report.hidden_share.__round__(2)
        (0.4, 0.33)
    """
    compute: Spans = []
    communication: dict[str, Spans] = collections.defaultdict(list)
    steps: Spans = []
    for event in events:
        category = event.get("cat")
        if event.get("ph") != "X" or category not in ("kernel", "user_annotation"):
            continue
        name, span = str(event["name"]), (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        if category == "user_annotation":
            if _STEP.fullmatch(name):
                steps.append(span)
        elif any(part in name.lower() for part in _COMMUNICATION):
            communication[_label(name, event.get("args", {}))].append(span)
        else:
            compute.append(span)
    kernels = [*compute, *(span for spans in communication.values() for span in spans)]
    if not kernels:
        return None
    everything = [*kernels, *steps]
    length = max(end for _, end in everything) - min(begin for begin, _ in everything)
    busy = _union(compute)
    total = _union([span for spans in communication.values() for span in spans])
    exposed = _length(_outside(total, busy))
    by_label = {label: _length(_outside(_union(spans), busy)) * 1e-6 for label, spans in communication.items()}
    return CommunicationReport(
        num_steps=max(1, len(steps)),
        span_s=length * 1e-6,
        compute_s=_length(busy) * 1e-6,
        communication_s=_length(total) * 1e-6,
        exposed_s=exposed * 1e-6,
        other_s=(length - _length(busy) - exposed) * 1e-6,
        exposed_by_collective=dict(sorted(by_label.items(), key=lambda item: -item[1])),
    )


def read_trace(path: str | Path) -> list[dict[str, Any]]:
    """The events of a trace, compressed or not.

    Raises:
        ValueError: no trace.
        OSError: the file cannot be read.
    """
    path = Path(path)
    data = path.read_bytes()
    try:
        content: Any = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    except (ValueError, EOFError, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is no trace: {error}; pass a .trace.json.gz of torch.profiler") from None
    if not isinstance(content, dict) or not isinstance(content.get("traceEvents"), list):
        raise ValueError(f"{path} holds no traceEvents; pass a .trace.json.gz of torch.profiler")
    return content["traceEvents"]


def _label(name: str, facts: Mapping[str, Any]) -> str:
    """Collective and group, as far as the trace tells."""
    match = _COLLECTIVE.search(name)
    kind = match[1] if match else str(facts.get("Collective name") or name.partition("(")[0].removeprefix("void "))
    group = str(facts.get("Process Group Description") or facts.get("Process Group Name") or "")
    return f"{kind} {group}".rstrip()


def _union(spans: Sequence[tuple[float, float]]) -> Spans:
    """The moments in any of the spans."""
    merged: Spans = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((begin, end))
    return merged


def _outside(spans: Spans, others: Spans) -> Spans:
    """The moments of ``spans`` in none of ``others``; both are unions."""
    remaining: Spans = []
    place = 0
    for begin, end in spans:
        while place < len(others) and others[place][1] <= begin:
            place += 1
        at = place
        while begin < end and at < len(others) and others[at][0] < end:
            if others[at][0] > begin:
                remaining.append((begin, others[at][0]))
            begin = max(begin, others[at][1])
            at += 1
        if begin < end:
            remaining.append((begin, end))
    return remaining


def _length(spans: Spans) -> float:
    return sum(end - begin for begin, end in spans)
