# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Judges, conversations and engines as workers of a Ray cluster of two nodes: placed, restarted, given their weights, named when they are
lost.

Needs the extra ``ray``; `nox -s ray` installs it.
"""

import asyncio
import contextlib
import dataclasses
import functools
import json
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mcore_inference import DynamicInferenceContext, DynamicInferenceEngine, InferenceConfig, PagedAttention
from mcore_parallel import ProcessGroups
from mcore_parallel.data import ByteTokenizer
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.optim import MegatronOptimizer, OptimizerConfig
from mcore_rl import (
    Conversation,
    Episode,
    GenericGenerationArgs,
    GRPOConfig,
    GRPOObjective,
    InferenceInterface,
    InferenceRequest,
    InferenceResponse,
    JudgeLimits,
    Learner,
    MegatronLocal,
    ModelJudge,
    NumberedAgent,
    NumberedConversations,
    NumberedProblems,
    Problem,
    ProcessJudge,
    RayInference,
    RayJudge,
    RayOptions,
    RayWorkerError,
    RayWorkers,
    TokenRollout,
    grpo_iteration,
    refit,
)
from mcore_rl._ray_workers import RayWorkerLostError
from mcore_rl.envs import CharacterShare
from tests.support.environments import HostileTool
from tests.support.spoken import chat

ray = pytest.importorskip("ray")
cluster_utils = pytest.importorskip("ray.cluster_utils")
# Ray's own processes and sockets.
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(400)]
TOKENIZER = ByteTokenizer()
PROBLEM = Problem(problem_id="0", prompt="say 0")
VOCAB = -(-TOKENIZER.vocab_size // 8) * 8
SIZES = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=2, ffn_hidden_size=48, vocab_size=VOCAB)
# A node has room for one of them.
ONE = RayOptions(num_workers=2, num_cpus=0.6, call_timeout_s=60.0, start_timeout_s=120.0)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[Any]:
    # Workers cannot import this file by its name.
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    own = cluster_utils.Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 100 << 20, "resources": {"tools": 1}}
    )
    own.add_node(num_cpus=1, object_store_memory=100 << 20, resources={"tools": 1})
    own.wait_for_nodes()
    # What is imported here is imported there.
    environment = {"env_vars": {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "OMP_NUM_THREADS": "1"}}
    ray.init(address=own.address, runtime_env=environment, logging_level="error")
    yield own
    ray.shutdown()
    own.shutdown()


class Judge(NumberedProblems):
    """Rewards the length of an answer; some answers are the end of whoever judges them."""

    def __init__(self, marks: str = "") -> None:
        super().__init__("length", judge_timeout_s=60.0)
        self.marks = marks

    def problem(self, number: int) -> Problem:
        return Problem(problem_id=str(number), prompt="p", golden="")

    async def get_reward(self, response: str, problem: Problem) -> float:
        if response.startswith("die"):
            mark = Path(self.marks) / response
            if response != "die once" or not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        if response == "raise":
            raise ArithmeticError("no such number")
        if response == "late":
            raise TimeoutError("no verdict in time")
        if response == "sleep":
            await asyncio.sleep(30)
        return float(len(response))


class Answers(InferenceInterface):
    """Says what it was told to, one after the other."""

    def __init__(self, *texts: str) -> None:
        self.texts = list(texts)

    def encode(self, text: str) -> list[int]:
        return [1]

    async def agenerate(self, request: InferenceRequest) -> list[list[InferenceResponse]]:
        return [[InferenceResponse(response=self.texts.pop(0), token_ids=[1, 2], prompt_length=1, logprobs=[-1.0])]]


def rollouts(environment: NumberedProblems, *texts: str) -> list[float]:
    args = GenericGenerationArgs(max_tokens=1)
    group = asyncio.run(environment.group_rollout(Answers(*texts), size=len(texts), args=args))
    return [rollout.reward for rollout in group]


def test_judges_on_two_nodes_give_the_rewards_of_one_here() -> None:
    environment = RayJudge(Judge, ONE)
    try:
        assert len(set(environment.workers.nodes)) == 2
        texts = ["a", "bb", "", "cccc"]
        assert rollouts(environment, *texts) == rollouts(Judge(), *texts) == [1.0, 2.0, 0.0, 4.0]
        assert environment.problem(3).problem_id == "3" and environment.workers.num_restarts == [0, 0]
    finally:
        environment.close()
        environment.close()


def test_a_judge_that_dies_is_started_again_and_no_answer_is_lost(tmp_path: Path) -> None:
    environment = RayJudge(functools.partial(Judge, str(tmp_path)), ONE)
    try:
        assert rollouts(environment, "a", "die once", "bb") == [1.0, 8.0, 2.0]
        assert sum(environment.workers.num_restarts) == 1
        assert rollouts(environment, "a", "bb") == [1.0, 2.0]
    finally:
        environment.close()


def test_what_is_lost_for_good_loses_its_answer_alone_and_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = RayOptions(num_workers=2, num_cpus=0.5, max_restarts=1, max_task_retries=0, call_timeout_s=5.0, start_timeout_s=120.0)
    environment = RayJudge(functools.partial(Judge, str(tmp_path)), options)
    try:
        with caplog.at_level(logging.WARNING):
            assert rollouts(environment, "a", "raise") == [1.0]
            assert rollouts(environment, "late", "bb") == [2.0]
            assert "no such number" in caplog.text and "no verdict in time" in caplog.text and "call_timeout_s" not in caplog.text
            begin = time.monotonic()
            assert rollouts(environment, "bb", "sleep") == [2.0] and time.monotonic() - begin < 20
            assert "did not answer get_reward within call_timeout_s=5" in caplog.text and "of 'length' (first on node" in caplog.text
            assert rollouts(environment, "die always") == []
            assert "was lost in get_reward, with max_restarts=1 and max_task_retries=0" in caplog.text
    finally:
        environment.close()


# -- conversations -----------------------------------------------------------------------------------------------------


class Tools(NumberedConversations):
    """Tools that write down whom they are asked by, and do to their process what the policy says; the reward is the number of turns."""

    def __init__(self, folder: Path) -> None:
        super().__init__("tools", max_turns=6)
        self.folder = folder

    def problem(self, number: int) -> Problem:
        return Problem(problem_id=str(number), prompt=f"say {number}")

    def begin(self, problem: Problem) -> Episode:
        return Tool(problem, self.folder)


class Tool(Episode):
    def __init__(self, problem: Problem, folder: Path) -> None:
        self.problem, self.folder, self.num_turns = problem, folder, 0

    async def start(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.problem.prompt}]

    async def reply(self, answer: str) -> list[dict[str, str]]:
        self.num_turns += 1
        with (self.folder / "calls").open("a") as file:
            file.write(f"{self.problem.problem_id} {answer} {os.getpid()}\n")
        if answer == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        while answer == "wait" and not (self.folder / "go").exists():
            await asyncio.sleep(0.02)
        while answer == "block" and not (self.folder / "go").exists():
            time.sleep(0.02)
        return [] if answer == "end" else [{"role": "tool", "content": f"{answer}: {self.num_turns}"}]

    async def reward(self) -> float:
        return float(self.num_turns)


class NumMessages:
    """A judge to whom more messages are better."""

    async def score(self, response: str, problem: Problem) -> float:
        return float(len(json.loads(response)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tools")


@pytest.fixture(scope="module")
def tools(folder: Path) -> Iterator[RayJudge]:
    # One on each node, beside those of other tests.
    limits: dict[str, Any] = {"max_restarts": -1, "call_timeout_s": 120.0, "start_timeout_s": 120.0}
    options = RayOptions(num_workers=2, num_cpus=0.0, resources={"tools": 1}, **limits)
    environment = RayJudge(functools.partial(Tools, folder), options)
    yield environment
    environment.close()


@pytest.fixture
def calls(folder: Path, tools: RayJudge) -> Iterator[Callable[[], list[tuple[str, str, int]]]]:
    """Problem and answer of each call of a tool so far, and its process."""
    (folder / "calls").write_text("")
    yield lambda: [(words[0], words[1], int(words[2])) for words in map(str.split, (folder / "calls").read_text().splitlines())]
    asyncio.run(until(lambda: all(map(tools.workers.is_responsive, range(2)))))
    for file in folder.iterdir():
        file.unlink()


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(100):
        while not is_so():
            await asyncio.sleep(0.02)


async def begun(judge: RayJudge, *numbers: int) -> list[Conversation]:
    problems = [judge.problem(number) for number in numbers]
    return [Conversation(problem=problem, opening=await judge._opening(problem)) for problem in problems]


async def in_each(judge: RayJudge, first: int, least: int = 3) -> list[list[Conversation]]:
    """Of each of two workers, so many conversations that are there, or more, about problems from this number on."""
    by_place: list[list[Conversation]] = [[], []]
    for number in range(first, first + 100):
        [conversation] = await begun(judge, number)
        place = judge._places.take(conversation)
        assert place is not None
        judge._places.put(conversation, place)
        by_place[place].append(conversation)
        if min(map(len, by_place)) >= least:
            break
    return by_place


async def said(judge: RayJudge, conversation: Conversation, *answers: str) -> Conversation:
    for answer in answers:
        conversation = conversation.with_turn(answer, await judge._reply(conversation, answer))
    return conversation


def spoken(environment: NumberedAgent, *conversations: Sequence[str]) -> list[TokenRollout]:
    args = GenericGenerationArgs(max_tokens=200)
    return asyncio.run(environment.group_rollout(chat(*conversations), size=len(conversations), args=args))


def test_conversations_in_workers_are_those_of_one_here_and_each_stays_in_its_worker(
    tools: RayJudge, folder: Path, calls: Callable[[], list[tuple[str, str, int]]]
) -> None:
    own = Tools(folder)
    assert tools.holds_conversations and tools.turn_limits == own.turn_limits and len(set(tools.workers.nodes)) == 2
    tools.start_at(0)
    conversations = [["a", "b", "end"], ["c"] * 6, ["d", "d", "end"], ["end"]]
    expected = spoken(own, *conversations)
    (folder / "calls").write_text("")
    assert sorted(spoken(tools, *conversations), key=str) == sorted(expected, key=str)
    assert [rollout.reward for rollout in expected] == [3.0, 6.0, 3.0, 1.0]
    assert sorted(answer for _, answer, _ in calls()) == sorted(answer for answers in conversations for answer in answers)

    async def talk() -> None:
        for conversation in await begun(tools, 1, 2, 3, 4):
            await tools._outcome(await said(tools, conversation, "a", "b"))

    (folder / "calls").write_text("")
    asyncio.run(talk())
    homes = {name: {pid for number, _, pid in calls() if number == name} for name in "1234"}
    assert len(calls()) == 8 and all(len(pids) == 1 for pids in homes.values()) and len(set.union(*homes.values())) == 2
    num_places = len(tools._places)
    assert [rollout.reward for rollout in spoken(ModelJudge(tools, NumMessages()), ["a", "end"])] == [4.0]
    assert len(tools._places) == num_places
    with pytest.raises(TypeError, match="'tools' holds conversations and judges no single answer"):
        asyncio.run(tools.get_reward("a", tools.problem(0)))


def test_a_worker_that_dies_in_turns_loses_their_conversations_alone_and_is_not_asked_twice(
    tools: RayJudge, folder: Path, calls: Callable[[], list[tuple[str, str, int]]]
) -> None:
    before, replayed = sum(tools.workers.num_restarts), []

    async def talk() -> None:
        places = [[await said(tools, conversation, "a") for conversation in place] for place in await in_each(tools, 100)]
        [[one, dying, between], [other, stays, _]] = [place[:3] for place in places]
        replayed.append(between.problem.problem_id)
        waiting = [asyncio.create_task(tools._reply(conversation, "wait")) for conversation in (one, other)]
        await until(lambda: sum(answer == "wait" for _, answer, _ in calls()) == 2)
        with pytest.raises(RayWorkerError, match=r"of 'tools' \(first on node .*\) was lost in reply, .* and max_task_retries=0"):
            await tools._reply(dying, "die")
        with pytest.raises(RayWorkerError, match="was lost in reply"):
            await waiting[0]
        # It was between two turns, and is replayed in the other worker, or in this one once it is there again.
        between = await said(tools, between, "b", "end")
        assert await tools._outcome(between) == 3.0
        (folder / "go").touch()
        assert await waiting[1] == [{"role": "tool", "content": "wait: 2"}]
        assert await tools._outcome(await said(tools, stays, "end")) == 2.0
        await until(lambda: all(map(tools.workers.is_responsive, range(2))))

    asyncio.run(talk())
    asked = [(number, answer) for number, answer, _ in calls()]
    assert sum(tools.workers.num_restarts) == before + 1
    assert [answer for number, answer in asked if number in replayed] == ["a", "a", "b", "end"]
    assert all(asked.count(turn) == 1 for turn in asked if turn != (replayed[0], "a"))


def test_an_evaluation_and_a_group_lose_the_conversation_that_ends_its_worker(
    tools: RayJudge, calls: Callable[[], list[tuple[str, str, int]]], caplog: pytest.LogCaptureFixture
) -> None:
    args = GenericGenerationArgs(max_tokens=200)
    # Both begin at once, in a worker each.
    report = asyncio.run(tools.run_evaluation(chat(["die"], ["a", "end"]), num_prompts=2, args=args))
    assert report.num_dropped == 1 and [result.reward for result in report.results] == [2.0]
    tools.start_at(7)
    assert spoken(tools, ["die"]) == []
    assert (
        "environment 'tools': an answer to problem '7' is dropped, its reply failed within judge_timeout_s=60.0: RayWorker" in caplog.text
    )
    assert sorted(answer for _, answer, _ in calls()) == ["a", "die", "die", "end"]


def test_a_turn_beyond_its_limit_is_lost_and_a_worker_that_is_held_up_gets_no_others(
    tools: RayJudge, folder: Path, calls: Callable[[], list[tuple[str, str, int]]]
) -> None:
    async def talk() -> None:
        [[late, blocks, beside, *_], [elsewhere, *_]] = await in_each(tools, 200)
        beside = await said(tools, beside, "a")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(tools._reply(late, "wait"), 1.0)
        # The tool that was given up is not running any more, and its worker answers.
        await until(lambda: all(map(tools.workers.is_responsive, range(2))))
        blocking = asyncio.create_task(tools._reply(blocks, "block"))
        await until(lambda: calls()[-1][1] == "block")
        held_up = calls()[-1][2]
        blocking.cancel()
        await asyncio.wait([blocking])
        await until(lambda: not tools.workers.is_responsive(0))
        assert tools.workers.is_responsive(1)
        # It was in the worker that is held up, and is replayed in the other one, where new ones begin, too.
        num_calls = len(calls())
        for conversation in (beside, elsewhere, *await begun(tools, 301, 302, 303)):
            assert await tools._outcome(await said(tools, conversation, "end")) == len(conversation.turns) + 1
        assert [answer for _, answer, _ in calls()[num_calls:]] == ["a", *["end"] * 5]
        assert held_up not in [pid for _, _, pid in calls()[num_calls:]]
        (folder / "go").touch()
        await until(lambda: tools.workers.is_responsive(0))

    asyncio.run(talk())


def test_a_call_that_is_given_up_says_nothing_of_a_worker_that_is_busy(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: dict[str, Any] = {"max_concurrency": 2, "call_timeout_s": 120.0, "start_timeout_s": 120.0}
    judge = RayJudge(functools.partial(Tools, folder), RayOptions(num_workers=2, num_cpus=0.1, **limits))
    monkeypatch.setattr("mcore_rl._ray_workers._PATIENCE_S", math.inf)

    async def talk() -> None:
        [[other, *waiting], _] = await in_each(judge, 400, least=5)
        turns = [asyncio.create_task(judge._reply(conversation, "wait")) for conversation in waiting[:4]]
        await until(lambda: (folder / "calls").exists() and (folder / "calls").read_text().count("wait") == 2)
        # It waits for a place, as the one behind it does.
        turns[2].cancel()
        await asyncio.wait([turns[2]])
        assert judge.workers.loads == (3, 0) and judge._place_of(other) == 0
        await until(lambda: judge.workers.is_responsive(0) and not judge.workers._probes)
        assert judge.workers.loads == (3, 0)
        (folder / "go").touch()
        assert [await turns[number] for number in (0, 1, 3)] == [[{"role": "tool", "content": "wait: 1"}]] * 3

    try:
        asyncio.run(talk())
    finally:
        judge.close()
        for file in folder.iterdir():
            file.unlink()


def test_workers_that_are_dead_for_good_get_no_calls_and_closed_ones_end_open_ones_first(folder: Path) -> None:
    options = RayOptions(num_workers=2, num_cpus=0.1, max_restarts=0, call_timeout_s=60.0, start_timeout_s=120.0)
    judge = RayJudge(functools.partial(Tools, folder), options)

    async def talk() -> None:
        first, second = await begun(judge, 1, 2)
        with pytest.raises(RayWorkerError, match="was lost in reply, with max_restarts=0"):
            await judge._reply(first, "die")
        for conversation in await begun(judge, 3, 4, 5):
            assert await judge._outcome(await said(judge, conversation, "a", "end")) == 2.0
        assert judge.workers.num_restarts == [0, 0]
        waiting = asyncio.create_task(judge._reply(second, "wait"))
        await until(lambda: "2 wait" in (folder / "calls").read_text())
        closing = asyncio.create_task(asyncio.to_thread(judge.close, 60.0))
        await until(lambda: judge.workers._is_closed)
        with pytest.raises(RayWorkerError, match="the workers of 'tools' are closed"):
            await begun(judge, 6)
        (folder / "go").touch()
        assert await waiting == [{"role": "tool", "content": "wait: 1"}]
        await closing

    try:
        asyncio.run(talk())
    finally:
        judge.close()
        for file in folder.iterdir():
            file.unlink()


def test_calls_wait_for_a_worker_that_is_started_again_and_none_that_is_left_is_named(folder: Path) -> None:
    limits: dict[str, Any] = {"max_restarts": 1, "max_task_retries": 0, "call_timeout_s": 120.0, "start_timeout_s": 120.0}
    options = RayOptions(num_workers=1, num_cpus=0.1, **limits)
    judge = RayJudge(functools.partial(Tools, folder), options)

    async def talk() -> None:
        for number in range(2):
            [conversation] = await begun(judge, number)
            with pytest.raises(RayWorkerError, match="was lost in reply"):
                await judge._reply(conversation, "die")
        assert judge.workers.num_restarts == [1]
        await until(lambda: not judge.workers.is_responsive(0) and bool(judge.workers._dead))
        with pytest.raises(RayWorkerError, match="no worker of 'tools' is left: each died more than max_restarts=1 times"):
            await begun(judge, 2)

    try:
        asyncio.run(talk())
    finally:
        judge.close()


def in_threads(num_threads: int, work: Callable[[], Any]) -> list[Any]:
    """What each thread's call gives."""
    with ThreadPoolExecutor(num_threads) as threads:
        return [call.result(100) for call in [threads.submit(work) for _ in range(num_threads)]]


def test_two_threads_may_ask_at_once_whether_a_worker_answers_again(tools: RayJudge, monkeypatch: pytest.MonkeyPatch) -> None:
    workers, wait, both = tools.workers, ray.wait, threading.Barrier(2)

    async def given_up() -> None:
        call = asyncio.create_task(workers.call("start", PROBLEM, worker=0))
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait([call])

    def wait_for_both(*arguments: Any, **options: Any) -> Any:
        ready = wait(*arguments, **options)
        # One after the other, they are never both here.
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.5)
        return ready

    asyncio.run(given_up())
    assert wait([workers._probes[0].reference], timeout=100)[0]
    monkeypatch.setattr(ray, "wait", wait_for_both)
    assert in_threads(2, lambda: workers.is_responsive(0)) == [True, True]


def test_calls_of_event_loops_in_several_threads_are_counted(tools: RayJudge, monkeypatch: pytest.MonkeyPatch) -> None:
    workers = tools.workers

    def answered_at_once(*_: Any) -> asyncio.Future[tuple[str, float]]:
        future = asyncio.get_running_loop().create_future()
        future.set_result((birth, 1.0))
        return future

    async def call_often() -> float:
        return sum([await workers.call("get_reward", "a", PROBLEM) for _ in range(3000)])

    [birth, *_] = workers._births[0]
    before, interval = workers.num_restarts, sys.getswitchinterval()
    monkeypatch.setattr(workers, "_births", [set(), set()])
    monkeypatch.setattr(workers, "_sent", answered_at_once)
    sys.setswitchinterval(1e-6)
    try:
        assert in_threads(3, lambda: asyncio.run(call_often())) == [3000.0] * 3
    finally:
        sys.setswitchinterval(interval)
    monkeypatch.undo()
    assert workers.loads == (0, 0) and workers.num_restarts == before


def test_a_call_that_cannot_be_sent_is_not_open_and_says_nothing_of_its_worker(tools: RayJudge) -> None:
    with pytest.raises(TypeError, match="pickle|serialize"):
        asyncio.run(tools.workers.call("get_reward", threading.Lock(), PROBLEM))
    assert tools.workers.loads == (0, 0) and all(map(tools.workers.is_responsive, range(2)))


def hostile() -> ProcessJudge:
    return ProcessJudge(HostileTool, JudgeLimits(num_workers=1, time_s=20.0, memory_gb=0.5))


def test_workers_hold_conversations_in_processes_with_limits(caplog: pytest.LogCaptureFixture) -> None:
    judge = RayJudge(hostile, dataclasses.replace(ONE, num_workers=1))
    try:
        group = spoken(judge, ["good", "end"], ["good", "kill", "end"], ["bad", "bad", "bad", "bad"])
        assert [rollout.reward for rollout in group] == [2.0, 4.0] and judge.workers.num_restarts == [0]
        assert "an answer to problem '0' is dropped" in caplog.text and "of 'hostile_tool' died" in caplog.text.replace("\\", "")
    finally:
        judge.close()
        assert isinstance(judge._own, ProcessJudge)
        judge._own.close()


def test_workers_that_find_no_place_are_named() -> None:
    needs = RayOptions(num_workers=2, num_cpus=0.1, resources={"third": 1}, start_timeout_s=3.0)
    with pytest.raises(RayWorkerError, match=r"workers \[0, 1\] of 'few' did not start within start_timeout_s=3, each needs .*'third': 1"):
        RayWorkers(Judge, needs, name="few")


def test_an_object_that_cannot_be_made_says_why() -> None:
    with pytest.raises(RayWorkerError, match=r"worker 0 of 'length' did not start.*"):
        RayWorkers(functools.partial(Judge, 1, 2, 3), ONE, name="length")  # type: ignore[call-arg]


# -- engines -----------------------------------------------------------------------------------------------------------


def make_engine() -> tuple[MegatronLocal, DynamicInferenceEngine]:
    context = DynamicInferenceContext(SIZES, InferenceConfig(max_sequence_length=32, max_requests=32, block_size_tokens=8))
    model = GPTModel(SIZES, ProcessGroups.single(), attention_core=PagedAttention(), seed=5).eval()
    engine = DynamicInferenceEngine(model, context, TOKENIZER, seed=os.getpid(), vocab_size=TOKENIZER.vocab_size)
    return MegatronLocal(engine), engine


def kill(inference: RayInference, number: int) -> None:
    """As the out-of-memory killer."""

    async def pid() -> int:
        return await inference.workers.call("pid", worker=number)

    os.kill(asyncio.run(pid()), signal.SIGKILL)


def test_a_policy_learns_from_engines_on_two_nodes_and_one_that_dies_comes_back_with_the_newest_weights() -> None:
    groups = ProcessGroups.single()
    model = GPTModel(SIZES, groups, unpadded_vocab_size=TOKENIZER.vocab_size)
    sync = DistributedDataParallel(DistributedDataParallelConfig(), model, groups)
    optimizer = MegatronOptimizer(OptimizerConfig(lr=2e-2, weight_decay=0.0), sync, groups)
    learner = Learner(model=model, groups=groups, objective=GRPOObjective(), sync=sync, optimizer=optimizer)
    args = GenericGenerationArgs(temperature=1.0, max_tokens=8)
    config = GRPOConfig(num_groups=2, group_size=16, seq_len=16, micro_batch_size=8, generation_args=args)
    agent = CharacterShare(["a", "b"], "abcdefghijklmnopqrstuvwxyz")
    inference = RayInference(make_engine, tokenizer=TOKENIZER, options=ONE, bucket_bytes=10_000)
    try:
        refit(model, groups, inference)
        parts: dict[str, Any] = {"agent": agent, "interface": inference, "engine": inference, "learner": learner}
        reports = [grpo_iteration(config, **parts, lr=2e-2) for _ in range(12)]
        kill(inference, 1)
        reports += [grpo_iteration(config, **parts, lr=2e-2) for _ in range(3)]
        assert all(report.train.metrics["logprob_mismatch"] < 1e-4 and report.num_dropped == 0 for report in reports)
        # Workers draw from seeds of their own, so that no run is the same.
        assert sum(report.mean_reward for report in reports[-3:]) > 1.2 * sum(report.mean_reward for report in reports[:3])
        assert inference.version == 16 and len(set(inference.workers.nodes)) == 2
        assert inference.workers.num_restarts == [0, 1]
    finally:
        inference.close()


class Scripted(InferenceInterface):
    """Says in which process it is. Of 0 it dies, and of 1 it holds its event loop up, once in all processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    async def agenerate(self, request: InferenceRequest) -> list[list[InferenceResponse]]:
        [[*prompt]] = request.prompts
        if prompt == [0]:
            os.kill(os.getpid(), signal.SIGKILL)
        if prompt == [1] and not (self.folder / "held").exists():
            (self.folder / "held").touch()
            while not (self.folder / "go").exists():
                time.sleep(0.02)
        return [[InferenceResponse(response=str(os.getpid()), token_ids=[*prompt, 1], prompt_length=1, logprobs=[-1.0])]]


class Weightless:
    def load_weights(self, weights: Any, /) -> None:
        list(weights)


def scripted(folder: Path) -> tuple[InferenceInterface, Weightless]:
    return Scripted(folder), Weightless()


async def answered(inference: RayInference, *prompts: int) -> list[str]:
    """By which process each prompt is answered, one after the other."""
    requests = [InferenceRequest(prompts=[[prompt]], generation_args=GenericGenerationArgs(max_tokens=1)) for prompt in prompts]
    return [answer.response for request in requests for [answer] in await inference.agenerate(request)]


def test_engines_that_are_dead_or_held_up_get_no_prompts_and_none_that_is_left_is_named(tmp_path: Path) -> None:
    options = RayOptions(num_workers=2, num_cpus=0.1, max_restarts=0, max_task_retries=0, call_timeout_s=60.0, start_timeout_s=120.0)
    inference = RayInference(functools.partial(scripted, tmp_path), tokenizer=TOKENIZER, options=options)

    async def ask() -> None:
        first, other = [str(await inference.workers.call("pid", worker=number)) for number in range(2)]
        assert await answered(inference, 2) == [first]
        waiting, given_up = [asyncio.create_task(answered(inference, 1)) for _ in range(2)]
        await until((tmp_path / "held").exists)
        given_up.cancel()
        await asyncio.wait([given_up])
        await until(lambda: not inference.workers.is_responsive(0))
        # The prompt's first engine, which still has it, is held up; the other one takes it.
        assert set(await answered(inference, 1, 2, 3, 1)) == {other}
        (tmp_path / "go").touch()
        assert await waiting == [first]
        await until(lambda: inference.workers.is_responsive(0))
        assert await answered(inference, 2) == [first]
        with pytest.raises(RayWorkerError, match=r"worker 0 of 'engines' .* was lost in answer"):
            await answered(inference, 0)
        assert set(await answered(inference, *range(2, 8))) == {other}
        with pytest.raises(RayWorkerError, match=r"worker 1 of 'engines' .* was lost in answer"):
            await answered(inference, 0)
        await until(lambda: not any(map(inference.workers.is_responsive, range(2))) and inference.workers._dead == {0, 1})
        with pytest.raises(RayWorkerError, match="no worker of 'engines' is left: each died more than max_restarts=0 times"):
            await answered(inference, 2)

    try:
        asyncio.run(ask())
    finally:
        inference.close()


class Spelt(NumberedProblems):
    """Problem 0 is the end of the engine that answers it."""

    def __init__(self) -> None:
        super().__init__("spelt")

    def problem(self, number: int) -> Problem:
        return Problem(problem_id=str(number), prompt=chr(2 * number))

    async def get_reward(self, response: str, problem: Problem) -> float:
        return 1.0


def test_an_engine_that_is_dead_for_good_costs_its_answers_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = RayOptions(num_workers=2, num_cpus=0.1, max_restarts=0, call_timeout_s=60.0, start_timeout_s=120.0)
    inference = RayInference(functools.partial(scripted, tmp_path), tokenizer=TOKENIZER, options=options)
    environment, args = Spelt(), GenericGenerationArgs(max_tokens=1)

    def group() -> list[float]:
        return [rollout.reward for rollout in asyncio.run(environment.group_rollout(inference, size=2, args=args))]

    try:
        assert (group(), group()) == ([], [1.0, 1.0])
        assert "environment 'spelt': an answer to problem '0' is dropped, worker 0 of 'engines' (first on node " in caplog.text
        asyncio.run(until(lambda: inference.workers._alive() == [1]))
        for _ in range(2):
            inference.load_weights([])
            assert group() == [1.0, 1.0]
        deaths = [record.getMessage() for record in caplog.records if "gets no calls any more" in record.getMessage()]
        assert (
            len(deaths) == 1
            and deaths[0].startswith("worker 0 of 'engines' (first on node ")
            and deaths[0].endswith("; 1 of 2 workers are left")
        )
        environment.start_at(0)
        assert group() == []
        asyncio.run(until(lambda: len(inference.workers._dead) == 2))
        for call in (group, lambda: inference.load_weights([])):
            with pytest.raises(RayWorkerError, match="no worker of 'engines' is left: each died more than max_restarts=0 times"):
                call()
    finally:
        inference.close()


def test_an_engine_that_is_lost_in_a_refit_gets_no_prompts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = RayOptions(num_workers=2, num_cpus=0.1, max_restarts=0, call_timeout_s=60.0, start_timeout_s=120.0)
    inference = RayInference(functools.partial(scripted, tmp_path), tokenizer=TOKENIZER, options=options)
    try:
        other = asyncio.run(inference.workers.call("pid", worker=1))
        kill(inference, 0)
        inference.load_weights([])
        assert "version 1 of the weights was taken by the others: worker 0 of 'engines'" in caplog.text
        assert asyncio.run(answered(inference, 2, 3)) == [str(other)] * 2
        kill(inference, 1)
        with pytest.raises(
            RayWorkerError, match="version 2 of the weights was not taken by 1 of the workers: worker 1|no worker .* is left"
        ):
            inference.load_weights([])
    finally:
        inference.close()
    with pytest.raises(RayWorkerError, match=r"^the workers of 'engines' are closed$"):
        inference.load_weights([])


def test_a_refit_that_no_engine_took_ends_whenever_each_was_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = RayOptions(num_workers=2, num_cpus=0.1, max_restarts=0, call_timeout_s=60.0, start_timeout_s=120.0)
    inference = RayInference(functools.partial(scripted, tmp_path), tokenizer=TOKENIZER, options=options)
    alive = inference.workers._alive

    def then_lost() -> list[int]:
        numbers = alive()
        if len(numbers) == 2:
            for number in numbers:
                kill(inference, number)
            inference.workers._dead.add(0)
        return numbers

    try:
        for error, kind in (
            (ray.exceptions.ObjectStoreFullError("full"), RayWorkerError),
            (ray.exceptions.ActorUnavailableError("gone", None), RayWorkerLostError),
            (ray.exceptions.ActorDiedError(), RayWorkerLostError),
        ):
            assert type(inference.workers._failure(0, "load", error, 1)) is kind
        monkeypatch.setattr(inference.workers, "_alive", then_lost)
        with pytest.raises(RayWorkerError, match="version 1 of the weights was not taken by 2 of the workers: worker 0"):
            inference.load_weights([])
    finally:
        inference.close()


def test_weights_that_a_worker_refuses_are_named() -> None:
    inference = RayInference(make_engine, tokenizer=TOKENIZER, options=ONE)
    try:
        with pytest.raises(RayWorkerError, match=r"version 1 of the weights was not taken by 2 of the workers: worker 0 of 'engines' .*"):
            inference.load_weights([("stranger", next(make_engine()[1].model.parameters()).detach())])
    finally:
        inference.close()
