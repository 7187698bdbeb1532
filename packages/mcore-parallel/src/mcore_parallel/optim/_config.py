# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Choices of the optimizer."""

import math
from dataclasses import dataclass

_RESERVED = ("use_distributed_optimizer", "use_precision_aware_optimizer", "optimizer_cpu_offload", "overlap_cpu_optimizer_d2h_h2d")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The update rule and its constants.

    Raises:
        ValueError: a constant out of range, an unknown optimizer, or a feature that is not available yet.

    Example:
        >>> OptimizerConfig(lr=1e-3).decoupled_weight_decay
        True
    """

    optimizer: str = "adam"
    lr: float
    """Learning rate of a step that is not given another one."""
    min_lr: float = 0.0
    """Lowest learning rate of a schedule that is built from this config."""
    weight_decay: float = 0.01
    """Not applied to parameters of one dimension (norms, biases)."""
    decoupled_weight_decay: bool = True
    """True for AdamW: p shrinks by lr * weight_decay. False for Adam with L2: weight_decay * p joins the gradient."""
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8
    clip_grad: float = 1.0
    """Largest global gradient norm; a larger one is scaled down to it. 0 switches clipping off."""
    grad_norm_skip_threshold: float = math.inf
    """A step whose gradient norm exceeds this is skipped."""
    use_distributed_optimizer: bool = False
    """Reserved: states split over the replicas."""
    use_precision_aware_optimizer: bool = False
    """Reserved: states in narrower dtypes."""
    optimizer_cpu_offload: bool = False
    """Reserved: states in host memory."""
    optimizer_offload_fraction: float = 0.0
    """Reserved: share of the parameters whose states are in host memory."""
    overlap_cpu_optimizer_d2h_h2d: bool = False
    """Reserved: copies of the host optimizer overlap its work."""

    def __post_init__(self) -> None:
        if self.optimizer != "adam":
            raise ValueError(f"optimizer={self.optimizer!r} is not available yet; use 'adam'")
        for name in _RESERVED:
            if getattr(self, name):
                raise ValueError(f"{name}=True is not available yet; leave it False")
        if self.optimizer_offload_fraction != 0.0:
            raise ValueError(f"optimizer_offload_fraction={self.optimizer_offload_fraction} is not available yet; leave it 0.0")
        for name in ("lr", "min_lr", "weight_decay", "adam_eps", "clip_grad", "grad_norm_skip_threshold"):
            if not getattr(self, name) >= 0.0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")
        for name in ("adam_beta1", "adam_beta2"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name}={getattr(self, name)} must lie in [0, 1)")
