# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What the planner says of a model sharded by megatron_fsdp, beside its buffers and what was measured on GPUs."""

import dataclasses
import json

import pytest
import torch

from mcore_moe import MoEConfig, moe_feed_forward
from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.models import GPTModel, TransformerConfig, dense_feed_forward
from mcore_parallel.nn import RecomputeConfig
from mcore_parallel.optim import MegatronOptimizer, OptimizerConfig
from mcore_parallel.planner import Cluster, ExpertSizes, Layout, ModelSizes, PlannerError, Workload, estimate, step_cost
from mcore_parallel.planner._cli import main
from mcore_parallel.planner._estimate import stage_parts
from mcore_parallel.planner._sharded import FsdpUnit, unit_bytes
from mcore_parallel.planner._sizes import sizes
from mcore_tools.assembly import FullyShardedModel

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
TINY = TransformerConfig(num_layers=3, hidden_size=128, num_attention_heads=4, num_query_groups=2, vocab_size=512)
LLAMA = TransformerConfig(
    num_layers=32, hidden_size=4096, ffn_hidden_size=14336, num_attention_heads=32, num_query_groups=8, vocab_size=128256
)
SMALL = dataclasses.replace(LLAMA, num_layers=16, hidden_size=2048, ffn_hidden_size=8192)


@pytest.mark.parametrize(
    ("config", "micro_batch", "global_batch", "strategy", "norms", "measured"),
    [
        (LLAMA, 2, 4, "optim_grads_params", False, 92.5),
        (LLAMA, 2, 4, "optim_grads_params", True, 88.5),
        (SMALL, 4, 16, "optim", False, 34.9),
        (SMALL, 4, 16, "no_shard", False, 39.1),
    ],
)
def test_peaks_measured_on_two_h200s_are_estimated(config, micro_batch, global_batch, strategy, norms, measured) -> None:
    work = Workload(model=ModelSizes(config=config), sequence=4096, micro_batch=micro_batch, global_batch=global_batch)
    recompute = RecomputeConfig(modules=("norm",)) if norms else None
    memory = estimate(work, Layout(plan=ParallelPlan(dp=2), recompute=recompute, zero_dp_strategy=strategy))
    assert memory.gib()["allocated"] == pytest.approx(measured, rel=0.01)


def check_all_buffers() -> None:
    for strategy in STRATEGIES:
        check_buffers(strategy, tied=False, ep=1)
    check_buffers("optim_grads_params", tied=True, ep=2)


def check_buffers(strategy: str, *, tied: bool, ep: int) -> None:
    config = dataclasses.replace(TINY, share_embeddings_and_output_weights=tied)
    experts = ExpertSizes(num_experts=4, topk=2, ffn_hidden_size=64) if ep > 1 else None
    moe = MoEConfig(num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=64)
    feed_forward = dense_feed_forward if experts is None else moe_feed_forward(moe)
    plan = ParallelPlan(dp=2, ep=ep)
    groups = ProcessGroups.build(plan)
    work = Workload(model=ModelSizes(config=config, experts=experts), sequence=16, global_batch=8)
    layout = Layout(plan=plan, zero_dp_strategy=strategy)
    memory = estimate(work, layout, kernels=False)
    model = GPTModel(config, groups, feed_forward=feed_forward, dtype=torch.bfloat16)
    sharded = FullyShardedModel(model, groups, zero_dp_strategy=strategy)
    optimizer = MegatronOptimizer(OptimizerConfig(lr=1e-4, use_distributed_optimizer=True), sharded, groups)
    [chunk] = sharded.chunks
    parts = list(chunk.runtime.groups)
    params = {each.main.untyped_storage().data_ptr(): each.main.untyped_storage().nbytes() for each in parts}
    grads = sum(each.gradients.reduced.nbytes for each in parts)
    if strategy == "optim":
        grads += sum(4 * each.layout.numel for each in parts if each.topology.shards.size > 1)
    # Slices of small models are padded by up to 5 %, and the tables of the fused kernel exist on a GPU only.
    assert memory.params == pytest.approx(sum(params.values()), rel=0.05)
    assert memory.grads == pytest.approx(grads, rel=0.05)
    assert memory.optimizer == pytest.approx(optimizer.state_bytes["device"], rel=0.05)
    units = unit_bytes(work, layout, stage_parts(config, 1, 1, 0), sizes(work, layout, kernels=False), 0)
    estimates = {"root": units.root, "layers.0": units.layer, "embedding": units.embedding}
    for unit in chunk.runtime.units:
        unit_estimate = estimates.pop(unit.name or "root", None)
        if unit_estimate is None:
            continue
        assert unit_estimate.gathered == pytest.approx(unit.num_bytes, rel=0.05)
        whole = sum(4 * each.layout.numel for each in unit.groups) if layout.divides_grads else 0
        assert unit_estimate.summed == pytest.approx(whole, rel=0.05)
    assert set(estimates) == ({"embedding"} if tied else set()) and (units.embedding == FsdpUnit()) == (tied or not layout.divides_grads)


@pytest.mark.world(2)
def test_buffers_are_those_of_a_sharded_model(world) -> None:
    world(check_all_buffers)


def test_the_command_plans_a_sharded_model(capsys) -> None:
    words = "--model llama3-8b --gpus 2 --sequence 4096 --global-batch 4 --micro-batch 2 --fix tp=1 pp=1 cp=1 --recompute none --json"
    layouts = []
    for kind in ("ddp", "fsdp"):
        assert main([*words.split(), "--data-parallel", kind]) == 0
        layouts.append(json.loads(capsys.readouterr().out)["layouts"][0])
    assert layouts[1]["gib"]["params"] == pytest.approx(layouts[0]["gib"]["params"] / 2, rel=0.01)
    assert layouts[1]["gib"]["allocated"] == pytest.approx(92.5, rel=0.01)


def test_gathers_of_every_micro_batch_are_sent() -> None:
    work = Workload(model=ModelSizes(config=LLAMA), sequence=4096, global_batch=8)
    plan = ParallelPlan(dp=2)
    sent = [step_cost(work, Layout(plan=plan, zero_dp_strategy=each), Cluster()).bytes_sent for each in STRATEGIES]
    numel = work.model.num_parameters / 2
    # Four micro-batches: float32 sums once or in each, and gathers of 16 bits once a step or twice a micro-batch.
    assert sent == pytest.approx([8 * numel, 6 * numel, (4 * 4 + 2) * numel, (4 * 4 + 2 * 8) * numel], rel=0.01)
    with pytest.raises(PlannerError, match="optim_grads_params"):
        Layout(plan=plan, zero_dp_strategy="zero3")
