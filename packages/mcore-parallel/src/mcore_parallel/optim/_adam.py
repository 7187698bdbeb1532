# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Update rules over flat pieces, written with torch operators."""

from dataclasses import dataclass

from torch import Tensor

from mcore_parallel.optim._config import OptimizerConfig
from mcore_parallel.optim._unit import Unit


@dataclass(frozen=True)
class Numbers:
    """What a step's update depends on, on the host."""

    factor: float
    """Of the gradients: their scale times the clipping."""
    lr: float
    correction1: float
    """1 - beta1 ** step."""
    root2: float
    """(1 - beta2 ** step) ** 0.5."""
    skip: bool


def adam(unit: Unit, gradient: Tensor, config: OptimizerConfig, numbers: Numbers) -> None:
    """Adam: m and v follow the gradient and its square, p moves by lr * m^ / (sqrt(v^) + eps)."""
    assert unit.exp_avg_sq is not None
    p, m, v = unit.master.read(), unit.exp_avg.read(), unit.exp_avg_sq.read()
    lr, decay = numbers.lr * unit.rule.lr_mult, unit.rule.weight_decay
    g = gradient.to(p.dtype) * (numbers.factor * unit.piece.factor)
    if decay and config.decoupled_weight_decay:
        p.mul_(1.0 - lr * decay)
    elif decay:
        g.add_(p, alpha=decay)
    m.mul_(config.adam_beta1).add_(g, alpha=1.0 - config.adam_beta1)
    v.mul_(config.adam_beta2).addcmul_(g, g, value=1.0 - config.adam_beta2)
    p.addcdiv_(m, v.sqrt().div_(numbers.root2).add_(config.adam_eps), value=-lr / numbers.correction1)
    unit.exp_avg.write(m)
    unit.exp_avg_sq.write(v)
    unit.master.write(p)


def sgd(unit: Unit, gradient: Tensor, config: OptimizerConfig, numbers: Numbers) -> None:
    """Momentum with L2: m = momentum * m + g + decay * p, p moves by lr * m."""
    p, m = unit.master.read(), unit.exp_avg.read()
    g = gradient.to(p.dtype) * (numbers.factor * unit.piece.factor)
    g.add_(p, alpha=unit.rule.weight_decay)
    m.mul_(config.sgd_momentum).add_(g)
    p.add_(m, alpha=-numbers.lr * unit.rule.lr_mult)
    unit.exp_avg.write(m)
    unit.master.write(p)
