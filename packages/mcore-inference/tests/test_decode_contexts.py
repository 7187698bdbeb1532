# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Contexts that are copied once against contexts that each step gathers."""

import dataclasses
import random
import weakref
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pytest
import torch

from mcore_inference import DynamicInferenceContext, InferenceConfig, PagedAttention, SamplingParams
from mcore_inference.attention import ContinuedRows, _decode_contexts
from mcore_parallel.models import TransformerConfig
from mcore_parallel.nn import AttentionSpec

Make = Callable[..., Any]


def make_context(kv_cache_dtype: Literal["fp8"] | None = None, dtype: torch.dtype = torch.float64) -> DynamicInferenceContext:
    config = TransformerConfig(num_layers=2, hidden_size=24, num_attention_heads=6, num_query_groups=2, kv_channels=4, vocab_size=8)
    sizes = InferenceConfig(
        max_sequence_length=40, num_blocks=100, block_size_tokens=4, max_requests=6, max_tokens=300, kv_cache_dtype=kv_cache_dtype
    )
    return DynamicInferenceContext(config, sizes, dtype=dtype)


@pytest.mark.parametrize("kv_cache_dtype", [None, "fp8"])
@pytest.mark.parametrize(("window", "with_sink"), [(None, False), ((5, 0), False), (None, True), ((5, 0), True)])
def test_rows_that_decode_together_attend_as_rows_that_are_gathered(
    kv_cache_dtype: Literal["fp8"] | None, window: tuple[int, int] | None, with_sink: bool
) -> None:
    torch.manual_seed(0)
    rng, lengths = random.Random(0), [3, 9, 1]
    copied, gathered = (make_context(kv_cache_dtype) for _ in range(2))
    spec = AttentionSpec(num_heads=6, num_kv_heads=2, head_dim=4, window=window)
    core, sink = PagedAttention(spec), torch.randn(6, dtype=torch.float64) if with_sink else None
    rng.shuffle(copied.allocator._free)
    contexts = copied.builder.decode_contexts(len(lengths))
    assert contexts is not None
    for number, length in enumerate(lengths):
        for context in (copied, gathered):
            context.add_request(number)
            context.extend(number, length)
    work, num_filled = [(number, [0] * length) for number, length in enumerate(lengths) if length > 1], 0
    work.insert(0, (2, [0]))
    for _ in range(1 + 25):
        steps = [context.host_step(work) for context in (copied, gathered)]
        if all(len(tokens) == 1 for _, tokens in work):
            steps[0] = dataclasses.replace(steps[0], contexts=contexts)
        q, k, v = (torch.randn(len(steps[0].tokens_T), heads, 4, dtype=torch.float64) for heads in (6, 2, 2))
        inputs = [context.builder.build(step) for context, step in zip((copied, gathered), steps, strict=True)]
        for layer in range(2):
            first, second = (core(q, k, v, layer, one.step, sink=sink) for one in inputs)
            torch.testing.assert_close(first, second, rtol=1e-12, atol=1e-12)
        decode = inputs[0].step.attention.rows.decode
        num_filled += isinstance(decode, ContinuedRows) and decode.context_RL is not None
        for context in (copied, gathered):
            for number, tokens in work:
                context.advance(number, len(tokens))
        work = [(number, [0]) for number in range(3)]
        for context in (copied, gathered):
            assert context.extend_lines(np.array([context.line(number) for number in range(3)]))
    assert num_filled == 1


def test_contexts_are_copied_where_their_scores_keep_digits_and_memory_holds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert make_context(dtype=torch.bfloat16).builder.decode_contexts(2) is None
    # Two rows of two layers with keys and values of 8 float64 each.
    monkeypatch.setattr(_decode_contexts, "_MOST_BYTES", 2 * 2 * 2 * 8 * 8 * 10)
    contexts = make_context().builder.decode_contexts(2)
    assert contexts is not None and contexts.takes(10) and not contexts.takes(11)


@pytest.mark.parametrize("most_bytes", [_decode_contexts._MOST_BYTES, 40_000, 1])
@pytest.mark.parametrize("spare", [0, 96])
def test_tokens_do_not_depend_on_the_memory_for_contexts(
    make_model: Make, make_engine: Make, monkeypatch: pytest.MonkeyPatch, most_bytes: int, spare: int
) -> None:
    model, settings = make_model(), SamplingParams(temperature=0, num_tokens_to_generate=40, return_log_probs=True)
    prompts = [[1, 2, 3], list(range(20)), [7]]
    alone = [make_engine(model).generate([prompt], settings)[0] for prompt in prompts]
    monkeypatch.setattr(_decode_contexts, "_MOST_BYTES", most_bytes)
    monkeypatch.setattr(_decode_contexts, "_SPARE", spare)
    for record, wanted in zip(make_engine(model).generate(prompts, settings), alone, strict=True):
        assert record.generated_tokens == wanted.generated_tokens
        torch.testing.assert_close(record.generated_log_probs, wanted.generated_log_probs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("aborts", [False, True])
def test_an_idle_engine_holds_no_copies(make_engine: Make, run_ahead: bool, aborts: bool) -> None:
    engine = make_engine(run_ahead=run_ahead)
    number = engine.add_request([1, 2, 3], SamplingParams(num_tokens_to_generate=6, ignore_eos=True))
    for _ in range(4):
        engine.step()
    batch = engine._loop._batch
    assert not batch.contexts.is_empty
    contexts = weakref.ref(batch.contexts)
    del batch
    if aborts:
        engine.abort(number)
    while engine.has_unfinished_requests():
        engine.step()
    assert contexts() is None
