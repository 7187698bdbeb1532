# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Good requests beside hostile bytes on every port, and what of their delay the senders of those bytes cost by themselves."""

import contextlib
import dataclasses
import json
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.campaigns._serving_service import Figures, Service, beside, ended, lost, quiet, started

__all__ = ["Attack", "attacked", "hostile"]

_NAMES = "without attack", "hostile bytes", "senders elsewhere"


@dataclass(frozen=True, kw_only=True)
class Attack:
    """Hostile messages, from processes of their own."""

    frames: int
    """To the coordinator's port."""
    http_requests: int
    """To the HTTP ports."""
    seconds: float
    """Ended then, whatever was sent; 0 to send all."""
    per_s: tuple[float, float]
    """Frames and HTTP requests a second, in sum; 0 for as fast as may be."""
    attackers: int
    """Processes that send frames, and as many that send requests over one connection at a time."""
    seed: int

    def send(self, cores: Sequence[int], ports: Sequence[int], coordinator_port: int) -> tuple[Figures, Figures]:
        """Figures of the frames and of the HTTP requests."""
        with contextlib.ExitStack() as stack:

            def start(kind: str, targets: Sequence[int], count: int, rate: float) -> list[subprocess.Popen[str]]:
                plan = {"seconds": self.seconds, "per_s": rate / self.attackers}
                shares = [count // self.attackers + (number < count % self.attackers) for number in range(self.attackers)]
                seeded = [{"count": share, "seed": 1000 * self.seed + number, "number": number} for number, share in enumerate(shares)]
                processes = [started(kind, targets, cores, **each, **plan) for each in seeded]
                for process in processes:
                    stack.callback(process.kill)
                return processes

            senders = start("hostile_coordinator", [coordinator_port], self.frames, self.per_s[0])
            askers = start("hostile_http", ports, self.http_requests, self.per_s[1])
            frames, requests = [ended(sender) for sender in senders], [ended(asker) for asker in askers]
        statuses = sum((Counter(each["statuses"]) for each in requests), Counter[str]())
        counts = [sum(each["count"] for each in figures) for figures in (frames, requests)]
        return {"count": counts[0]}, {"count": counts[1], "statuses": dict(sorted(statuses.items()))}


def hostile(service: Service, attack: Attack, rate: float) -> Figures:
    """Good requests at ``rate`` beside the attack: none may be lost, no answer to the attack is a 5xx, nothing stays held."""
    begin, used = time.monotonic(), time.process_time()
    steady, (frames, requests) = beside(service, rate, lambda: attack.send(service.cores.others, service.ports, service.coordinator_port))
    used, attack_s = time.process_time() - used, time.monotonic() - begin
    failed = [f"{count} answers {status}" for status, count in requests["statuses"].items() if status.startswith("5")]
    return {
        "frames": frames["count"],
        "http_requests": requests["count"],
        "http_statuses": requests["statuses"],
        "attack_s": round(attack_s, 2),
        "per_s": round((frames["count"] + requests["count"]) / attack_s, 1),
        "server_cpu_s": round(used, 2),
        "good": steady,
        "problems": lost(steady) + service.left() + failed,
    }


def _elsewhere(service: Service, attack: Attack, figures: Figures, seconds: float, rate: float) -> Figures:
    """What the senders of an attack alone cost the good requests: for ``seconds`` they send as fast to a process that drops it."""
    sink = started("sink", [], service.cores.others)
    assert sink.stdout is not None
    try:
        http, coordinator = json.loads(sink.stdout.readline())
        counts = figures["frames"], figures["http_requests"]
        rates = counts[0] / figures["attack_s"], counts[1] / figures["attack_s"]
        same = dataclasses.replace(attack, frames=counts[0], http_requests=counts[1], seconds=seconds, per_s=rates)
        steady, (frames, requests) = beside(service, rate, lambda: same.send(service.cores.others, [http], coordinator))
    finally:
        sunk = ended(sink)
    sent = {"frames": frames["count"], "http_requests": requests["count"], "sink_cpu_s": sunk["cpu_s"]}
    return {**sent, "good": steady, "problems": lost(steady) + service.left()}


def attacked(service: Service, attack: Attack, rounds: int, seconds: float, rate: float) -> Iterator[dict[str, Figures]]:
    """Without attack, under one, and beside its senders, in turn; after each round the figures of all so far.

    Args:
        service: that is attacked.
        attack: of each round.
        rounds: one at least.
        seconds: of the good requests without attack, and beside the senders alone.
        rate: of good requests a second.
    """
    done: list[tuple[Figures, Figures, Figures]] = []
    for number in range(rounds):
        this = dataclasses.replace(attack, seed=attack.seed + number)
        alone, under = quiet(service, seconds, rate), hostile(service, this, rate)
        done.append((alone, under, _elsewhere(service, this, under, seconds, rate)))
        yield _compared(done)


def _compared(rounds: Sequence[tuple[Figures, Figures, Figures]]) -> dict[str, Figures]:
    """Each trial's rounds, and how the good requests' p99 compare, by the median round."""
    trials: dict[str, Figures] = {}
    for name, figures in zip(_NAMES, zip(*rounds, strict=True), strict=True):
        plain = [{field: value for field, value in each.items() if field != "problems"} for each in figures]
        problems = [problem for each in figures for problem in each["problems"]]
        trials[name] = {**(plain[0] if len(plain) == 1 else {"rounds": plain}), "problems": problems}
    p99 = [[alone["p99_ms"], under["good"]["p99_ms"], sent["good"]["p99_ms"]] for alone, under, sent in rounds]
    ratios = {name: round(statistics.median(row[index] / row[0] for row in p99), 2) for index, name in enumerate(_NAMES) if index}
    sums = {
        "messages": sum(under["frames"] + under["http_requests"] for _, under, _ in rounds),
        "good_requests": sum(under["good"]["requests"] for _, under, _ in rounds),
    }
    return {**trials, "under attack in all rounds": {**sums, "problems": []}, "p99 to that without attack": {**ratios, "problems": []}}
