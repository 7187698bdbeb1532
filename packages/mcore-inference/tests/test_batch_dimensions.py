# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Sizes of steps: which are recorded, and which recording holds a step."""

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_inference import (
    CUDAGraphBatchDimensionBuilder,
    ExecutionConfig,
    InferenceBatchDimensions,
    SamplingParams,
    match_graph_config,
)
from mcore_inference.engine._decode_graphs import graph_sizes

Dims = InferenceBatchDimensions
GRID = [Dims(*counts) for counts in itertools.product(range(5), range(3), range(3), (False, True))]


def holds(graph: Dims, real: Dims, strict: bool) -> bool:
    """By giving each request of the step a place of the recording."""
    if graph.has_explicit_chunked_prefill_req != real.has_explicit_chunked_prefill_req or graph.token_count < real.token_count:
        return False
    if real.prefill_req_count == 0 and graph.prefill_req_count > 0:
        return False
    places = ["P"] * graph.prefill_req_count + ["D"] * graph.decode_req_count
    for kind in ["P"] * real.prefill_req_count + ["D"] * real.decode_req_count:
        fitting = [place for place in (["P"] if kind == "P" else ["D"] if strict else ["D", "P"]) if place in places]
        if not fitting:
            return False
        places.remove(fitting[0])
    return True


@pytest.mark.parametrize("strict", [False, True])
def test_a_recording_holds_a_step_if_its_requests_have_places(strict: bool) -> None:
    for graph, real in itertools.product(GRID, GRID):
        assert graph.is_applicable_for_batch_dim(real, strict) == holds(graph, real, strict), (graph, real)


def test_the_smallest_recording_that_holds_a_step_is_taken() -> None:
    for real in GRID:
        for strict, decode_only in itertools.product((False, True), repeat=2):
            best = match_graph_config(real, GRID[::3], strict, decode_only)
            fitting = [graph for graph in sorted(GRID[::3]) if holds(graph, real, strict)]
            assert best == (fitting[0] if fitting and not (decode_only and real.prefill_req_count) else None)
            assert best is None or (best.prefill_req_count > 0) >= (real.prefill_req_count > 0)


def test_valid_sizes_are_those_that_requests_can_have() -> None:
    for size in GRID:
        # Every request has a token, a prompt at most three.
        can_be = size.req_count <= size.token_count <= 3 * size.prefill_req_count + size.decode_req_count and size.req_count <= 3
        assert size.is_valid(3, 3) == (can_be and (size.prefill_req_count > 0 or not size.has_explicit_chunked_prefill_req))
    assert not Dims(2, -1, 1).is_valid(3, 3) and not Dims(2, 3, -1).is_valid(3, 3)
    assert str(Dims(9, 2, 3, True)) == "[9]: 2 P + 3 D (chunked)" and Dims(9, 2, 3).req_count == 5
    rising = [Dims(1, 0, 1), Dims(1, 0, 1, True), Dims(1, 1, 0), Dims(2, 0, 1)]
    assert all(one < two for one, two in itertools.pairwise(rising)) and len({*rising, *rising}) == 4


def build(**fields: Any) -> CUDAGraphBatchDimensionBuilder:
    return CUDAGraphBatchDimensionBuilder(
        **{"max_requests": 16, "max_tokens": 32, "max_sequence_length": 64, "num_cuda_graphs": 2} | fields
    )


@pytest.mark.parametrize("strategy", ["linear", "exponential"])
def test_the_worked_list_of_sizes_and_what_matches(strategy: Any) -> None:
    builder = build(cuda_graph_mixed_prefill_count=4, use_cuda_graphs_for_non_decode_steps=True, strategy=strategy)
    sizes, token_counts = builder.generate_cuda_graph_batch_dimensions_list()
    assert token_counts == [32, 16]
    assert sizes == [Dims(32, 16, 0), Dims(32, 4, 12), Dims(16, 16, 0), Dims(16, 4, 12), Dims(16, 0, 16), Dims(8, 0, 8)]
    found = [match_graph_config(Dims(*real), sizes) for real in ((5, 0, 5), (20, 2, 3), (14, 3, 11), (14, 6, 0), (40, 2, 3), (17, 0, 17))]
    assert found == [Dims(8, 0, 8), Dims(32, 4, 12), Dims(16, 4, 12), Dims(16, 16, 0), None, None]
    assert match_graph_config(Dims(14, 6, 0, True), sizes) is None
    assert match_graph_config(Dims(14, 6, 0), sizes, decode_only_cuda_graphs=True) is None


def test_numbers_of_tokens_are_even_or_halve() -> None:
    even = build(num_cuda_graphs=4, tp_size=2, strategy="linear", max_requests=1000, max_tokens=1000)
    assert even.token_counts(1000) == [1000, 752, 504, 256]
    assert even.generate_cuda_graph_batch_dimensions_list()[1] == [1000, 752, 504, 256]
    assert build(num_cuda_graphs=1, strategy="linear").token_counts(29) == [29]
    assert build(num_cuda_graphs=99, strategy="linear").token_counts(5) == [5]
    assert build(num_cuda_graphs=99).token_counts(100) == [100, 50, 26, 14, 8, 4, 2]
    assert build(num_cuda_graphs=3).token_counts(512) == [512, 256, 128]
    assert build(num_cuda_graphs=3, tp_size=8).token_counts(7) == []
    assert build(num_cuda_graphs=None).generate_cuda_graph_batch_dimensions_list() == ([], None)
    assert build(cuda_graph_max_tokens=99).generate_cuda_graph_batch_dimensions_list()[1] == [32, 16]
    assert build(cuda_graph_max_tokens=8).generate_cuda_graph_batch_dimensions_list() == ([Dims(8, 0, 8), Dims(4, 0, 4)], [8, 4])


def test_an_engine_records_as_many_decode_steps_as_it_is_told() -> None:
    assert graph_sizes(64, 4) == [8, 16, 32, 64] and graph_sizes(70, 1) == [70] and graph_sizes(3, 9) == [2, 3]
    with pytest.raises(ValueError, match="num_cuda_graphs=2 and use_graphs=False"):
        ExecutionConfig(num_cuda_graphs=2, use_graphs=False)
    for bad in (0, True, 1.5):
        with pytest.raises(ValueError, match="num_cuda_graphs="):
            ExecutionConfig(num_cuda_graphs=bad)  # type: ignore[arg-type]


def test_an_engine_without_a_gpu_replays_nothing(make_engine: Any) -> None:
    engine = make_engine()
    engine.generate([[1, 2]], SamplingParams(num_tokens_to_generate=3))
    assert engine.cuda_graph_request_count_map == {} and engine.stats()["graph_steps"] == 0 < engine.step_count


def test_fields_out_of_range_are_refused_by_name() -> None:
    for bad in ({"max_requests": 0}, {"num_cuda_graphs": True}, {"tp_size": 0}, {"cuda_graph_max_tokens": -1}, {"strategy": "best"},
                {"cuda_graph_mixed_prefill_count": -1}, {"use_cuda_graphs_for_non_decode_steps": 1}, {"max_tokens": None}):  # fmt: skip
        with pytest.raises(ValueError, match=next(iter(bad))):
            build(**bad)


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_every_step_up_to_the_caps_has_a_recording_that_wastes_little(data: st.DataObject) -> None:
    tp = data.draw(st.sampled_from([1, 2, 4, 8]))
    max_requests, number = tp * data.draw(st.integers(1, 40)), data.draw(st.integers(1, 12))
    strategy = data.draw(st.sampled_from(["linear", "exponential"]))
    builder = build(
        max_requests=max_requests, max_tokens=max_requests + tp * data.draw(st.integers(0, 60)), max_sequence_length=64,
        num_cuda_graphs=number, tp_size=tp, cuda_graph_mixed_prefill_count=data.draw(st.integers(1, 20)),
        use_cuda_graphs_for_non_decode_steps=True, strategy=strategy,
    )  # fmt: skip
    sizes, counts = builder.generate_cuda_graph_batch_dimensions_list()
    assert counts is not None and 1 <= len(counts) <= number and counts == sorted(set(counts), reverse=True)
    assert len(sizes) == len(set(sizes)) and all(size.is_valid(max_requests, 64) and size.token_count % tp == 0 for size in sizes)
    decode = data.draw(st.integers(0, max_requests))
    prompts = data.draw(st.integers(0, max_requests - decode))
    tokens = decode + data.draw(st.integers(prompts, prompts * 64)) if prompts else decode
    found = match_graph_config(Dims(tokens, prompts, decode), sizes)
    whole = build(max_requests=max_requests, num_cuda_graphs=number, tp_size=tp, strategy=strategy)
    if not prompts:
        choices = whole.token_counts(max_requests)
        assert found is not None and found.token_count == min(count for count in choices if count >= tokens)
        assert found.decode_req_count == found.token_count
        assert strategy != "linear" or found.token_count - tokens <= choices[-1]
    elif tokens > counts[0]:
        assert found is None
    elif builder.cuda_graph_mixed_prefill_count <= min(counts[-1], max_requests - 1) and counts[0] <= 63 * (max_requests - 1):
        assert found is not None and found.token_count == min(count for count in counts if count >= tokens)
        assert strategy != "linear" or found.token_count - tokens <= counts[-1]
