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
    count(torch.Tensor, "to", "down", when=lambda _, target, *rest: target == "cpu")
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
