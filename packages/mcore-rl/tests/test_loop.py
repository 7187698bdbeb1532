# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""An iteration over any layout: same rollouts, same weights everywhere, a policy that learns."""

import dataclasses

import pytest
import torch

from mcore_inference import DynamicInferenceContext, DynamicInferenceEngine, InferenceConfig, PagedAttention
from mcore_parallel import ParallelPlan, ProcessGroups, named_shards
from mcore_parallel.data import ByteTokenizer
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.optim import MegatronOptimizer, OptimizerConfig
from mcore_rl import GenericGenerationArgs, GRPOConfig, GRPOObjective, IterationReport, MegatronLocal, gather_weights, grpo_iteration, refit
from mcore_rl.envs import CharacterShare

TOKENIZER = ByteTokenizer()
SIZES = TransformerConfig(
    num_layers=2, hidden_size=32, num_attention_heads=2, ffn_hidden_size=48, vocab_size=-(-TOKENIZER.vocab_size // 8) * 8
)
CONFIG = GRPOConfig(
    num_groups=2, group_size=16, seq_len=16, micro_batch_size=8, generation_args=GenericGenerationArgs(temperature=1.0, max_tokens=8)
)


def iterate(plan: ParallelPlan, iterations: int, device: str = "cpu") -> list[IterationReport]:
    groups = ProcessGroups.build(plan)
    model = GPTModel(SIZES, groups, device=device)
    sync = DistributedDataParallel(DistributedDataParallelConfig(), model, groups)
    optimizer = MegatronOptimizer(OptimizerConfig(lr=2e-2, weight_decay=0.0), sync, groups)
    context = DynamicInferenceContext(SIZES, InferenceConfig(max_sequence_length=32, max_requests=32, block_size_tokens=8), device=device)
    copy = GPTModel(SIZES, ProcessGroups.single(), attention_core=PagedAttention(), seed=5, device=device).eval()
    engine = DynamicInferenceEngine(copy, context, TOKENIZER, seed=groups.world.rank, vocab_size=TOKENIZER.vocab_size)
    refit(model, groups, engine)
    agent = CharacterShare(["a", "b"][groups.world.rank % 2 :], "abcdefghijklmnopqrstuvwxyz")
    interface = MegatronLocal(engine)
    reports = []
    for _ in range(iterations):
        reports.append(
            grpo_iteration(
                CONFIG, agent=agent, interface=interface, engine=engine, model=model, groups=groups,
                objective=GRPOObjective(), sync=sync, optimizer=optimizer, lr=2e-2,
            )
        )  # fmt: skip
    for name, full in gather_weights(model, groups):
        assert torch.equal(full, dict(copy.named_parameters())[name]), name
    return reports


def check_refit(plan: ParallelPlan) -> None:
    """What is gathered from a layout is what one rank holds from the same seed, each parameter once."""
    groups = ProcessGroups.build(plan)
    for sizes in (SIZES, dataclasses.replace(SIZES, share_embeddings_and_output_weights=True)):
        whole = {shard.name: shard.parameter for shard in named_shards(GPTModel(sizes, ProcessGroups.single()))}
        gathered = list(gather_weights(GPTModel(sizes, groups), groups))
        assert [name for name, _ in gathered] == list(whole)
        assert all(torch.equal(full, whole[name]) for name, full in gathered)


@pytest.mark.world(4)
@pytest.mark.parametrize("plan", [ParallelPlan(tp=2, pp=2), ParallelPlan(tp=2, dp=2), ParallelPlan(pp=2, dp=2)])
def test_gathered_weights_are_the_global_ones(world, plan: ParallelPlan) -> None:
    world(check_refit, plan=plan)


def test_the_policy_learns_and_engine_and_trainer_agree() -> None:
    reports = iterate(ParallelPlan(), 8)
    assert sum(report.mean_reward for report in reports[-2:]) > 1.2 * sum(report.mean_reward for report in reports[:2])
    assert all(report.train.metrics["logprob_mismatch"] < 1e-5 for report in reports)
    assert reports[0].train.metrics["ratio"] == pytest.approx(1.0)


@pytest.mark.world(2)
@pytest.mark.parametrize("plan", [ParallelPlan(tp=2), ParallelPlan(pp=2), ParallelPlan(dp=2)])
def test_ranks_see_the_same_rollouts_and_keep_one_policy(world, plan: ParallelPlan) -> None:
    first, second = world(iterate, plan=plan, iterations=2)
    for ours, theirs in zip(first, second, strict=True):
        assert (ours.mean_reward, ours.num_rollouts, ours.train.loss) == (theirs.mean_reward, theirs.num_rollouts, theirs.train.loss)
        assert ours.train.metrics["logprob_mismatch"] < 1e-5


@pytest.mark.gpu
def test_the_policy_learns_on_a_gpu() -> None:
    reports = iterate(ParallelPlan(), 8, device="cuda")
    assert sum(report.mean_reward for report in reports[-2:]) > 1.2 * sum(report.mean_reward for report in reports[:2])


def test_sizes_that_cannot_learn_are_refused() -> None:
    with pytest.raises(ValueError, match="group_size=1 must be at least 2"):
        GRPOConfig(num_groups=1, group_size=1, seq_len=8)
