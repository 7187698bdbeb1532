# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Conversations whose problems have numbers, and a calculator in them: what is trained on, what comes next, what is refused."""

import asyncio
import dataclasses
import json
import random
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pytest
import torch

from mcore_inference import DynamicInferenceContext, DynamicInferenceEngine, InferenceConfig, PagedAttention
from mcore_parallel import ProcessGroups
from mcore_parallel.backends import choose_backend
from mcore_parallel.data import ByteTokenizer
from mcore_parallel.models import GPTModel, TransformerConfig, add_value_head
from mcore_parallel.training import Batch
from mcore_rl import (
    ChatInferenceInterface,
    Episode,
    GenericGenerationArgs,
    InferenceInterface,
    InferenceRequest,
    InferenceResponse,
    MegatronChatLocal,
    ModelJudge,
    NumberedConversations,
    Problem,
    RewardModel,
    TokenRollout,
    WeightedMultiTask,
    recite,
)
from mcore_rl._reference import token_logprobs
from mcore_rl._rollouts._stream import LiveWeights
from mcore_rl.envs import Arithmetic, ArithmeticConfig, Calculator

SUMS = ArithmeticConfig(num_numbers=(2, 2), max_number=9, operators="+")
ARGS = GenericGenerationArgs(temperature=1.0, max_tokens=12)


class ToolTokenizer(ByteTokenizer):
    """Bytes, whose template writes tools as a message of the system."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return (self.special_tokens_dict["turn_end"],)

    def apply_tool_template(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], add_generation_prompt: bool = False
    ) -> list[int]:
        return self.apply_chat_template([{"role": "system", "content": json.dumps(tools)}, *messages], add_generation_prompt)


TOKENIZER = ToolTokenizer()
TURN_END = TOKENIZER.special_tokens_dict["turn_end"]


class Scripted(InferenceInterface):
    """Gives these answers, one after the other, each with the end of its turn."""

    def __init__(self, *answers: str) -> None:
        self.answers, self.prompts = iter(answers), []

    def encode(self, text: str) -> list[int]:
        raise AssertionError("a conversation is not a text")

    async def agenerate(self, request: InferenceRequest) -> list[list[InferenceResponse]]:
        [prompt] = request.prompts
        self.prompts.append(list(prompt))
        text = next(self.answers)
        drawn = [*TOKENIZER.tokenize(text), TURN_END]
        answer = InferenceResponse(
            response=text, token_ids=[*prompt, *drawn], prompt_length=len(prompt), logprobs=[-1.0] * len(drawn), finish_reason="stop"
        )
        return [[answer]]


def call(expression: Any) -> str:
    return "<tool_call>" + json.dumps({"name": "calculate", "arguments": {"expression": expression}}) + "</tool_call>"


def template(messages: Sequence[Mapping[str, Any]], is_open: bool) -> list[int]:
    return TOKENIZER.apply_tool_template(messages, (), is_open)


def chat(*answers: str) -> ChatInferenceInterface:
    return ChatInferenceInterface(Scripted(*answers), template)


def played(environment: Any, interface: InferenceInterface) -> TokenRollout:
    rollout = asyncio.run(environment.rollout(interface, args=ARGS))
    assert rollout is not None
    return rollout


def num_turns(rollout: TokenRollout) -> int:
    """That the policy ended."""
    return sum(own and token == TURN_END for token, own in zip(rollout.trajectory, rollout.generation_mask, strict=True))


def test_what_the_tool_says_is_in_the_conversation_and_not_trained_on() -> None:
    environment = Calculator(SUMS)
    problem = environment.problem(0)
    posed, value = problem.golden.split("=")
    interface = chat(call(posed), value)
    rollout = played(environment, interface)
    assert (rollout.reward, rollout.problem_id, rollout.env_id) == (1.0, problem.problem_id, "calculator")
    turns = [("user", problem.prompt), ("assistant", call(posed)), ("tool", value), ("assistant", value)]
    whole = TOKENIZER.apply_tool_template([{"role": role, "content": content} for role, content in turns], ())
    # The line end behind the last turn is nobody's.
    assert list(rollout.trajectory) == whole[:-1]
    learnt = [token for token, own in zip(rollout.trajectory, rollout.generation_mask, strict=True) if own]
    assert learnt == [*TOKENIZER.tokenize(call(posed)), TURN_END, *TOKENIZER.tokenize(value), TURN_END]
    assert len(rollout.logprobs) == len(learnt)


@pytest.mark.parametrize(
    ("answer", "replies"),
    [
        ("7", []),
        (call("(3 + 4) / 2"), ["7/2"]),
        (f"First {call('2*3')} then {call('1-5')}", ["6", "-4"]),
        (call("2**99"), ["error: a number is missing"]),
        (call("1/0"), ["error: a division by zero"]),
        (call("__import__('os')"), ["error: no sum from character 0 on"]),
        (call(7), ["error: expression must be a text"]),
        ('<tool_call>{"name": "calculate", "arguments": {}}</tool_call>', ["error: expression must be a text"]),
        ('<tool_call>{"name": "shell", "arguments": {"expression": "1"}}</tool_call>', []),
        ('<tool_call>{"name": "calculate", "argum', []),
    ],
)
def test_calls_are_answered_and_other_texts_end_the_conversation(answer: str, replies: list[str]) -> None:
    episode = Calculator(SUMS).begin(Problem(problem_id="0", prompt="3+4=", golden="3+4=7"))

    async def talk() -> tuple[Any, float]:
        return await episode.reply(answer), await episode.reward()

    messages, reward = asyncio.run(talk())
    assert list(messages) == [{"role": "tool", "content": reply} for reply in replies]
    assert reward == (1.0 if answer == "7" else 0.0)


@pytest.mark.parametrize("worked", [0.0, 1.0])
def test_its_own_conversations_are_well_formed_and_recited_token_by_token(worked: float) -> None:
    environment = Calculator(ArithmeticConfig(worked=worked, slips=0.0))
    for number in range(5):
        problem = environment.problem(number)
        answers = environment.attempt_turns(problem, random.Random(number))
        options: dict[str, Any] = {"template": template, "encode": lambda text: [*TOKENIZER.tokenize(text), TURN_END], "max_tokens": 500}
        rollout = asyncio.run(recite(environment, problem, answers, **options))
        written = [token for token, learnt in zip(rollout.trajectory, rollout.generation_mask, strict=True) if learnt]
        assert written == [token for answer in answers for token in (*TOKENIZER.tokenize(answer), TURN_END)]
        assert rollout.reward == 1.0 and num_turns(rollout) == len(answers) == 1 + worked
        # What is learnt is what a policy that says the same would be trained on.
        environment.start_at(number)
        drawn = played(environment, chat(*answers))
        assert (rollout.trajectory, rollout.generation_mask) == (drawn.trajectory, drawn.generation_mask)
    with pytest.raises(ValueError, match="the conversation about problem calculator/0/4 has .* tokens or more, max_tokens=20; raise it"):
        asyncio.run(recite(environment, problem, answers, **{**options, "max_tokens": 20}))


def test_a_mixture_of_conversations_shows_those_of_each() -> None:
    mixed = WeightedMultiTask([Calculator(ArithmeticConfig(worked=1.0, slips=0.0))], [1])
    problem = mixed.problem(3)
    answers = mixed.attempt_turns(problem, random.Random(0))
    options: dict[str, Any] = {"template": template, "encode": TOKENIZER.tokenize, "max_tokens": 500}
    rollout = asyncio.run(recite(mixed, problem, answers, **options))
    assert len(answers) == 2 and rollout.reward == 1.0 and (rollout.env_id, rollout.problem_id) == ("calculator", problem.problem_id)
    shown = {problem.env_id: mixture().attempt_turns(problem, random.Random(0)) for problem in map(mixture().problem, range(2))}
    assert shown["arithmetic"] is None and shown["calculator"]


def test_answers_that_end_before_the_conversation_are_an_error() -> None:
    environment = Calculator(ArithmeticConfig())
    options: dict[str, Any] = {"template": template, "encode": TOKENIZER.tokenize, "max_tokens": 500}
    with pytest.raises(ValueError, match="the answers to problem calculator/0/3 end before the conversation does; give one a turn"):
        asyncio.run(recite(environment, environment.problem(3), [call("1+2")], **options))


def test_a_conversation_that_ends_with_a_call_earns_nothing() -> None:
    environment = Calculator(SUMS)
    rollout = played(environment, chat(*[call("1+1")] * environment.max_turns))
    assert rollout.reward == 0.0 and num_turns(rollout) == environment.max_turns


def test_ranks_share_the_conversations_and_a_run_goes_on_where_it_was() -> None:
    def ids(position: int, rank: int, num_ranks: int, count: int) -> tuple[list[str], int]:
        environment = Calculator(SUMS)
        environment.start_at(position, rank=rank, num_ranks=num_ranks)
        groups = [asyncio.run(environment.group_rollout(chat("0", "0"), size=2, args=ARGS)) for _ in range(count)]
        assert all(len({rollout.problem_id for rollout in group}) == 1 for group in groups)
        return [group[0].problem_id for group in groups], environment.num_posed

    alone, end = ids(0, 0, 1, 6)
    assert alone == [f"calculator/0/{number}" for number in range(6)] and end == 6
    shared = [ids(0, rank, 2, 2)[0] for rank in range(2)]
    assert [name for pair in zip(*shared, strict=True) for name in pair] == alone[:4]
    assert ids(4, 0, 1, 2) == (alone[4:], 2)
    report = asyncio.run(Calculator(SUMS).run_evaluation(chat("0", "0"), num_prompts=2, args=ARGS))
    assert [result.problem_id for result in report.results] == [f"calculator/0/{(1 << 32) + number}" for number in range(2)]


def test_a_mixture_holds_conversations_and_asks_for_single_answers() -> None:
    mixed = mixture()
    assert mixed.holds_conversations and mixed.tools == list(Calculator(SUMS).tools)
    outer = WeightedMultiTask([mixture()], [1], env_id="outer")
    for environment, prefix in ((mixed, ""), (outer, "multi_task/")):
        turns = {}
        for number in range(2):
            problem = mixed.problem(number)
            posed, value = problem.golden.split("=")
            is_chat = problem.env_id == "calculator"
            rollout = played(environment, chat(*([call(posed)] if is_chat else []), value))
            assert (rollout.reward, rollout.env_id, rollout.problem_id) == (1.0, problem.env_id, prefix + problem.problem_id)
            turns[rollout.env_id] = num_turns(rollout)
        assert turns == {"calculator": 2, "arithmetic": 1}
    with pytest.raises(TypeError, match="'calculator' holds conversations and judges no single answer"):
        asyncio.run(mixed.get_reward("7", next(mixed.problem(number) for number in range(2) if "calc" in mixed.problem(number).env_id)))


class OtherTool(Calculator):
    """A tool of the calculator's name."""

    def __init__(self) -> None:
        super().__init__(SUMS)
        self.env_id = "other"

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        return ({"type": "function", "function": {"name": "calculate"}},)


def longer() -> Calculator:
    """One of more turns."""
    made = Calculator(SUMS)
    made.max_turns = 9
    return made


def mixture() -> WeightedMultiTask:
    return WeightedMultiTask([Calculator(SUMS), Arithmetic(SUMS)], [1, 1])


def test_a_model_judges_whole_conversations_and_single_answers() -> None:
    sizes = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=2, vocab_size=TOKENIZER.vocab_size)
    model = GPTModel(sizes, ProcessGroups.single())
    head = add_value_head(model)
    assert head is not None
    with torch.no_grad():
        head.weight.normal_(generator=torch.Generator().manual_seed(3))
    read: list[list[int]] = []

    def encode(problem: Problem, response: str) -> list[int]:
        is_conversation = problem.env_id == "calculator"
        read.append(TOKENIZER.apply_chat_template(json.loads(response)) if is_conversation else TOKENIZER.tokenize(response))
        return read[-1]

    rewards = RewardModel(model, head, encode, max_tokens=512)
    environment, own = ModelJudge(mixture(), rewards), mixture()
    assert environment.turn_limits == own.turn_limits and list(environment.tools) == list(own.tools)
    posed, value = own.problem(0).golden.split("=")
    for answers in ([call(posed), value], ["no number"]):
        expected, rollout = played(own, chat(*answers)), played(environment, chat(*answers))
        assert rollout.reward == pytest.approx(rewards._values([read[-1]])[0], abs=1e-6) and rollout.reward != expected.reward
        assert rollout == dataclasses.replace(expected, reward=rollout.reward)
    turns = [("user", own.problem(0).prompt), ("assistant", call(posed)), ("tool", value), ("assistant", value)]
    assert read[0] == TOKENIZER.apply_chat_template([{"role": role, "content": content} for role, content in turns])
    assert read[1] == TOKENIZER.tokenize("no number")


def test_environments_that_do_not_go_together_and_other_interfaces_are_refused() -> None:
    with pytest.raises(ValueError, match="'outer' has another 'calculator' than one before it, of other turns; rename it"):
        WeightedMultiTask([longer(), WeightedMultiTask([Calculator(SUMS)], [1], env_id="outer")], [1, 1])
    with pytest.raises(ValueError, match="'other' has another tool 'calculate' than one before it"):
        WeightedMultiTask([Calculator(SUMS), OtherTool()], [1, 1])
    with pytest.raises(TypeError, match="environment 'calculator' needs a ChatInferenceInterface"):
        played(Calculator(SUMS), Scripted("7"))


class Insisting(NumberedConversations):
    """A tool speaks after each of three answers, whatever they are."""

    tools = Calculator(SUMS).tools

    def problem(self, number: int) -> Problem:
        return Problem(problem_id=str(number), prompt=f"say {number}")

    def begin(self, problem: Problem) -> Episode:
        return _Insistence(problem.prompt)


class _Insistence(Episode):
    def __init__(self, prompt: str) -> None:
        self.prompt, self.num_answers = prompt, 0

    async def start(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.prompt}]

    async def reply(self, answer: str) -> list[dict[str, str]]:
        self.num_answers += 1
        return [{"role": "tool", "content": f"{self.num_answers}"}]

    async def reward(self) -> float:
        return float(self.num_answers)


SIZES = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=2, vocab_size=TOKENIZER.vocab_size, init_method_std=0.05)


def engine(tokenizer: ByteTokenizer = TOKENIZER, longest: int = 512) -> DynamicInferenceEngine:
    # Which requests share a step is a matter of time, and is none of the bits.
    backend = choose_backend(batch_invariant=True)
    model = GPTModel(SIZES, ProcessGroups.single(), attention_core=PagedAttention(), backend=backend, seed=0).eval()
    with torch.no_grad():
        # Turns of a few tokens.
        model.output.weight[TURN_END] *= 3.0
    context = DynamicInferenceContext(SIZES, InferenceConfig(max_sequence_length=longest, max_requests=8, block_size_tokens=16))
    return DynamicInferenceEngine(model, context, tokenizer, seed=1)


@pytest.mark.journey
def test_log_probs_of_all_turns_are_those_of_the_trainer() -> None:
    drawing = engine()
    interface = MegatronChatLocal(drawing, tools=Insisting.tools)
    assert isinstance(interface, LiveWeights)
    environment = Insisting("insisting", max_turns=3)
    rollouts = asyncio.run(environment.group_rollout(interface, size=8, args=GenericGenerationArgs(temperature=1.0, max_tokens=200)))
    trainer = GPTModel(SIZES, ProcessGroups.single(), seed=7).eval()
    trainer.load_state_dict(drawing.model.state_dict())
    assert any(rollout.reward == 3.0 for rollout in rollouts)
    for rollout in rollouts:
        # The tools are written before the first turn.
        first = rollout.generation_mask.index(True)
        assert TOKENIZER.detokenize(rollout.trajectory[:first]).count("calculate") == 1
        tokens = torch.tensor(rollout.trajectory)[None]
        batch = Batch(tokens=tokens[:, :-1], labels=tokens[:, 1:], loss_mask=torch.ones(1, tokens.numel() - 1))
        [scores] = token_logprobs(trainer, [batch], ProcessGroups.single())
        own = torch.tensor(rollout.generation_mask[1:])
        torch.testing.assert_close(scores[0][own], torch.tensor(rollout.logprobs), rtol=0, atol=1e-5)
        # What was drawn is not encoded again: between two turns stands what the template writes, and nothing else.
        given = [token for token, own in zip(rollout.trajectory, rollout.generation_mask, strict=True) if not own][first:]
        assert TOKENIZER.detokenize(given) == "".join(f"\ntool\n{number}\nassistant\n" for number in range(1, int(rollout.reward)))


class InTurn(Insisting):
    """Its tool speaks first in the conversations of this order, by when they began."""

    def __init__(self, order: Sequence[int]) -> None:
        super().__init__("insisting", max_turns=3)
        self.spoken = [asyncio.Event() for _ in order]
        before = dict(zip(order[1:], order[:-1], strict=True))
        self.left = [(self.spoken[before[place]] if place in before else None, self.spoken[place]) for place in sorted(order)]

    def begin(self, problem: Problem) -> Episode:
        return _InTurn(problem.prompt, *self.left.pop(0))


class _InTurn(_Insistence):
    def __init__(self, prompt: str, before: asyncio.Event | None, own: asyncio.Event) -> None:
        super().__init__(prompt)
        self.before, self.own = before, own

    async def reply(self, answer: str) -> list[dict[str, str]]:
        if self.before is not None:
            await self.before.wait()
        self.own.set()
        return await super().reply(answer)


@pytest.mark.journey
def test_what_a_conversation_draws_does_not_hang_on_which_one_is_faster() -> None:
    def trajectories(order: Sequence[int], seed: int = 3) -> list[Sequence[int]]:
        interface = MegatronChatLocal(engine(), seed=seed)
        group = asyncio.run(InTurn(order).group_rollout(interface, size=6, args=GenericGenerationArgs(temperature=1.0, max_tokens=99)))
        assert len(group) == 6 and sum(rollout.reward > 1 for rollout in group) > 1
        return [rollout.trajectory for rollout in group]

    first = trajectories(range(6))
    assert trajectories(range(5, -1, -1)) == first
    assert len({tuple(one) for one in first}) == 6 and trajectories(range(6), seed=4) != first


def test_requests_of_conversations_are_named_by_group_choice_and_turn() -> None:
    class Noting(Scripted):
        names: ClassVar[list[str | None]] = []

        async def agenerate(self, request: InferenceRequest) -> list[list[InferenceResponse]]:
            self.names.append(request.draw)
            return await super().agenerate(request)

    environment = mixture()
    answers = [call("1+1"), "0", call("1+1"), "0"]
    noting = Noting(*answers)
    asyncio.run(environment.rollout(ChatInferenceInterface(noting, template), args=ARGS))
    noting.answers = iter("00")
    asyncio.run(environment.group_rollout(ChatInferenceInterface(noting, template), size=2, args=ARGS))
    noting.answers = iter("0000")
    asyncio.run(environment.run_evaluation(ChatInferenceInterface(noting, template), num_prompts=1, num_samples=2, args=ARGS))
    single = environment.problem(0).env_id == "arithmetic"
    named = {name for name in noting.names if name is not None}
    assert named == (
        {"multi_task 2 0 turn 0", "multi_task 2 1 turn 0"} if single else {"multi_task 1 0 turn 0", "multi_task 1 0 turn 1"}
    ) | {"calculator evaluation 1 0 turn 0", "calculator evaluation 1 1 turn 0"}
    with pytest.raises(ValueError, match="draw='x' names one continuation, and 1 prompts have n=2 each; ask for each alone"):
        InferenceRequest(prompts=[[1]], n=2, draw="x")


def test_a_conversation_ends_where_the_engine_has_no_room() -> None:
    interface = MegatronChatLocal(engine(longest=64))
    rollouts = asyncio.run(Insisting("insisting", max_turns=50).group_rollout(interface, size=8, args=ARGS))
    assert len(rollouts) == 8 and all(len(rollout.trajectory) <= 64 and rollout.finish_reason == "length" for rollout in rollouts)


def test_a_tokenizer_whose_template_writes_no_tools_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="ByteTokenizer has no chat template that writes tools"):
        MegatronChatLocal(engine(ByteTokenizer()), tools=Calculator(SUMS).tools)
