# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A policy takes over a teacher's distribution at the tokens that it writes itself."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from mcore_inference import DynamicInferenceContext, DynamicInferenceEngine, InferenceConfig, PagedAttention
from mcore_parallel import ParallelPlan, ProcessGroups, named_shards
from mcore_parallel.data import ByteTokenizer
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.nn import Step
from mcore_parallel.optim import MegatronOptimizer, OptimizerConfig
from mcore_parallel.training.distill import DistillationConfig, DistillationObjective, Teacher
from mcore_rl import (
    AdvantageConfig,
    Aggregation,
    GenericGenerationArgs,
    GRPOConfig,
    GRPOObjective,
    IterationReport,
    Learner,
    MegatronLocal,
    OverlongPenalty,
    PackingConfig,
    TokenRollout,
    grpo_iteration,
    refit,
)
from mcore_rl.envs import CharacterShare

TOKENIZER = ByteTokenizer()
SIZES = TransformerConfig(
    num_layers=2, hidden_size=32, num_attention_heads=2, ffn_hidden_size=48, vocab_size=-(-TOKENIZER.vocab_size // 8) * 8
)
LARGER = dataclasses.replace(SIZES, num_layers=3, hidden_size=48, init_method_std=0.1)
CONFIG = GRPOConfig(
    num_groups=4, group_size=4, seq_len=16, micro_batch_size=4, generation_args=GenericGenerationArgs(temperature=1.0, max_tokens=8)
)


class RolloutRecorder(CharacterShare):
    """Keeps the rollouts of each iteration."""

    def __init__(self) -> None:
        super().__init__(["a", "b", "c", "d"], "abc")
        self.rollouts: list[TokenRollout] = []

    async def group_rollout(self, *args: Any, **keywords: Any) -> list[TokenRollout]:
        group = await super().group_rollout(*args, **keywords)
        self.rollouts += group
        return group


def teacher_of(groups: ProcessGroups) -> Teacher:
    """Of another size than the student, and fond of a few letters."""
    model, whole = (
        GPTModel(LARGER, layout, unpadded_vocab_size=TOKENIZER.vocab_size, seed=9, dtype=torch.float64)
        for layout in (groups, ProcessGroups.single())
    )
    direction = torch.ones(LARGER.hidden_size, dtype=torch.float64) / LARGER.hidden_size**0.5
    with torch.no_grad():
        whole.get_parameter("embedding.weight").add_(direction)
        whole.get_parameter("output.weight")[TOKENIZER.tokenize("abc")] += 0.6 * direction
        weights = dict(whole.named_parameters())
        for shard in named_shards(model):
            shard.parameter.copy_(weights[shard.name][shard.spec.slices(groups)])
    return Teacher(model, groups=groups)


def distill(plan: ParallelPlan | None, iterations: int, config: GRPOConfig = CONFIG) -> tuple[list[IterationReport], float]:
    """The reports, and the divergence of the first iteration's answers, computed plainly."""
    groups = ProcessGroups.single() if plan is None else ProcessGroups.build(plan)
    student = GPTModel(SIZES, groups, unpadded_vocab_size=TOKENIZER.vocab_size, dtype=torch.float64)
    before = GPTModel(SIZES, ProcessGroups.single(), unpadded_vocab_size=TOKENIZER.vocab_size, dtype=torch.float64)
    teacher = teacher_of(groups)
    sync = DistributedDataParallel(DistributedDataParallelConfig(), student, groups)
    optimizer = MegatronOptimizer(OptimizerConfig(lr=1e-2, weight_decay=0.0), sync, groups)
    served = GPTModel(SIZES, ProcessGroups.single(), attention_core=PagedAttention(), dtype=torch.float64).eval()
    context = DynamicInferenceContext.for_model(
        served, InferenceConfig(max_sequence_length=32, max_requests=32, block_size_tokens=8, num_blocks=128)
    )
    engine = DynamicInferenceEngine(served, context, TOKENIZER, seed=groups.world.rank, vocab_size=TOKENIZER.vocab_size)
    refit(student, groups, engine)
    objective = DistillationObjective(config=DistillationConfig(reverse=True), teacher=teacher)
    learner = Learner(model=student, groups=groups, objective=objective, sync=sync, optimizer=optimizer, teacher=teacher)
    agent = RolloutRecorder()
    agent.start_at(0, rank=groups.world.rank, num_ranks=groups.world.size)
    parts: dict[str, Any] = {"agent": agent, "interface": MegatronLocal(engine), "engine": engine, "learner": learner}
    reports = [grpo_iteration(config, **parts, lr=1e-2)]
    plain = divergence(before, agent.rollouts)
    reports += [grpo_iteration(config, **parts, lr=1e-2) for _ in range(iterations - 1)]
    return reports, plain


def divergence(student: GPTModel, rollouts: list[TokenRollout]) -> float:
    """Mean KL(student || teacher) at the tokens that were written, answer by answer."""
    teacher, total, count = teacher_of(ProcessGroups.single()).chunks[0], 0.0, 0
    assert isinstance(teacher, GPTModel)
    for rollout in rollouts:
        tokens = torch.tensor(rollout.trajectory)[:-1]
        written = torch.tensor(rollout.generation_mask)[1:]
        logs = []
        for model in (student, teacher):
            with torch.no_grad():
                logs.append(model(tokens, Step.causal(1, len(tokens)))[0].logits()[written, : TOKENIZER.vocab_size].log_softmax(-1))
        total += (logs[0].exp() * (logs[0] - logs[1])).sum().item()
        count += int(written.sum())
    return total / count


@pytest.mark.journey
def test_the_divergence_falls_and_is_that_of_the_whole_distributions() -> None:
    reports, plain = distill(None, 7)
    assert reports[0].train.loss == pytest.approx(plain, rel=1e-6)
    first, last = reports[0].train.loss, reports[-1].train.loss
    assert last < 0.3 * first, (first, last)


def test_answers_may_be_packed() -> None:
    reports, plain = distill(None, 1, dataclasses.replace(CONFIG, packing=PackingConfig(bin_size=32)))
    assert reports[0].train.loss == pytest.approx(plain, rel=1e-6)


@pytest.mark.world(2, shared=True)
@pytest.mark.parametrize(
    "plan", [ParallelPlan(tp=2), ParallelPlan(pp=2), ParallelPlan(cp=2), ParallelPlan(dp=2)], ids=["tp", "pp", "cp", "dp"]
)
def test_every_layout_distils(world, plan: ParallelPlan) -> None:
    (one, plain), (other, rest) = world(distill, plan=plan, iterations=2)
    assert one[0].train.loss == other[0].train.loss == pytest.approx((plain + rest) / 2, rel=1e-6)
    assert one[-1].train.loss < one[0].train.loss


def test_teacher_and_objective_go_together() -> None:
    groups, nobody = ProcessGroups.single(), None
    parts: dict[str, Any] = {**dict.fromkeys(("sync", "optimizer")), "model": nn.Identity(), "groups": groups}
    teacher = teacher_of(groups)
    alone = Learner(objective=GRPOObjective(), teacher=teacher, **parts)
    without = Learner(objective=DistillationObjective(teacher=teacher), **parts)
    both = Learner(objective=DistillationObjective(teacher=teacher), teacher=teacher, **parts)
    rest: dict[str, Any] = {"agent": nobody, "interface": nobody, "engine": nobody, "lr": 1.0}
    with pytest.raises(ValueError, match="teacher=given and an objective of GRPOObjective do not go together"):
        grpo_iteration(CONFIG, learner=alone, **rest)
    with pytest.raises(ValueError, match="teacher=None and an objective of DistillationObjective do not go together"):
        grpo_iteration(CONFIG, learner=without, **rest)
    reference = dataclasses.replace(both, reference=nn.Identity())
    for learner, options in (
        (both, {"aggregation": Aggregation(mode="sequence_mean")}),
        (both, {"advantage": AdvantageConfig(scale="none")}),
        (both, {"overlong": OverlongPenalty(max_length=8, buffer=2)}),
        (both, {"reward_clip": (-1.0, 1.0)}),
        (both, {"filter_equal_groups": True}),
        (both, {"old_logprobs": "inference"}),
        (reference, {"kl_in_reward": 0.1}),
    ):
        with pytest.raises(ValueError, match=f"{next(iter(options))}=.* has no effect on a distillation"):
            grpo_iteration(dataclasses.replace(CONFIG, **options), learner=learner, **rest)
