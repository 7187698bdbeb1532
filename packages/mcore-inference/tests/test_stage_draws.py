# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The last stage of a pipeline draws, and sends tokens in place of logits."""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mcore_inference import (
    DynamicInferenceContext,
    DynamicInferenceEngine,
    DynamicInferenceRequestRecord,
    ExecutionConfig,
    InferenceConfig,
    NgramSpeculation,
    PagedAttention,
    SamplingParams,
    StructuredOutput,
)
from mcore_inference.engine._prompt_scores import PromptScores
from mcore_inference.engine._stage_message import StageMessage, StepResults
from mcore_inference.sampling import Draws
from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.data import ByteTokenizer
from mcore_parallel.models import GPTModel, TransformerConfig

World = Callable[..., list[Any]]
CONFIG = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2, vocab_size=272, init_method_std=0.3)
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"top_p": 0.9, "top_k": 40, "min_p": 0.01, "repetition_penalty": 1.3, "frequency_penalty": 0.2, "presence_penalty": 0.5},
    {"bad_words": ["a", "bcd"], "logit_bias": {97: 5.0, 98: 5.0, 99: 5.0, 100: 5.0}},
    {"allowed_token_ids": tuple(range(48, 58)), "stop_token_ids": (50,), "min_tokens": 4},
    {"return_log_probs": True, "skip_prompt_log_probs": False, "top_n_logprobs": 3},
    {"return_log_probs": True, "processed_log_probs": True, "top_n_logprobs": 5, "top_p": 0.7, "logit_bias": {65: 4.0}},
    {"structured_output": StructuredOutput(regex="[a-c]{3}-[0-9]{2}"), "return_log_probs": True},
    {"return_log_probs": True, "skip_prompt_log_probs": False, "num_tokens_to_generate": 0, "top_n_logprobs": 2},
]
PROMPTS = [[index, *range(index, 2 * index + 1)] for index in range(1, 9)]


def settings() -> list[SamplingParams]:
    return [SamplingParams(**{"num_tokens_to_generate": 9, "seed": index, **kind}) for index, kind in enumerate(KINDS)]


def make_engine(groups: ProcessGroups, *, vocab_size: int | None = 260, **execution: Any) -> DynamicInferenceEngine:
    model = GPTModel(CONFIG, groups, attention_core=PagedAttention(), dtype=torch.float64, seed=0).eval()
    sizes = InferenceConfig(max_sequence_length=64, num_blocks=80, block_size_tokens=4, max_tokens=24, max_requests=6)
    context = DynamicInferenceContext.for_model(model, sizes)
    return DynamicInferenceEngine(model, context, ByteTokenizer(), vocab_size=vocab_size, execution=ExecutionConfig(**execution))


def staged(**plan: int) -> ProcessGroups:
    return ProcessGroups.build(ParallelPlan(**plan, sequence_parallel=False))


@contextmanager
def counted_bytes() -> Iterator[list[int]]:
    """Of the tensors that the stages broadcast, while it lasts."""
    sizes, broadcast = list[int](), dist.broadcast

    def count(tensor: Tensor, *inputs: Any, **options: Any) -> Any:
        sizes.append(tensor.numel() * tensor.element_size())
        return broadcast(tensor, *inputs, **options)

    dist.broadcast = count
    try:
        yield sizes
    finally:
        dist.broadcast = broadcast


def check_equal(ours: Sequence[DynamicInferenceRequestRecord], theirs: Sequence[DynamicInferenceRequestRecord]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert one.generated_tokens == other.generated_tokens and one.status is other.status and one.generated_text == other.generated_text
        close = functools.partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)
        close(one.generated_log_probs, other.generated_log_probs)
        close(one.prompt_log_probs, other.prompt_log_probs)
        for ranked, reference in zip(one.generated_top_n_logprobs, other.generated_top_n_logprobs, strict=True):
            assert list(ranked) == list(reference)
            close(ranked, reference)
        for ranked, reference in zip(one.prompt_top_n_logprobs or (), other.prompt_top_n_logprobs or (), strict=True):
            assert list(ranked) == list(reference)
            close(ranked, reference)


def check_all_kinds(plan: dict[str, int], execution: dict[str, Any]) -> list[list[int]]:
    split, whole = make_engine(staged(**plan), **execution), make_engine(ProcessGroups.single())
    for _ in range(2):
        ours, theirs = split.generate(PROMPTS, settings()), whole.generate(PROMPTS, settings())
        check_equal(ours, theirs)
    assert [record.error for record in ours] == [None] * len(KINDS)
    assert theirs[6].generated_text[3] == "-" and set(theirs[3].generated_tokens) <= set(range(48, 58))
    # The counts and tables of penalties, biases and bans are where the draws are.
    assert (split._executor.draws.adjusted.adjuster.num_bytes > 0) == split.model.is_last
    return [record.generated_tokens for record in ours]


EXECUTIONS = {
    "two in flight": {},
    "one at a time": {"run_ahead": False},
    "proposals": {"speculation": NgramSpeculation(num_tokens=3)},
}


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.world(2, shared=True)
def test_whatever_requests_ask_the_last_stage_draws_what_one_rank_does(world: World, execution: str) -> None:
    one, two = world(functools.partial(check_all_kinds, {"pp": 2}, EXECUTIONS[execution]))
    assert one == two


@pytest.mark.world(4, shared=True)
def test_so_it_does_over_tp_ranks(world: World) -> None:
    ranks = world(functools.partial(check_all_kinds, {"tp": 2, "pp": 2}, {}))
    assert ranks == ranks[:1] * 4


def check_bytes(asked: dict[str, Any], execution: dict[str, Any]) -> tuple[int, int, int]:
    """Steps, draws and bytes of requests that decode together."""
    engine, count = make_engine(staged(pp=2), **execution), 4
    params = SamplingParams(temperature=0.0, num_tokens_to_generate=10, ignore_eos=True, **asked)
    with counted_bytes() as sizes:
        records = engine.generate([[index] for index in range(count)], params)
    assert [record.num_generated for record in records] == [10] * count and len(sizes) == engine.step_count
    return engine.step_count, 10 * count, sum(sizes)


BYTES_OF_A_DRAW = {
    "tokens": ({}, 8),
    "penalties": ({"repetition_penalty": 1.2, "presence_penalty": 0.5}, 8),
    "log-probabilities": ({"return_log_probs": True}, 16),
    "best tokens": ({"return_log_probs": True, "top_n_logprobs": 4}, 16 + 4 * 16),
}


@pytest.mark.parametrize("asked", BYTES_OF_A_DRAW)
@pytest.mark.parametrize("execution", ["two in flight", "one at a time"])
@pytest.mark.world(2, shared=True)
def test_a_draw_costs_a_few_bytes_and_not_a_row_of_logits(world: World, asked: str, execution: str) -> None:
    fields, num_bytes = BYTES_OF_A_DRAW[asked]
    for num_steps, num_draws, total in world(functools.partial(check_bytes, fields, EXECUTIONS[execution])):
        assert total == num_draws * num_bytes and num_steps >= 10
        # The logits of these draws, in their dtype.
        assert total <= num_draws * CONFIG.vocab_size * 8 / 25


def check_prompts_in_parts() -> None:
    engine = make_engine(staged(pp=2))
    with counted_bytes() as sizes:
        engine.generate([list(range(60))], SamplingParams(temperature=0.0, num_tokens_to_generate=2, ignore_eos=True))
    # Of 60 tokens by 24 a step; steps that draw nothing say nothing.
    assert engine.step_count == 4 and sizes == [8, 8]


@pytest.mark.world(2, shared=True)
def test_a_step_that_draws_nothing_sends_nothing(world: World) -> None:
    world(check_prompts_in_parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_message_keeps_every_number(dtype: torch.dtype) -> None:
    engine = make_engine(ProcessGroups.single(), vocab_size=None)
    settings = [SamplingParams(return_log_probs=True, top_n_logprobs=2), SamplingParams(), SamplingParams(return_log_probs=True)]
    for params in settings:
        engine.add_request([1, 2, 3], params)
    first, _, third = engine._requests.entries.values()
    values = torch.tensor([-1 / 3, math.nan, -1e-30], dtype=dtype)
    ids, best = torch.tensor([[7, 2**30], [0, 1], [3, 4]]), torch.tensor([[-0.1, -math.inf], [-1.5, -2.5], [-1e-9, -3.1]], dtype=dtype)
    message = StageMessage(params=settings, prompts=[(first, 2), (third, 1)], vocab_size=272)
    scores = [
        PromptScores(entry=first, values_N=values[1:], best=(ids[:2], best[:2])),
        PromptScores(entry=third, values_N=values[:1], best=None),
    ]
    results = StepResults(draws=Draws(torch.tensor([2**31, -1, 5]), values, (ids, best), [2, 0, 0]), prompt_scores=scores)
    numbers = message.pack(results)
    assert numbers.dtype == torch.float64 and len(numbers) == message.num_numbers == 3 + 3 + 6 + 6 + (2 + 4 + 4) + 1
    unpacked = message.unpack(numbers)
    assert unpacked.draws is not None and results.draws is not None
    torch.testing.assert_close(unpacked.draws.wait(), results.draws.wait(), rtol=0, atol=0, equal_nan=True)
    for ours, theirs in zip(unpacked.prompt_scores, scores, strict=True):
        assert ours.entry is theirs.entry and (ours.best is None) == (theirs.best is None)
        pairs = zip((ours.values_N, *(ours.best or ())), (theirs.values_N, *(theirs.best or ())), strict=True)
        for one, other in pairs:
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True, check_dtype=False)
    assert unpacked.prompt_scores[0].best[0].dtype == torch.int64  # type: ignore[index]


def test_a_message_of_nothing_is_empty() -> None:
    message = StageMessage(params=[], prompts=[], vocab_size=8)
    assert message.num_numbers == 0 and len(message.pack(StepResults())) == 0
    assert message.unpack(torch.empty(0, dtype=torch.float64)) == StepResults(prompt_scores=[])
