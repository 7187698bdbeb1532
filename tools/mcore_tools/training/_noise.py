# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Random numbers that a model draws in training."""

from collections.abc import Iterator
from typing import TypeVar

import torch

from mcore_tools.recipes import RunConfig

T = TypeVar("T")


def seeded(config: RunConfig, batches: Iterator[T], step: int) -> Iterator[T]:
    """Where the model of a run draws random numbers, as in the dropout of adapters and the noise of routers, those of a step follow from
    its number and ``train.seed``: a run that goes on draws those that it would have drawn.

    Args:
        config: the run.
        batches: of the following steps.
        step: the last one that is done.
    """
    draws = (config.lora is not None and config.lora.dropout > 0) or (config.moe is not None and config.moe.noise_fields != "")
    for number, batch in enumerate(batches, config.train.seed + step):
        if draws:
            torch.manual_seed(number)
        yield batch
