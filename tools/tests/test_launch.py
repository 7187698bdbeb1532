# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Worlds of an application: results, failures by rank."""

import os

import pytest
import torch.distributed as dist

from tools.launch import RankError, launch


def double(value: int) -> int:
    return 2 * value + dist.get_rank()


def fail(value: int) -> None:
    if dist.get_rank() == value:
        raise ValueError("no more tokens")
    dist.barrier()


def die() -> None:
    if dist.get_rank() == 1:
        os._exit(3)
    dist.barrier()


def test_results_come_in_rank_order() -> None:
    assert launch(double, 2, value=5) == [10, 11]


def test_a_failing_rank_is_named_with_its_traceback() -> None:
    with pytest.raises(RankError, match=r"(?s)rank 1 failed.*no more tokens"):
        launch(fail, 2, value=1)


def test_a_dead_rank_is_named() -> None:
    with pytest.raises(RankError, match="rank"):
        launch(die, 2)
