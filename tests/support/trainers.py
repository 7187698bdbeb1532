# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A small model in the training loop, what it reads, and a writer that remembers."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from mcore_parallel import ProcessGroups
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.optim import ConstantSchedule, MegatronOptimizer, OptimizerConfig
from mcore_parallel.training import Batch, CrossEntropyObjective, Objective, Schedule, Trainer, TrainerConfig

TINY = TransformerConfig(num_layers=2, hidden_size=16, num_attention_heads=2, ffn_hidden_size=16, vocab_size=16)


class Rows:
    """A writer that keeps what it is given, by step."""

    def __init__(self) -> None:
        self.written: dict[int, dict[str, float]] = {}

    @property
    def rows(self) -> list[dict[str, float]]:
        return list(self.written.values())

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self.written[step] = dict(values)

    def close(self) -> None:
        pass


def counting(number: int, rows: int = 2, mask: float = 1.0) -> Batch:
    """Sequences of 8 tokens that count upwards from a start that depends on the number."""
    tokens = (torch.arange(9) + torch.arange(number, number + rows)[:, None]) % 16
    return Batch(tokens=tokens[:, :-1], labels=tokens[:, 1:], loss_mask=torch.full((rows, 8), mask))


def count_on(consumed: int) -> Iterator[list[Batch]]:
    """A micro-batch of two rows a step, without end."""
    while True:
        yield [counting(consumed)]
        consumed += 2


def build_trainer(
    config: TrainerConfig,
    source: Callable[[int], Iterable[Sequence[Batch]]] = count_on,
    *,
    model: TransformerConfig = TINY,
    objective: Objective | None = None,
    schedule: Schedule | None = None,
    groups: ProcessGroups | None = None,
    dtype: torch.dtype = torch.float64,
    rule: Mapping[str, Any] | None = None,
    **options: Any,
) -> Trainer:
    """The loop around a model with AdamW; ``rule`` is more of its config."""
    groups = groups or ProcessGroups.single()
    built = GPTModel(model, groups, dtype=dtype)
    sync = DistributedDataParallel(DistributedDataParallelConfig(), built, groups)
    optimizer = MegatronOptimizer(OptimizerConfig(lr=0.01, **(rule or {})), sync, groups)
    parts = (objective or CrossEntropyObjective(), source, schedule or ConstantSchedule(max_lr=0.01))
    return Trainer(config, built, sync, optimizer, *parts, **options)
