# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Late answers and failing judges cost themselves, and are counted exactly."""

import asyncio
import time
from typing import Any

import pytest
import torch

from mcore_inference import DynamicInferenceContext, DynamicInferenceEngine, InferenceConfig, PagedAttention
from mcore_parallel import ProcessGroups
from mcore_parallel.data import ByteTokenizer
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_rl import (
    GenericGenerationArgs,
    GRPOConfig,
    InferenceInterface,
    InferenceRequest,
    InferenceResponse,
    MegatronLocal,
    Problem,
    RewardOnlyAgent,
)
from mcore_rl._collect import draw, exchange
from mcore_rl.envs import CharacterShare

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


def test_one_of_64_that_never_ends_costs_itself_in_50_runs() -> None:
    config = GRPOConfig(num_groups=8, group_size=8, seq_len=8, rollout_timeout_s=0.1)
    for run in range(50):
        interface = OneNeverEnds(run)
        begin = time.perf_counter()
        drawn = draw(config, CharacterShare(["x"], "a"), interface, 8)
        groups = exchange(config, drawn, ProcessGroups.single(), torch.device("cpu")).groups
        assert time.perf_counter() - begin < 5
        assert sorted(map(len, groups)) == [7] + [8] * 7
        assert interface.running == 0


def test_the_limit_of_an_answer_is_its_own() -> None:
    agent = CharacterShare(["x"], "a")
    agent.answer_timeout_s = 0.1
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
        time.sleep(0.02)
        return step()

    monkeypatch.setattr(sink, "step", slow_step)

    async def main() -> None:
        task = asyncio.ensure_future(CharacterShare(["x"], "a").group_rollout(MegatronLocal(sink), size=4, args=ARGS))
        while not task.done():
            turns.append(time.perf_counter())
            await asyncio.sleep(0.001)

    asyncio.run(main())
    assert len(turns) > 20


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
