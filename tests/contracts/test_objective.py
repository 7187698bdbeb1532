# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Objectives: sums over tokens that add up over micro-batches, and leave masked tokens out."""

import pytest
import torch

from mcore_parallel import ProcessGroups
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.training import Batch, CrossEntropyObjective, LossReport, Objective
from mcore_rl import GRPOObjective
from tests.contracts.conformance import mismatches

CONFIG = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, ffn_hidden_size=16, vocab_size=16, init_method_std=0.3)

PROVIDERS: dict[str, Objective] = {
    "cross-entropy": CrossEntropyObjective(),
    "grpo": GRPOObjective(kl_beta=0.1, entropy_weight=0.01),
}


def batch() -> Batch:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(16, (4, 7), generator=generator)
    names = ("advantages", "inference_logprobs", "old_logprobs", "ref_logprobs")
    return Batch(
        tokens=tokens[:, :-1],
        labels=tokens[:, 1:],
        loss_mask=(torch.rand(4, 6, generator=generator) > 0.3).double(),
        extras={name: torch.randn(4, 6, dtype=torch.float64, generator=generator) - 2 * (name != "advantages") for name in names},
    )


def part(whole: Batch, rows: slice) -> Batch:
    extras = {name: value[rows] for name, value in whole.extras.items()}
    return Batch(tokens=whole.tokens[rows], labels=whole.labels[rows], loss_mask=whole.loss_mask[rows], extras=extras)


def reported(objective: Objective, batch: Batch) -> tuple[LossReport, torch.Tensor]:
    """The report, and the gradient of its sum by one weight."""
    model = GPTModel(CONFIG, ProcessGroups.single(), dtype=torch.float64)
    output, _ = model(batch.tokens.flatten(), batch.step())
    report = objective(output, batch)
    report.sum.backward()
    gradient = model.get_parameter("layers.0.mlp.down.weight").grad
    assert gradient is not None
    return report, gradient


@pytest.mark.parametrize("name", PROVIDERS)
def test_reports_of_micro_batches_add_up(name: str) -> None:
    objective, whole = PROVIDERS[name], batch()
    assert mismatches(objective, Objective) == []
    report, gradient = reported(objective, whole)
    assert report.sum.shape == report.count.shape == () and gradient.abs().sum() > 0
    assert report.count.item() == whole.loss_mask.sum().item()
    parts = [reported(objective, part(whole, rows)) for rows in (slice(0, 1), slice(1, 4))]
    torch.testing.assert_close(sum(one.sum for one, _ in parts), report.sum)
    torch.testing.assert_close(sum(one.count for one, _ in parts), report.count)
    torch.testing.assert_close(sum(one for _, one in parts), gradient)
    for metric, value in report.metrics.items():
        torch.testing.assert_close(sum(one.metrics[metric] for one, _ in parts), value)


@pytest.mark.parametrize("name", PROVIDERS)
def test_a_masked_token_has_no_influence(name: str) -> None:
    whole = batch()
    row, column = (whole.loss_mask == 0).nonzero()[0].tolist()
    others = [value.clone() for value in (whole.labels, *whole.extras.values())]
    for value in others:
        value[row, column] = 3
    changed = Batch(
        tokens=whole.tokens, labels=others[0], loss_mask=whole.loss_mask, extras=dict(zip(whole.extras, others[1:], strict=True))
    )
    (before, gradient), (after, other) = reported(PROVIDERS[name], whole), reported(PROVIDERS[name], changed)
    torch.testing.assert_close(after.sum, before.sum)
    torch.testing.assert_close(other, gradient)
