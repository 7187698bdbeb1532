# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Three steps, a checkpoint and three more give the bits of six, in every layout."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from numpy.typing import NDArray

from mcore_ckpt import CheckpointManager
from mcore_moe import MoEConfig
from mcore_parallel import ParallelPlan
from mcore_parallel.data import GPTDataset
from mcore_parallel.models import TransformerConfig
from mcore_parallel.optim import OptimizerConfig
from mcore_parallel.training import Rerun, RerunConfig, TensorShard, Trainer, TrainerConfig, TrainerState
from mcore_tools.assembly import assemble, schedule, step_batches
from mcore_tools.recipes import RunConfig, TrainConfig

CONFIG = RunConfig(
    model=TransformerConfig(num_layers=2, hidden_size=16, num_attention_heads=2, ffn_hidden_size=16, vocab_size=32),
    # The batch grows at step 4, where the run is interrupted, and at step 6, and the rate falls all the time.
    train=TrainConfig(
        steps=6, warmup_steps=2, seq_len=8, micro_batch_size=2, global_batch_size=12, batch_ramp_up=(4, 4, 24), dtype="bfloat16"
    ),
    optimizer=OptimizerConfig(lr=1e-2, weight_decay=0.1, clip_grad=1.0),
)


MIXTURE = MoEConfig(
    num_moe_experts=4,
    moe_aux_loss_coeff=0.01,
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    moe_router_bias_decay_steps=5,
    moe_router_bias_decay_style="cosine",
)


class Samples(GPTDataset):
    """Sequences that their number decides."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = torch.randint(32, (9,), generator=torch.Generator().manual_seed(index))
        return {"tokens": row[:-1], "labels": row[1:], "loss_mask": torch.ones(8)}


def train(config: RunConfig, steps: int, folder: str) -> Trainer:
    parts = assemble(config, "cpu")
    sizes = config.train.batch_sizes()
    trainer = Trainer(
        TrainerConfig(steps=steps, save_every=steps),
        parts.model,
        parts.sync,
        parts.optimizer,
        parts.objective,
        lambda consumed: step_batches(config, Samples(400), parts.groups, "cpu", consumed, sizes),
        schedule(config),
        checkpointer=CheckpointManager(Path(folder)),
        groups=parts.groups,
        pipeline=parts.pipeline,
        rerun=Rerun(RerunConfig(mode="validate", window=2)),
    )
    trainer.resume()
    trainer.run()
    return trainer


def bits(trainer: Trainer) -> dict[str, NDArray[Any]]:
    found = {}
    for name, shards in trainer.tensors().items():
        for number, shard in enumerate([shards] if isinstance(shards, TensorShard) else shards):
            found[f"{name}.{number}"] = shard.data.detach().contiguous().view(torch.uint8).numpy().copy()
    return found


def check_resume(config: RunConfig, folder: str) -> TrainerState:
    straight = train(config, 6, f"{folder}/straight")
    train(config, 3, f"{folder}/halves")
    resumed = train(config, 6, f"{folder}/halves")
    assert resumed.rerun is not None and straight.rerun is not None
    assert resumed.rerun.state() == straight.rerun.state()
    assert resumed.state == straight.state
    expected = bits(straight)
    for name, value in bits(resumed).items():
        assert (value == expected[name]).all(), name
    assert len(expected) > 10
    return straight.state


LAYOUTS = {
    "tp2": {"plan": ParallelPlan(tp=2)},
    "pp2": {"plan": ParallelPlan(pp=2)},
    "dp2": {"plan": ParallelPlan(dp=2)},
    "dp2-sliced": {"plan": ParallelPlan(dp=2), "optimizer": dataclasses.replace(CONFIG.optimizer, use_distributed_optimizer=True)},
    "cp2": {"plan": ParallelPlan(cp=2)},
    "ep2": {"plan": ParallelPlan(dp=2, ep=2), "moe": MIXTURE},
    "fsdp2": {"plan": ParallelPlan(dp=2), "data_parallel": "fsdp"},
    "fsdp2-of-torch": {"plan": ParallelPlan(dp=2), "data_parallel": "fsdp2"},
    "pp2-vpp2": {"plan": ParallelPlan(pp=2, vpp=2), "model": dataclasses.replace(CONFIG.model, num_layers=4)},
}


# The ring takes a minute on two cores.
MARKS = {"cp2": pytest.mark.slow, "tp2": ()}


@pytest.mark.world(2)
@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, pytest.mark.journey)) for name in LAYOUTS])
def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(world: Callable[..., list[Any]], tmp_path: Path, name: str) -> None:
    config = dataclasses.replace(CONFIG, **LAYOUTS[name])
    consumed = 0
    for _ in range(6):
        consumed += config.train.batch_sizes().size(consumed)
    assert world(check_resume, config=config, folder=str(tmp_path)) == [TrainerState(step=6, consumed_samples=consumed)] * 2
