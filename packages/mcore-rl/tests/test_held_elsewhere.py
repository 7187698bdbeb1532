# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Conversations whose environment is in processes of its own or behind HTTP: those of one here, and what goes wrong costs one alone."""

import asyncio
import contextlib
import copy
import dataclasses
import functools
import json
import os
import pickle
import random
import signal
import threading
import time
import urllib.error
import urllib.request
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mcore_rl import (
    Conversation,
    EnvironmentServer,
    Episode,
    GenericGenerationArgs,
    JudgeLimits,
    JudgeProcessError,
    ModelJudge,
    NumberedAgent,
    NumberedConversations,
    Problem,
    ProcessJudge,
    RayJudge,
    RayOptions,
    RemoteEnvironment,
    TokenRollout,
    Turn,
    TurnLimits,
    WeightedMultiTask,
    recite,
)
from mcore_rl.agent import _conversation_memory, _numbered, _process_judge, _ray_judge, _remote_environment
from mcore_rl.agent._conversation_memory import ConversationMemory
from mcore_rl.envs import Arithmetic, ArithmeticConfig, Calculator
from mcore_rl.inference import PeerError, PeerReplyError
from tests.support.environments import Drawing, HostileTool, Nodding, Noting
from tests.support.journeys import journeys_among
from tests.support.spoken import TOKENIZER, TURN_END, chat, template

SUMS = ArithmeticConfig(num_numbers=(2, 2), max_number=9, operators="+", worked=1.0, slips=0.0)
ARGS = GenericGenerationArgs(max_tokens=200)
PROBLEM = Problem(problem_id="7", prompt="say 7")
OPENING = [{"role": "user", "content": "say 7"}]
KEY = "secret"


RECITED: dict[str, Any] = {"template": template, "encode": lambda text: [*TOKENIZER.tokenize(text), TURN_END], "max_tokens": 500}


def played(environment: NumberedAgent, *conversations: Sequence[str]) -> list[TokenRollout]:
    """A group with an answer a conversation."""
    return asyncio.run(environment.group_rollout(chat(*conversations), size=len(conversations), args=ARGS))


def call(expression: str) -> str:
    return "<tool_call>" + json.dumps({"name": "calculate", "arguments": {"expression": expression}}) + "</tool_call>"


def mixture() -> WeightedMultiTask:
    return WeightedMultiTask([Calculator(SUMS), Arithmetic(SUMS)], [1, 1])


@contextlib.contextmanager
def elsewhere(how: str, make: Any, limits: JudgeLimits) -> Iterator[ProcessJudge | RemoteEnvironment]:
    """An environment in processes, behind HTTP, or both."""
    with contextlib.ExitStack() as stack:
        environment = make()
        if "processes" in how:
            environment = ProcessJudge(make, limits)
            stack.callback(environment.close)
        if "http" in how:
            server = stack.enter_context(EnvironmentServer(environment, api_key=KEY))
            environment = RemoteEnvironment(server.url, api_key=KEY)
        yield environment


@pytest.mark.parametrize(
    "how", [pytest.param("processes", marks=pytest.mark.journey), "http", pytest.param("http of processes", marks=pytest.mark.journey)]
)
def test_conversations_and_rewards_are_those_of_an_environment_here(how: str) -> None:
    own = mixture()
    with elsewhere(how, mixture, JudgeLimits(num_workers=2)) as environment:
        assert environment.holds_conversations and list(environment.tools) == list(own.tools)
        assert environment.turn_limits == {"calculator": TurnLimits(max_turns=4, max_tokens=None), "arithmetic": None}
        assert environment.env_ids == own.env_ids
        for number in range(2):
            problem = own.problem(number)
            posed, value = problem.golden.split("=")
            texts = [[value], ["no number"]]
            if problem.env_id == "calculator":
                # With and without the tool, one call after the other until turns end, two at once, one that is none.
                texts += [[call(posed), value], [call("1/0"), "7"], [call("1+1")] * 4, [call(posed) + call("2*3"), "<tool_call>", "7"]]
            for answers in texts:
                own.start_at(number)
                environment.start_at(number)
                [expected], [rollout] = played(own, answers), played(environment, answers)
                assert rollout == expected
            answers = environment.attempt_turns(problem, random.Random(3))
            assert (answers is None) == (problem.env_id == "arithmetic")
            if answers is not None:
                expected, rollout = (asyncio.run(recite(one, problem, answers, **RECITED)) for one in (own, environment))
                assert rollout == expected and rollout.reward == 1.0 and len(answers) == 2


@pytest.fixture(scope="module")
def processes() -> Iterator[ProcessJudge]:
    judge = ProcessJudge(HostileTool, JudgeLimits(num_workers=2, time_s=3.0, memory_gb=0.5))
    yield judge
    judge.close()


@pytest.fixture(scope="module")
def server(processes: ProcessJudge) -> Iterator[EnvironmentServer]:
    with EnvironmentServer(processes, api_key=KEY) as server:
        yield server


@pytest.fixture(scope="module")
def remote(server: EnvironmentServer) -> RemoteEnvironment:
    return RemoteEnvironment(server.url, api_key=KEY)


def num_ended(judge: ProcessJudge) -> int:
    """Processes that were replaced, or will be when they are needed."""
    return judge.num_restarts + sum(not worker.is_alive for worker in judge._idle)


@pytest.mark.parametrize(
    ("where", "hostile", "words"),
    [
        pytest.param(
            "processes",
            "loop",
            "the process that holds the conversation about problem '0' of 'hostile_tool' was ended after time_s=3",
            marks=pytest.mark.journey,
        ),
        pytest.param(
            "remote",
            "loop",
            "the process that holds the conversation about problem '0' of 'hostile_tool' was ended after time_s=3",
            marks=pytest.mark.journey,
        ),
        ("processes", "kill", "the process that holds the conversation about problem '0' of 'hostile_tool' died"),
        ("remote", "exit", "the process that holds the conversation about problem '0' of 'hostile_tool' died"),
        ("processes", "memory", "the environment 'hostile_tool' failed: MemoryError()"),
        ("remote", "memory", "the environment 'hostile_tool' failed: MemoryError()"),
        ("processes", "network", "the environment 'hostile_tool' failed: OSError(101, 'Network is unreachable')"),
        ("processes", "raise", "the environment 'hostile_tool' failed: ValueError('of the judge')"),
        pytest.param(
            "processes",
            "other",
            "the environment says what is no message: a chat message has an unknown field 'text'; it has role, content",
            marks=pytest.mark.journey,
        ),
        ("processes", "flood", "the environment 'hostile_tool' failed: ValueError('a reply of 2097"),
    ],
)
def test_what_a_tool_does_costs_its_conversation(
    where: str, hostile: str, words: str, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    environment, processes = request.getfixturevalue(where), request.getfixturevalue("processes")
    environment.start_at(0)
    before = num_ended(processes)
    group = played(environment, ["good", "bad", "end"], ["good", hostile, "end"], ["a", "b", "c", "d"], ["end"])
    assert sorted(rollout.reward for rollout in group) == [1.0, 3.0, 4.0]
    [dropped] = [record.getMessage() for record in caplog.records if "is dropped" in record.getMessage()]
    assert "environment 'hostile_tool': an answer to problem '0' is dropped" in dropped and words in dropped.replace("\\", "")
    assert num_ended(processes) == before + (hostile in ("loop", "kill", "exit"))


def test_an_evaluation_counts_the_conversations_that_are_lost(processes: ProcessJudge) -> None:
    conversations = [["good", "end"], ["kill"], ["raise"], ["end"]]
    report = asyncio.run(processes.run_evaluation(chat(*conversations), num_prompts=4, args=ARGS))
    # Which problem has which conversation is a matter of which process comes first.
    assert report.num_dropped == 2 and sorted(result.reward for result in report.results) == [1.0, 2.0]


def test_processes_that_die_between_two_turns_lose_nothing(processes: ProcessJudge) -> None:
    async def talk() -> tuple[list[Any], float]:
        turns = []
        for answer in ("good", "bad", "end"):
            replies = await processes._reply(Conversation(problem=PROBLEM, opening=OPENING, turns=turns), answer)
            turns.append(Turn(answer=answer, replies=replies))
            for worker in [worker for worker in processes._idle if worker.is_alive]:
                os.kill(worker.pid, signal.SIGKILL)
                assert worker._pipe.poll(20)
        return turns, await processes._outcome(Conversation(problem=PROBLEM, opening=OPENING, turns=turns))

    turns, reward = asyncio.run(talk())
    assert [turn.replies for turn in turns] == [[{"role": "tool", "content": "1: 1"}], [{"role": "tool", "content": "2: 0"}], []]
    assert reward == 3.0


@pytest.mark.journey
def test_a_start_of_processes_holds_no_event_loop_up(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = ProcessJudge(HostileTool, LENIENT)
    starts, may_go_on = threading.Event(), threading.Event()
    wait_until_ready = _process_judge._Template.wait_until_ready

    def wait(template: _process_judge._Template) -> None:
        starts.set()
        assert may_go_on.wait(30), "the event loop waits for the start"
        wait_until_ready(template)

    async def talk() -> list[Any]:
        first = asyncio.create_task(judge._opening(PROBLEM))
        assert await asyncio.to_thread(starts.wait, 30)
        second = asyncio.create_task(judge._opening(PROBLEM))
        await asyncio.sleep(0)
        may_go_on.set()
        return await asyncio.gather(first, second)

    try:
        monkeypatch.setattr(_process_judge._Template, "wait_until_ready", wait)
        judge._template._process.kill()
        judge._template._process.join(20)
        assert all(worker._pipe.poll(20) for worker in judge._idle)
        assert asyncio.run(talk()) == [OPENING, OPENING]
    finally:
        judge.close()
    assert judge.num_restarts == 2


HOW = ["processes", "http", "http of processes"]
LENIENT = JudgeLimits(num_workers=2, time_s=20.0, memory_gb=0.5)


@pytest.mark.parametrize("how", journeys_among(HOW, "processes", "http of processes"))
def test_tools_are_asked_once_a_turn(how: str, tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    conversations = [["a", "lock", "b", "lock", "c", "d"], *[["a", "a", "a", "a", "a", "a"]] * 3]
    with elsewhere(how, functools.partial(Noting, calls), LENIENT) as environment:
        group = played(environment, *conversations)
    assert [rollout.reward for rollout in group] == [6.0] * 4
    # It waited in the event loop of the turn that made it.
    assert any(TOKENIZER.detokenize(list(rollout.trajectory)).count("lock: waited") == 2 for rollout in group)
    assert sorted(calls.read_text().split()) == sorted(answer for answers in conversations for answer in answers)


@pytest.mark.journey
def test_what_a_conversation_keeps_takes_no_memory_from_others(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    judge = ProcessJudge(functools.partial(Noting, calls), dataclasses.replace(LENIENT, num_workers=1))

    async def talk() -> list[Any]:
        opening = await judge._opening(PROBLEM)
        first = Conversation(problem=PROBLEM, opening=opening)
        held = await judge._reply(first, "hold")
        # 200 MiB that were kept and 450 of this one are more than there is.
        used = await judge._reply(first, "use")
        going_on = dataclasses.replace(first, turns=[Turn(answer="hold", replies=held)])
        return [held, used, await judge._reply(going_on, "a")]

    try:
        assert [replies[0]["content"] for replies in asyncio.run(talk())] == ["hold: held", "use: used", "a: a"]
    finally:
        judge.close()
    # The first conversation was forgotten, and replayed.
    assert calls.read_text().split() == ["hold", "use", "hold", "a"]


@pytest.mark.journey
@pytest.mark.parametrize(("answer", "judged_by_model"), [("raise", False), ("begin", False), ("raise", True)])
def test_a_conversation_that_fails_or_leaves_a_task_costs_others_of_its_process_a_replay(
    answer: str, judged_by_model: bool, tmp_path: Path
) -> None:
    calls = tmp_path / "calls"
    make = functools.partial(noting_judged_by_model if judged_by_model else Noting, calls)
    judge = ProcessJudge(make, dataclasses.replace(LENIENT, num_workers=1))

    async def talk() -> Any:
        first = Conversation(problem=PROBLEM, opening=await judge._opening(PROBLEM))
        begun = dataclasses.replace(first, turns=[Turn(answer="a", replies=await judge._reply(first, "a"))])
        with pytest.raises(JudgeProcessError, match="of the tool") if answer == "raise" else contextlib.nullcontext():
            left = dataclasses.replace(first, turns=[Turn(answer=answer, replies=await judge._reply(first, answer))])
            # The task does not run in the meantime.
            assert (await judge._reply(left, "finish"))[0]["content"] == "finish: begun"
        return await judge._reply(begun, "b")

    try:
        assert asyncio.run(talk())[0]["content"] == "b: b"
    finally:
        judge.close()
    assert calls.read_text().split() == ["a", answer, *(["begin", "finish"] if answer == "begin" else []), "a", "b"]


@pytest.mark.journey
def test_threads_of_a_turn_end_with_it_and_cost_nobody_a_replay(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    judge = ProcessJudge(functools.partial(Noting, calls), dataclasses.replace(LENIENT, num_workers=1))

    async def talk() -> None:
        first = Conversation(problem=PROBLEM, opening=await judge._opening(PROBLEM))
        begun = dataclasses.replace(first, turns=[Turn(answer="a", replies=await judge._reply(first, "a"))])
        await judge._reply(first, "thread")
        await judge._reply(begun, "b")

    try:
        asyncio.run(talk())
    finally:
        judge.close()
    assert calls.read_text().split() == ["a", "thread", "written", "b"]


def test_conversations_are_remembered_until_they_are_taken_or_too_many() -> None:
    one, other = (Conversation(problem=PROBLEM, opening=[{"role": "user", "content": text}]) for text in ("one", "other"))
    memory = ConversationMemory[int](3)
    for number in range(2):
        memory.put(one, number)
    memory.put(other, 2)
    assert (memory.take(dataclasses.replace(one)), len(memory)) == (0, 2)
    memory.put(other, 3)
    memory.put(other, 4)
    # The oldest was forgotten.
    assert [memory.take(one), memory.take(other), memory.take(other), memory.take(other), memory.take(other)] == [None, 2, 3, 4, None]
    memory.put(one, 5)
    assert len(pickle.loads(pickle.dumps(memory))) == len(copy.deepcopy(memory)) == 0 and len(memory) == 1
    memory.clear()
    assert memory.take(one) is None and len(memory) == 0


class OneWorker:
    """In place of `RayWorkers`: a worker of this process."""

    def __init__(self, make: Callable[[], Any], options: RayOptions | None, *, name: str) -> None:
        self.options, self._own = options or RayOptions(), make()

    def least_busy(self) -> int:
        return 0

    def is_responsive(self, number: int) -> bool:
        return number == 0

    async def call(self, method: str, *arguments: Any, **_: Any) -> Any:
        return await getattr(self._own, method)(*arguments)


def test_event_loops_in_two_threads_may_ask_for_places_of_workers_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2)

    class Seen(OrderedDict[str, list[Any]]):
        def __contains__(self, key: object) -> bool:
            is_there = super().__contains__(key)
            # One after the other, they are never both here.
            with contextlib.suppress(threading.BrokenBarrierError):
                both.wait(0.5)
            return is_there

    monkeypatch.setattr(_conversation_memory, "OrderedDict", Seen)
    monkeypatch.setattr(_ray_judge, "RayWorkers", OneWorker)
    judge = RayJudge(Nodding)
    conversation = Conversation(problem=PROBLEM, opening=asyncio.run(judge._opening(PROBLEM)))
    both.reset()
    with ThreadPoolExecutor(2) as threads:
        outcomes = [threads.submit(asyncio.run, judge._outcome(conversation)) for _ in range(2)]
        assert [outcome.result(100) for outcome in outcomes] == [0.0, 0.0]
    assert len(judge._places) == 0


def test_an_environment_remembers_conversations_in_one_place_whatever_threads_ask_first(monkeypatch: pytest.MonkeyPatch) -> None:
    both, environment = threading.Barrier(2), Nodding()

    def made(most: int) -> ConversationMemory[Episode]:
        # One after the other, they are never both here.
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.5)
        return ConversationMemory(most)

    monkeypatch.setattr(_numbered, "ConversationMemory", made)
    with ThreadPoolExecutor(2) as threads:
        one, other = [asked.result(100) for asked in [threads.submit(lambda: environment._episodes) for _ in range(2)]]
    assert one is other


@pytest.mark.journey
def test_each_turn_has_the_limit_of_time_for_itself(processes: ProcessJudge) -> None:
    # Replayed, the four together take longer than time_s.
    turns = [Turn(answer="slow", replies=[{"role": "tool", "content": f"{number}: 0"}]) for number in range(1, 5)]
    assert asyncio.run(processes._outcome(Conversation(problem=PROBLEM, opening=OPENING, turns=turns))) == 4.0


def test_replies_that_are_drawn_need_what_was_said(processes: ProcessJudge) -> None:
    drawn = Turn(answer="draw", replies=[{"role": "tool", "content": "of a process that is lost"}])
    with pytest.raises(JudgeProcessError, match=r"something else than before to the same answers, in turn 1 of.* give it a resume\(\)"):
        asyncio.run(processes._reply(Conversation(problem=PROBLEM, opening=OPENING, turns=[drawn]), "good"))
    with elsewhere("http", Drawing, JudgeLimits()) as environment:
        [rollout] = played(environment, ["draw", "draw", "end"])
        assert rollout.reward == 3.0


@pytest.mark.journey
def test_a_process_that_is_stopped_is_ended_though_the_conversation_is_longer_than_its_pipe(processes: ProcessJudge) -> None:
    asyncio.run(processes._opening(PROBLEM))
    stopped = [worker.pid for worker in processes._idle if worker.is_alive]
    end = time.monotonic() + 20
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
        while Path(f"/proc/{pid}/stat").read_text().split()[2] != "T":
            assert time.monotonic() < end
            time.sleep(0.01)
    before = num_ended(processes)
    with pytest.raises(JudgeProcessError, match="about problem '7' of 'hostile_tool' was ended after time_s=3"):
        asyncio.run(processes._reply(Conversation(problem=PROBLEM, opening=OPENING), "x" * (4 << 20)))
    assert num_ended(processes) == before + 1
    for pid in {worker.pid for worker in processes._idle if worker.is_alive} & set(stopped):
        os.kill(pid, signal.SIGCONT)
    [rollout] = played(processes, ["end"])
    assert rollout.reward == 1.0


def post(server: EnvironmentServer, path: str, body: Any, key: str = KEY) -> tuple[int, str]:
    request = urllib.request.Request(f"{server.url}{path}", json.dumps(body).encode(), {"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())["error"]


class Hanging(HostileTool):
    """Has less time than its slow tool takes."""

    def __init__(self) -> None:
        super().__init__()
        self.judge_timeout_s = 0.05


class Lengths:
    """A judge to whom more words are better."""

    async def score(self, response: str, problem: Problem) -> float:
        return float(sum(len(message["content"].split()) for message in json.loads(response)))


def noting_judged_by_model(calls: Path) -> ModelJudge:
    return ModelJudge(Noting(calls), Lengths())


@pytest.mark.parametrize("how", ["here", "http"])
def test_a_model_judges_what_an_environment_replies(how: str) -> None:
    with contextlib.nullcontext(HostileTool()) if how == "here" else elsewhere("http", HostileTool, LENIENT) as replies:
        environment = ModelJudge(replies, Lengths())
        # "say 0", "good", "1: 1" and "end".
        assert [rollout.reward for rollout in played(environment, ["good", "end"])] == [6.0]
        with pytest.raises(TypeError, match="'hostile_tool' holds conversations and judges no single answer"):
            asyncio.run(environment.get_reward("good", PROBLEM))


def test_what_a_model_has_judged_is_kept_nowhere(processes: ProcessJudge) -> None:
    tool = HostileTool()
    num_places = len(processes._places)
    for environment in (
        ModelJudge(tool, Lengths()),
        ModelJudge(WeightedMultiTask([tool], [1]), Lengths()),
        ModelJudge(ModelJudge(tool, Lengths()), Lengths()),
        ModelJudge(processes, Lengths()),
    ):
        assert sorted(rollout.reward for rollout in played(environment, ["good", "end"], ["end"])) == [3.0, 6.0]
        assert len(tool._episodes) == 0 and len(processes._places) == num_places
    environment = ModelJudge(tool, Lengths())
    asyncio.run(environment._opening(PROBLEM))
    assert len(tool._episodes) == 1
    environment._forget_episodes()
    assert len(tool._episodes) == 0


def test_the_replies_of_an_environment_that_a_model_judges_have_its_own_limit(caplog: pytest.LogCaptureFixture) -> None:
    assert played(ModelJudge(Hanging(), Lengths()), ["slow", "end"]) == []
    assert "environment 'hostile_tool' took longer than judge_timeout_s=0.05" in caplog.text.replace("\\", "")


def of_two_limits() -> WeightedMultiTask:
    """Its own limit is that of the longer one."""
    return WeightedMultiTask([Hanging(), Calculator(SUMS)], [1, 1])


@pytest.mark.parametrize("how", [pytest.param("processes", marks=pytest.mark.journey), "http"])
def test_the_environment_of_a_mixture_that_takes_long_is_named(how: str, caplog: pytest.LogCaptureFixture) -> None:
    with elsewhere(how, of_two_limits, JudgeLimits(num_workers=1)) as environment:
        assert played(environment, ["slow"]) == []
        assert "environment 'hostile_tool' took longer than judge_timeout_s=0.05" in caplog.text.replace("\\", "")


class Levels(NumberedConversations):
    """Problems of two names, which ``env_ids`` says, or does not. The first answer is replied to by an iterator, the second by None."""

    names: tuple[str, ...] = ("easy", "hard")

    def __init__(self) -> None:
        super().__init__("levels", max_turns=4)

    @property
    def env_ids(self) -> tuple[str, ...]:
        return self.names

    def problem(self, number: int) -> Problem:
        return Problem(problem_id=str(number), prompt="?", env_id=("easy", "hard")[number % 2])

    def begin(self, problem: Problem) -> Episode:
        return _Level(problem)


class Unsaid(Levels):
    names = ("levels",)


class _Level(Episode):
    def __init__(self, problem: Problem) -> None:
        self._name, self._num_answers = problem.env_id, 0

    async def start(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self._name}]

    async def reply(self, answer: str) -> Any:
        self._num_answers += 1
        return ({"role": "user", "content": text} for text in ("go", "on")) if self._num_answers == 1 else None

    async def reward(self) -> float:
        return float(self._num_answers)


def of_levels() -> WeightedMultiTask:
    return WeightedMultiTask([Levels(), Arithmetic(SUMS)], [1, 0])


def of_unsaid() -> WeightedMultiTask:
    return WeightedMultiTask([Unsaid(), Arithmetic(SUMS)], [1, 0])


@pytest.mark.parametrize("how", ["here", pytest.param("processes", marks=pytest.mark.journey), "http"])
@pytest.mark.parametrize("make", [Levels, Unsaid, of_levels])
def test_problems_with_names_of_their_own_are_conversations_and_no_reply_ends_them(how: str, make: Any) -> None:
    with elsewhere(how, make, JudgeLimits(num_workers=1)) as environment:
        [first], [second] = (played(environment, ["a", "b"]) for _ in range(2))
        assert [(one.env_id, one.reward, sum(one.generation_mask)) for one in (first, second)] == [("easy", 2.0, 4), ("hard", 2.0, 4)]
        text = TOKENIZER.detokenize(first.trajectory)
        assert "easy" in text and "go" in text and "on" in text
        assert environment.holds_conversations and (make is Unsaid or {"easy", "hard"} <= set(environment.env_ids))


def test_a_name_that_no_environment_of_a_mixture_has_is_refused() -> None:
    words = "has env_id='easy', which is none of levels, arithmetic; name it in env_ids of its environment"
    with elsewhere("http", of_unsaid, JudgeLimits(num_workers=1)) as environment, pytest.raises(ValueError, match=words):
        played(environment, ["a", "b"])
    assert played(of_unsaid(), ["a", "b"])[0].reward == 2.0


TURN = {"answer": "good", "replies": [{"role": "tool", "content": "1: 1"}]}
SAID = {"problem": dataclasses.asdict(PROBLEM), "opening": OPENING, "turns": [TURN]}


def said(**changes: Any) -> dict[str, Any]:
    return {"conversation": SAID | changes, "answer": "good"}


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("start", {"problem": SAID["problem"], "seed": 1}, "a message has an unknown field 'seed'"),
        ("start", {}, "a message has no problem"),
        ("reply", {"conversation": SAID}, "a message has no answer"),
        ("reply", said() | {"answer": 3}, "answer of a message must be str, found 3"),
        ("reply", said(more=1), "a conversation has an unknown field 'more'"),
        ("reply", said(turns=None), "turns of a conversation must be list, found null"),
        ("reply", said(turns=[3]), "a turn must be an object, found 3"),
        ("reply", said(turns=[TURN | {"reward": 1}]), "a turn has an unknown field 'reward'"),
        ("reply", said(turns=[{"answer": "good"}]), "a turn has no replies"),
        ("reply", said(opening=["say 7"]), 'a chat message must be an object, found "say 7"'),
        ("reply", said(opening=[{"role": "user"}]), "a chat message has no content"),
        ("reply", said(opening=[OPENING[0] | {"image": "x"}]), "a chat message has an unknown field 'image'"),
        ("reply", said(opening=[OPENING[0] | {"name": 3}]), "name of a chat message must be str, found 3"),
        ("reply", said(turns=[TURN] * 4), "a conversation of 5 turns is longer than max_turns=4"),
        # Refused before it is read.
        ("reply", said(turns=[3] * 5), "a conversation of 6 turns is longer than max_turns=4"),
        ("reply", said(turns=[TURN | {"replies": []}, TURN]), "turn 1 of a conversation has no replies, which ends it, and another one"),
        ("reply", said(turns=[TURN | {"replies": []}]), "the last turn of a conversation has no replies, which ends it; ask"),
        ("reward", {"conversation": SAID | {"turns": [TURN] * 5}}, "a conversation of 5 turns is longer than max_turns=4"),
        ("reward", said(), "a message has an unknown field 'answer'"),
        ("attempt", {"problem": SAID["problem"]}, "a message has no seed"),
    ],
)
def test_messages_of_other_types_are_refused(server: EnvironmentServer, path: str, body: Any, words: str) -> None:
    status, text = post(server, f"/conversation/{path}", body)
    assert status == 400 and words in text


@pytest.mark.parametrize("path", ["start", "reply", "reward", "attempt"])
def test_every_request_bears_the_token(server: EnvironmentServer, path: str) -> None:
    assert post(server, f"/conversation/{path}", {}, key="other") == (401, "the api_key is missing or another one")


def test_single_answers_and_conversations_are_not_taken_for_each_other(server: EnvironmentServer, remote: RemoteEnvironment) -> None:
    status, text = post(server, "/reward", {"problem": SAID["problem"], "response": "good"})
    assert status == 400 and "problem '7' is one of a conversation; ask /conversation/reward" in text
    with pytest.raises(TypeError, match="'hostile_tool' holds conversations and judges no single answer"):
        asyncio.run(remote.get_reward("good", PROBLEM))
    status, text = post(server, "/conversation/reply", said(turns=[TURN | {"replies": [OPENING[0]]}]))
    assert status == 500 and "says something else than before to the same answers, in turn 1 of problem '7'" in text.replace("\\", "")
    with pytest.raises(TypeError, match="'arithmetic' judges single answers and holds no conversation"):
        asyncio.run(Arithmetic(SUMS)._opening(PROBLEM))


def test_a_conversation_that_is_too_large_is_not_sent(remote: RemoteEnvironment) -> None:
    long = Conversation(problem=PROBLEM, opening=OPENING, turns=[Turn(answer="x" * (9 << 20), replies=OPENING)] * 2)
    with pytest.raises(PeerError, match=r"environment 'hostile_tool': what http:.*/conversation/reward is asked has 18874\d+ bytes"):
        asyncio.run(remote._outcome(long))


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        ({"messages": "end"}, 'messages of a message must be list, found "end"'),
        ({"messages": [3]}, "a chat message must be an object, found 3"),
        ({"messages": [{"role": "tool", "content": None}]}, "content of a chat message must be str, found null"),
        ({"messages": [], "reward": 1}, "a message has an unknown field 'reward'"),
    ],
)
def test_replies_of_other_types_are_refused(remote: RemoteEnvironment, reply: Any, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def post(self: Any, path: str, body: bytes) -> bytes:
        return json.dumps(reply).encode()

    monkeypatch.setattr(_remote_environment.HttpPeer, "post", post)
    with pytest.raises(PeerReplyError, match=f"environment 'hostile_tool': .* gave no reply to /conversation/start: {words}"):
        asyncio.run(remote._opening(PROBLEM))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"turn_limits": []}, "turn_limits of a message must be dict"),
        ({"turn_limits": {"e": {"max_turns": 0, "max_tokens": None}}}, "max_turns=0 and max_tokens=None must be at least 1"),
        ({"turn_limits": {"e": {"max_turns": 2}}}, "a limit of turns has no max_tokens"),
        ({"turn_limits": {"e": 3}}, "a limit of turns must be an object, found 3"),
        ({"turn_limits": {}}, "turn_limits of a message names no environment"),
        ({"tools": [{"type": "function"}]}, "a tool has no function"),
        ({"tools": [{"type": "function", "function": {}}]}, "the function of a tool has no name"),
    ],
)
def test_cards_of_other_types_are_refused(change: Any, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    card = {"version": 2, "env_id": "e", "num_problems": 3, "num_evaluation": 2, "turn_limits": {"e": None}, "tools": []}
    card |= {f"{name}_timeout_s": 1.0 for name in ("prompt", "answer", "judge")}

    async def post(self: Any, path: str, body: bytes) -> bytes:
        return json.dumps(card | change).encode()

    monkeypatch.setattr(_remote_environment.HttpPeer, "post", post)
    with pytest.raises(PeerReplyError, match=f"is no server of an environment: .*{words}"):
        RemoteEnvironment("http://127.0.0.1:1")


def test_a_server_that_is_started_again_goes_on_with_the_conversation() -> None:
    first = EnvironmentServer(HostileTool(), api_key=KEY)
    port = int(first.url.rpartition(":")[2])
    remote = RemoteEnvironment(first.url, api_key=KEY)
    replies = asyncio.run(remote._reply(Conversation(problem=PROBLEM, opening=OPENING), "good"))
    turn = Turn(answer="good", replies=replies)
    first.close()
    with pytest.raises(PeerError, match="environment 'hostile_tool': .* was lost"):
        asyncio.run(remote._reply(Conversation(problem=PROBLEM, opening=OPENING, turns=[turn]), "bad"))
    with EnvironmentServer(HostileTool(), api_key=KEY, port=port):
        assert asyncio.run(remote._reply(Conversation(problem=PROBLEM, opening=OPENING, turns=[turn]), "bad")) == [
            {"role": "tool", "content": "2: 0"}
        ]
        assert asyncio.run(remote._outcome(Conversation(problem=PROBLEM, opening=OPENING, turns=[turn]))) == 1.0
