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


class PoisonedGradients(ZeroedGradients):
    """Discards its sums, and leaves NaN in them."""

    least_share = 1.0
    """Least share of the elements that were NaN still when a step began."""

    def discard_gradients(self) -> None:
        sums = [total for buffer in self.ddp.grad_buffers for total in (buffer.data, *fp32_sums(buffer))]
        for total in sums:
            total.fill_(torch.nan)
        self.ddp.discard_gradients()
        self.least_share = min(self.least_share, sum(int(total.isnan().sum()) for total in sums) / sum(total.numel() for total in sums))


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
    tensors: list[Tensor] = []
    for step in range(steps):
        micro_batches = batches(model, step)
        report = train_step(model, micro_batches, CrossEntropyObjective(), sync, optimizer, lr=0.01, groups=groups, **options)
        tensors += [torch.tensor(report.loss), torch.tensor(report.grad_norm), *(piece.gradient.clone() for piece in parallel.pieces())]
    parallel.finish_param_sync()
    return [*tensors, *(parameter.detach().clone() for parameter in model.parameters())], sync


def check_same_bits(*arguments: Any, least: float = 0.5, **options: Any) -> None:
    """Arguments as of ``trained`` without ``wrap``; at least that share of the sums is not zeroed."""
    expected, _ = trained(*arguments, ZeroedGradients, **options)
    tensors, sync = trained(*arguments, PoisonedGradients, **options)
    assert len(tensors) == len(expected) and all(torch.equal(poisoned, zeroed) for poisoned, zeroed in zip(tensors, expected, strict=True))
    assert sync.least_share >= least, sync.least_share
