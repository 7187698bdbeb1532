# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What tests of the engine compare it with, and ask of it at the end."""

import random

from mcore_inference import DynamicInferenceEngine


def random_prompts(rng: random.Random, count: int, longest: int = 24) -> list[list[int]]:
    return [[rng.randrange(64) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def check_idle(engine: DynamicInferenceEngine) -> None:
    assert not engine.has_unfinished_requests()
    assert engine.context.allocator.total_used == 0
    assert engine.context.get_active_request_count() == 0
    assert engine.step() == []
