# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A head of one number a token: the same values and the same training in every layout."""

import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.models import GPTModel, TransformerConfig, ValueHead, add_value_head
from mcore_parallel.optim import MegatronOptimizer, OptimizerConfig
from mcore_parallel.training import Batch, LossReport, model_state, score, train_step

SIZES = TransformerConfig(num_layers=2, hidden_size=16, num_attention_heads=4, ffn_hidden_size=24, vocab_size=32, init_method_std=0.3)


def micro_batches() -> list[Batch]:
    rows = torch.randint(32, (4, 2, 17), generator=torch.Generator().manual_seed(0))
    return [Batch(tokens=row[:, :-1], labels=row[:, 1:], loss_mask=torch.ones(2, 16, dtype=torch.float64)) for row in rows]


@dataclasses.dataclass(frozen=True)
class ToParity:
    """Squared distance of each value to the parity of its token."""

    head: ValueHead | None

    def __call__(self, output: Any, batch: Batch) -> LossReport:
        assert self.head is not None
        error = self.head(output.hidden) - (batch.tokens.flatten() % 2)
        return LossReport(sum=error.square().sum(), count=batch.weight())


def train(groups: ProcessGroups, config: TransformerConfig = SIZES) -> tuple[list[float], list[Tensor], Tensor | None]:
    """Losses, values, and this rank's part of the embedding, if it has one."""
    model = GPTModel(config, groups, dtype=torch.float64)
    head = add_value_head(model)
    sync = DistributedDataParallel(DistributedDataParallelConfig(), model, groups)
    optimizer = MegatronOptimizer(OptimizerConfig(lr=1e-2, weight_decay=0.1, clip_grad=1.0), sync, groups)
    batches = micro_batches()[groups.dp.rank :: groups.dp.size]
    losses = [train_step(model, batches, ToParity(head), sync, optimizer, lr=1e-2).loss for _ in range(2)]
    assert ("value_head.weight" in model_state(model, groups)) == groups.pp.is_last
    values = score(model, micro_batches(), lambda output, batch: head(output.hidden), groups=groups)  # pyright: ignore[reportOptionalCall]
    return losses, values, None if model.embedding is None else model.get_parameter("embedding.weight").detach()


@functools.cache
def serial(config: TransformerConfig = SIZES) -> tuple[list[float], list[Tensor], Tensor | None]:
    return train(ProcessGroups.single(), config)


def check(
    plan: ParallelPlan, config: TransformerConfig, expected: list[float], whole: list[Tensor], expected_table: Tensor | None = None
) -> None:
    losses, values, table = train(ProcessGroups.build(plan), config)
    assert losses == pytest.approx(expected, rel=1e-10) and losses[-1] < losses[0]
    for one, other in zip(values, whole, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)
    if expected_table is not None:
        torch.testing.assert_close(table, expected_table, rtol=1e-9, atol=1e-11)


PLANS = [
    ParallelPlan(tp=2),
    ParallelPlan(tp=2, sequence_parallel=False),
    ParallelPlan(pp=2),
    ParallelPlan(cp=2),
    ParallelPlan(dp=2),
]


@pytest.mark.world(2, shared=True)
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_layouts_train_one_head(world, plan: ParallelPlan) -> None:
    losses, values, _ = serial()
    world(check, plan=plan, config=SIZES, expected=losses, whole=values)


@pytest.mark.world(2)
def test_tied_embeddings_on_two_stages_keep_their_sums(world) -> None:
    config = dataclasses.replace(SIZES, share_embeddings_and_output_weights=True)
    losses, values, table = serial(config)
    # No value reads the last stage's copy, which has no gradient of its own: the sum alone keeps it like the first one's.
    world(check, plan=ParallelPlan(pp=2), config=config, expected=losses, whole=values, expected_table=table)


def test_values_begin_at_zero_and_the_output_is_frozen() -> None:
    model = GPTModel(SIZES, ProcessGroups.single(), dtype=torch.bfloat16)
    head = add_value_head(model)
    assert head is not None
    [first, *_] = score(model, micro_batches(), lambda output, batch: head(output.hidden))
    assert first.dtype == torch.float32 and not first.any()
    assert not model.get_parameter("output.weight").requires_grad and head.weight.requires_grad
    with pytest.raises(ValueError, match="has a value_head already"):
        add_value_head(model)
