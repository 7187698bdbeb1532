# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Late answers and failing judges cost themselves, and are counted exactly."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mcore_inference import (
    DynamicInferenceContext,
    DynamicInferenceEngine,
    EngineDeadError,
    InferenceConfig,
    PagedAttention,
    StepFailedError,
)
from mcore_parallel import ProcessGroups
from mcore_parallel.data import ByteTokenizer
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_rl import (
    BestAndWorst,
    GenericGenerationArgs,
    GRPOConfig,
    InferenceInterface,
    InferenceRequest,
    InferenceResponse,
    LostError,
    MegatronLocal,
    NumberedProblems,
    PackingConfig,
    Problem,
    RewardOnlyAgent,
    TokenRollout,
)
from mcore_rl._loop._dpo import ask_pairs
from mcore_rl._loop._loop import rollout_means
from mcore_rl._rollouts._collect import ask, draw, exchange, run_async
from mcore_rl.agent import _judged
from mcore_rl.envs import CharacterShare
from mcore_rl.inference import PeerTimeoutError
from mcore_rl.inference._local import _response

ARGS = GenericGenerationArgs(max_tokens=4)


class OneNeverEnds(InferenceInterface):
    """Request ``late`` never ends; keeps count of what runs."""

    def __init__(self, late: int) -> None:
        self.late, self.asked, self.running = late, 0, 0

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    async def agenerate(self, request: InferenceRequest) -> list[list[InferenceResponse]]:
        number, self.asked = self.asked, self.asked + 1
        self.running += 1
        try:
            await asyncio.sleep(3600 if number == self.late else 0)
        finally:
            self.running -= 1
        [prompt] = request.prompts
        return [[InferenceResponse(response=f"{number}", token_ids=[*prompt, 1], prompt_length=len(prompt), logprobs=[-1.0])]]


@pytest.mark.journey
def test_one_of_64_that_never_ends_costs_itself() -> None:
    # The campaign of tests.campaigns.rl_trust has 50 runs.
    config = GRPOConfig(num_groups=8, group_size=8, seq_len=8, rollout_timeout_s=1.5)
    for run in range(0, 64, 21):
        interface = OneNeverEnds(run)
        begin = time.perf_counter()
        drawn = draw(config, CharacterShare(["x"], "a"), interface, 8)
        groups = exchange(config, drawn, ProcessGroups.single(), torch.device("cpu")).groups
        assert time.perf_counter() - begin < 15
        assert sorted(map(len, groups)) == [7] + [8] * 7
        assert interface.running == 0


class Outcomes(NumberedProblems):
    """Of problem n: answers that differ, that earn the same, or that are all lost; the pair, equal and lost ones of `outcomes` in turn."""

    def __init__(self, *outcomes: str) -> None:
        super().__init__("outcomes")
        self.outcomes, self.num_judged = outcomes, 0

    def problem(self, number: int) -> Problem:
        return Problem(problem_id=self.outcomes[number % len(self.outcomes)], prompt="x")

    async def get_reward(self, response: str, problem: Problem) -> float:
        if problem.problem_id == "lost":
            raise RuntimeError("judge fell over")
        self.num_judged += 1
        return float(self.num_judged) if problem.problem_id == "pair" else 1.0


@pytest.mark.journey
def test_an_answer_that_never_ends_costs_none_of_the_pairs() -> None:
    config = GRPOConfig(num_groups=8, group_size=8, seq_len=8, rollout_timeout_s=5.0)
    interface, pairs = OneNeverEnds(3), BestAndWorst(Outcomes("pair"), group_size=8)
    drawn = run_async(ask_pairs(config, pairs, interface, 8))
    assert [len(pair) for pair in drawn.groups] == [2] * 8 and drawn.lost is None
    assert (drawn.num_filtered, drawn.num_unpaired, interface.running) == (0, 0, 0)


class OneAfterTheOther(NumberedProblems):
    """Problems whose answers are judged one behind the other, in the order of their numbers or against it."""

    def __init__(self, num_problems: int, *, backwards: bool) -> None:
        super().__init__("ordered")
        self.backwards, self.judged = backwards, [asyncio.Event() for _ in range(num_problems)]
        self.num_judged = 0

    def problem(self, number: int) -> Problem:
        return Problem(problem_id=str(number), prompt="x")

    async def get_reward(self, response: str, problem: Problem) -> float:
        number = int(problem.problem_id)
        before = number + 1 if self.backwards else number - 1
        if 0 <= before < len(self.judged):
            await self.judged[before].wait()
        self.judged[number].set()
        self.num_judged += 1
        return float(self.num_judged)


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("backwards", [False, True])
def test_which_update_a_group_is_in_does_not_depend_on_who_was_faster(backwards: bool, pairs: bool) -> None:
    config = GRPOConfig(num_groups=4, group_size=2, seq_len=8, num_mini_batches=2)
    agent = OneAfterTheOther(4, backwards=backwards)
    call = ask_pairs(config, BestAndWorst(agent, group_size=2), OneNeverEnds(-1), 4) if pairs else ask(config, agent, OneNeverEnds(-1), 4)
    collected = exchange(config, run_async(call), ProcessGroups.single(), torch.device("cpu"), pairs=pairs)
    updates = [[collected.headers[number].problem_id for share in update.shares for number in share] for update in collected.updates]
    assert [sorted(set(problems)) for problems in updates] == [["0", "1"], ["2", "3"]]


class FailsAfter(OneAfterTheOther):
    """The second problem's reward is no number; the first one's never comes."""

    async def get_reward(self, response: str, problem: Problem) -> float:
        await asyncio.sleep(3600 if problem.problem_id == "0" else 0)
        return float("nan")


def test_a_group_that_fails_behind_one_that_never_ends_is_told_at_once() -> None:
    agent = FailsAfter(2, backwards=False)

    async def collect() -> None:
        async for _ in agent.get_grouped_rollouts(OneNeverEnds(-1), num_groups=2, size=2, args=ARGS, in_order=True):
            raise AssertionError("there is none")

    with pytest.raises(ValueError, match="must be a finite number"):
        asyncio.run(asyncio.wait_for(collect(), 30))


class NothingEnds(InferenceInterface):
    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    async def agenerate(self, request: InferenceRequest) -> list[list[InferenceResponse]]:
        await asyncio.Event().wait()
        raise AssertionError


def test_where_no_pair_is_there_in_time_the_error_says_so() -> None:
    config = GRPOConfig(num_groups=2, group_size=2, seq_len=8, rollout_timeout_s=0.1)
    drawn = run_async(ask_pairs(config, BestAndWorst(Outcomes("pair"), group_size=2), NothingEnds(), 2))
    with pytest.raises(RuntimeError, match="no pair of 2 is left.*2 of 2 pairs were not there within rollout_timeout_s=0.1; raise it"):
        exchange(config, drawn, ProcessGroups.single(), torch.device("cpu"), pairs=True)


@pytest.mark.parametrize(
    ("max_filter_ratio", "outcomes", "num_rollouts", "num_filtered", "num_dropped"),
    [
        (1.0, ["pair", "equal", "lost", "pair"], 4, 1, 2),
        # The equal one is replaced, the lost one is not.
        (1.5, ["pair", "equal", "lost", "pair", "pair", "lost"], 6, 1, 2),
        (1.5, ["pair", "equal", "equal", "pair", "equal", "equal"], 4, 4, 0),
        (1.25, ["pair", "equal", "lost", "pair", "pair"], 6, 1, 2),
    ],
)
def test_groups_of_equal_rewards_are_no_lost_pairs(
    max_filter_ratio: float, outcomes: list[str], num_rollouts: int, num_filtered: int, num_dropped: int
) -> None:
    config = GRPOConfig(num_groups=4, group_size=2, seq_len=8)
    pairs = BestAndWorst(Outcomes(*outcomes), group_size=2, max_filter_ratio=max_filter_ratio)
    drawn = run_async(ask_pairs(config, pairs, OneNeverEnds(-1), 4))
    means = rollout_means(config, exchange(config, drawn, ProcessGroups.single(), torch.device("cpu"), pairs=True), 8)
    assert (means["num_rollouts"], means["num_filtered"], means["num_dropped"]) == (num_rollouts, num_filtered, num_dropped)


def test_no_rollout_is_written_down_when_drawing_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[TokenRollout] = []
    monkeypatch.setattr(TokenRollout, "__repr__", lambda rollout: written.append(rollout) or "")
    config = GRPOConfig(num_groups=1, group_size=2, seq_len=8)
    assert len(draw(config, CharacterShare(["x"], "a"), OneNeverEnds(-1), 1).groups) == 1
    assert not written


def test_the_limit_of_an_answer_is_its_own() -> None:
    agent = CharacterShare(["x"], "a")
    agent.answer_timeout_s = 1.0
    assert len(asyncio.run(agent.group_rollout(OneNeverEnds(3), size=8, args=ARGS))) == 7


def test_a_caller_that_cancels_gets_no_group() -> None:
    interface = OneNeverEnds(0)

    async def give_up() -> None:
        task = asyncio.ensure_future(CharacterShare(["x"], "a").group_rollout(interface, size=2, args=ARGS))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(give_up())
    assert interface.running == 0


def test_answers_come_without_await_in_and_beside_an_event_loop() -> None:
    interface = MegatronLocal(engine(), seed=3)
    request = InferenceRequest(prompts=[[97, 98], [99]], n=2, generation_args=GenericGenerationArgs(temperature=0.0, max_tokens=3))
    beside = interface.generate(request)

    async def inside() -> list[list[InferenceResponse]]:
        return interface.generate(request)

    assert beside == asyncio.run(inside()) == asyncio.run(interface.agenerate(request))
    assert [[answer.token_ids[:1] for answer in answers] for answers in beside] == [[[97]] * 2, [[99]] * 2]
    with pytest.raises(EngineDeadError):
        Refuses(0, EngineDeadError("the engine was closed")).generate(InferenceRequest(prompts=[[97]]))


class Refuses(InferenceInterface):
    """Answers with three tokens, but says of request ``number`` what it is told, so often."""

    def __init__(self, number: int, *errors: Exception, num_tokens: int = 3) -> None:
        self.number, self.errors, self.num_tokens, self.asked = number, list(errors), num_tokens, 0

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    async def agenerate(self, request: InferenceRequest) -> list[list[InferenceResponse]]:
        number, self.asked = self.asked, self.asked + 1
        if number >= self.number and self.errors:
            raise self.errors.pop(0)
        [prompt], count = request.prompts, self.num_tokens if number == self.number else 3
        tokens, logprobs = [*prompt, *[97] * count], [-1.0] * count
        return [[InferenceResponse(response="a" * count, token_ids=tokens, prompt_length=len(prompt), logprobs=logprobs)]]


def answers(interface: InferenceInterface, config: GRPOConfig | None = None) -> list[int]:
    """How many answers the groups of an iteration have."""
    config = config or GRPOConfig(num_groups=2, group_size=4, seq_len=8)
    drawn = draw(config, CharacterShare(["x"], "a"), interface, config.num_groups)
    return sorted(map(len, exchange(config, drawn, ProcessGroups.single(), torch.device("cpu")).groups))


def test_a_request_that_is_refused_loses_one_answer(caplog: pytest.LogCaptureFixture) -> None:
    interface = Refuses(3, LostError("it has 2100 tokens"))
    assert answers(interface) == [3, 4] and interface.asked == 8
    assert "an answer to problem '0' is dropped, it has 2100 tokens" in caplog.text


def test_a_request_whose_failure_passes_is_repeated_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_judged, "_RETRY_WAITS_S", (0.001, 0.001))
    busy = LostError("busy", is_transient=True)
    assert answers(Refuses(7, busy, busy)) == [4, 4]
    interface = Refuses(7, busy, busy, busy)
    assert answers(interface) == [3, 4] and interface.asked == 10


def test_a_server_that_does_not_answer_in_time_loses_one_answer(caplog: pytest.LogCaptureFixture) -> None:
    interface = Refuses(3, PeerTimeoutError("http://127.0.0.1:1 did not answer within timeout_s=60"))
    assert answers(interface) == [3, 4] and interface.asked == 8
    assert "an answer to problem '0' is dropped, not there in time: http://127.0.0.1:1 did not answer within timeout_s=60" in caplog.text


def test_an_engine_that_is_dead_ends_the_iteration() -> None:
    with pytest.raises(EngineDeadError):
        answers(Refuses(3, EngineDeadError("the engine was closed")))


@pytest.mark.parametrize("packing", [None, PackingConfig(bin_size=8)], ids=["rows", "packed"])
@pytest.mark.parametrize("num_tokens", [8, 9])
def test_an_answer_that_no_row_holds_is_lost_alone(
    packing: PackingConfig | None, num_tokens: int, caplog: pytest.LogCaptureFixture
) -> None:
    # A row of 8 places holds 9 tokens.
    config = GRPOConfig(num_groups=2, group_size=4, seq_len=8, packing=packing)
    assert answers(Refuses(2, num_tokens=num_tokens), config) == [4 if num_tokens == 8 else 3, 4]
    assert ("is dropped, it has 10 tokens with its prompt" in caplog.text) == (num_tokens == 9)


@pytest.mark.parametrize("is_filtering", [False, True])
def test_a_problem_that_loses_all_its_answers_is_left_out(is_filtering: bool, caplog: pytest.LogCaptureFixture) -> None:
    interface = MegatronLocal(engine())
    config = GRPOConfig(
        num_groups=3, group_size=2, seq_len=64, filter_equal_groups=is_filtering, generation_args=GenericGenerationArgs(max_tokens=4)
    )
    drawn = draw(config, Rising(["a", "x" * 100, "b"], "a"), interface, 3)
    groups = exchange(config, drawn, ProcessGroups.single(), torch.device("cpu"))
    assert [{rollout.problem_id for rollout in group} for group in groups.groups] == [{"0"}, {"2"}] and groups.num_filtered == 0
    assert rollout_means(config, groups, None)["num_dropped"] == 2
    assert "the prompt has 100 tokens" in caplog.text and "problem '1' is dropped, all of its 2 answers are lost" in caplog.text


class Rising(CharacterShare):
    """Each answer earns more than the one before."""

    num_judged = 0

    async def get_reward(self, response: str, problem: Problem) -> float:
        self.num_judged += 1
        return float(self.num_judged)


def test_a_request_that_fails_in_the_engine_says_so() -> None:
    record: Any = SimpleNamespace(request_id=40, error=StepFailedError(40, "no memory"))
    with pytest.raises(LostError, match="request 40 failed: request 40: no memory") as caught:
        _response(record)
    assert caught.value.is_transient


class Watching(RewardOnlyAgent):
    """Notes how much is being generated while it judges."""

    def __init__(self, interface: Any) -> None:
        super().__init__("watching")
        self.interface, self.beside = interface, []

    async def get_prompt(self, *, validation: bool = False) -> Problem:
        return Problem(problem_id="p", prompt="x")

    async def get_reward(self, response: str, problem: Problem) -> float:
        self.beside.append(self.interface.engine.has_unfinished_requests())
        return 1.0


def engine(max_requests: int = 4) -> DynamicInferenceEngine:
    tokenizer = ByteTokenizer()
    sizes = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2, vocab_size=tokenizer.vocab_size)
    model = GPTModel(sizes, ProcessGroups.single(), attention_core=PagedAttention()).eval()
    context = DynamicInferenceContext(sizes, InferenceConfig(max_sequence_length=64, max_requests=max_requests, block_size_tokens=16))
    return DynamicInferenceEngine(model, context, tokenizer, vocab_size=tokenizer.vocab_size)


def test_answers_are_judged_while_others_are_generated() -> None:
    interface = MegatronLocal(engine())
    agent = Watching(interface)
    rollouts = asyncio.run(agent.group_rollout(interface, size=12, args=GenericGenerationArgs(temperature=1.0, max_tokens=40)))
    assert len(rollouts) == 12 == len(agent.beside)
    assert sum(agent.beside) >= 4
    assert not interface.engine.has_unfinished_requests()


def test_the_event_loop_goes_on_while_the_engine_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    sink = engine()
    step, turns = sink.step, []

    def slow_step() -> Any:
        """As slow as it takes the loop to turn a few times."""
        before, deadline = len(turns), time.monotonic() + 20.0
        while len(turns) < before + 5:
            assert time.monotonic() < deadline, "the event loop waits for the step"
            time.sleep(0.001)
        return step()

    monkeypatch.setattr(sink, "step", slow_step)

    async def main() -> None:
        task = asyncio.ensure_future(CharacterShare(["x"], "a").group_rollout(MegatronLocal(sink), size=4, args=ARGS))
        while not task.done():
            turns.append(time.perf_counter())
            await asyncio.sleep(0.001)

    asyncio.run(main())
    assert len(turns) >= 15


def test_an_engine_that_fails_is_an_error_and_the_next_one_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    sink = engine()
    interface, step = MegatronLocal(sink), sink.step
    request = InferenceRequest(prompts=[[1, 2]], n=2, generation_args=ARGS)

    def fails() -> Any:
        raise ValueError("no memory")

    monkeypatch.setattr(sink, "step", fails)
    with pytest.raises(RuntimeError):
        asyncio.run(interface.agenerate(request))
    monkeypatch.setattr(sink, "step", step)
    [answers] = asyncio.run(interface.agenerate(request))
    assert len(answers) == 2
