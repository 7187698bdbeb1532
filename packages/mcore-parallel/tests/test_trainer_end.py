# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""How a run ends, what it is compared with, and where its numbers go."""

import os
import signal
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.training import (
    Batch,
    StopSignals,
    StragglerProbe,
    TelemetrySpans,
    Throughput,
    TrackioWriter,
    Trainer,
    TrainerConfig,
    WandbWriter,
)
from mcore_parallel.training._stragglers import _slowest
from tests.support.trainers import Rows, build_trainer, count_on


class Saves:
    """A checkpointer that only knows which steps there are."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def save(self, step: int, state: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
        self.steps.append(step)

    def load(self, state: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        raise NotImplementedError

    def latest(self) -> int | None:
        return None


def trainer(groups: ProcessGroups | None = None, source: Any = count_on, **options: Any) -> tuple[Trainer, Saves]:
    saves = Saves()
    return build_trainer(TrainerConfig(steps=6, save_every=4), source, groups=groups, checkpointer=saves, **options), saves


def test_every_end_is_saved_once() -> None:
    loop, saves = trainer()
    loop.run()
    assert saves.steps == [4, 6] and not loop.stopped
    short, saves = trainer(source=lambda consumed: [next(count_on(0))] * 3)
    assert short.run().step == 3 and saves.steps == [3]


def test_steps_on_the_nodes_have_a_rhythm_of_their_own() -> None:
    saves, local = Saves(), list[tuple[int, Mapping[str, Any]]]()
    config = TrainerConfig(steps=8, save_every=5, save_local_every=2)
    loop = build_trainer(config, count_on, checkpointer=saves, save_local=lambda step, state, extra: local.append((step, extra["trainer"])))
    loop.run()
    # The last one is not kept: it is saved.
    assert saves.steps == [5, 8] and [(step, state["step"]) for step, state in local] == [(2, 2), (4, 4), (6, 6)]
    with pytest.raises(ValueError, match="save_local_every=2 needs save_local"):
        build_trainer(config, count_on, checkpointer=saves)


def test_a_signal_ends_the_run_after_its_step_and_saves() -> None:
    def source(consumed: int) -> Iterator[list[Batch]]:
        for number, batches in enumerate(count_on(consumed)):
            if number == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            yield batches

    before = signal.getsignal(signal.SIGTERM)
    with StopSignals() as stop:
        loop, saves = trainer(source=source, stop=stop)
        assert loop.run().step == 2
        assert stop.received is signal.SIGTERM
    assert loop.stopped and saves.steps == [2]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_second_signal_acts_as_before_unless_it_follows_at_once() -> None:
    # A shell without job control starts what is in the background with SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with StopSignals() as stop:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        assert stop() and stop.received is signal.SIGINT
    with StopSignals(again_after_s=0.0) as stop, pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
        assert stop()
        signal.raise_signal(signal.SIGINT)


def check_all_stop_with_one(plan: ParallelPlan) -> tuple[int, list[int]]:
    groups = ProcessGroups.build(plan)
    loop, saves = trainer(groups, stop=lambda: groups.world.rank == 1 and loop.state.step == 2)
    return loop.run().step, saves.steps


@pytest.mark.world(2)
@pytest.mark.parametrize("plan", [ParallelPlan(tp=2), ParallelPlan(pp=2), ParallelPlan(dp=2)], ids=["tp2", "pp2", "dp2"])
def test_all_ranks_stop_when_one_is_asked(world: Callable[..., list[Any]], plan: ParallelPlan) -> None:
    assert world(check_all_stop_with_one, plan=plan) == [(3, [3])] * 2


def test_speed_is_reported_against_the_peak() -> None:
    lines = Rows()
    loop, _ = trainer(throughput=Throughput(flops_per_token=1e6, peak_flops=1e9))
    loop.writers = (lines,)
    loop.run()
    for row in lines.rows:
        assert row["tflops_per_rank"] == pytest.approx(row["tokens_per_s"] * 1e-6)
        assert row["mfu"] == pytest.approx(row["tokens_per_s"] * 1e-3)
        assert row["num_samples"] == 2
    assert Throughput(flops_per_token=6.0).values(tokens_per_s=1e12, num_ranks=2) == {"tflops_per_rank": 3.0}
    with pytest.raises(ValueError, match="peak_flops=0 must be positive"):
        Throughput(flops_per_token=1.0, peak_flops=0)


def check_the_slow_rank(sleep_s: float) -> list[dict[str, float]]:
    import time

    groups = ProcessGroups.build(ParallelPlan(dp=2))
    model = nn.Linear(2, 2)
    probe = StragglerProbe(model, groups, every=2)
    if groups.world.rank == 1:
        model.register_forward_pre_hook(lambda *_: time.sleep(sleep_s))
    found = []
    for _ in range(4):
        model(torch.ones(1, 2))
        found.append(probe())
    probe.close()
    return found


@pytest.mark.journey
@pytest.mark.world(2)
def test_the_slowest_rank_is_named_every_second_step(world: Callable[..., list[Any]]) -> None:
    # Far longer than a core may be taken away from the other.
    first, second = world(check_the_slow_rank, sleep_s=0.4)
    assert first == second
    assert [bool(row) for row in first] == [False, True, False, True]
    assert first[1]["straggler/rank"] == 1 and first[1]["straggler/slowdown"] > 1.2 and first[1]["straggler/forward_s"] > 0.4


def test_ranks_are_compared_with_their_own_stage() -> None:
    found = _slowest([(0, 1.0), (0, 1.0), (0, 1.5), (1, 4.0), (1, 4.0), (1, 5.0)])
    assert found == {"straggler/rank": 2.0, "straggler/slowdown": 1.5, "straggler/forward_s": 1.5}


def test_spans_surround_the_parts_of_a_run() -> None:
    seen: list[tuple[str, Any]] = []

    class Tracer:
        @contextmanager
        def start_as_current_span(self, name: str, attributes: Mapping[str, Any]) -> Iterator[None]:
            seen.append((name, attributes["rank"]))
            yield

    loop, _ = trainer(spans=TelemetrySpans(Tracer(), rank=3))
    loop.run()
    parts = ["batch", "step", "forward-backward", "grad-sync", "optimizer"]
    assert [name for name, _ in seen] == [*parts * 4, "save", *parts * 2, "save"]
    assert {rank for _, rank in seen} == {3}
    with TelemetrySpans()("step"):
        pass


def test_weights_and_biases_gets_every_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, Any]] = []

    class Run:
        def log(self, values: Mapping[str, float], step: int) -> None:
            calls.append(("log", (step, values)))

        def finish(self) -> None:
            calls.append(("finish", None))

    def init(**options: Any) -> Run:
        calls.append(("init", options))
        return Run()

    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "wandb", None)
        with pytest.raises(ModuleNotFoundError, match=r'wandb is not installed: pip install "mcore-parallel\[wandb\]"'):
            WandbWriter("project", tmp_path / "logs")
    assert not (tmp_path / "logs").exists()
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    writer = WandbWriter("project", tmp_path / "logs", run_id="abc", config={"lr": 1.0}, mode="offline")
    writer.write(2, {"loss": 1.0})
    writer.close()
    (_, options), *rest = calls
    assert options["id"] == "abc" and options["resume"] == "allow" and options["config"] == {"lr": 1.0} and options["mode"] == "offline"
    assert rest == [("log", (2, {"loss": 1.0})), ("finish", None)]


def test_trackio_gets_what_a_step_has(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, Any]] = []
    run = types.SimpleNamespace(
        log=lambda values, step: calls.append(("log", (step, values))), finish=lambda: calls.append(("finish", None))
    )

    def init(**options: Any) -> Any:
        calls.append(("init", options))
        return run

    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "trackio", None)
        with pytest.raises(ModuleNotFoundError, match=r'trackio is not installed: pip install "mcore-parallel\[trackio\]"'):
            TrackioWriter("project")
    monkeypatch.setitem(sys.modules, "trackio", types.SimpleNamespace(init=init))
    writer = TrackioWriter("project", name="abc", config={"lr": 1.0})
    writer.write(2, {"loss": 1.0})
    writer.close()
    options = {"project": "project", "name": "abc", "resume": "allow", "config": {"lr": 1.0}}
    assert calls == [("init", options), ("log", (2, {"loss": 1.0})), ("finish", None)]
