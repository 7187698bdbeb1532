# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Without Ray its workers say what to install, and wrong numbers are refused."""

import sys
from typing import Any

import pytest

from mcore_parallel.data import ByteTokenizer
from mcore_rl import RayInference, RayJudge, RayOptions, RayWorkers
from mcore_rl.envs import Countdown, CountdownConfig


def nothing() -> Any:
    raise AssertionError("nothing is made")


def countdown() -> Countdown:
    return CountdownConfig().build()


def test_a_missing_extra_is_one_line_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    for make in (lambda: RayWorkers(nothing), lambda: RayJudge(countdown), lambda: RayInference(nothing, tokenizer=ByteTokenizer())):
        with pytest.raises(ModuleNotFoundError, match=r'^ray is not installed: pip install "mcore-rl\[ray\]"$'):
            make()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_workers", 0),
        ("max_concurrency", 0),
        ("max_restarts", -2),
        ("max_task_retries", -1),
        ("num_cpus", -1.0),
        ("num_gpus", -0.5),
        ("start_timeout_s", 0.0),
        ("call_timeout_s", -1.0),
    ],
)
def test_numbers_out_of_range_are_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{field}={value} must"):
        RayOptions(**{field: value})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="bucket_bytes=0 must be positive"):
        RayInference(nothing, tokenizer=ByteTokenizer(), bucket_bytes=0)
