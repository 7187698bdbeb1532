# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Virtual stages and the other schedules train as one rank does."""

import functools

import pytest
import torch

from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.optim import MegatronOptimizer, OptimizerConfig
from mcore_parallel.pipeline import ModelChunks, PipelineLayout, Schedule, combined_one_f_one_b, interleaved_one_f_one_b, zero_bubble
from mcore_parallel.training import Batch, CrossEntropyObjective, TensorShard, evaluate, model_state, train_step

CONFIG = TransformerConfig(
    num_layers=5, hidden_size=8, num_attention_heads=2, num_query_groups=2, ffn_hidden_size=12, vocab_size=16, init_method_std=0.2
)
SCHEDULES: dict[str, tuple[str, Schedule | None]] = {
    "interleaved": ("Et|tt|t|tL", None),
    "groups": ("Ett|t||ttL", functools.partial(interleaved_one_f_one_b, num_chunks=2, group_size=3)),
    "pairs": ("Et|t|ttt|L", functools.partial(combined_one_f_one_b, num_chunks=2, delay_weight_grad=True)),
    "zero bubble": ("Etttt|tL", zero_bubble),
}
# Losses and gradient norms of the steps, the loss of the evaluation, the parameters.
Run = tuple[list[float], float, dict[str, TensorShard]]


def micro_batches(step: int, count: int = 5) -> list[Batch]:
    tokens = torch.randint(0, 16, (count, 2, 5), generator=torch.Generator().manual_seed(step))
    return [Batch(tokens=x[:, :-1], labels=x[:, 1:], loss_mask=torch.ones(2, 4)) for x in tokens]


def run(groups: ProcessGroups, layout: PipelineLayout, schedule: Schedule | None) -> Run:
    model = ModelChunks([GPTModel(CONFIG, groups, layers=part, dtype=torch.float64) for part in layout.of_rank(groups.pp.rank)])
    sync = DistributedDataParallel(DistributedDataParallelConfig(), model, groups)
    optimizer = MegatronOptimizer(OptimizerConfig(lr=1.0, clip_grad=0.5, weight_decay=0.1), sync, groups)
    numbers: list[float] = []
    for step in range(2):
        report = train_step(model, micro_batches(step), CrossEntropyObjective(), sync, optimizer, lr=0.02, groups=groups, pipeline=schedule)
        numbers += [report.loss, report.grad_norm]
    final = evaluate(model, micro_batches(9), CrossEntropyObjective(), groups=groups)
    assert model.training
    return numbers, (final.sum / final.count).item(), model_state(model, groups)


@functools.cache
def serial() -> Run:
    return run(ProcessGroups.single(), PipelineLayout.even(5, num_stages=1), None)


def check_schedules(degrees: dict[str, int], expected: Run) -> None:
    groups = ProcessGroups.build(ParallelPlan(pp=2, **degrees))
    for text, schedule in SCHEDULES.values():
        numbers, final, state = run(groups, PipelineLayout.parse(text, num_stages=2, num_layers=5), schedule)
        torch.testing.assert_close(numbers, expected[0], rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(final, expected[1], rtol=1e-9, atol=0)
        for name, shard in state.items():
            part = tuple(slice(begin, begin + size) for begin, size in zip(shard.offset, shard.data.shape, strict=True))
            torch.testing.assert_close(shard.data, expected[2][name].data[part], rtol=1e-8, atol=1e-9)


@pytest.mark.world(2)
def test_every_schedule_trains_as_one_rank(world) -> None:
    world(check_schedules, degrees={}, expected=serial())


@pytest.mark.world(4)
def test_every_schedule_trains_as_one_rank_beside_tensor_parallelism(world) -> None:
    world(check_schedules, degrees={"tp": 2}, expected=serial())


def test_a_layout_of_further_tokens_is_refused_by_a_model_without_them() -> None:
    layout = PipelineLayout.parse("Etm|L", num_stages=2)
    with pytest.raises(ValueError, match="places mtp_layers, which GPTModel does not hold"):
        GPTModel(CONFIG, ProcessGroups.single(), layers=layout.stage(0))
