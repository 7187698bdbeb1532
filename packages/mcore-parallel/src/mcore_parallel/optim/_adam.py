# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Update rules over flat pieces, written with torch operators."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from mcore_parallel.optim._config import OptimizerConfig, Rule
from mcore_parallel.optim._piece_state import PieceState
from mcore_parallel.optim._rate import Limits


@dataclass(frozen=True)
class Numbers:
    """What a step's update depends on, on the host."""

    factors: Mapping[str | None, float]
    """Of the gradients, by ``Rule.norm_group``: their scale times the clipping."""
    lr: float
    correction1: float
    """1 - beta1 ** step."""
    root2: float
    """(1 - beta2 ** step) ** 0.5."""
    skip: bool
    weight_decay: float
    rates: Mapping[Limits, tuple[float, float]]
    """Of ``group_rates``."""

    def factor(self, unit: PieceState) -> float:
        """Of the gradient of a unit."""
        return self.factors[unit.rule.norm_group] * unit.piece.factor

    def rate(self, rule: Rule) -> float:
        """Learning rate of a parameter."""
        share, own = self.rates.get(rule.limits, (1.0, 0.0))
        return rule.lr_mult * (share * self.lr + own)

    def decay(self, rule: Rule) -> float:
        """Weight decay of a parameter."""
        return rule.wd_mult * self.weight_decay


def adam(unit: PieceState, gradient: Tensor, config: OptimizerConfig, numbers: Numbers) -> None:
    """Adam: m and v follow the gradient and its square, p moves by lr * m^ / (sqrt(v^) + eps)."""
    assert unit.exp_avg_sq is not None
    p, m, v = unit.master.read(), unit.exp_avg.read(), unit.exp_avg_sq.read()
    lr, decay = numbers.rate(unit.rule), numbers.decay(unit.rule)
    g = gradient.to(p.dtype) * numbers.factor(unit)
    _decay(p, g, lr, decay, config)
    m.mul_(config.adam_beta1).add_(g, alpha=1.0 - config.adam_beta1)
    v.mul_(config.adam_beta2).addcmul_(g, g, value=1.0 - config.adam_beta2)
    p.addcdiv_(m, v.sqrt().div_(numbers.root2).add_(config.adam_eps), value=-lr / numbers.correction1)
    unit.exp_avg.write(m)
    unit.exp_avg_sq.write(v)
    unit.master.write(p)


def sgd(unit: PieceState, gradient: Tensor, config: OptimizerConfig, numbers: Numbers) -> None:
    """Momentum with L2: m = momentum * m + g + decay * p, p moves by lr * m."""
    p, m = unit.master.read(), unit.exp_avg.read()
    g = gradient.to(p.dtype) * numbers.factor(unit)
    g.add_(p, alpha=numbers.decay(unit.rule))
    m.mul_(config.sgd_momentum).add_(g)
    p.add_(m, alpha=-numbers.rate(unit.rule))
    unit.exp_avg.write(m)
    unit.master.write(p)


def lion(unit: PieceState, gradient: Tensor, config: OptimizerConfig, numbers: Numbers) -> None:
    """Lion (arXiv 2302.06675): p moves by lr * sign(beta1 * m + (1 - beta1) * g), then m = beta2 * m + (1 - beta2) * g."""
    p, m = unit.master.read(), unit.exp_avg.read()
    lr, decay = numbers.rate(unit.rule), numbers.decay(unit.rule)
    g = gradient.to(p.dtype) * numbers.factor(unit)
    _decay(p, g, lr, decay, config)
    p.add_(m.mul(config.lion_beta1).add_(g, alpha=1.0 - config.lion_beta1).sign_(), alpha=-lr)
    m.mul_(config.lion_beta2).add_(g, alpha=1.0 - config.lion_beta2)
    unit.exp_avg.write(m)
    unit.master.write(p)


def _decay(p: Tensor, g: Tensor, lr: float, decay: float, config: OptimizerConfig) -> None:
    """Weight decay in place: of the parameter when decoupled, else added to the gradient."""
    if decay and config.decoupled_weight_decay:
        p.mul_(1.0 - lr * decay)
    elif decay:
        g.add_(p, alpha=decay)
