# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The bench of reinforcement learning on one device runs on the CPU."""

import pytest
import torch

from mcore_rl import refit
from tools.bench.rl import SHARED, SIZES, Clock, build, build_learner, shared_prompts, turns

pytestmark = pytest.mark.journey


def test_a_shared_prompt_trains_as_one_with_each_answer_in_fewer_places() -> None:
    device = torch.device("cpu")
    row = shared_prompts(build_learner("tiny", device, narrow=False), SHARED["tiny"], Clock(device))
    apart, shared = row["with_each_answer"], row["shared"]
    assert shared["trained_tokens"] == apart["trained_tokens"] == 2 * 4 * 4
    assert shared["grad_norm"] == pytest.approx(apart["grad_norm"], rel=1e-5)
    assert shared["mean_logprob"] == pytest.approx(apart["mean_logprob"], rel=1e-5)
    assert (shared["places"], apart["places"]) == (80, 160) and row["times_as_fast"] > 0


def test_turns_of_trainer_and_engine_leave_no_tensor_behind() -> None:
    device = torch.device("cpu")
    learner, engine = build("tiny", SIZES["tiny"], device, narrow=False)
    refit(learner.model, learner.groups, engine)
    row = turns(learner, engine, Clock(device), cycles=6)
    least, most = row["tensor_bytes"]
    assert least == most > 1e6 and row["cycles"] == 6 and 0 < row["peak_gib"][0] <= row["peak_gib"][1]
