# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Everything that the training program of a run needs, from its configuration."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from mcore_parallel.training import Batch, Schedule, Throughput
from mcore_tools.assembly import _data
from mcore_tools.assembly._assemble import Parts, assemble
from mcore_tools.assembly._rates import schedule, throughput
from mcore_tools.assembly._tokenizer import open_tokenizer
from mcore_tools.recipes import RunConfig


@dataclass(frozen=True, kw_only=True)
class Run:
    """The parts of this rank, what they learn from, and how fast."""

    parts: Parts
    rates: Schedule
    throughput: Throughput | None
    """None where operations are not counted: in an encoder and a decoder."""
    batches: Callable[[int], Iterator[list[Batch]]]
    """The micro-batches of each step, from a number of samples on."""
    validation: Callable[[], list[Batch]]
    """The micro-batches of one evaluation."""


def assemble_run(config: RunConfig, device: torch.device) -> Run:
    """Build all of it on this rank; every rank of the world calls it.

    Raises:
        ValueError: parts that do not go together, or a corpus that is not fit for the run.
    """
    parts = assemble(config, device)
    tokenizer = open_tokenizer(config.data.tokenizer, config.model.vocab_size)
    train_set, valid_set = _data.datasets(config, tokenizer)
    sizes = config.train.batch_sizes()
    return Run(
        parts=parts,
        rates=schedule(config),
        throughput=None if config.spans else throughput(config, device),
        batches=lambda consumed: _data.step_batches(config, train_set, parts.groups, device, consumed, sizes),
        validation=lambda: _data.validation_batches(config, valid_set, parts.groups, device),
    )
