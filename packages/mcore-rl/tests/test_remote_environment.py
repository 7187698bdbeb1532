# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""An environment behind HTTP is the one that it serves, and what goes wrong names it."""

import asyncio
import contextlib
import json
import math
import random
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from mcore_rl import (
    EnvironmentServer,
    GenericGenerationArgs,
    InferenceInterface,
    InferenceRequest,
    InferenceResponse,
    ModelJudge,
    NumberedProblems,
    Problem,
    RemoteEnvironment,
    WeightedMultiTask,
)
from mcore_rl.agent import _environment_http
from mcore_rl.envs import CharacterShare, CountdownConfig
from mcore_rl.inference import PeerError, PeerReplyError, PeerTimeoutError

CARD: dict[str, Any] = {"version": 2, "env_id": "e", "num_problems": 3, "num_evaluation": 2, "turn_limits": {"e": None}, "tools": []} | {
    f"{name}_timeout_s": 1.0 for name in ("prompt", "answer", "judge")
}
PROBLEM = Problem(problem_id="7", prompt="?")


class Told(NumberedProblems):
    """The answer says what the judge does."""

    def __init__(self) -> None:
        super().__init__("told", judge_timeout_s=1.0)
        self.running = self.most = 0
        self.released = threading.Event()
        """Ends what holds the loop up."""

    def problem(self, number: int) -> Problem:
        return Problem(problem_id=str(number), prompt="x" * (number % 5 + 1))

    async def get_reward(self, response: str, problem: Problem) -> float:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(60 if response == "hang" else 0.02)
        finally:
            self.running -= 1
        if response == "hold up":
            self.released.wait(60)
        if response == "raise":
            raise RuntimeError("fell over")
        return math.nan if response == "nan" else 0.5


class Scripted(InferenceInterface):
    """Gives the answers in turn."""

    def __init__(self, *answers: str) -> None:
        self.answers = list(answers)

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    async def agenerate(self, request: InferenceRequest) -> list[list[InferenceResponse]]:
        answer = self.answers.pop(0)
        [prompt] = request.prompts
        return [[InferenceResponse(response=answer, token_ids=[*prompt, 1], prompt_length=len(prompt), logprobs=[-1.0])]]


@pytest.fixture
def told() -> Iterator[tuple[Told, EnvironmentServer]]:
    environment = Told()
    with EnvironmentServer(environment, api_key="secret") as server:
        yield environment, server


def test_it_poses_and_judges_what_the_environment_there_does() -> None:
    own = CountdownConfig.small().build()
    with EnvironmentServer(own) as server:
        remote = RemoteEnvironment(server.url)
        assert remote.env_id == "countdown" and remote.answer_timeout_s == own.answer_timeout_s
        problems = [own.problem(number) for number in range(4)]
        assert [remote.problem(number) for number in range(4)] == problems
        assert len(remote.get_dataset()) == len(own.get_dataset()) and remote.get_dataset()[2] == problems[2]
        answers = [own.attempt(problem, random.Random(3)) for problem in problems]
        for problem, answer in zip(problems, answers, strict=True):
            assert asyncio.run(remote.get_reward(answer, problem)) == asyncio.run(own.get_reward(answer, problem))
        generator = random.Random(5)
        assert len({remote.attempt(problems[0], generator) for _ in range(8)}) > 1
        assert isinstance(remote.attempt(problems[0], random.Random(5)), str)
        remote.start_at(2, rank=1, num_ranks=2)
        assert asyncio.run(remote.get_prompt()) == problems[3]
        assert asyncio.run(remote.evaluation_prompts(2)) == [own.problem((1 << 32) + number) for number in (1, 3)]


def test_environments_without_attempts_and_several_as_one_are_served() -> None:
    mixed = WeightedMultiTask([CharacterShare(["x", "y"], "a"), Told()], [1, 1])
    with EnvironmentServer(mixed) as server:
        remote = RemoteEnvironment(server.url)
        problem = remote.problem(1)
        assert problem == mixed.problem(1) and problem.env_id
        assert remote.attempt(remote.problem(0), random.Random(0)) is None
        outer = WeightedMultiTask([remote], [1])
        assert asyncio.run(outer.get_prompt()).problem_id == f"multi_task/{mixed.problem(0).problem_id}"


def test_an_evaluation_loses_what_its_judge_loses(told: tuple[Told, EnvironmentServer], caplog: pytest.LogCaptureFixture) -> None:
    remote = RemoteEnvironment(told[1].url, api_key="secret")
    interface, args = Scripted("fine", "hang", "raise", "nan", "fine"), GenericGenerationArgs()
    response = asyncio.run(remote.run_evaluation(interface, num_prompts=5, args=args))
    assert response.metrics()["reward"] == [0.5, 0.5] and response.num_dropped == 3
    dropped = [record.getMessage() for record in caplog.records if "is dropped" in record.getMessage()]
    for words in ("took longer than its limit of 1 s", "fell over", "reward=nan of problem"):
        assert sum(words in message and "environment 'told'" in message for message in dropped) == 1


@pytest.mark.journey
def test_a_judge_that_holds_the_server_up_is_given_up(told: tuple[Told, EnvironmentServer]) -> None:
    environment, server = told
    remote = RemoteEnvironment(server.url, api_key="secret")
    # The judge is still at it when the error comes.
    with pytest.raises(PeerError, match="environment 'told': .* refused with status 504: .*took longer than its limit of 1 s"):
        asyncio.run(remote.get_reward("hold up", PROBLEM))
    environment.released.set()


@pytest.mark.parametrize("key", [None, "other"])
def test_a_request_without_the_key_is_refused(told: tuple[Told, EnvironmentServer], key: str | None) -> None:
    with pytest.raises(PeerError, match="refused with status 401: .*the api_key is missing or another one"):
        RemoteEnvironment(told[1].url, api_key=key)
    assert json.loads(urllib.request.urlopen(f"{told[1].url}/health").read()) == {"status": "ok"}


def post(server: EnvironmentServer, path: str, body: bytes, **headers: str) -> tuple[int, str]:
    request = urllib.request.Request(f"{server.url}{path}", body, {"Authorization": "Bearer secret"} | headers)
    try:
        with urllib.request.urlopen(request) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())["error"]


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/problem", {"number": 1, "seed": 2}, 400, "a message has an unknown field 'seed'; it has number"),
        ("/problem", {}, 400, "a message has no number"),
        ("/problem", {"number": True}, 400, "number of a message must be int, found true"),
        ("/problem", {"number": 1.0}, 400, "number of a message must be int, found 1.0"),
        ("/problem", {"number": -1}, 400, "number=-1 must not be negative"),
        ("/problem", [1], 400, "a message must be an object, found [1]"),
        ("/reward", {"response": "a", "problem": {"problem_id": "1", "prompt": "x", "golden": "", "env_id": "", "more": 1}}, 400, "'more'"),
        ("/reward", {"response": "a", "problem": {"problem_id": "1", "prompt": "x", "golden": ""}}, 400, "a problem has no env_id"),
        ("/reward", {"response": None, "problem": {}}, 400, "response of a message must be str, found null"),
        ("/other", {}, 404, "no /other here"),
    ],
)
def test_messages_of_other_types_are_refused(told: tuple[Told, EnvironmentServer], path: str, body: Any, status: int, words: str) -> None:
    got, text = post(told[1], path, json.dumps(body).encode())
    assert got == status and words in text


def test_bodies_that_are_no_json_or_too_long_are_refused(told: tuple[Told, EnvironmentServer]) -> None:
    assert (
        post(told[1], "/problem", b"{")[0] == post(told[1], "/problem", b"[" * 100_000)[0] == post(told[1], "/problem", b"\xff")[0] == 400
    )
    assert post(told[1], "/problem", b"", **{"Content-Length": str(1 << 30)})[0] == 413
    assert post(told[1], "/problem", b"", **{"Content-Length": "9" * 5000})[0] == 413
    assert post(told[1], "/problem", b"", **{"Content-Length": "-1"})[0] == 411
    assert RemoteEnvironment(told[1].url, api_key="secret").problem(0).problem_id == "0"


@contextlib.contextmanager
def replying(*replies: bytes | None) -> Iterator[str]:
    """A server that gives these replies, one a connection; None ends the connection."""

    def work() -> None:
        with contextlib.suppress(OSError):
            for content in replies:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(1 << 16)
                    if content == b"":
                        # No answer, until the client leaves.
                        connection.recv(1)
                    elif content is not None:
                        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(content) + content)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        ({"reward": "good"}, 'reward of a message must be int or float, found "good"'),
        ({"reward": True}, "reward of a message must be int or float, found true"),
        ({"reward": math.inf}, "reward of a message must be int or float, found Infinity"),
        ({"reward": 1, "why": ""}, "unknown field 'why'"),
    ],
)
def test_replies_of_other_types_are_refused(reply: Any, words: str) -> None:
    with replying(json.dumps(CARD).encode(), json.dumps(reply).encode()) as url:
        remote = RemoteEnvironment(url)
        with pytest.raises(PeerReplyError, match=f"environment 'e': {url} gave no reply to /reward: .*{words}"):
            asyncio.run(remote.get_reward("a", PROBLEM))


@pytest.mark.parametrize(
    ("card", "words"),
    [
        ({"models": []}, "unknown field 'models'"),
        ({"version": 1}, "version=1 must be 2"),
        (CARD | {"env_id": 3}, "env_id of a message"),
    ],
)
def test_other_servers_are_named(card: Any, words: str) -> None:
    with (
        replying(json.dumps(card).encode()) as url,
        pytest.raises(PeerReplyError, match=f"{url} is no server of an environment: .*{words}"),
    ):
        RemoteEnvironment(url)


def test_a_server_that_does_not_answer_in_time_is_named_with_its_environment() -> None:
    with replying(json.dumps(CARD | {"judge_timeout_s": 0.1}).encode(), b"") as url:
        remote = RemoteEnvironment(url)
        # It has asked who is there, for which it may take its time.
        remote._timeout_s = 0.2
        with pytest.raises(PeerTimeoutError, match=f"environment 'e': {url} did not answer within timeout_s=0.3"):
            asyncio.run(remote.get_reward("a", PROBLEM))


def test_a_connection_that_ends_is_made_again_and_a_server_that_is_gone_is_named() -> None:
    reply = json.dumps({"problem": {"problem_id": "1", "prompt": "x", "golden": "", "env_id": ""}}).encode()
    with replying(json.dumps(CARD).encode(), None, reply) as url:
        remote = RemoteEnvironment(url, num_tries=2)
        assert asyncio.run(remote.get_prompt()) == Problem(problem_id="1", prompt="x")
    with pytest.raises(PeerError, match=f"environment 'e': {url} was lost"):
        asyncio.run(remote.get_prompt())


def test_requests_beyond_the_limit_wait() -> None:
    environment = Told()
    with EnvironmentServer(environment, max_requests=2) as server:
        remote = RemoteEnvironment(server.url)

        async def ask() -> list[float]:
            return await asyncio.gather(*(remote.get_reward("fine", PROBLEM) for _ in range(12)))

        assert asyncio.run(ask()) == [0.5] * 12
    assert environment.most == 2


def test_closing_gives_up_what_is_judged() -> None:
    environment = Told()
    environment.judge_timeout_s = 60.0
    server = EnvironmentServer(environment)
    remote = RemoteEnvironment(server.url, num_tries=1)
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            asyncio.run(remote.get_reward("hang", PROBLEM))
        except PeerError as error:
            errors.append(error)

    client = threading.Thread(target=ask)
    client.start()
    while not environment.running:
        time.sleep(0.01)
    server.close()
    server.close()
    client.join(10)
    assert len(errors) == 1 and environment.running == 0
    with pytest.raises(PeerError, match="was lost"):
        RemoteEnvironment(server.url, num_tries=1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"host": "0.0.0.0"}, "host='0.0.0.0' is reached by others; set api_key, or host='127.0.0.1'"),
        ({"max_requests": 0}, "max_requests=0 must be at least 1"),
        ({"api_key": "a b"}, "api_key must be visible ASCII characters"),
    ],
)
def test_settings_that_cannot_be_served_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EnvironmentServer(Told(), **settings)
    with pytest.raises(ValueError, match="num_tries=0 must be at least 1"):
        RemoteEnvironment("http://127.0.0.1:1", num_tries=0)


def test_a_server_without_room_closes_at_once() -> None:
    environment = Told()
    environment.judge_timeout_s = 60.0
    server = EnvironmentServer(environment, max_requests=1)
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))), socket.create_connection((host, int(port))):
        time.sleep(0.3)
        begin = time.monotonic()
        server.close()
        assert time.monotonic() - begin < 5.0


def test_a_client_that_trickles_does_not_keep_the_place_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_environment_http, "_REQUEST_S", 0.5)
    with EnvironmentServer(Told(), max_requests=1) as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as slow:
            begin, ended = time.monotonic(), False
            slow.settimeout(0.1)
            while not ended and time.monotonic() - begin < 10.0:
                with contextlib.suppress(TimeoutError):
                    slow.sendall(b"x")
                    ended = slow.recv(1) == b""
            assert 0.4 < time.monotonic() - begin < 5.0
        monkeypatch.undo()
        assert RemoteEnvironment(server.url).problem(0).prompt == "x"


def test_a_refusal_keeps_its_status(told: tuple[Told, EnvironmentServer]) -> None:
    with pytest.raises(PeerError, match="an environment") as caught:
        RemoteEnvironment(told[1].url, api_key="another")
    assert caught.value.status == 401


class Named(InferenceInterface):
    """Notes who asks about which prompt."""

    def __init__(self) -> None:
        self.names: set[tuple[str, str | None]] = set()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    async def agenerate(self, request: InferenceRequest) -> list[list[InferenceResponse]]:
        [prompt] = request.prompts
        self.names.add((bytes(prompt).decode(), request.draw))
        return [[InferenceResponse(response="", token_ids=[*prompt, 1], prompt_length=len(prompt), logprobs=[-1.0])]]


@pytest.mark.parametrize("last_first", [False, True])
def test_what_is_drawn_to_problems_of_a_server_does_not_hang_on_which_one_comes_first(
    last_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    posed, there = RemoteEnvironment._posed, dict[int, asyncio.Event]()

    async def in_turn(remote: RemoteEnvironment, number: int) -> Problem:
        before = number + 1 if last_first else number - 1
        if before in there:
            await there[before].wait()
        problem = await posed(remote, number)
        there[number].set()
        return problem

    async def groups(environment: NumberedProblems, interface: Named) -> None:
        there.update((number, asyncio.Event()) for number in range(4))
        calls = [environment.group_rollout(interface, size=2, args=GenericGenerationArgs(max_tokens=1)) for _ in range(4)]
        assert [len(group) for group in await asyncio.gather(*calls)] == [2] * 4

    monkeypatch.setattr(RemoteEnvironment, "_posed", in_turn)
    own, remote, here = Named(), Named(), Named()
    with EnvironmentServer(Told()) as server:
        environment = RemoteEnvironment(server.url)
        asyncio.run(groups(environment, remote))
        asyncio.run(groups(ModelJudge(environment, Half()), own))
    asyncio.run(groups(Told(), here))
    assert remote.names == own.names == {("x" * (number + 1), f"told {number + 1} {choice}") for number in range(4) for choice in range(2)}
    # In a certain order they need no names.
    assert here.names == {("x" * (number + 1), None) for number in range(4)}


class Half:
    async def score(self, response: str, problem: Problem) -> float:
        return 0.5


def test_problems_of_a_server_are_waited_for_beside_others_in_a_mixture(monkeypatch: pytest.MonkeyPatch) -> None:
    with EnvironmentServer(Told()) as server:
        mixed = WeightedMultiTask([RemoteEnvironment(server.url), CharacterShare(["a"], "a")], [1, 1])
        whole = [mixed.problem(number) for number in range(4)]
        monkeypatch.setattr(RemoteEnvironment, "problem", None)

        async def ask() -> list[Problem]:
            return [await mixed.get_prompt() for _ in range(4)]

        assert asyncio.run(ask()) == whole
