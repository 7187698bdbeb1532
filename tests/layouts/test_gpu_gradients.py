# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Gradients of two GPUs in bfloat16 lie within the bounds of ``mcore_parallel.numerics`` around those of one in float32."""

import dataclasses
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from mcore_parallel import ParallelPlan, ProcessGroups, ShardSpec, named_shards
from mcore_parallel.comm import all_reduce
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.models import TransformerConfig
from mcore_parallel.numerics import check_gradient, compare_gradients, expected_rel_bound, relative_grad_diff
from mcore_parallel.optim import OptimizerConfig
from mcore_parallel.training import Batch, CrossEntropyObjective, train_step
from mcore_tools.assembly import FullyShardedModel, assemble, build_model
from mcore_tools.recipes import RunConfig, TrainConfig
from tests.support.world import run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]

CONFIG = RunConfig(
    model=TransformerConfig(
        num_layers=4, hidden_size=256, num_attention_heads=8, num_query_groups=4, ffn_hidden_size=512, vocab_size=512, init_method_std=0.05
    ),
    train=TrainConfig(steps=1, seq_len=128, micro_batch_size=2, global_batch_size=8, dtype="bfloat16"),
    optimizer=OptimizerConfig(lr=1e-3),
)
LAYERS = CONFIG.model.num_layers
LAYOUTS = {
    "tp2": (ParallelPlan(tp=2), "ddp"),
    "tp2 without sequence parallelism": (ParallelPlan(tp=2, sequence_parallel=False), "ddp"),
    "pp2": (ParallelPlan(pp=2), "ddp"),
    "dp2": (ParallelPlan(dp=2), "ddp"),
    "fsdp2": (ParallelPlan(dp=2), "fsdp"),
}


class Still:
    """An optimizer that leaves the parameters where they are."""

    def step(self, *, grad_scale: Tensor, lr: float) -> object:
        return type("Result", (), {"grad_norm": torch.zeros(()), "skipped": False})()


def batches_of(groups: ProcessGroups) -> list[Batch]:
    """This replica's share of one global batch."""
    train = CONFIG.train
    tokens = torch.randint(512, (train.global_batch_size, train.seq_len + 1), generator=torch.Generator().manual_seed(0)).to("cuda")
    micro = tokens.split(train.micro_batch_size)[groups.dp.rank :: groups.dp.size]
    return [Batch(tokens=part[:, :-1], labels=part[:, 1:], loss_mask=torch.ones_like(part[:, 1:], dtype=torch.float32)) for part in micro]


def reference() -> dict[str, Tensor]:
    """Gradients by one GPU in float32, from weights that are rounded to bfloat16."""
    alone = ProcessGroups.single()
    model = build_model(dataclasses.replace(CONFIG, train=dataclasses.replace(CONFIG.train, dtype="float32")), alone, "cuda")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    sync = DistributedDataParallel(DistributedDataParallelConfig(), model, alone)
    train_step(model, batches_of(alone), CrossEntropyObjective(), sync, Still(), lr=0.0)  # type: ignore[arg-type]
    return sync.gradients()


def main_gradients(plan: ParallelPlan, data_parallel: str) -> tuple[dict[str, Tensor], Mapping[str, ShardSpec], ProcessGroups]:
    """Main gradients of this rank's stage, its parts of them under tp; how they are cut."""
    parts = assemble(dataclasses.replace(CONFIG, plan=plan, data_parallel=data_parallel), "cuda")
    specs = {shard.name: shard.spec for shard in named_shards(parts.sync.module)}
    train_step(parts.model, batches_of(parts.groups), CrossEntropyObjective(), parts.sync, Still(), lr=0.0)  # type: ignore[arg-type]
    if not isinstance(parts.sync, FullyShardedModel):
        return parts.sync.gradients(), specs, parts.groups
    whole = {name: torch.zeros(spec.shape, device="cuda") for name, spec in specs.items()}
    for piece in parts.sync.pieces():
        whole[piece.name].view(-1)[piece.start : piece.end] = piece.gradient * piece.factor
    return {name: all_reduce(gradient, parts.groups.dp_cp) for name, gradient in whole.items()}, specs, parts.groups


def check_layouts() -> None:
    references = reference()
    for name, (plan, data_parallel) in LAYOUTS.items():
        gradients, specs, groups = main_gradients(plan, data_parallel)
        expected = {key: references[key][specs[key].slices(groups)] for key in gradients}
        report = compare_gradients(gradients, expected, num_layers=LAYERS, specs=specs, groups=groups)
        assert report.ok, f"{name}\n{report.table()}"
        assert report.worst.rel > 1e-4, f"{name}: bfloat16 rounds, so this did not run in it"
        # The bounds are tight enough to see a gradient that misses a rank, or a tenth of itself.
        key = next(key for key in gradients if key.startswith("layers.") and key.endswith("mlp.up.weight"))
        for factor in (0.5, 1.1):
            check = check_gradient(key, gradients[key] * factor, expected[key], num_layers=LAYERS, spec=specs[key], groups=groups)
            assert not check.ok and check.bound == expected_rel_bound(check.layer, LAYERS), (name, check)
        assert relative_grad_diff(expected[key], expected[key], spec=specs[key], groups=groups) == 0.0


def test_bfloat16_gradients_of_two_gpus_are_within_their_bounds() -> None:
    run(check_layouts, 2, backend="nccl", timeout_s=100.0)
