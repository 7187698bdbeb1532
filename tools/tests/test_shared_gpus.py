# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""More ranks than GPUs: engines share those of the trainers, and nobody else shares one."""

from collections.abc import Callable

import pytest
import torch

from mcore_tools.recipes import RunConfig, override, recipe
from mcore_tools.training import _world as world_module
from mcore_tools.training import take_device

APART = ("rl.placement.num_engines=2", "rl.placement.timeout_s=30", "rl.rollout_timeout_s=27")
TWO = ("plan.dp=2", "train.micro_batch_size=32")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """A machine with so many GPUs, on which this process is such a rank; returns the numbers of the GPUs that were taken."""

    def pretend(num_gpus: int, rank: int, num_ranks: int) -> list[int]:
        taken: list[int] = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
        monkeypatch.setattr(torch.cuda, "set_device", taken.append)
        for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}.items():
            monkeypatch.setenv(name, str(value))
        return taken

    return pretend


def run(*changes: str) -> RunConfig:
    return override(recipe("countdown_tiny"), list(changes))


@pytest.mark.parametrize(("num_gpus", "expected", "backend"), [(4, [0, 1, 2, 3], "nccl"), (2, [0, 1, 0, 1], "cpu:gloo,cuda:nccl")])
def test_engines_take_the_gpus_of_trainers_where_there_are_no_more(
    machine: Callable[..., list[int]], num_gpus: int, expected: list[int], backend: str
) -> None:
    config, taken = run(*APART, *TWO), []
    for rank in range(4):
        numbers = machine(num_gpus, rank, 4)
        assert take_device(config) == "cuda"
        taken += numbers
        assert world_module._backend("cuda") == backend
    assert taken == expected


def test_a_rank_that_trains_shares_no_gpu(machine: Callable[..., list[int]]) -> None:
    taken = machine(1, 1, 4)
    with pytest.raises(ValueError, match=r"^rank 1 trains, as 2 ranks of plan do, and has none of the 1 GPUs of its machine alone"):
        take_device(run(*APART, *TWO))
    assert not taken


def test_without_engines_of_their_own_ranks_share_no_gpu(machine: Callable[..., list[int]]) -> None:
    machine(2, 2, 4)
    for config in (None, run()):
        with pytest.raises(ValueError, match=r"^LOCAL_RANK=2 of rank 2 has none of the 2 GPUs of its machine; start at most 2 ranks"):
            take_device(config)
