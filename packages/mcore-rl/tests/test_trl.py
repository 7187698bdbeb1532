# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Losses and gradients are those that TRL's own trainer computes, for each of its loss types that the objective has."""

import itertools
import math
from collections import defaultdict
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_parallel import ProcessGroups
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.training import Batch
from mcore_rl import (
    Aggregation,
    BatchStyle,
    ContrastiveRollout,
    DPOObjective,
    GRPOObjective,
    ImportanceCorrection,
    PolicyLossConfig,
    TokenRollout,
    pair_batches,
    with_ref_logprobs,
)
from mcore_rl._packing._trajectories import TrajectoryBatches, place_rows, write_batches

pytest.importorskip("trl")

SIZES = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, ffn_hidden_size=16, vocab_size=16, init_method_std=0.6)
# Prompt and answer.
LENGTHS = ((2, 5), (1, 3), (3, 1), (1, 7), (4, 2), (2, 4))
ADVANTAGES = (1.3, -0.7, 0.4, -2.0, 0.9, -0.4)
LONGEST = 9


@dataclass(frozen=True, kw_only=True)
class Case:
    """What TRL calls a loss, and what it is here."""

    loss_type: str
    policy: PolicyLossConfig = field(default_factory=lambda: PolicyLossConfig(clip_low=0.1, clip_high=0.3))
    aggregation: Aggregation
    kl_beta: float = 0.0
    entropy_weight: float = 0.0
    correction: ImportanceCorrection | None = None
    temperature: float = 1.0


DAPO = Case(loss_type="dapo", aggregation=Aggregation())
GSPO = PolicyLossConfig(ratio_level="sequence", clip_low=0.03, clip_high=0.04)
CASES = {
    "grpo": Case(loss_type="grpo", aggregation=Aggregation(mode="sequence_mean")),
    "bnpo": Case(loss_type="bnpo", aggregation=Aggregation()),
    "dr_grpo": Case(loss_type="dr_grpo", aggregation=Aggregation(mode="constant", length=LONGEST)),
    "dapo": DAPO,
    "cispo": replace(DAPO, loss_type="cispo", policy=PolicyLossConfig(kind="cispo", clip_low=math.inf, clip_high=0.4)),
    "gspo": Case(loss_type="grpo", policy=GSPO, aggregation=Aggregation(mode="sequence_mean")),
    "luspo": Case(loss_type="luspo", policy=GSPO, aggregation=Aggregation(mode="sequence_sum")),
    "delta": replace(DAPO, policy=PolicyLossConfig(clip_low=0.1, clip_high=0.3, dual_clip=1.5)),
    "kl": Case(loss_type="grpo", aggregation=Aggregation(mode="sequence_mean"), kl_beta=0.2),
    "entropy": Case(loss_type="bnpo", aggregation=Aggregation(), entropy_weight=0.05),
    "temperature": replace(DAPO, temperature=0.7, kl_beta=0.1),
    "truncated weights": replace(DAPO, correction=ImportanceCorrection(high=1.1), kl_beta=0.1),
}


def rollouts() -> list[TokenRollout]:
    generator = torch.Generator().manual_seed(0)
    return [
        TokenRollout(
            trajectory=torch.randint(16, (prompt + written,), generator=generator).tolist(),
            reward=0.0,
            generation_mask=[False] * prompt + [True] * written,
            logprobs=[0.0] * written,
            env_id="env",
            problem_id="0",
        )
        for prompt, written in LENGTHS
    ]


def forward(model: GPTModel, tokens: list[int], temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probability of each token but the first, and entropy of its distribution."""
    row = torch.tensor([tokens])
    batch = Batch(tokens=row[:, :-1], labels=row[:, 1:], loss_mask=torch.ones(1, row.shape[1] - 1))
    output, _ = model(batch.tokens.flatten(), batch.step())
    every = (output.logits() / temperature).log_softmax(-1)
    return every.gather(1, batch.labels.flatten()[:, None]).squeeze(1), -(every.exp() * every).sum(-1)


def scores(model: GPTModel, temperature: float) -> dict[str, list[Tensor]]:
    """Of the engine, of the policy before the update and of a reference: near those of the policy, on both sides of every bound."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        current = [forward(model, rollout.trajectory, temperature)[0] for rollout in rollouts()]

    def near(values: list[Tensor], spread: float) -> list[Tensor]:
        return [one + spread * torch.randn(one.shape, generator=generator, dtype=one.dtype) for one in values]

    old = near(current, 0.4)
    return {"old_logprobs": old, "inference_logprobs": near(old, 0.3), "ref_logprobs": near(current, 0.5)}


def ours(case: Case) -> tuple[Tensor, list[Tensor]]:
    model = GPTModel(SIZES, ProcessGroups.single(), dtype=torch.float64)
    places, shape = place_rows(rollouts(), 9, len(LENGTHS))
    written = write_batches(rollouts(), places, shape, BatchStyle(aggregation=case.aggregation, dtype=torch.float64))
    batches = TrajectoryBatches(batches=written, places=places).with_advantages(ADVANTAGES)
    for name, rows in scores(model, case.temperature).items():
        values = [torch.zeros_like(batch.loss_mask) for batch in batches.batches]
        for row, place in zip(rows, places, strict=True):
            values[place.batch].flatten()[place.start : place.start + place.num_labels] = row
        batches = batches.with_extra(name, values)
    objective = GRPOObjective(
        policy=case.policy,
        kl_beta=case.kl_beta,
        entropy_weight=case.entropy_weight,
        temperature=case.temperature,
        correction=case.correction,
    )
    [batch] = batches.batches
    output, _ = model(batch.tokens.flatten(), batch.step())
    report = objective(output, batch)
    loss = report.sum / report.count
    return loss, list(torch.autograd.grad(loss, list(model.parameters())))


def trainer(case: Case) -> SimpleNamespace:
    """What the trainer's loss reads of the trainer."""

    def per_token(model: GPTModel, ids: Tensor, mask: Tensor, kept: int, **_: Any) -> tuple[Tensor, Tensor, None]:
        """Of the last ``kept`` tokens of each row; 0 where there is padding."""
        scored = [forward(model, row[real.bool()].tolist(), case.temperature) for row, real in zip(ids, mask, strict=True)]
        logprobs, entropy = (
            padded([values[prompt - 1 :] for values, (prompt, _) in zip(rows, LENGTHS, strict=True)], kept)
            for rows in zip(*scored, strict=True)
        )
        return logprobs, entropy, None

    policy = case.policy
    return SimpleNamespace(
        _get_per_token_logps_and_entropies=per_token,
        loss_type=case.loss_type,
        importance_sampling_level=policy.ratio_level,
        epsilon_low=policy.clip_low,
        epsilon_high=policy.clip_high + 1 if policy.kind == "cispo" else policy.clip_high,
        beta=case.kl_beta,
        max_completion_length=LONGEST,
        current_gradient_accumulation_steps=1,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=case.correction is not None,
        vllm_importance_sampling_correction=case.correction is not None,
        aux_loss_enabled=False,
        use_adaptive_entropy=False,
        _entropy_bonus_enabled=case.entropy_weight != 0,
        entropy_coef=case.entropy_weight,
        args=SimpleNamespace(use_bias_correction_kl=False, delta=policy.dual_clip, steps_per_generation=1),
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(
            num_processes=1, sync_gradients=True, gather=lambda value: value, reduce=lambda value, reduction: value
        ),
        _metrics=defaultdict(lambda: defaultdict(list)),
    )


def padded(rows: list[Tensor], width: int, *, left: bool = False) -> Tensor:
    return torch.stack([torch.cat([gap, row] if left else [row, gap]) for row in rows for gap in [row.new_zeros(width - len(row))]])


def theirs(case: Case) -> tuple[Tensor, list[Tensor]]:
    from trl.trainer.grpo_trainer import GRPOTrainer  # pyright: ignore[reportMissingImports]

    model = GPTModel(SIZES, ProcessGroups.single(), dtype=torch.float64)
    prompts = [torch.tensor(rollout.trajectory[:prompt]) for rollout, (prompt, _) in zip(rollouts(), LENGTHS, strict=True)]
    answers = [torch.tensor(rollout.trajectory[prompt:]) for rollout, (prompt, _) in zip(rollouts(), LENGTHS, strict=True)]
    width, before = max(map(len, answers)), max(map(len, prompts))
    old, engine, ref = (
        padded([row[prompt - 1 :] for row, (prompt, _) in zip(rows, LENGTHS, strict=True)], width)
        for rows in scores(model, case.temperature).values()
    )
    inputs = {
        "prompt_ids": padded(prompts, before, left=True),
        "prompt_mask": padded([torch.ones_like(row) for row in prompts], before, left=True),
        "completion_ids": padded(answers, width),
        "completion_mask": padded([torch.ones_like(row) for row in answers], width),
        "advantages": torch.tensor(ADVANTAGES, dtype=torch.float64),
        "old_per_token_logps": old,
        "ref_per_token_logps": ref,
        "num_items_in_batch": torch.tensor(sum(map(len, answers))),
    }
    if case.correction is not None:
        inputs["importance_sampling_ratio"] = torch.exp(old - engine).clamp(max=case.correction.high)
    loss = GRPOTrainer._compute_loss(trainer(case), model, inputs)
    return loss, list(torch.autograd.grad(loss, list(model.parameters())))


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_those_of_trl(name: str) -> None:
    (loss, gradients), (wanted, wanted_gradients) = ours(CASES[name]), theirs(CASES[name])
    torch.testing.assert_close(loss, wanted, rtol=1e-10, atol=1e-12)
    for one, other in zip(gradients, wanted_gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)
    assert max(one.abs().max().item() for one in gradients) > 1e-3


def test_each_case_is_another_loss() -> None:
    # Of one rank, and without accumulation, TRL's bnpo is its dapo.
    losses = {name: ours(case)[0].item() for name, case in CASES.items()}
    assert losses.pop("bnpo") == pytest.approx(losses["dapo"])
    values = sorted(losses.values())
    assert all(after - before > 1e-6 for before, after in itertools.pairwise(values))


def pairs() -> list[ContrastiveRollout]:
    """Of prompts and answers of several lengths, two of one prompt each."""
    generator = torch.Generator().manual_seed(2)
    made = []
    for number, (prompt, chosen, rejected) in enumerate(((2, 5, 3), (1, 1, 6), (3, 4, 4))):
        question = torch.randint(16, (prompt,), generator=generator).tolist()
        answers = [
            TokenRollout(
                trajectory=[*question, *torch.randint(16, (written,), generator=generator).tolist()],
                reward=reward,
                generation_mask=[False] * prompt + [True] * written,
                logprobs=None,
                env_id="env",
                problem_id=str(number),
            )
            for written, reward in ((chosen, 1.0), (rejected, 0.0))
        ]
        made.append(ContrastiveRollout(chosen=answers[0], rejected=answers[1]))
    return made


def preferred(objective: DPOObjective) -> tuple[Tensor, list[Tensor]]:
    model, reference = (GPTModel(SIZES, ProcessGroups.single(), dtype=torch.float64, seed=seed) for seed in (0, 1))
    groups = ProcessGroups.single()
    [batch] = with_ref_logprobs(
        reference, pair_batches(pairs(), seq_len=9, micro_batch_size=6, style=BatchStyle(dtype=torch.float64)), groups
    )
    output, _ = model(batch.tokens.flatten(), batch.step())
    report = objective(output, batch)
    loss = report.sum / report.count
    return loss, list(torch.autograd.grad(loss, list(model.parameters())))


def preferred_by_trl(objective: DPOObjective, loss_type: str, made: list[ContrastiveRollout]) -> tuple[Tensor, list[Tensor]]:
    from trl.trainer.dpo_trainer import DPOTrainer  # pyright: ignore[reportMissingImports]

    model, reference = (GPTModel(SIZES, ProcessGroups.single(), dtype=torch.float64, seed=seed) for seed in (0, 1))
    rows = [pair.chosen for pair in made] + [pair.rejected for pair in made]
    tokens = [torch.tensor(row.trajectory) for row in rows]
    width = max(map(len, tokens))

    def outputs(scored: GPTModel, labels: Tensor) -> SimpleNamespace:
        logprobs = padded([forward(scored, row.trajectory, 1.0)[0] for row in rows], width - 1)
        kept = torch.where(labels[:, 1:] != -100, logprobs, 0)
        nothing = torch.zeros_like(kept)
        return SimpleNamespace(log_probs=kept, entropy=nothing, mean_logits=nothing, is_top1=nothing.bool())

    inputs = {
        "input_ids": padded(tokens, width),
        "attention_mask": padded([torch.ones_like(row) for row in tokens], width),
        "completion_mask": padded([torch.tensor(row.generation_mask, dtype=torch.int64) for row in rows], width),
    }
    with torch.no_grad():
        known = outputs(reference, inputs["input_ids"].masked_fill(inputs["completion_mask"] == 0, -100)).log_probs.sum(1)
    inputs["ref_chosen_logps"], inputs["ref_rejected_logps"] = known.chunk(2)
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(device=torch.device("cpu"), gather=lambda value: value, gather_for_metrics=lambda value: value),
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=[loss_type],
        loss_weights=[1.0],
        beta=objective.beta,
        label_smoothing=objective.label_smoothing,
        use_weighting=False,
        _total_train_tokens=0,
        _tp_size=1,
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    loss = DPOTrainer._compute_loss(trainer, lambda labels, **_: outputs(model, labels), inputs, return_outputs=False)
    return loss, list(torch.autograd.grad(loss, list(model.parameters())))


@pytest.mark.parametrize("beta", [0.1, 2.0])
def test_the_loss_of_preferences_is_that_of_trl(beta: float) -> None:
    objective = DPOObjective(beta=beta)
    (loss, gradients), (wanted, wanted_gradients) = preferred(objective), preferred_by_trl(objective, "sigmoid", pairs())
    torch.testing.assert_close(loss, wanted, rtol=1e-10, atol=1e-12)
    for one, other in zip(gradients, wanted_gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)
    assert max(one.abs().max().item() for one in gradients) > 1e-3


def test_label_smoothing_is_that_of_trl() -> None:
    # TRL smooths the labels of its aot; of one pair, whose ratios need no order, that is DPO.
    objective = DPOObjective(beta=0.5, label_smoothing=0.2)
    loss, gradients = preferred(objective)
    alone = [preferred_by_trl(objective, "aot", [pair]) for pair in pairs()]
    torch.testing.assert_close(loss, torch.stack([one for one, _ in alone]).mean(), rtol=1e-10, atol=1e-12)
    for one, *others in zip(gradients, *(parts for _, parts in alone), strict=True):
        torch.testing.assert_close(one, torch.stack(others).mean(0), rtol=1e-8, atol=1e-10)
