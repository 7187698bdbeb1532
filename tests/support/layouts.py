# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A model trained for a few steps in some layout, and whether it did as in another one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from mcore_parallel import ProcessGroups, named_shards
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.optim import MegatronOptimizer, OptimizerConfig
from mcore_parallel.pipeline import ModelChunks, PipelineLayout
from mcore_parallel.training import Batch, Objective, evaluate, train_step

Build = Callable[..., nn.Module]
"""``build(groups, layers=...)`` of one chunk."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """What became of a model."""

    numbers: list[float]
    """Of every step the loss, the gradient norm and the metrics by name; the loss of the evaluation at the end."""
    initial: dict[str, NDArray[Any]]
    """Parameters before the first step, whole or this rank's part; as arrays, which need no file descriptor each to travel."""
    trained: dict[str, NDArray[Any]]
    slices: dict[str, tuple[slice, ...]]
    """Where the parts lie in the whole."""


def train_in(
    groups: ProcessGroups,
    layout: PipelineLayout,
    build: Build,
    batches: Sequence[Sequence[Batch]],
    objective: Objective,
    **sync_options: Any,
) -> Curve:
    """A step of plain gradient descent on each list of micro-batches, by the default schedule; then an evaluation on the first one."""
    model = ModelChunks([build(groups, layers=part) for part in layout.of_rank(groups.pp.rank)])
    shards = [shard for chunk in model for shard in named_shards(chunk)]
    initial = {shard.name: shard.parameter.detach().numpy().copy() for shard in shards}
    sync = DistributedDataParallel(DistributedDataParallelConfig(**sync_options), model, groups)
    rule = OptimizerConfig(optimizer="sgd", lr=1.0, clip_grad=0.0, weight_decay=0.0)
    optimizer = MegatronOptimizer(rule, sync, groups)
    mine = slice(groups.dp.rank, None, groups.dp.size)
    numbers: list[float] = []
    for micro in batches:
        report = train_step(model, micro[mine], objective, sync, optimizer, lr=0.2, groups=groups)
        numbers += [report.loss, report.grad_norm, *(value for _, value in sorted(report.metrics.items()))]
    numbers.append(evaluate(model, batches[0][mine], objective, groups=groups).mean.item())
    trained = {shard.name: shard.parameter.detach().numpy().copy() for shard in shards}
    return Curve(numbers=numbers, initial=initial, trained=trained, slices={shard.name: shard.spec.slices(groups) for shard in shards})


def check_curve(found: Curve, whole: Curve, *, tolerance: float = 1e-10) -> None:
    """The same initial bits, losses, gradient norms and, after plain steps, gradients of every parameter."""
    torch.testing.assert_close(found.numbers, whole.numbers, rtol=tolerance, atol=tolerance)
    for name, part in found.slices.items():
        np.testing.assert_array_equal(found.initial[name], whole.initial[name][part], err_msg=name)
        assert np.isfinite(whole.trained[name]).all(), name
        moved, expected = (curve.trained[name] - curve.initial[name] for curve in (found, whole))
        np.testing.assert_allclose(moved, expected[part], rtol=1e-8, atol=tolerance, err_msg=name)
