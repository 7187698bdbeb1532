# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Training whose sums of gradients hold NaN when a step begins, beside training whose sums begin at zero."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mcore_parallel import ProcessGroups
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.optim import MegatronOptimizer, OptimizerConfig
from mcore_parallel.training import Batch, CrossEntropyObjective, train_step


class ZeroedGradients:
    """A ``GradSync`` that can zero its sums only."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.ddp = ddp
        self.zero_grad_buffer, self.no_sync, self.finish_grad_sync = ddp.zero_grad_buffer, ddp.no_sync, ddp.finish_grad_sync


class StaleGradients(ZeroedGradients):
    """Discards its sums, and leaves NaN in them."""

    left = 1.0
    """Least share of the elements that were NaN still when a step began."""

    def discard_gradients(self) -> None:
        sums = [total for buffer in self.ddp.grad_buffers for total in (buffer.data, *fp32_sums(buffer))]
        for total in sums:
            total.fill_(torch.nan)
        self.ddp.discard_gradients()
        self.left = min(self.left, sum(int(total.isnan().sum()) for total in sums) / sum(total.numel() for total in sums))


def fp32_sums(buffer: Any) -> list[Tensor]:
    return [total for bucket in buffer.buckets for total in bucket.accumulators.values()]


def trained(
    build: Callable[[], nn.Module],
    groups: ProcessGroups,
    batches: Callable[[nn.Module, int], Sequence[Batch]],
    wrap: Callable[[DistributedDataParallel], Any],
    *,
    steps: int = 4,
    ddp: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[list[Tensor], Any]:
    """Loss, norm and this rank's gradients of each step, then the parameters; and the gradient sync."""
    model, config = build(), DistributedDataParallelConfig(**(ddp or {}))
    parallel = DistributedDataParallel(config, model, groups)
    sync = wrap(parallel)
    rule = OptimizerConfig(lr=0.01, use_distributed_optimizer=config.use_distributed_optimizer)
    optimizer = MegatronOptimizer(rule, parallel, groups)
    found: list[Tensor] = []
    for step in range(steps):
        given = batches(model, step)
        report = train_step(model, given, CrossEntropyObjective(), sync, optimizer, lr=0.01, groups=groups, **options)
        found += [torch.tensor(report.loss), torch.tensor(report.grad_norm), *(piece.gradient.clone() for piece in parallel.pieces())]
    parallel.finish_param_sync()
    return [*found, *(parameter.detach().clone() for parameter in model.parameters())], sync


def check_same_bits(*arguments: Any, least: float = 0.5, **options: Any) -> None:
    """Arguments as of ``trained`` without ``wrap``; at least that share of the sums is not zeroed."""
    expected, _ = trained(*arguments, ZeroedGradients, **options)
    found, sync = trained(*arguments, StaleGradients, **options)
    assert len(found) == len(expected) and all(torch.equal(ours, zeroed) for ours, zeroed in zip(found, expected, strict=True))
    assert sync.left >= least, sync.left
