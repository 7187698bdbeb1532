# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""DPO against its formula, sequence by sequence in float64; the same in every layout, and a policy that learns to prefer."""

import math
from typing import Any

import pytest
import torch

from mcore_moe import MoEConfig, moe_feed_forward
from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.optim import MegatronOptimizer, OptimizerConfig
from mcore_parallel.training import Batch, TrainReport, train_step
from mcore_rl import (
    Aggregation,
    BatchStyle,
    ContrastiveRollout,
    DPOObjective,
    FrozenWeights,
    TokenRollout,
    pair_batches,
    with_ref_logprobs,
)

SIZES = TransformerConfig(num_layers=2, hidden_size=16, num_attention_heads=2, ffn_hidden_size=24, vocab_size=16, init_method_std=0.5)
LENGTHS = ((2, 5, 3), (1, 3, 6), (3, 1, 1), (2, 4, 2))
STYLE = BatchStyle(dtype=torch.float64)


def answer(prompt: list[int], written: list[int], reward: float, number: int) -> TokenRollout:
    return TokenRollout(
        trajectory=[*prompt, *written],
        reward=reward,
        generation_mask=[False] * len(prompt) + [True] * len(written),
        logprobs=[-1.0] * len(written),
        env_id="env",
        problem_id=str(number),
    )


def pairs() -> list[ContrastiveRollout]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for number, lengths in enumerate(LENGTHS):
        prompt, better, worse = (torch.randint(16, (length,), generator=generator).tolist() for length in lengths)
        made.append(ContrastiveRollout(chosen=answer(prompt, better, 1.0, number), rejected=answer(prompt, worse, 0.0, number)))
    return made


def models(groups: ProcessGroups) -> tuple[GPTModel, GPTModel]:
    return GPTModel(SIZES, groups, dtype=torch.float64), GPTModel(SIZES, groups, dtype=torch.float64, seed=7)


def sequence_logprob(model: GPTModel, rollout: TokenRollout) -> torch.Tensor:
    row, prompt = torch.tensor([rollout.trajectory]), rollout.generation_mask.index(True)
    batch = Batch(tokens=row[:, :-1], labels=row[:, 1:], loss_mask=torch.ones(1, row.shape[1] - 1))
    every = model(batch.tokens.flatten(), batch.step())[0].logits().log_softmax(-1)
    return every.gather(1, batch.labels.flatten()[:, None])[prompt - 1 :].sum()


def expected(objective: DPOObjective) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The losses that TRL has as its sigmoid loss, pair by pair."""
    policy, reference = models(ProcessGroups.single())
    losses = []
    for pair in pairs():
        with torch.no_grad():
            ref = sequence_logprob(reference, pair.chosen) - sequence_logprob(reference, pair.rejected)
        logits = sequence_logprob(policy, pair.chosen) - sequence_logprob(policy, pair.rejected) - ref
        right, wrong = (-torch.log(1 / (1 + torch.exp(-sign * objective.beta * logits))) for sign in (1, -1))
        losses.append(right * (1 - objective.label_smoothing) + wrong * objective.label_smoothing)
    loss = torch.stack(losses).mean()
    return loss, list(torch.autograd.grad(loss, list(policy.parameters())))


@pytest.mark.parametrize("rows", [2, 4, 6, 8])
@pytest.mark.parametrize("objective", [DPOObjective(), DPOObjective(beta=0.7, label_smoothing=0.2)], ids=str)
def test_loss_and_gradient_are_those_of_the_formula(objective: DPOObjective, rows: int) -> None:
    policy, reference = models(ProcessGroups.single())
    batches = pair_batches(pairs(), seq_len=8, micro_batch_size=rows, num_pairs=5, style=STYLE)
    total, count = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for batch in with_ref_logprobs(reference, batches, ProcessGroups.single()):
        report = objective(policy(batch.tokens.flatten(), batch.step())[0], batch)
        total, count = total + report.sum, count + report.count
    assert count == 4
    loss, gradients = expected(objective)
    torch.testing.assert_close(total / count, loss, rtol=1e-10, atol=1e-12)
    for ours, theirs in zip(torch.autograd.grad(total / count, list(policy.parameters())), gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


def learn(plan: ParallelPlan | None) -> list[tuple[float, float]]:
    groups = ProcessGroups.single() if plan is None else ProcessGroups.build(plan)
    policy, _ = models(groups)
    sync = DistributedDataParallel(DistributedDataParallelConfig(), policy, groups)
    optimizer = MegatronOptimizer(OptimizerConfig(lr=3e-3, weight_decay=0.0), sync, groups)
    own = pairs()[groups.dp.rank :: groups.dp.size]
    batches = with_ref_logprobs(FrozenWeights(policy), pair_batches(own, seq_len=8, micro_batch_size=2, style=STYLE), groups)
    reports = [train_step(policy, batches, DPOObjective(), sync, optimizer, lr=3e-3) for _ in range(12)]
    return [(report.loss, report.metrics["accuracy"]) for report in reports]


def test_the_policy_learns_to_prefer() -> None:
    reports = learn(None)
    assert reports[0] == (pytest.approx(math.log(2)), 0.0)
    assert reports[-1][0] < 0.6 and reports[-1][1] == 1.0


def check(plan: ParallelPlan) -> None:
    for ours, theirs in zip(learn(plan), learn(None), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-9)


@pytest.mark.journey
@pytest.mark.world(2, shared=True)
@pytest.mark.parametrize("plan", [ParallelPlan(dp=2), ParallelPlan(tp=2), ParallelPlan(pp=2), ParallelPlan(cp=2)], ids=str)
def test_layouts_learn_alike(world, plan: ParallelPlan) -> None:
    world(check, plan=plan)


def mixture_step(plan: ParallelPlan | None, rows: int) -> TrainReport:
    groups = ProcessGroups.single() if plan is None else ProcessGroups.build(plan)
    moe = MoEConfig(num_moe_experts=4, moe_aux_loss_coeff=0.01, moe_ffn_hidden_size=8)
    policy = GPTModel(SIZES, groups, dtype=torch.float64, feed_forward=moe_feed_forward(moe))
    sync = DistributedDataParallel(DistributedDataParallelConfig(), policy, groups)
    optimizer = MegatronOptimizer(OptimizerConfig(lr=3e-3, weight_decay=0.0), sync, groups)
    own = pairs()[groups.dp.rank :: groups.dp.size]
    batches = pair_batches(own, seq_len=8, micro_batch_size=rows, num_pairs=0 if rows == 2 else 6, style=STYLE)
    batches = with_ref_logprobs(FrozenWeights(policy), batches, groups)
    return train_step(policy.train(), batches, DPOObjective(), sync, optimizer, lr=0.0)


@pytest.mark.parametrize("rows", [2, 4, 6, 8])
def test_auxiliary_losses_are_means_whatever_the_tokens_of_a_pair(rows: int) -> None:
    report = mixture_step(None, rows)
    losses = [value for (_, name), value in report.layers.losses.items() if name == "load_balancing_loss"]
    # Of a layer: 1 for an even router, 2 for one that sends all tokens to the same two of four experts.
    assert len(losses) == 2 and all(1 <= loss <= 2 for loss in losses)
    assert report.aux == pytest.approx(0.01 * sum(losses), rel=1e-9)


def check_mixture(plan: ParallelPlan) -> None:
    ours, theirs = mixture_step(plan, 2), mixture_step(None, 2)
    for value, expected in ((ours.loss, theirs.loss), (ours.aux, theirs.aux), (ours.grad_norm, theirs.grad_norm)):
        assert value == pytest.approx(expected, rel=1e-9)
    assert ours.layers.losses == pytest.approx(theirs.layers.losses, rel=1e-9)


@pytest.mark.world(2, shared=True)
@pytest.mark.parametrize("plan", [ParallelPlan(dp=2), ParallelPlan(tp=2), ParallelPlan(pp=2), ParallelPlan(cp=2)], ids=str)
def test_layouts_weigh_auxiliary_losses_alike(world, plan: ParallelPlan) -> None:
    world(check_mixture, plan=plan)


def test_what_holds_no_pairs_is_refused() -> None:
    with pytest.raises(ValueError, match="micro_batch_size=3 must be even"):
        pair_batches(pairs(), seq_len=8, micro_batch_size=3)
    with pytest.raises(ValueError, match="compared by all their tokens"):
        pair_batches(pairs(), seq_len=8, micro_batch_size=2, style=BatchStyle(aggregation=Aggregation(mode="sequence_mean")))
    for fields, message in (({"beta": 0.0}, "beta=0.0 must be positive"), ({"label_smoothing": 0.5}, "from 0 to below 0.5")):
        with pytest.raises(ValueError, match=message):
            DPOObjective(**fields)
    nothing: Any = None
    [batch, *_] = pair_batches(pairs(), seq_len=8, micro_batch_size=2)
    with pytest.raises(ValueError, match="DPO needs ref_logprobs"):
        DPOObjective()(nothing, batch)
