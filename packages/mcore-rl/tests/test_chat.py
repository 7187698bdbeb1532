# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Conversations: what the policy drew stays as it was drawn, the environment's part is not learnt from, limits end them."""

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from mcore_inference import DynamicInferenceContext, DynamicInferenceEngine, InferenceConfig, PagedAttention
from mcore_parallel import ProcessGroups
from mcore_parallel.data import ByteTokenizer
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_rl import (
    ChatInferenceInterface,
    Episode,
    GenericGenerationArgs,
    InferenceInterface,
    InferenceRequest,
    InferenceResponse,
    MegatronChatLocal,
    MultiTurnAgent,
    Problem,
)

END = 300
ARGS = GenericGenerationArgs(max_tokens=8)


def template(messages: Sequence[Mapping[str, Any]], is_open: bool) -> list[int]:
    """A turn is its role's first letter, a colon, the content, END and a line end; role and end are ids of their own."""
    written = [token for each in messages for token in [*f"{each['role'][0]}:".encode(), *each["content"].encode(), END, 10]]
    return [*written, *b"a:"] if is_open else written


class Guesser(InferenceInterface):
    """Says each of its answers in turn, with or without the end of its turn."""

    def __init__(self, answers: Sequence[str], end: Sequence[int] = (END,), reason: str = "stop") -> None:
        self.answers, self.end, self.reason, self.prompts = list(answers), list(end), reason, []

    def encode(self, text: str) -> list[int]:
        raise AssertionError("a conversation is not a text")

    async def agenerate(self, request: InferenceRequest) -> list[list[InferenceResponse]]:
        [prompt] = request.prompts
        self.prompts.append(list(prompt))
        self.limit = request.generation_args.max_tokens
        text = self.answers[len(self.prompts) - 1]
        drawn = [*text.encode(), *self.end]
        scores = [-0.5 * (i + 1) for i in range(len(drawn))]
        return [[InferenceResponse(response=text, token_ids=[*prompt, *drawn], prompt_length=len(prompt), logprobs=scores,
                                   finish_reason=self.reason)]]  # fmt: skip


class HigherOrLower(Episode):
    def __init__(self, number: int) -> None:
        self.number, self.answers = number, []

    async def start(self) -> list[dict[str, str]]:
        return [{"role": "system", "content": "guess"}, {"role": "user", "content": "0-9"}]

    async def reply(self, answer: str) -> list[dict[str, str]]:
        self.answers.append(answer)
        if answer == "!":
            raise RuntimeError("the environment fell over")
        guess = int(answer)
        return [] if guess == self.number else [{"role": "user", "content": "lower" if guess > self.number else "higher"}]

    async def reward(self) -> float:
        return 1.0 / len(self.answers) if int(self.answers[-1]) == self.number else 0.0


class Guessing(MultiTurnAgent):
    def __init__(self, **limits: Any) -> None:
        super().__init__("guessing", **limits)

    async def get_prompt(self, *, validation: bool = False) -> Problem:
        return Problem(problem_id="7", prompt="0-9", golden="7")

    def begin(self, problem: Problem) -> Episode:
        return HigherOrLower(int(problem.golden))


@pytest.mark.parametrize("end", [(END, 10), (END,), ()])
def test_a_conversation_is_the_tokens_that_were_sent_and_drawn(end: tuple[int, ...]) -> None:
    guesser = Guesser(["9", "3", "7"], end)
    rollout = asyncio.run(Guessing().rollout(ChatInferenceInterface(guesser, template), args=ARGS))
    assert rollout is not None and rollout.reward == pytest.approx(1 / 3)
    turns = [("s", "guess"), ("u", "0-9"), ("a", "9"), ("u", "lower"), ("a", "3"), ("u", "higher"), ("a", "7")]
    whole = [token for role, text in turns for token in [*f"{role}:{text}".encode(), END, 10]]
    written = len([*b"7"]) + len(end)
    assert list(rollout.trajectory) == whole[: len(rollout.trajectory)] and guesser.prompts[0] == template(
        [{"role": "system", "content": "guess"}, {"role": "user", "content": "0-9"}], True
    )
    # Where the policy wrote an end, it learns it; where it did not, the template wrote it and nothing is learnt.
    learnt = [token for token, own in zip(rollout.trajectory, rollout.generation_mask, strict=True) if own]
    assert learnt == [*b"9", *end, *b"3", *end, *b"7", *end]
    assert list(rollout.logprobs) == [-0.5 * (i + 1) for i in range(written)] * 3
    # Each prompt is the last one with what was drawn and said after it.
    assert all(later[: len(earlier)] == earlier for earlier, later in zip(guesser.prompts, guesser.prompts[1:], strict=False))


def test_limits_end_a_conversation() -> None:
    def play(answers: list[str], reason: str = "stop", **limits: int) -> tuple[Guesser, Any]:
        guesser = Guesser(answers, reason=reason)
        return guesser, asyncio.run(Guessing(**limits).rollout(ChatInferenceInterface(guesser, template), args=ARGS))

    guesser, rollout = play(["1", "2", "3"], max_turns=2)
    assert len(guesser.prompts) == 2 and rollout.reward == 0
    guesser, rollout = play(["1", "2"], reason="length")
    assert len(guesser.prompts) == 1 and rollout.finish_reason == "length"
    first = len(template([{"role": "system", "content": "guess"}, {"role": "user", "content": "0-9"}], True))
    guesser, rollout = play(["1", "7"], max_tokens=first + 5)
    assert guesser.limit == 5 and len(guesser.prompts) == 1 and rollout.finish_reason == "length"
    for limits in ({"max_turns": 0}, {"max_tokens": 0}, {"answer_timeout_s": 0}):
        with pytest.raises(ValueError, match="guessing"):
            Guessing(**limits)


class Recording(Guesser):
    """Says which experts its tokens went to, as an engine that finds the whole last prompt in its cache."""

    def __init__(self, answers: Sequence[str], reason: str = "stop") -> None:
        super().__init__(answers, reason=reason)
        self.num_cached = 0

    async def agenerate(self, request: InferenceRequest) -> list[list[InferenceResponse]]:
        [[answer]] = await super().agenerate(request)
        experts = torch.arange(len(answer.token_ids) - 1, dtype=torch.int16).view(-1, 1, 1).expand(-1, 2, 2).clone()
        experts[: self.num_cached] = -1
        self.num_cached = answer.prompt_length
        return [[dataclasses.replace(answer, routed_experts=experts)]]


def test_what_a_turn_finds_in_the_cache_was_recorded_by_an_earlier_one() -> None:
    rollout = asyncio.run(Guessing().rollout(ChatInferenceInterface(Recording(["9", "3", "7"]), template), args=ARGS))
    assert rollout is not None and rollout.routed_experts is not None
    assert rollout.routed_experts[:, 0, 0].tolist() == list(range(len(rollout.trajectory) - 1))
    # A reply that nobody answered was never computed, and neither was the last token before it.
    first = len(template([{"role": "system", "content": "guess"}, {"role": "user", "content": "0-9"}], True))
    rollout = asyncio.run(Guessing(max_tokens=first + 14).rollout(ChatInferenceInterface(Recording(["1", "7"]), template), args=ARGS))
    assert rollout is not None and rollout.routed_experts is not None
    assert len(rollout.routed_experts) == len(rollout.trajectory) - 1


def test_an_environment_that_falls_over_loses_its_attempt_alone() -> None:
    chat = ChatInferenceInterface(Guesser(["7", "!", "7"]), template)
    rollouts = asyncio.run(Guessing().group_rollout(chat, size=3, args=ARGS))
    assert [rollout.reward for rollout in rollouts] == [1.0, 1.0]
    more = asyncio.run(Guessing().get_reward_rollouts(ChatInferenceInterface(Guesser(["7", "!"]), template), num_rollouts=2, args=ARGS))
    assert len(more) == 1
    report = asyncio.run(Guessing().run_evaluation(ChatInferenceInterface(Guesser(["3", "7"]), template), num_prompts=1, args=ARGS))
    assert [(result.response, result.reward) for result in report.results] == [("3\n7", 0.5)]


@pytest.mark.parametrize("part", ["begin", "start", "reply"])
def test_what_cannot_begin_or_be_written_loses_its_attempt_alone(part: str, caplog: pytest.LogCaptureFixture) -> None:
    def strict(messages: Sequence[Mapping[str, Any]], is_open: bool) -> list[int]:
        if any(message["role"] == "oracle" for message in messages):
            raise ValueError("unknown role")
        return template(messages, is_open)

    class Odd(HigherOrLower):
        async def start(self) -> list[dict[str, str]]:
            return [{"role": "oracle", "content": "?"}] if part == "start" else await super().start()

        async def reply(self, answer: str) -> list[dict[str, str]]:
            return [{"role": "oracle", "content": "?"}]

    class Oddly(Guessing):
        num_begun = 0

        def begin(self, problem: Problem) -> Episode:
            self.num_begun += 1
            if self.num_begun == 2 and part == "begin":
                raise LookupError("no such board")
            return (Odd if self.num_begun == 2 else HigherOrLower)(7)

    answers = ["7", "7"] if part != "reply" else ["7", "3", "7"]
    rollouts = asyncio.run(Oddly().group_rollout(ChatInferenceInterface(Guesser(answers), strict), size=3, args=ARGS))
    assert [rollout.reward for rollout in rollouts] == [1.0, 1.0]
    [dropped] = [record.getMessage() for record in caplog.records]
    assert ("LookupError('no such board')" if part == "begin" else "template does not take what the environment says: Value") in dropped


def test_what_takes_no_conversations_is_refused() -> None:
    with pytest.raises(TypeError, match="ChatInferenceInterface"):
        asyncio.run(Guessing().rollout(Guesser(["7"]), args=ARGS))

    def forgetful(messages: Sequence[Mapping[str, Any]], is_open: bool) -> list[int]:
        return template(messages[-1:], is_open)

    with pytest.raises(ValueError, match="turns cannot be appended"):
        ChatInferenceInterface(Guesser(["7"]), forgetful)


def test_a_template_that_writes_the_last_answer_otherwise_than_earlier_ones_holds_conversations() -> None:
    def thinking(messages: Sequence[Mapping[str, Any]], is_open: bool) -> list[int]:
        """As Qwen3's: thoughts, here none, stand in the last turn alone."""
        *earlier, last = messages
        written = template(earlier, False)
        return [*written, *(b"()" if last["role"] == "assistant" else b""), *template([last], is_open)]

    rollout = asyncio.run(Guessing().rollout(ChatInferenceInterface(Guesser(["9", "7"]), thinking), args=ARGS))
    assert rollout is not None and rollout.reward == 0.5
    turns = [("s", "guess"), ("u", "0-9"), ("a", "9"), ("u", "lower"), ("a", "7")]
    whole = [token for role, text in turns for token in [*f"{role}:{text}".encode(), END, 10]]
    assert list(rollout.trajectory) == whole[:-1]


def test_an_engine_holds_conversations() -> None:
    config = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2, vocab_size=384, init_method_std=0.3)
    model = GPTModel(config, ProcessGroups.single(), attention_core=PagedAttention(), seed=0)
    context = DynamicInferenceContext.for_model(model, InferenceConfig(max_sequence_length=256, num_blocks=32, block_size_tokens=16))
    chat = MegatronChatLocal(DynamicInferenceEngine(model, context, ByteTokenizer()))

    class Echo(HigherOrLower):
        async def reply(self, answer: str) -> list[dict[str, str]]:
            self.answers.append("7")
            return [{"role": "user", "content": "go on"}] if len(self.answers) < 3 else []

    class Echoing(Guessing):
        def begin(self, problem: Problem) -> Episode:
            return Echo(7)

    rollouts = asyncio.run(Echoing().group_rollout(chat, size=4, args=GenericGenerationArgs(temperature=1.0, max_tokens=4)))
    assert len(rollouts) == 4
    for rollout in rollouts:
        begins = list(rollout.trajectory[: rollout.generation_mask.index(True)])
        assert begins == chat.encode_messages([{"role": "system", "content": "guess"}, {"role": "user", "content": "0-9"}])
        assert rollout.finish_reason == "stop" or sum(rollout.generation_mask) == 4
