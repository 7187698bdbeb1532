# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Servers under attack: hostile bytes, clients that leave or hold on, oversize requests, killed engines, suspends, new weights, long use.

A tiny engine serves twice, by its own HTTP server and by one over a coordinator. Every client is in a process of its own. Where there are
eight cores and more, servers, clients whose requests are timed, and all other clients have cores of their own. ``--output`` has the
figures of each part as soon as it is over, and names those that are not.

python -m tests.campaigns.serving --parts quiet leaving slow oversize suspends weights kills memory --aborts 10000 --requests 2000 \\
    --rate 50 --seconds 15 --budget-seconds 450 --output docs/benchmarks/serving_trust.json
python -m tests.campaigns.serving --parts slow oversize --slow-clients 1000 --seconds 30 --rate 20 --repeats 5 \\
    --output docs/benchmarks/serving_slow.json
python -m tests.campaigns.serving --only-attack --engine-processes 1 --rounds 5 --frames 200000 --http-share 0.1 --attack-per-s 4500 \\
    --seconds 15 --rate 50 --attackers 2 --budget-seconds 400 --output docs/benchmarks/serving_attack.json
python -m tests.campaigns.serving --soak-minutes 120 --rate 5 --output docs/benchmarks/serving_soak.json
"""

import argparse
import contextlib
import dataclasses
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

import torch

from tests.campaigns._serving_attack import Attack, attacked, hostile
from tests.campaigns._serving_changes import killed_engines, suspended, swapped_weights
from tests.campaigns._serving_cores import FEWEST, Cores, assigned, physical_core
from tests.campaigns._serving_service import Figures, Service, quiet, served
from tests.campaigns._serving_trials import leaving, memory, oversize, slow, soak
from tools.bench._record import record

__all__ = ["PARTS", "main"]

PARTS = {
    "quiet": "without attack",
    "hostile": "hostile bytes",
    "leaving": "clients that leave",
    "slow": "slow clients",
    "oversize": "oversize requests",
    "suspends": "suspends",
    "weights": "weights",
    "memory": "memory",
    "kills": "killed engines",
}
"""Each part's name in the figures."""


def _attack(options: argparse.Namespace) -> Attack:
    http = round(options.frames * options.http_share)
    per_s = options.attack_per_s * (1 - options.http_share), options.attack_per_s * options.http_share
    return Attack(
        frames=options.frames - http,
        http_requests=http,
        seconds=options.attack_seconds,
        per_s=per_s,
        attackers=options.attackers,
        seed=options.seed,
    )


def _trials(options: argparse.Namespace, service: Service, until: float) -> dict[str, Callable[[], Figures]]:
    """The parts that need the service."""
    runner = service.runners[0] if service.runners else None
    trials: dict[str, Callable[[], Figures]] = {
        "quiet": lambda: quiet(service, options.seconds, options.rate),
        "hostile": lambda: hostile(service, _attack(options), options.rate),
        "leaving": lambda: leaving(service, options.aborts, options.seed, until - time.monotonic()),
        "slow": lambda: slow(service, options.slow_clients, options.seconds, options.rate),
        "oversize": lambda: oversize(service, options.repeats, options.oversize_ms),
        "memory": lambda: memory(service, options.requests),
    }
    if runner is not None:
        trials["suspends"] = lambda: suspended(runner, options.swaps, options.seed)
        trials["weights"] = lambda: swapped_weights(runner, options.swaps, options.seed)
    return trials


def _timed(trial: Callable[[], Figures]) -> Figures:
    begin = time.monotonic()
    figures = trial()
    return {**figures, "seconds": round(time.monotonic() - begin, 1)}


def _run(options: argparse.Namespace, cores: Cores, until: float) -> Iterator[dict[str, Figures]]:
    """All parts so far, after each of them; none begins after the time ``until``."""
    if options.soak_minutes:
        with served(cores, options.max_refused_per_s) as service:
            yield {"soak": soak(service, options.soak_minutes, options.sample_seconds, options.rate)}
        return
    done: dict[str, Figures] = {}
    with contextlib.ExitStack() as stack:
        if set(options.parts) != {"kills"} or options.only_attack:
            service = stack.enter_context(served(cores, options.max_refused_per_s, options.engine_processes))
            if options.only_attack:
                for figures in attacked(service, _attack(options), options.rounds, options.seconds, options.rate):
                    yield figures
                    if time.monotonic() > until:
                        return
                return
            trials = _trials(options, service, until)
            for part in options.parts:
                if part in trials and time.monotonic() < until:
                    yield (done := {**done, PARTS[part]: _timed(trials[part])})
    if "kills" in options.parts and time.monotonic() < until:
        yield {**done, PARTS["kills"]: _timed(lambda: killed_engines(options.kills, options.seed, until))}


def _short(options: argparse.Namespace, trials: Mapping[str, Figures]) -> list[str]:
    """What the options asked for and the figures lack."""
    if options.soak_minutes:
        return [] if trials else ["the soak"]
    if options.only_attack:
        under = trials.get("hostile bytes", {})
        count = len(under.get("rounds", [under] if under else []))
        return [f"{options.rounds - count} of {options.rounds} rounds"] if count < options.rounds else []
    short = [PARTS[part] for part in options.parts if PARTS[part] not in trials]
    counted = {"leaving": ("count", options.aborts), "kills": ("kills", options.kills)}
    for part, (field, count) in counted.items():
        figures = trials.get(PARTS[part])
        if figures is not None and figures[field] < count:
            short.append(f"{PARTS[part]}: {figures[field]} of {count}")
    return short


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, count in {
        "frames": 100_000,
        "aborts": 2000,
        "kills": 50,
        "swaps": 200,
        "repeats": 20,
        "slow-clients": 100,
        "requests": 5000,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=count)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--budget-seconds", type=float, default=math.inf, help="begin no part or round later; what is lacking is a problem")
    parser.add_argument("--seconds", type=float, default=30, help="of the trial without attack, and of the slow clients")
    parser.add_argument(
        "--oversize-ms", type=float, default=500, help="of computing that an oversize request may cost; ten times as much in all"
    )
    parser.add_argument("--rate", type=float, default=20, help="good requests a second")
    parser.add_argument("--http-share", type=float, default=0.5, help="of --frames: to the HTTP ports; the rest to the coordinator's")
    parser.add_argument("--attackers", type=int, default=1, help="processes that send frames, and as many that send HTTP requests")
    parser.add_argument("--attack-per-s", type=float, default=0, help="hostile messages a second; 0 for as many as may be")
    parser.add_argument("--attack-seconds", type=float, default=0, help="end the attack then, whatever was sent; 0 to send all --frames")
    parser.add_argument("--rounds", type=int, default=1, help="of --only-attack, whose trials take turns, each with --frames")
    parser.add_argument("--max-refused-per-s", type=float, default=None, help="as of ConnectionLimits; good clients have another address")
    parser.add_argument(
        "--only-attack", action="store_true", help="the trials without attack, of hostile bytes, and of their senders alone"
    )
    parser.add_argument(
        "--engine-processes",
        type=int,
        default=0,
        help="of --only-attack: serve by so many engines behind a coordinator, as --data-parallel does",
    )
    parser.add_argument("--soak-minutes", type=float, default=0, help="serve a steady load for so long, and nothing else")
    parser.add_argument("--sample-seconds", type=float, default=30, help="of the soak, between two looks at memory, tasks and descriptors")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    return parser


def _checked(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if options.soak_minutes and 60 * options.soak_minutes < 8 * options.sample_seconds:
        parser.error(f"--soak-minutes {options.soak_minutes:g} has less than 8 samples; lower --sample-seconds {options.sample_seconds:g}")
    if options.engine_processes and not options.only_attack:
        parser.error(f"--engine-processes {options.engine_processes} is of --only-attack; the other trials look into the engines")
    if not 0 <= options.http_share <= 1:
        parser.error(f"--http-share {options.http_share:g} is no share; give 0 to 1")
    if not 1 <= options.attackers <= 250:
        parser.error(f"--attackers {options.attackers} must be 1 to 250: each has an address 127.0.0.x")


def _terminated(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the campaign, write its figures after each part, return 1 where something was lost, leaked, late or left out."""
    parser = _parser()
    options = parser.parse_args(arguments)
    _checked(parser, options)
    torch.set_num_threads(1)
    # Processes of the campaign end with it.
    signal.signal(signal.SIGTERM, _terminated)
    start, load, available = time.monotonic(), os.getloadavg()[0], os.sched_getaffinity(0)
    cores = assigned(available, {core: physical_core(core) for core in available})
    # Threads and processes that are started from here on are bound with this one.
    os.sched_setaffinity(0, cores.server)
    # What else the machine does shows in every time.
    places = dataclasses.asdict(cores) if len(available) >= FEWEST else "all parts share all cores"
    machine = {"cores": len(available), "cores_of": places, "load_average_before": round(load, 1)}

    def written(trials: Mapping[str, Figures]) -> Figures:
        problems = [f"{name}: {problem}" for name, trial in trials.items() for problem in trial["problems"]]
        plain = {name: {field: value for field, value in trial.items() if field != "problems"} for name, trial in trials.items()}
        times = {"unfinished": _short(options, trials), "seconds": round(time.monotonic() - start, 1)}
        figures = {**machine, **plain, "problems": problems, **times}
        if options.output:
            record(options.output, figures)
        return figures

    figures = written({})
    for trials in _run(options, cores, start + options.budget_seconds):
        figures = written(trials)
        print(f"{figures['seconds']} s, unfinished: {', '.join(figures['unfinished']) or 'nothing'}", file=sys.stderr)
    print(json.dumps(figures, indent=1))
    return 1 if figures["problems"] or figures["unfinished"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
