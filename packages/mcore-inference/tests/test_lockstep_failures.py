# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Ranks of a split model that are lost, silent, late or out of step, and the runner that names them."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
import torch
import torch.distributed as dist

from mcore_inference import EngineDeadError, EngineRunner, LockstepConfig, SamplingParams, follow_runner
from mcore_inference.engine import _rank_link, _weight_broadcast
from mcore_inference.engine._rank_link import RankLink
from mcore_inference.server import serve, serve_runner
from mcore_parallel import ProcessGroups
from mcore_parallel.data import ByteTokenizer
from tests.support.lockstep_engines import (
    LONG,
    PATIENT,
    QUICK,
    expects_rank_failure,
    make_engine,
    num_groups,
    slow_down,
    split_engine,
    weights_of,
)

World = Callable[..., list[Any]]


def peer_pid() -> int:
    pids = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
    dist.all_gather(pids, torch.tensor([os.getpid()]))
    return int(pids[1 - dist.get_rank()])


def check_killed() -> float:
    engine, pid = split_engine(), peer_pid()
    if engine.model.groups.tp.rank == 1:
        slow_down(engine, 0.01)
        follow_runner(engine, PATIENT)
    with serve(engine) as server:
        body = {"prompt": "a", "max_tokens": 200, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=30) as stream:
            lines = stream.iter_lines()
            next(lines)
            begin = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            rest = "".join(lines)
            seconds = time.monotonic() - begin
        assert "RankFailedError" in rest and "tp rank 1 is gone" in rest
        health = httpx.get(f"{server.url}/health")
        assert health.status_code == 503 and health.json()["status"] == "dead"
        late = httpx.post(f"{server.url}/v1/completions", json={"prompt": "b"})
        assert late.status_code == 503 and late.json()["error"]["code"] == "RankFailedError"
        with pytest.raises(EngineDeadError, match="tp rank 1 is gone"):
            server.wait()
    return seconds


@pytest.mark.world(2)
def test_a_killed_rank_fails_what_is_open_and_turns_health_red(world: World) -> None:
    seconds, _ = world(check_killed, doomed=(1,))
    assert seconds < 5


def check_frozen() -> float:
    engine, pid = split_engine(), peer_pid()
    if engine.model.groups.tp.rank == 1:
        with expects_rank_failure(0, "tp rank 0 (was silent|is gone)"):
            follow_runner(engine, QUICK)
        return 0.0

    with serve_runner(lambda: EngineRunner(engine, lockstep=QUICK), ByteTokenizer()) as server:
        assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "b"}, timeout=30).status_code == 200
        os.kill(pid, signal.SIGSTOP)
        begin = time.monotonic()
        # The step hangs in the model, where nobody answers.
        answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "b"}, timeout=30)
        seconds = time.monotonic() - begin
        assert answer.status_code == 503 and "tp rank 1 was silent for 3 s" in answer.text
        os.kill(pid, signal.SIGCONT)
    return seconds


@pytest.mark.journey
@pytest.mark.world(2)
def test_a_silent_rank_is_named_while_the_step_hangs(world: World) -> None:
    seconds, _ = world(check_frozen)
    # Of its silence, not of the step.
    assert seconds < 18


def check_interrupted() -> int:
    """Ctrl-C on the rank that follows, whose process lives on."""
    engine = split_engine()
    if engine.model.groups.tp.rank == 0:

        async def main() -> None:
            with EngineRunner(engine, lockstep=PATIENT) as runner:
                stream = await runner.submit("a", LONG)
                with expects_rank_failure(1, "tp rank 1 ended: KeyboardInterrupt in its process"):
                    await stream.record()

        asyncio.run(main())
        return engine.step_count
    step = engine.step

    def interrupted() -> Any:
        if engine.step_count == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return step()

    engine.step = interrupted  # type: ignore[method-assign]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        follow_runner(engine, PATIENT)
    return engine.step_count


@pytest.mark.world(2)
def test_a_rank_that_is_interrupted_is_named_at_once_and_steps_no_more(world: World) -> None:
    assert max(world(check_interrupted)) < LONG.num_tokens_to_generate


def check_one_sided_failures() -> None:
    engine = split_engine()
    rank = engine.model.groups.tp.rank
    failing: list[int] = []

    def fail(*_: Any) -> None:
        if failing and failing.pop():
            raise RuntimeError(f"broken on rank {rank}")

    engine.model.register_forward_pre_hook(fail)
    dist.barrier()
    if rank == 1:
        # Both ranks fail in the fourth step, this one alone in the eighth.
        steps = iter(range(1, 100))
        step = engine.step

        def counted() -> Any:
            failing[:] = [next(steps) in (4, 8)]
            return step()

        engine.step = counted  # type: ignore[method-assign]
        with pytest.raises(EngineDeadError, match="tp rank 1 (failed in|is not in) step 8: RuntimeError: broken on rank 1"):
            follow_runner(engine, QUICK)
        return
    steps = iter(range(1, 100))
    step = engine.step

    def counted() -> Any:
        failing[:] = [next(steps) == 4]
        return step()

    engine.step = counted  # type: ignore[method-assign]

    async def main() -> None:
        with EngineRunner(engine, lockstep=QUICK) as runner:
            record = await (await runner.submit("a", LONG)).record()
            assert "broken on rank 0" in str(record.error) and runner.health().alive
            with expects_rank_failure(1, "step 8: RuntimeError: broken on rank 1"):
                await (await runner.submit("a", LONG)).record()
            assert not runner.health().alive

    asyncio.run(main())


@pytest.mark.journey
@pytest.mark.world(2)
def test_a_step_that_fails_everywhere_ends_its_requests_and_one_that_fails_on_a_rank_the_engine(world: World) -> None:
    world(check_one_sided_failures)


def check_first_rank_fails() -> float:
    engine = split_engine()
    quick = LockstepConfig(join_timeout_s=50, silence_timeout_s=3, step_timeout_s=20)
    num_before = num_groups()
    if engine.model.groups.tp.rank == 1:
        # It waits in the model for the first rank, which is not coming.
        with pytest.raises(EngineDeadError, match="tp rank 0 failed in step 4: RuntimeError: broken"):
            follow_runner(engine, quick)
        assert num_groups() == num_before
        return 0.0
    steps, step = iter(range(1, 100)), engine.step

    def broken() -> Any:
        if next(steps) == 4:
            raise RuntimeError("broken")
        return step()

    engine.step = broken  # type: ignore[method-assign]

    async def main() -> float:
        with EngineRunner(engine, lockstep=quick) as runner:
            begin = time.monotonic()
            with expects_rank_failure(0, "tp rank 0 failed in step 4: RuntimeError: broken"):
                await (await runner.submit("a", LONG)).record()
            return time.monotonic() - begin

    seconds = asyncio.run(main())
    assert num_groups() == num_before
    return seconds


@pytest.mark.journey
@pytest.mark.world(2)
def test_a_step_that_fails_on_the_first_rank_alone_is_blamed_on_it_and_leaves_no_group_open(world: World) -> None:
    seconds, _ = world(check_first_rank_fails)
    # Of its silence, not of the step.
    assert seconds < 18


def check_hanging_load() -> float:
    """After its first bucket a rank takes no more, though it is alive."""
    engine = split_engine()
    _weight_broadcast._BUCKET_BYTES = 4096
    impatient = LockstepConfig(join_timeout_s=50, silence_timeout_s=2, step_timeout_s=1.5)

    def stuck(chunks: Iterator[Any]) -> None:
        next(chunks)
        time.sleep(60)

    culprit = "tp rank 1 did not take bucket 2 of load_weights within 1.5 s"
    if engine.model.groups.tp.rank == 1:
        engine.weights.load = stuck  # type: ignore[method-assign,assignment]
        with pytest.raises(EngineDeadError, match=culprit):
            follow_runner(engine, impatient)
        return 0.0
    new = weights_of(make_engine(ProcessGroups.single(), seed=1))

    async def main() -> float:
        with EngineRunner(engine, lockstep=impatient) as runner:
            begin = time.monotonic()
            with expects_rank_failure(1, culprit):
                await runner.load_weights(new)
            assert not runner.health().alive
            return time.monotonic() - begin

    return asyncio.run(main())


@pytest.mark.journey
@pytest.mark.world(2)
def test_a_rank_that_takes_no_weights_is_named(world: World) -> None:
    seconds, _ = world(check_hanging_load)
    assert seconds < 8


def test_joining_a_silent_rank_takes_its_time_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now, waits = [100.0], list[float]()

    class Stuck:
        """A thread that does not end."""

        def join(self, timeout: float) -> None:
            waits.append(timeout)
            now[0] += timeout

    link = object.__new__(RankLink)
    link._threads = cast(Any, [Stuck(), Stuck()])
    monkeypatch.setattr(_rank_link, "time", SimpleNamespace(monotonic=lambda: now[0]))
    link.join(2.0)
    assert waits == [2.0, 0.0]


def check_other_tokens() -> None:
    engine = split_engine()
    if engine.model.groups.tp.rank == 1:
        take = engine.take_finished

        def wrong() -> Any:
            records = take()
            for record in records:
                record.requests[-1].generated_tokens[-1] += 1
            return records

        engine.take_finished = wrong  # type: ignore[method-assign]
        with pytest.raises(EngineDeadError, match="tp rank 1 is not in step 3: drew other tokens"):
            follow_runner(engine, PATIENT)
        return

    async def main() -> None:
        with EngineRunner(engine, lockstep=PATIENT) as runner, expects_rank_failure(1, "drew other tokens"):
            # Its own answer may be out before the other rank's step is compared.
            for _ in range(20):
                await (await runner.submit("a", SamplingParams(num_tokens_to_generate=3, ignore_eos=True))).record()

    asyncio.run(main())


@pytest.mark.world(2)
def test_ranks_that_draw_other_tokens_are_not_served_from(world: World) -> None:
    world(check_other_tokens)


def check_alone() -> None:
    engine = split_engine()
    impatient = LockstepConfig(join_timeout_s=1)
    if engine.model.groups.tp.rank == 1:
        with pytest.raises(ValueError, match=r"tp rank 1 of 2, and rank 0 runs the engine; call follow_runner"):
            EngineRunner(engine)
        time.sleep(2)
        return
    with pytest.raises(ValueError, match="makes the EngineRunner"):
        follow_runner(engine)
    with pytest.raises(TimeoutError, match=r"ranks \[1\] of 2 did not all come within join_timeout_s=1"):
        EngineRunner(engine, lockstep=impatient)


@pytest.mark.journey
@pytest.mark.world(2)
def test_a_rank_that_does_not_come_is_named(world: World) -> None:
    world(check_alone)


def test_patience_is_positive() -> None:
    for field in ("join_timeout_s", "silence_timeout_s", "step_timeout_s"):
        with pytest.raises(ValueError, match=f"{field}=0 must be a number"):
            LockstepConfig(**{field: 0})
