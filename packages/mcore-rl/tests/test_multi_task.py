# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Which environment poses which problem."""

import asyncio
import random
from collections.abc import Sequence
from fractions import Fraction

import pytest

from mcore_rl import (
    GenericGenerationArgs,
    InferenceInterface,
    InferenceRequest,
    InferenceResponse,
    ModelJudge,
    NumberedProblems,
    Problem,
    WeightedMultiTask,
)


class Named(NumberedProblems):
    """Problem n is its number; an answer earns it back."""

    def problem(self, number: int) -> Problem:
        return Problem(problem_id=str(number), prompt=f"{self.env_id} {number}", golden=str(number))

    def attempt(self, problem: Problem, generator: random.Random) -> str:
        return problem.golden

    async def get_reward(self, response: str, problem: Problem) -> float:
        return float(response == problem.golden == problem.problem_id)


def mixture(weights: Sequence[float]) -> WeightedMultiTask:
    return WeightedMultiTask([Named(f"env{i}") for i in range(len(weights))], weights)


WEIGHTS = [(1, 1), (9, 1), (0.97, 0.03), (1, 0, 2), (5,), (0.5, 0.2, 0.1, 0.1, 0.05, 0.05), (1, *[0.01] * 12)]


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_every_prefix_has_its_shares(weights: tuple[float, ...]) -> None:
    mixed, counts = mixture(weights), [0] * len(weights)
    exact = [Fraction(str(weight)) for weight in weights]
    for number in range(1000):
        problem = mixed.problem(number)
        index = int(problem.env_id.removeprefix("env"))
        # Each environment poses its own problems one after the other.
        assert problem.prompt == f"{problem.env_id} {counts[index]}" and problem.problem_id == f"{problem.env_id}/{counts[index]}"
        counts[index] += 1
        assert all(abs(count - weight * (number + 1) / sum(exact)) < 1 for count, weight in zip(counts, exact, strict=True))
    assert all(bool(count) == bool(weight) for count, weight in zip(counts, weights, strict=True))


def test_random_weights_keep_their_shares() -> None:
    generator = random.Random(0)
    for _ in range(30):
        weights = [generator.randrange(1, 40) for _ in range(generator.randrange(2, 9))]
        mixed, total, counts = mixture(weights), sum(weights), [0] * len(weights)
        for number in range(2 * total):
            counts[int(mixed.problem(number).env_id.removeprefix("env"))] += 1
            assert all(abs(count * total - weight * (number + 1)) < total for count, weight in zip(counts, weights, strict=True))


def test_ranks_share_the_problems_and_a_run_goes_on_where_it_was() -> None:
    def posed(rank: int, num_ranks: int, position: int, count: int) -> tuple[list[str], int]:
        mixed = mixture((0.97, 0.03))
        mixed.start_at(position, rank=rank, num_ranks=num_ranks)
        prompts = [asyncio.run(mixed.get_prompt()).prompt for _ in range(count)]
        return prompts, mixed.num_posed

    alone, end = posed(0, 1, 0, 200)
    assert end == 200 and len(set(alone)) == 200
    shared = [posed(rank, 2, 0, 50) for rank in range(2)]
    assert [prompt for pair in zip(*(prompts for prompts, _ in shared), strict=True) for prompt in pair] == alone[:100]
    resumed, end = posed(0, 1, 100, 100)
    assert (resumed, end) == (alone[100:], 100)
    # Far from the first problem nothing is walked through.
    assert [mixture((2, 1)).problem((1 << 31) + i).prompt.split()[0] for i in range(3)] == ["env0", "env0", "env1"]


def test_a_problem_is_judged_by_its_environment_also_in_a_mixture_of_mixtures() -> None:
    inner = WeightedMultiTask([Named("a"), Named("b")], [1, 1], env_id="inner")
    outer = WeightedMultiTask([inner, Named("c")], [2, 1])
    seen = set()
    for number in [*range(12), *range(1 << 32, (1 << 32) + 8)]:
        problem = outer.problem(number)
        seen.add(problem.env_id)
        answer = outer.attempt(problem, random.Random(0))
        assert answer is not None
        assert asyncio.run(outer.get_reward(answer, problem)) == 1.0 and asyncio.run(outer.get_reward("no", problem)) == 0.0
    assert seen == {"a", "b", "c"}


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ((0, 0), "one of them above 0"),
        ((1, -1), "not negative"),
        ((1, float("nan")), "finite"),
        ((1, 2, 3), r"weights=\[1, 2, 3\] must be as many as the 2 environments"),
        ((0.123456789, 1), "repeat only after 1123456789 problems, more than 100000; round them"),
    ],
)
def test_weights_that_cannot_be_kept_are_refused(weights: tuple[float, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WeightedMultiTask([Named("a"), Named("b")], weights)


def test_evaluations_ask_each_environment_as_many_prompts_on_every_rank() -> None:
    mixed = mixture([1, 0, 2])
    for rank in range(3):
        mixed.start_at(0, rank=rank, num_ranks=3)
        prompts = asyncio.run(mixed.evaluation_prompts(2))
        first = 1 << 32
        wanted = [(f"env{i}", f"env{i}/{first + rank + 3 * place}") for i in range(3) for place in range(2)]
        assert [(problem.env_id, problem.problem_id) for problem in prompts] == wanted
        assert asyncio.run(mixed.get_reward(prompts[-1].golden, prompts[-1])) == 1.0
        assert [problem.problem_id for problem in asyncio.run(mixed.evaluation_prompts(1, validation=False))] == [
            f"env{i}/{rank}" for i in range(3)
        ]


class Echo(InferenceInterface):
    """Answers with the prompt's last character."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    async def agenerate(self, request: InferenceRequest) -> list[list[InferenceResponse]]:
        return [
            [InferenceResponse(response="1", token_ids=[*request.prompts[0], 1], prompt_length=len(request.prompts[0]), logprobs=[0.0])]
        ]


def test_evaluations_say_of_whom_each_answer_is() -> None:
    mixed = WeightedMultiTask([mixture([1, 1]), Named("other")], [1, 1])
    assert mixed.env_ids == ("env0", "env1", "other")
    response = asyncio.run(mixed.run_evaluation(Echo(), num_prompts=2, args=GenericGenerationArgs(), num_samples=2))
    assert {name: len(response.of(name).results) for name in mixed.env_ids} == {"env0": 4, "env1": 4, "other": 4}
    assert {result.problem_id for result in response.of("env1").results} == {f"multi_task/env1/{(1 << 32) + k}" for k in range(2)}
    assert not response.of("nobody").results and len(response.of("env1").pass_at(2)) == 2


class Waited(Named):
    """Problems that are there once the next one, or the one before, is, as of a server."""

    def __init__(self, env_id: str, last_first: bool) -> None:
        super().__init__(env_id)
        self.step = 1 if last_first else -1
        self.there = {number: asyncio.Event() for number in range(3)}

    @property
    def _poses_at_once(self) -> bool:
        return False

    async def _posed(self, number: int) -> Problem:
        if (before := self.there.get(number + self.step)) is not None:
            await before.wait()
        self.there[number].set()
        return self.problem(number)


class Half:
    async def score(self, response: str, problem: Problem) -> float:
        return 0.5


class Draws(Echo):
    """Notes the name of the draw of each prompt."""

    def __init__(self) -> None:
        self.names: dict[str, str | None] = {}

    async def agenerate(self, request: InferenceRequest) -> list[list[InferenceResponse]]:
        self.names[bytes(request.prompts[0]).decode()] = request.draw
        return await super().agenerate(request)


@pytest.mark.parametrize("last_first", [False, True])
def test_what_is_drawn_in_a_judged_mixture_does_not_hang_on_which_problem_is_there_first(last_first: bool) -> None:
    async def groups(environments: Sequence[NumberedProblems], interface: Draws) -> None:
        judge = ModelJudge(WeightedMultiTask(environments, [1] * len(environments)), Half())
        calls = [judge.group_rollout(interface, size=1, args=GenericGenerationArgs()) for _ in range(6)]
        assert [len(group) for group in await asyncio.gather(*calls)] == [1] * 6

    mixed, here = Draws(), Draws()
    asyncio.run(groups([Waited("far", last_first), Named("near")], mixed))
    asyncio.run(groups([Named("far"), Named("near")], here))
    whole = [f"{name} {number}" for number in range(3) for name in ("far", "near")]
    assert mixed.names == {prompt: f"multi_task {place} 0" for place, prompt in enumerate(whole, 1)}
    # In a certain order they need no names.
    assert here.names == dict.fromkeys(whole)


@pytest.mark.parametrize("names", [(), ("a", "a"), ("a/b",)])
def test_environments_without_a_name_of_their_own_are_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="of different env_id without a /"):
        WeightedMultiTask([Named(name) for name in names], [1.0] * len(names))
