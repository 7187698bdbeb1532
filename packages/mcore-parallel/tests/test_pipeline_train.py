# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Virtual stages and the other schedules train as one rank does, with the embedding shared by both ends too."""

import dataclasses
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist

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
    "groups": ("Ett|t||ttL", functools.partial(interleaved_one_f_one_b, num_chunks=2, group_size=4)),
    "pairs": ("Et|t|ttt|L", functools.partial(combined_one_f_one_b, num_chunks=2, delay_weight_grad=True)),
    "zero bubble": ("Etttt|tL", zero_bubble),
}
TIED = dataclasses.replace(CONFIG, share_embeddings_and_output_weights=True)
TIED_SCHEDULES = {**SCHEDULES, "one chunk": ("Ettt|ttL", None)}
# Of data parallelism, which the sum over both ends follows.
SYNCS: tuple[dict[str, Any], ...] = (
    {"gradient_accumulation_fusion": False},
    {"bucket_size": 40},
    {"use_distributed_optimizer": True, "overlap_param_gather": True, "bucket_size": 40},
)
# Losses and gradient norms of the steps, the loss of the evaluation, the parameters.
Run = tuple[list[float], float, dict[str, TensorShard]]


def micro_batches(step: int, count: int = 4) -> list[Batch]:
    tokens = torch.randint(0, 16, (count, 2, 5), generator=torch.Generator().manual_seed(step))
    return [Batch(tokens=x[:, :-1], labels=x[:, 1:], loss_mask=torch.ones(2, 4)) for x in tokens]


def run(groups: ProcessGroups, layout: PipelineLayout, schedule: Schedule | None, config=CONFIG, **sync_options: Any) -> Run:
    model = ModelChunks([GPTModel(config, groups, layers=part, dtype=torch.float64) for part in layout.of_rank(groups.pp.rank)])
    sync = DistributedDataParallel(DistributedDataParallelConfig(**sync_options), model, groups)
    rule = OptimizerConfig(lr=1.0, clip_grad=0.5, weight_decay=0.1, use_distributed_optimizer=sync.is_sliced)
    optimizer = MegatronOptimizer(rule, sync, groups)
    mine = slice(groups.dp.rank, None, groups.dp.size)
    numbers: list[float] = []
    for step in range(2):
        batches = micro_batches(step)[mine]
        report = train_step(model, batches, CrossEntropyObjective(), sync, optimizer, lr=0.02, groups=groups, pipeline=schedule)
        numbers += [report.loss, report.grad_norm]
    final = evaluate(model, micro_batches(9)[mine], CrossEntropyObjective(), groups=groups)
    assert model.training
    return numbers, (final.sum / final.count).item(), model_state(model, groups)


@functools.cache
def serial(config: TransformerConfig = CONFIG) -> Run:
    return run(ProcessGroups.single(), PipelineLayout.even(5, num_stages=1), None, config)


def check_run(found: Run, expected: Run) -> None:
    torch.testing.assert_close(found[0], expected[0], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-9, atol=0)
    for name, shard in found[2].items():
        part = tuple(slice(begin, begin + size) for begin, size in zip(shard.offset, shard.data.shape, strict=True))
        torch.testing.assert_close(shard.data, expected[2][name].data[part], rtol=1e-8, atol=1e-9)


def check_schedules(degrees: dict[str, int], expected: Run) -> None:
    groups = ProcessGroups.build(ParallelPlan(pp=2, **degrees))
    # The size of a group is a matter of the order alone, which other axes do not see.
    for text, schedule in [table for title, table in SCHEDULES.items() if title != "groups" or not degrees]:
        check_run(run(groups, PipelineLayout.parse(text, num_stages=2, num_layers=5), schedule), expected)


def check_tied(degrees: dict[str, int], expected: Run) -> None:
    groups = ProcessGroups.build(ParallelPlan(**degrees))
    stages = groups.pp.size
    tables = TIED_SCHEDULES if stages == 2 else {"one chunk": ("Et|tt||ttL", None)}
    if len(degrees) > 1:
        tables = {title: tables[title] for title in ("one chunk", "interleaved", "zero bubble")}
    # All syncs with one schedule where both ends are alone or have replicas; where there are replicas, each with a further one.
    syncs = dict.fromkeys(tables, SYNCS[:1])
    if groups.dp.size > 1:
        syncs = {"one chunk": SYNCS, "interleaved": SYNCS[2:], "zero bubble": SYNCS[1:2]}
    elif degrees == {"pp": 2}:
        syncs["one chunk"] = SYNCS
    for title, (text, schedule) in tables.items():
        for options in syncs[title]:
            found = run(groups, PipelineLayout.parse(text, num_stages=stages, num_layers=5), schedule, TIED, **options)
            check_run(found, expected)
            assert "output.weight" not in found[2]
            if groups.embd is None:
                assert "embedding.weight" not in found[2]
                continue
            shard = found[2]["embedding.weight"]
            assert shard.replica == groups.embd.rank * groups.dp.size + groups.dp.rank
            copies = [torch.empty_like(shard.data) for _ in range(2)]
            dist.all_gather(copies, shard.data.contiguous(), group=groups.embd.pg)
            assert torch.equal(*copies)


@pytest.mark.world(2)
def test_every_schedule_trains_as_one_rank(world) -> None:
    world(check_schedules, degrees={}, expected=serial())


@pytest.mark.journey
@pytest.mark.world(4)
def test_every_schedule_trains_as_one_rank_beside_tensor_parallelism(world) -> None:
    world(check_schedules, degrees={"tp": 2}, expected=serial())


@pytest.mark.journey
@pytest.mark.world(2)
def test_both_ends_share_the_embedding_under_every_schedule(world) -> None:
    world(check_tied, degrees={"pp": 2}, expected=serial(TIED))


@pytest.mark.world(4)
@pytest.mark.parametrize(
    "degrees",
    [pytest.param({"pp": 2, "dp": 2}, marks=pytest.mark.journey), pytest.param({"tp": 2, "pp": 2}, marks=pytest.mark.journey), {"pp": 4}],
)
def test_both_ends_share_the_embedding_beside_other_axes(world, degrees: dict[str, Any]) -> None:
    world(check_tied, degrees=degrees, expected=serial(TIED))


def test_ends_of_tied_embeddings_that_cannot_meet_are_an_error() -> None:
    for part in PipelineLayout.parse("Ett|tttL", num_stages=1).stages:
        with pytest.raises(ValueError, match=r"need embedding and output in one chunk.* on stage 0 of pp=1"):
            GPTModel(TIED, ProcessGroups.single(), layers=part)


def test_a_layout_of_further_tokens_is_refused_by_a_model_without_them() -> None:
    layout = PipelineLayout.parse("Etm|L", num_stages=2)
    with pytest.raises(ValueError, match="puts 1 depths 'm' on a stage without the loss"):
        GPTModel(CONFIG, ProcessGroups.single(), layers=layout.stage(0))
