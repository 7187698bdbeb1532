# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The parts of the bench of many GPUs that need no GPU run on two ranks of the CPU."""

import pytest

from tools.bench._halves import grpo_on_halves
from tools.bench._killed import killed_engine
from tools.bench._scale import Scale

pytestmark = pytest.mark.journey
TWO = Scale(gpus=2, small=True)


def test_a_trainer_and_an_engine_work_by_turns_and_one_step_off() -> None:
    by_turns, one_off = grpo_on_halves(TWO, iterations=2)
    assert (by_turns["lag"], one_off["lag"]) == (0, 1)
    assert by_turns["logprob_mismatch"] < 1e-5 and one_off["num_dropped"] == 0
    assert all(row["tokens_per_s_per_gpu"] > 0 and row["refit_ms"] > 0 for row in (by_turns, one_off))


def test_a_killed_engine_takes_its_own_streams_only() -> None:
    [row] = killed_engine(TWO)
    assert row["problems"] == [] and 0 < row["streams_lost_by_its_name"] <= row["streams"] // 2
    assert row["noticed_s"] < 10 and row["afterwards"] > 0
