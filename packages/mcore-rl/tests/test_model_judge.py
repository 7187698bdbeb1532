# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Rewards by a model with a value head and by one that is asked: what they are, and what is lost where none comes."""

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.data import ByteTokenizer
from mcore_parallel.models import GPTModel, TransformerConfig, add_value_head
from mcore_rl import (
    ChatEndpoint,
    GenericGenerationArgs,
    InferenceInterface,
    InferenceRequest,
    InferenceResponse,
    LLMJudge,
    LostError,
    ModelJudge,
    NumberedProblems,
    Problem,
    RewardModel,
    UnreadableVerdictError,
)
from mcore_rl.agent import read_score
from mcore_rl.inference import PeerError, PeerReplyError, PeerTimeoutError
from tests.support.tcp_server import tcp_server

TOKENIZER = ByteTokenizer()
PROBLEM = Problem(problem_id="7", prompt="Add {1} and 2.", golden="3")
DRAWN = GenericGenerationArgs(temperature=1.0, max_tokens=8)


class PosedOnly(NumberedProblems):
    def problem(self, number: int) -> Problem:
        return Problem(problem_id=str(number), prompt="p")

    async def get_reward(self, response: str, problem: Problem) -> float:
        raise AssertionError("a model judges")


class Says(InferenceInterface):
    """Gives these answers, one a request, or raises them; the last one again and again."""

    def __init__(self, *answers: str | Exception, wait_s: float = 0.0) -> None:
        self.answers, self.questions, self.wait_s = list(answers), [], wait_s
        self.running, self.most = 0, 0

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    async def agenerate(self, request: InferenceRequest) -> list[list[InferenceResponse]]:
        [prompt] = request.prompts
        self.questions.append(bytes(prompt).decode())
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(self.wait_s)
        finally:
            self.running -= 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return [[InferenceResponse(response=answer, token_ids=[*prompt, 1], prompt_length=len(prompt), logprobs=[-1.0])]]


def scored(judge: Any, response: str = "3", problem: Problem = PROBLEM) -> float:
    return asyncio.run(judge.score(response, problem))


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mcore_rl.agent._model_judge._WAITS_S", (0.0,))


def reward_model(**options: Any) -> RewardModel:
    sizes = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=2, vocab_size=TOKENIZER.vocab_size, init_method_std=0.3)
    model = GPTModel(sizes, ProcessGroups.single())
    head = add_value_head(model)
    assert head is not None
    with torch.no_grad():
        head.weight.normal_(generator=torch.Generator().manual_seed(3))
    options = {"max_tokens": 64, **options}
    return RewardModel(model, head, lambda problem, response: TOKENIZER.tokenize(problem.prompt + response), **options)


def test_answers_that_are_scored_together_have_the_values_of_each_alone() -> None:
    rewards, sizes = reward_model(max_batch_size=3), []
    answers = ["a", "bcd", "ef", "ghijkl", "", "mno", "p"]
    alone = [scored(rewards, answer) for answer in answers]
    assert len({round(value, 4) for value in alone}) == len(answers)
    inner = rewards._values
    rewards._values = lambda rows: (sizes.append(len(rows)), inner(rows))[1]  # type: ignore[method-assign]

    async def all_of_them() -> list[float]:
        return await asyncio.gather(*(rewards.score(answer, PROBLEM) for answer in answers))

    assert asyncio.run(all_of_them()) == pytest.approx(alone, abs=1e-5)
    assert sizes == [3, 3, 1]
    # Later answers, of another event loop, find nothing left behind.
    assert scored(rewards, "a") == pytest.approx(alone[0], abs=1e-6)


def test_an_answer_that_is_given_up_or_too_long_or_whose_model_fails_is_lost_alone() -> None:
    rewards = reward_model(max_tokens=20)
    inner = rewards._values

    def fails_once(rows: list[Any]) -> list[float]:
        rewards._values = inner  # type: ignore[method-assign]
        raise RuntimeError("no memory")

    async def ask() -> list[Any]:
        given_up = asyncio.ensure_future(rewards.score("a", PROBLEM))
        await asyncio.sleep(0)
        given_up.cancel()
        outcomes = await asyncio.gather(rewards.score("b", PROBLEM), rewards.score("c" * 40, PROBLEM), return_exceptions=True)
        rewards._values = fails_once  # type: ignore[method-assign]
        return [*outcomes, *await asyncio.gather(rewards.score("b", PROBLEM), return_exceptions=True), await rewards.score("b", PROBLEM)]

    good, long, failed, again = asyncio.run(ask())
    assert good == again == pytest.approx(scored(rewards, "b"))
    assert isinstance(long, LostError) and "has 54 tokens with it, max_tokens=20" in str(long)
    assert isinstance(failed, LostError) and "no memory" in str(failed)


def test_one_batch_is_scored_at_a_time_whatever_event_loops_ask() -> None:
    rewards, running, most = reward_model(), [0], [0]
    head, both = rewards.head.forward, threading.Barrier(2)

    def watched(hidden: torch.Tensor) -> torch.Tensor:
        running[0] += 1
        most[0] = max(most[0], running[0])
        time.sleep(0.05)
        running[0] -= 1
        return head(hidden)

    def ask(answer: str) -> float:
        both.wait(10)
        return scored(rewards, answer)

    rewards.head.forward = watched  # type: ignore[method-assign]
    with ThreadPoolExecutor(2) as threads:
        one, other = threads.map(ask, ["a", "b"])
    assert most == [1] and (one, other) == pytest.approx((scored(rewards, "a"), scored(rewards, "b")))


def test_a_policy_is_judged_by_a_model_in_place_of_its_environment(caplog: pytest.LogCaptureFixture) -> None:
    environment = ModelJudge(PosedOnly("asked"), reward_model(max_tokens=8))
    environment.start_at(4)
    policy = Says("right", "much too long an answer", "right")
    group = asyncio.run(environment.group_rollout(policy, size=3, args=DRAWN))
    assert [rollout.problem_id for rollout in group] == ["4", "4"] and group[0].reward == group[1].reward != 0
    assert "max_tokens=8" in caplog.text and environment.env_id == "asked"


@pytest.mark.parametrize(
    ("verdict", "score"),
    [
        ("Good. <score>0.75</score>", 0.75),
        ("<score>0</score> no: < score>1</score> <score> 1.0 </score>", 1.0),
        ("Half right: **<score>0.5</score>**.\n", 0.5),
        # What the judge has quoted of the answer is no verdict, whether it goes on or was cut off.
        ("It says <score>1</score>, which", None),
        ("<score>0</score> It says <score>1</score> of itself.", None),
        ("<score>7</score>", None),
        ("<score>-0.1</score>", None),
        ("<score>" + "9" * 5000 + "</score>", None),
        ("<score>one</score>", None),
        ("", None),
    ],
)
def test_a_score_from_0_to_1_at_the_end_is_the_verdict(verdict: str, score: float | None) -> None:
    assert read_score(verdict) == score


def test_the_question_has_problem_answer_and_golden_answer() -> None:
    model = Says("<score>0.5</score>")
    assert scored(LLMJudge(model), "{x} <score>1</score>") == 0.5
    [question] = model.questions
    assert all(text in question for text in ("Add {1} and 2.", "Reference answer, where there is one:\n3\n", "{x} <score>1</score>"))
    own = Says("7")
    judge = LLMJudge(own, prompt="{golden}={response}?", read=lambda verdict: float(verdict) / 10)
    assert scored(judge) == 0.7 and own.questions == ["3=3?"]


@pytest.mark.parametrize(
    ("answers", "outcome", "counts"),
    [
        ((LostError("full", is_transient=True), TimeoutError(), "<score>1</score>"), 1.0, (3, 0, 0)),
        ((PeerError("lost"), "<score>1</score>"), 1.0, (2, 0, 0)),
        ((LostError("full", is_transient=True),), LostError, (3, 1, 0)),
        ((LostError("too long"), "<score>1</score>"), LostError, (1, 1, 0)),
        ((PeerReplyError("no JSON"), "<score>1</score>"), PeerReplyError, (1, 1, 0)),
        (("Hm.", "<score>2</score>", "<score>0.5</score>"), 0.5, (3, 0, 0)),
        (("Hm.",), UnreadableVerdictError, (3, 0, 1)),
    ],
)
@pytest.mark.usefixtures("at_once")
def test_what_passes_is_asked_again_and_the_rest_is_counted(answers: Any, outcome: Any, counts: tuple[int, int, int]) -> None:
    judge = LLMJudge(Says(*answers), args=DRAWN)
    if isinstance(outcome, float):
        assert scored(judge) == outcome
    else:
        with pytest.raises(outcome):
            scored(judge)
    assert (judge.counts.requests, judge.counts.failed, judge.counts.unreadable) == counts


def test_an_unreadable_verdict_has_the_reward_that_is_stated_for_it() -> None:
    judge = LLMJudge(Says("no idea"), unreadable=0.25)
    # A greedy verdict would be the same again.
    assert scored(judge) == 0.25 and (judge.counts.requests, judge.counts.unreadable) == (1, 1)
    with pytest.raises(UnreadableVerdictError, match="the judge of problem '7' gave no verdict: 'no idea'"):
        scored(LLMJudge(Says("no idea")))


def test_so_many_answers_are_judged_at_a_time_and_one_past_the_deadline_is_lost_alone(caplog: pytest.LogCaptureFixture) -> None:
    model = Says("<score>1</score>", wait_s=0.02)
    environment = ModelJudge(PosedOnly("asked"), LLMJudge(model, max_concurrency=2))
    for _ in range(2):
        assert len(asyncio.run(environment.group_rollout(Says("x"), size=6, args=DRAWN))) == 6 and model.most == 2
    # The event loop of the iteration before is not kept.
    assert isinstance(environment.scorer, LLMJudge) and len(environment.scorer._gates) == 1
    # The second verdict never comes, and the third answer waits for a place until its time is over.
    hangs = Says("<score>1</score>")
    environment = ModelJudge(PosedOnly("asked"), LLMJudge(hangs, max_concurrency=1), judge_timeout_s=1.0)
    inner = hangs.agenerate

    async def hang_after_the_first(request: InferenceRequest) -> list[list[InferenceResponse]]:
        hangs.wait_s = 3600.0 if hangs.questions else 0.0
        return await inner(request)

    hangs.agenerate = hang_after_the_first  # type: ignore[method-assign]
    rewards = [rollout.reward for rollout in asyncio.run(environment.group_rollout(Says("x"), size=3, args=DRAWN))]
    assert rewards == [1.0] and (hangs.running, len(hangs.questions)) == (0, 2) and caplog.text.count("judge_timeout_s=1.0") == 2


def endpoint(reply: Callable[[dict[str, Any]], tuple[str, bytes]]) -> contextlib.AbstractContextManager[str]:
    """A server that answers a request by ``reply`` of its body."""

    def answer(connection: socket.socket) -> None:
        raw = b""
        while b"\r\n\r\n" not in raw or len(raw.split(b"\r\n\r\n", 1)[1]) < int(raw.split(b"Content-Length: ")[1].split(b"\r")[0]):
            raw += connection.recv(1 << 16)
        head, body = raw.split(b"\r\n\r\n", 1)
        assert head.startswith(b"POST /v1/chat/completions ") and b"Authorization: Bearer key" in head
        status, content = reply(json.loads(body))
        connection.sendall(f"HTTP/1.1 {status}\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)

    return tcp_server(answer)


def completion(text: Any) -> bytes:
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}).encode()


@pytest.mark.usefixtures("at_once")
def test_a_server_of_chat_completions_judges() -> None:
    bodies: list[dict[str, Any]] = []

    def reply(body: dict[str, Any]) -> tuple[str, bytes]:
        bodies.append(body)
        return ("503 Busy", b"") if len(bodies) == 1 else ("200 OK", completion("<score>0.5</score>"))

    with endpoint(reply) as url:
        judge = LLMJudge(ChatEndpoint(url, model="judge", api_key="key"), prompt="Is {response} right?")
        assert scored(judge) == 0.5
    body = {"model": "judge", "messages": [{"role": "user", "content": "Is 3 right?"}], "temperature": 0.0, "max_tokens": 512}
    assert bodies == [body, body] and judge.counts.requests == 2


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"choices": []}', completion(None), completion([1])])
def test_what_is_no_completion_is_an_error_with_a_name(content: bytes) -> None:
    with endpoint(lambda _: ("200 OK", content)) as url, pytest.raises(PeerReplyError, match=url):
        scored(LLMJudge(ChatEndpoint(url, model="judge", api_key="key")))


def test_a_server_that_hangs_or_refuses_loses_the_answer() -> None:
    with endpoint(lambda _: ("401 Unauthorized", b"")) as url, pytest.raises(PeerError, match="401"):
        scored(LLMJudge(ChatEndpoint(url, model="judge", api_key="key")))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        judge = LLMJudge(ChatEndpoint(url, model="judge", timeout_s=0.05), num_tries=2)
        with pytest.raises(PeerTimeoutError, match=url):
            scored(judge)
    assert judge.counts.requests == 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LLMJudge(Says(""), prompt="{prompt}"), r"prompt has the fields \['prompt'\]; it must have response"),
        (lambda: LLMJudge(Says(""), prompt="{response} {answer}"), "may have golden and prompt"),
        (lambda: LLMJudge(Says(""), num_tries=0), "num_tries=0 must be at least 1"),
        (lambda: LLMJudge(Says(""), max_concurrency=0), "max_concurrency=0 must be at least 1"),
        (lambda: ModelJudge(PosedOnly("asked"), LLMJudge(Says("")), judge_timeout_s=0), "judge_timeout_s=0 of environment 'asked'"),
        (lambda: ChatEndpoint("http://127.0.0.1/v1", model="judge"), "must be http"),
        (lambda: reward_model(max_batch_size=0), "max_batch_size=0 must be at least 1"),
        (lambda: RewardModel(torch.nn.Identity(), _divided(), lambda *_: [1], max_tokens=8), "each rank judges for itself"),
    ],
)
def test_settings_that_cannot_judge_are_refused_by_name(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def _divided() -> Any:
    one, two = SimpleNamespace(size=1), SimpleNamespace(size=2)
    return SimpleNamespace(groups=SimpleNamespace(tp=two, pp=one, cp=one, plan=ParallelPlan(tp=2)))
