# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Copies between host and device in a step: each is a call that the device waits behind, so that few are made."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from mcore_inference import (
    DynamicInferenceContext,
    DynamicInferenceEngine,
    ExecutionConfig,
    InferenceConfig,
    PagedAttention,
    SamplingParams,
)
from mcore_parallel import ProcessGroups
from mcore_parallel.models import GPTModel, TransformerConfig
from tests.support.decode_graphs import serve_as_on_a_gpu

CONFIG = TransformerConfig(num_layers=2, hidden_size=16, num_attention_heads=4, num_query_groups=2, vocab_size=64)
SIZES = InferenceConfig(max_sequence_length=64, num_blocks=64, block_size_tokens=16, max_requests=8, max_tokens=48)


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Tensors that are made of numbers of the host, "up", and those that the host reads, "down": on a GPU each is a copy."""
    counts: Counter[str] = Counter()
    patch = pytest.MonkeyPatch()

    def count(owner: Any, name: str, direction: str, *, when: Callable[..., bool] = lambda *_: True) -> None:
        real = getattr(owner, name)

        def call(*args: Any, **options: Any) -> Any:
            counts[direction] += when(*args)
            return real(*args, **options)

        patch.setattr(owner, name, call)

    for name in ("tensor", "as_tensor", "from_numpy"):
        count(torch, name, "up")
    count(torch.Tensor, "to", "down", when=lambda _, target=None, *rest: target == "cpu")
    try:
        yield counts
    finally:
        patch.undo()


def check_copies(*, records_prompts: bool) -> tuple[list[dict[str, int]], list[int]]:
    """Copies of each step, and the prompt tokens that it computed."""
    serve_as_on_a_gpu()
    model = GPTModel(CONFIG, ProcessGroups.single(), attention_core=PagedAttention(), dtype=torch.float64).eval()
    execution = ExecutionConfig(run_ahead=True, use_cuda_graphs_for_non_decode_steps=records_prompts)
    engine = DynamicInferenceEngine(model, DynamicInferenceContext.for_model(model, SIZES), execution=execution)
    engine.create_cuda_graphs()
    for number in range(6):
        engine.add_request([1 + number] * 12, SamplingParams(temperature=number % 2, top_k=5, num_tokens_to_generate=9, seed=number))
    copies, computed = [], []
    while engine.has_unfinished_requests():
        before = engine.stats()["computed_tokens"]
        with counted() as counts:
            engine.step()
        copies.append(dict(counts))
        computed.append(int(engine.stats()["computed_tokens"] - before))
    return copies, computed


@pytest.mark.world(1)
@pytest.mark.parametrize("records_prompts", [False, True], ids=["launched", "recorded"])
def test_a_decode_step_sends_once_and_reads_once_and_one_with_prompts_sends_little(
    world: Callable[..., Any], records_prompts: bool
) -> None:
    [(copies, computed)] = world(check_copies, records_prompts=records_prompts)
    # Prompts fill the first step and end in the second; what is read last is of a step before.
    assert computed == [48, 28, *[6] * 7, 2, 0] and copies[-1] == {}
    # The numbers of a step, those of its rows that are read, and of draws the lines, the integers and the floats.
    assert copies[:2] == [{"up": 4 if records_prompts else 5, "down": 1}] * 2
    # A batch that begins to decode sends the numbers of its draws, and then each step its own alone.
    assert copies[2:9] == [{"up": 4, "down": 1}, *[{"up": 1, "down": 1}] * 6]


PLAIN = [{"temperature": 0.0}, {"temperature": 1.0}]
ALL_KINDS = [
    *PLAIN,
    {"top_k": 5, "top_p": 0.9, "min_p": 0.01},
    {"return_log_probs": True, "top_n_logprobs": 3},
    {"return_log_probs": True, "processed_log_probs": True, "top_n_logprobs": 2, "top_p": 0.8},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "logit_bias": {5: 2.0}},
    {"min_tokens": 200, "stop_token_ids": (3, 4), "allowed_token_ids": tuple(range(60))},
]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kinds", [PLAIN, ALL_KINDS], ids=["plain", "all kinds"])
def test_a_decode_step_on_a_gpu_waits_for_nothing_but_the_results_of_the_one_before(kinds: list[dict[str, Any]]) -> None:
    config = TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=4, num_query_groups=2, vocab_size=128)
    model = GPTModel(config, ProcessGroups.single(), attention_core=PagedAttention(), device="cuda", dtype=torch.bfloat16).eval()
    sizes = InferenceConfig(max_sequence_length=256, num_blocks=160, block_size_tokens=16, max_requests=8)
    engine = DynamicInferenceEngine(model, DynamicInferenceContext.for_model(model, sizes))
    engine.warm_up()
    settings = [SamplingParams(**{"num_tokens_to_generate": 100, "ignore_eos": True, "seed": i, **kind}) for i, kind in enumerate(kinds)]
    prompts = [[1 + number] * 12 for number in range(len(settings))]
    # Kernels that these requests need are compiled now.
    wanted = [record.generated_tokens for record in engine.generate(prompts, settings)]
    numbers = [engine.add_request(prompt, params) for prompt, params in zip(prompts, settings, strict=True)]
    for _ in range(6):
        engine.step()
    replayed, copies = engine.stats()["graph_steps"], list[dict[str, int]]()
    mode = torch.cuda.get_sync_debug_mode()
    # The results come by one event; a copy that somebody waits for, or a number read from the device, is an error.
    try:
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(60):
            with counted() as counts:
                engine.step()
            copies.append(dict(counts))
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    assert engine.stats()["graph_steps"] == replayed + 60
    if kinds is PLAIN:
        assert copies == [{"up": 1, "down": 1}] * 60
    ended = {}
    while engine.has_unfinished_requests():
        ended |= {record.request_id: record.generated_tokens for record in engine.step()}
    assert [ended[number] for number in numbers] == wanted


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_the_mode_that_finds_synchronisations_on_a_gpu_finds_one() -> None:
    numbers, mode = torch.ones(3, device="cuda"), torch.cuda.get_sync_debug_mode()
    try:
        torch.cuda.set_sync_debug_mode("error")
        with pytest.raises(RuntimeError, match="synchroniz"):
            numbers.sum().item()
    finally:
        torch.cuda.set_sync_debug_mode(mode)
