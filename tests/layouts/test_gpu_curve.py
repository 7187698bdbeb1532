# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The layouts on GPUs, through NCCL."""

import dataclasses

import pytest
import torch

from mcore_parallel import ParallelPlan
from tests.layouts.test_one_curve import CONFIG, losses
from tests.support.world import run

pytestmark = pytest.mark.gpu

PLANS = {
    "tp2-ep2": ParallelPlan(tp=2, ep=2),
    "pp2": ParallelPlan(pp=2),
    "dp2": ParallelPlan(dp=2),
    "ep2": ParallelPlan(dp=2, ep=2),
}


def test_one_gpu_gives_the_losses_of_the_cpu() -> None:
    [cpu] = run(losses, 1, plan=ParallelPlan())
    [gpu] = run(losses, 1, backend="nccl", plan=ParallelPlan(), device="cuda")
    # The rotary tables are float32 on either side, so the two differ where float32 rounds.
    for ours, expected in zip(gpu, cpu, strict=True):
        assert ours == pytest.approx(expected, rel=1e-6)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", PLANS)
def test_two_gpus_give_the_losses_of_one(name: str) -> None:
    [one] = run(losses, 1, backend="nccl", plan=ParallelPlan(), device="cuda")
    for rows in run(losses, 2, backend="nccl", plan=PLANS[name], device="cuda"):
        for ours, expected in zip(rows, one, strict=True):
            assert ours == pytest.approx(expected, rel=1e-8)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_two_fully_sharded_gpus_give_the_losses_of_two_replicas(dtype: str) -> None:
    replicas = run(losses, 2, backend="nccl", plan=ParallelPlan(dp=2), device="cuda", dtype=dtype)
    for rows in run(losses, 2, backend="nccl", plan=ParallelPlan(dp=2), device="cuda", dtype=dtype, data_parallel="fsdp"):
        for ours, expected in zip(rows, replicas[0], strict=True):
            assert ours == pytest.approx(expected, rel=1e-8 if dtype == "float64" else 2e-2)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", PLANS)
def test_two_gpus_in_bfloat16_stay_near_one(name: str) -> None:
    [one] = run(losses, 1, backend="nccl", plan=ParallelPlan(), device="cuda", dtype="bfloat16")
    for rows in run(losses, 2, backend="nccl", plan=PLANS[name], device="cuda", dtype="bfloat16"):
        for (loss, _), (expected, _) in zip(rows, one, strict=True):
            assert loss == pytest.approx(expected, rel=2e-2)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_two_gpus_sharded_by_torch_give_the_losses_of_two_replicas(dtype: str) -> None:
    shared = {
        "backend": "nccl",
        "plan": ParallelPlan(dp=2),
        "device": "cuda",
        "dtype": dtype,
        "base": dataclasses.replace(CONFIG, moe=None),
    }
    replicas = run(losses, 2, **shared)
    for rows in run(losses, 2, **shared, data_parallel="fsdp2"):
        for ours, expected in zip(rows, replicas[0], strict=True):
            assert ours == pytest.approx(expected, rel=1e-8 if dtype == "float64" else 2e-2)
