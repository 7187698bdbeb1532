# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Judges in processes of their own: what an answer does to one costs that answer."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mcore_rl import (
    GenericGenerationArgs,
    InferenceInterface,
    InferenceRequest,
    InferenceResponse,
    JudgeLimits,
    JudgeProcessError,
    Problem,
    ProcessJudge,
    _confine,
)
from mcore_rl.envs import CountdownConfig
from tests.support.environments import Hostile, here_alone

PROBLEM = Problem(problem_id="7", prompt="?")
LIMITS = JudgeLimits(num_workers=2, time_s=1.0, memory_gb=0.5)


@pytest.fixture(scope="module")
def judge() -> Iterator[ProcessJudge]:
    made = ProcessJudge(Hostile, LIMITS)
    yield made
    made.close()


def rewards(judge: ProcessJudge, *responses: str) -> list[float | str]:
    async def all_at_once() -> list[float | BaseException]:
        return await asyncio.gather(*(judge.get_reward(one, PROBLEM) for one in responses), return_exceptions=True)

    return [one if isinstance(one, float) else f"{type(one).__name__}: {one}" for one in asyncio.run(all_at_once())]


@pytest.mark.journey
def test_it_judges_and_poses_what_the_environment_does_and_its_processes_end_with_it() -> None:
    make = CountdownConfig.small().build
    own, judge = make(), ProcessJudge(make, LIMITS)
    try:
        problems = [own.problem(number) for number in range(6)]
        assert [judge.problem(number) for number in range(6)] == problems and judge.env_id == "countdown"
        assert len(judge.get_dataset()) == len(own.get_dataset()) and judge.get_dataset(validation=True)[3] == own.problem((1 << 32) + 3)
        answers = ["1+1</answer>", "hello", *(f"{problem.golden.split(' =')[0].replace(' ', '+')}</answer>" for problem in problems[2:])]
        judged = [asyncio.run(judge.get_reward(answer, problem)) for answer, problem in zip(answers, problems, strict=True)]
        assert judged == [own.judge(answer, problem) for answer, problem in zip(answers, problems, strict=True)]
        assert judge.num_restarts == 0
        workers = list(judge._idle)
        template, pids = judge._template._process, [worker.pid for worker in workers]
        assert template.is_alive() and pids
    finally:
        judge.close()
        judge.close()
    # All processes end with it.
    assert not template.is_alive()
    end = time.monotonic() + 10
    while any(os.path.exists(f"/proc/{pid}") for pid in pids):
        assert time.monotonic() < end
        time.sleep(0.01)
    # A judgement that found its process gone meanwhile starts no others.
    with pytest.raises(JudgeProcessError, match="the processes of 'countdown' have ended"):
        judge._replaced(workers[0])


@pytest.mark.parametrize(
    ("hostile", "words"),
    [
        ("exit", "the process that judges problem '7' of 'hostile' died"),
        ("kill", "the process that judges problem '7' of 'hostile' died"),
        ("loop", "the process that judges problem '7' of 'hostile' was ended after time_s=1"),
        ("memory", "the judge of 'hostile' failed: MemoryError()"),
        ("raise", "the judge of 'hostile' failed: ValueError('of the judge')"),
        pytest.param("text", "the judge of 'hostile' failed: {'reward': 'much'}", marks=pytest.mark.journey),
        ("network", "the judge of 'hostile' failed: OSError(101, 'Network is unreachable')"),
    ],
)
def test_what_an_answer_does_to_its_judge_costs_that_answer(judge: ProcessJudge, hostile: str, words: str) -> None:
    begin = time.monotonic()
    first, lost, *others = rewards(judge, "good", hostile, "good", "bad", "good")
    assert (first, *others) == (1.0, 1.0, 0.0, 1.0)
    assert isinstance(lost, str) and lost.startswith("JudgeProcessError: ") and words in lost
    assert time.monotonic() - begin < 30


def test_the_agent_drops_it_and_goes_on(judge: ProcessJudge) -> None:
    class Answers(InferenceInterface):
        texts = iter(["good", "kill", "good", "raise"])

        def encode(self, text: str) -> list[int]:
            return list(text.encode())

        async def agenerate(self, request: InferenceRequest) -> list[list[InferenceResponse]]:
            [prompt] = request.prompts
            return [[InferenceResponse(response=next(self.texts), token_ids=[*prompt, 1], prompt_length=len(prompt), logprobs=[-1.0])]]

    group = asyncio.run(judge.group_rollout(Answers(), size=4, args=GenericGenerationArgs(max_tokens=1)))
    assert [rollout.reward for rollout in group] == [1.0, 1.0]


def test_a_process_that_was_killed_while_idle_is_started_again(judge: ProcessJudge) -> None:
    assert rewards(judge, "good", "good") == [1.0, 1.0]
    before = judge.num_restarts
    workers = [worker for worker in judge._idle if worker.is_alive]
    for worker in workers:
        os.kill(worker.pid, signal.SIGKILL)
        assert worker._pipe.poll(10)
    assert workers and rewards(judge, "good", "bad", "good", "bad") == [1.0, 0.0, 1.0, 0.0]
    assert judge.num_restarts >= before + 1


@pytest.mark.journey
def test_the_first_process_is_started_again_too(judge: ProcessJudge) -> None:
    judge._template._process.kill()
    judge._template._process.join(10)
    # Those that judge end with it.
    assert all(worker._pipe.closed or worker._pipe.poll(10) for worker in judge._idle)
    assert rewards(judge, "good", "bad", "kill", "good")[::3] == [1.0, 1.0]


@pytest.mark.journey
def test_processes_may_have_the_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        judge = ProcessJudge(Hostile, JudgeLimits(num_workers=1, network=True))
        try:
            assert rewards(judge, f"network {server.getsockname()[1]}") == [0.5]
        finally:
            judge.close()


@pytest.mark.journey
def test_an_environment_that_cannot_be_made_there_says_why() -> None:
    with pytest.raises(JudgeProcessError, match=r"no process for 'hostile' started: OSError\('no data here'\)"):
        ProcessJudge(here_alone, LIMITS)


@pytest.mark.parametrize(("field", "value"), [("num_workers", 0), ("time_s", 0.0), ("memory_gb", -1.0), ("start_timeout_s", float("inf"))])
def test_limits_out_of_range_are_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{field}={value} must be"):
        JudgeLimits(**{field: value})  # type: ignore[arg-type]


def test_signals_to_the_group_do_not_reach_the_judges(judge: ProcessJudge) -> None:
    assert rewards(judge, "good", "good") == [1.0, 1.0]
    groups = {os.getpgid(worker.pid) for worker in judge._idle}
    assert len(groups) == 1 and os.getpgrp() not in groups


def test_who_has_no_rights_keeps_his_name_without_network() -> None:
    # Without one, a program that such a judge runs could not leave the network once more.
    lines = (
        "import ctypes, os, sys",
        "sys.path.insert(0, sys.argv[1])",
        "import _confine",
        "if not os.getuid(): os.setresgid(1234, 1234, 1234); os.setresuid(1234, 1234, 1234)",
        "ctypes.CDLL(None).prctl(4, 1)",
        "user = os.getuid()",
        "_confine.leave_network()",
        "print(user == os.getuid(), open('/proc/self/uid_map').read().split() == [str(user), str(user), '1'])",
    )
    folder = str(Path(_confine.__file__).parent)
    assert subprocess.check_output([sys.executable, "-I", "-c", "\n".join(lines), folder], text=True) == "True True\n"
