# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Two models on two grids train as both do on one process."""

import functools
import math

import pytest
import torch

from mcore_parallel import ParallelPlan
from mcore_parallel.pipeline import PipelineConfig
from mcore_tools.joint import JointConfig, main, train_alone, train_joint
from tests.support.world import run

CONFIG = JointConfig(steps=14, lr=1e-2, micro_batches=3, micro_batch_size=5, dtype="float64")
GRIDS = {
    "dp2 to tp2": {"encoder": ParallelPlan(dp=2), "decoder": ParallelPlan(tp=2)},
    "one to one": {"encoder": ParallelPlan(), "decoder": ParallelPlan()},
    "tp2 to dp2": {"encoder": ParallelPlan(tp=2), "decoder": ParallelPlan(dp=2)},
    "dp3 to one": {"encoder": ParallelPlan(dp=3), "decoder": ParallelPlan(), "pipeline": PipelineConfig(schedule="zero_bubble")},
    "one to dp2": {"encoder": ParallelPlan(), "decoder": ParallelPlan(dp=2), "pipeline": PipelineConfig(schedule="combined")},
}


@functools.cache
def alone() -> list[float]:
    torch.set_num_threads(1)
    return train_alone(CONFIG)


def config_of(name: str) -> JointConfig:
    return JointConfig(steps=CONFIG.steps, lr=CONFIG.lr, micro_batches=3, micro_batch_size=5, dtype="float64", **GRIDS[name])


@pytest.mark.journey
def test_the_decoder_learns_what_only_the_encoder_sees() -> None:
    # The classes are drawn anew for every patch: without the encoder nothing is below the cost of a guess.
    torch.set_num_threads(1)
    curve = train_alone(JointConfig(steps=40))
    assert curve[0] > math.log(16) - 0.5
    assert curve[-1] < 0.2 * math.log(16)


@pytest.mark.journey
@pytest.mark.parametrize("name", GRIDS)
def test_every_pair_of_grids_gives_the_curve_of_one_process(name: str) -> None:
    config = config_of(name)
    for curve in run(train_joint, config.num_ranks, config=config):
        assert curve == pytest.approx(alone(), rel=1e-10)
    assert alone()[-1] < alone()[0] - 0.2


def test_the_command_trains_and_names_what_is_wrong(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--set", "encoder.dp=1", "--set", "decoder.tp=1", "--set", "steps=3"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0] == "encoder on 1 ranks, decoder on 1; a guess costs 2.7726"
    first, last = (float(word) for word in lines[-1].removeprefix("loss ").split(" -> "))
    assert last < first
    assert main(["--set", "encoder.cp=2"]) == 2
    assert "encoder=ParallelPlan(" in (message := capfd.readouterr().err) and "must have tp and dp only; set pp, cp and vpp to 1" in message
    assert main(["--set", "encoder.dp=7"]) == 2
    assert "micro_batch_size=6 must give each of encoder.dp=7 replicas a sequence" in capfd.readouterr().err
