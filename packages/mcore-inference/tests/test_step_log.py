# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Lines of the step log add up to the engine's own counters."""

import json
import logging
import time
from collections.abc import Callable
from typing import Any

import pytest

from mcore_inference import DynamicInferenceContext, DynamicInferenceEngine, ExecutionConfig, InferenceConfig, SamplingParams
from mcore_inference.engine._process_age import process_age_s
from mcore_inference.engine._step_log import COUNTERS
from tests.support.commands import run_command


def build(model: Any, **execution: Any) -> DynamicInferenceEngine:
    sizes = InferenceConfig(max_sequence_length=64, num_blocks=40, block_size_tokens=4, max_requests=4)
    return DynamicInferenceEngine(model, DynamicInferenceContext.for_model(model, sizes), execution=ExecutionConfig(**execution))


@pytest.mark.parametrize("run_ahead", [False, True])
def test_lines_add_up_to_the_counters_of_the_engine(
    make_model: Callable[..., Any], caplog: pytest.LogCaptureFixture, run_ahead: bool
) -> None:
    engine = build(make_model(layers=1), run_ahead=run_ahead, log_interval_steps=5)
    with caplog.at_level(logging.INFO, "mcore_inference.steps"):
        engine.generate([[1] * 9] * 3, SamplingParams(temperature=0, num_tokens_to_generate=19))
    lines = [json.loads(record.getMessage()) for record in caplog.records if record.name == "mcore_inference.steps"]
    assert [line["step"] for line in lines] == [5, 10, 15, 20] and engine.step_count == 20
    stats = engine.stats()
    # No engine of one rank moves experts.
    assert set(stats) >= COUNTERS - {"expert_rebalances", "moved_experts"} and all(
        set(line) == {"step", "seconds", *stats} for line in lines
    )
    assert all(line["steps"] == 5 and line["seconds"] >= 0 for line in lines)
    assert [line["prefix_cache_hits"] for line in lines] == [16, 0, 0, 0] and lines[0]["prefix_cache_queries"] == 27
    # One prompt of nine tokens, the last token of the two others, and eighteen tokens of each that are fed back.
    assert sum(line["computed_tokens"] for line in lines) == stats["computed_tokens"] == 9 + 1 + 1 + 3 * 18
    assert stats["generated_tokens"] == 3 * 19
    assert 0 < lines[0]["seconds_to_first_token"] == stats["seconds_to_first_token"] <= process_age_s()
    assert lines[1]["running_requests"] == 3 and lines[1]["total_blocks"] == 40


def test_nothing_is_written_unless_asked_for(make_model: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "mcore_inference.steps"):
        build(make_model(layers=1)).generate([[1]], SamplingParams(num_tokens_to_generate=9))
    assert not caplog.records
    for bad in (0, True, 1.5):
        with pytest.raises(ValueError, match="log_interval_steps="):
            ExecutionConfig(log_interval_steps=bad)  # type: ignore[arg-type]


def print_age(_: list[str]) -> int:
    time.sleep(0.3)
    print(process_age_s())
    return 0


def test_the_age_of_a_process_counts_from_its_start() -> None:
    # What it is forked from is as old as the tests.
    begun = time.monotonic()
    code, output, _ = run_command(print_age, [])
    # Ticks of 1/100 s.
    assert code == 0 and 0.29 < float(output) < time.monotonic() - begun + 0.02
