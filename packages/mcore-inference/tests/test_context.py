# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Sizes, and what is refused before anything is allocated."""

from typing import Any

import numpy as np
import pytest
import torch

from mcore_inference import (
    BlockOverflowError,
    ContextErrorFactory,
    ContextOverflowError,
    DynamicInferenceContext,
    InferenceConfig,
    MaxSequenceLengthOverflowError,
    RequestOverflowError,
    TensorStateDeallocatedError,
    TokenOverflowError,
)
from mcore_inference.requests import ActiveRequestCountOverflowError
from mcore_parallel.models import TransformerConfig

MODEL = TransformerConfig(num_layers=3, hidden_size=16, num_attention_heads=4, num_query_groups=2, vocab_size=8)


def make(**sizes: Any) -> DynamicInferenceContext:
    return DynamicInferenceContext(MODEL, InferenceConfig(**{"max_sequence_length": 32, "block_size_tokens": 4, "num_blocks": 6} | sizes))


def test_the_cache_has_the_blocks_asked_for_and_a_sink() -> None:
    context = make()
    assert context.cache.pages.shape == (3, 2, 7, 4, 2, 4)
    assert context.allocator.usable_count == context.max_requests == 6
    assert context.get_kvcache_utilization_stats()["available_blocks"] == 6


def test_bytes_give_blocks_and_no_more_than_requests_can_fill() -> None:
    one = 2 * 3 * 4 * 2 * 4 * 4
    context = make(num_blocks=None, buffer_size_gb=(one * 10 + 1) / 2**30)
    assert context.allocator.total_count == 10
    assert context.cache.num_bytes == 10 * one
    assert make(num_blocks=None, buffer_size_gb=1.0, max_requests=2).allocator.usable_count == 2 * 8
    with pytest.raises(ValueError, match=f"at least {2 * one} bytes"):
        make(num_blocks=None, buffer_size_gb=one / 2**30)


@pytest.mark.parametrize(
    "bad",
    [
        {"max_requests": 0},
        {"max_tokens": 2, "max_requests": 3},
        {"watermark": 1.0},
        {"buffer_size_gb": 0},
        {"num_blocks": 0},
        {"num_blocks": 4, "buffer_size_gb": 3.0},
    ],
)
def test_bad_sizes_are_refused_by_name(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        InferenceConfig(**bad)


def test_what_never_fits_is_refused_with_its_own_type_and_leaves_no_trace() -> None:
    context = make(enable_chunked_prefill=False, max_tokens=10, max_requests=2)
    for prompt, budget, kind in ((32, 1, MaxSequenceLengthOverflowError), (11, 1, TokenOverflowError), (10, 16, BlockOverflowError)):
        with pytest.raises(kind) as caught:
            context.check_fits(prompt, budget, 7)
        assert not caught.value.is_transient and caught.value.request_id == 7
    assert context.allocator.total_used == 0 and context.get_active_request_count() == 0
    assert context.check_fits(10, 15) == 15
    assert context.room(10) == 15
    assert make(num_blocks=20).check_fits(30, 100) == 2


def test_slots_and_blocks_that_run_out_are_transient_and_take_nothing() -> None:
    context = make(max_requests=2)
    context.add_request(0)
    context.extend(0, 20)
    context.add_request(1)
    with pytest.raises(BlockOverflowError) as caught:
        context.extend(1, 8)
    assert caught.value.is_transient
    assert context.num_blocks(1) == 0 and context.allocator.total_avail == 1
    with pytest.raises(RequestOverflowError):
        context.add_request(2)
    with pytest.raises(ValueError, match="slot already"):
        context.add_request(0)
    context.release(0)
    context.release(1)
    assert context.allocator.total_used == 0
    with pytest.raises(ActiveRequestCountOverflowError):
        context.build_step([(0, [1]), (1, [1]), (2, [1])])


def test_no_step_is_made_over_memory_that_was_given_up() -> None:
    context = make()
    context.add_request(0)
    context.extend(0, 3)
    context.memory.free()
    for make_step in (lambda: context.host_step([(0, [1, 2, 3])]), lambda: context.decode_step(np.array([context.line(0)]))):
        with pytest.raises(TensorStateDeallocatedError, match=r"call resume\(\) first") as caught:
            make_step()
        assert caught.value.is_transient
    context.memory.allocate_again()
    assert context.build_step([(0, [1, 2, 3])]).tokens_T.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    "error",
    [
        ContextOverflowError(1, "a"),
        RequestOverflowError(None),
        TokenOverflowError(2, "b", is_transient=False),
        MaxSequenceLengthOverflowError(3),
        BlockOverflowError(4, "c"),
        ActiveRequestCountOverflowError(2, 3, request_id=5),
        TensorStateDeallocatedError(None),
    ],
)
def test_every_context_error_survives_the_wire(error: ContextOverflowError) -> None:
    back = ContextErrorFactory.deserialize(ContextErrorFactory.serialize(error))
    assert type(back) is type(error)
    assert vars(back) == vars(error)
    assert str(back) == str(error)
    assert isinstance(back, ValueError)


def test_a_foreign_error_type_is_refused() -> None:
    with pytest.raises(ValueError, match="no context error"):
        ContextErrorFactory.deserialize({"type": "SystemExit", "request_id": 1, "message": "", "is_transient": True})


def test_dtype_and_device_follow_the_model(make_model) -> None:
    context = DynamicInferenceContext.for_model(make_model(dtype=torch.float32), InferenceConfig(num_blocks=2, block_size_tokens=4))
    assert context.cache.pages.dtype == torch.float32


def test_what_a_gpu_has_left_is_asked_of_a_gpu_alone() -> None:
    with pytest.raises(
        ValueError, match="buffer_size_gb=None takes what a GPU has left, and the cache is on a cpu; give a number or num_blocks"
    ):
        DynamicInferenceContext(MODEL, InferenceConfig(buffer_size_gb=None))
    assert DynamicInferenceContext(MODEL, InferenceConfig(buffer_size_gb=None, num_blocks=8)).allocator.usable_count == 8


@pytest.mark.gpu
def test_the_cache_takes_what_a_gpu_has_left_up_to_what_requests_fill(monkeypatch: pytest.MonkeyPatch) -> None:
    # Other processes take and free memory of the same card meanwhile.
    free, total = memory = torch.cuda.mem_get_info()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: memory)
    context = DynamicInferenceContext(MODEL, InferenceConfig(buffer_size_gb=None, max_requests=4, max_sequence_length=128), device="cuda")
    assert context.config.buffer_size_gb is not None and 0 < context.config.buffer_size_gb < (free - 0.1 * total) / 2**30
    assert context.allocator.usable_count == 4 * context.max_blocks_per_request
