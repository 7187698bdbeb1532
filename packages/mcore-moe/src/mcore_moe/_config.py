# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Sizes and choices of a mixture-of-experts layer."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """A mixture-of-experts feed-forward.

    Raises:
        ValueError: fields that do not fit together; names both.

    Example:
        >>> MoEConfig(num_moe_experts=8).moe_router_topk
        2
    """

    num_moe_experts: int
    moe_router_topk: int = 2
    """Experts a token goes to."""
    moe_ffn_hidden_size: int | None = None
    """Width of one expert; None for the feed-forward width of the model."""
    moe_router_score_function: str = "softmax"
    """softmax or sigmoid."""
    moe_router_pre_softmax: bool = False
    """Softmax over all experts before the selection, without renormalising; else over the selected ones."""
    moe_router_topk_scaling_factor: float | None = None
    moe_router_dtype: str | None = "fp32"
    """Precision of the gating product: fp32, fp64, or None for that of the parameters."""
    moe_aux_loss_coeff: float = 0.0
    """Weight of the load-balancing loss; 0 switches it off."""

    def __post_init__(self) -> None:
        if self.num_moe_experts < 1:
            raise ValueError(f"num_moe_experts={self.num_moe_experts} must be at least 1")
        if not 1 <= self.moe_router_topk <= self.num_moe_experts:
            raise ValueError(f"moe_router_topk={self.moe_router_topk} must lie in 1..num_moe_experts={self.num_moe_experts}")
        if self.moe_router_score_function not in ("softmax", "sigmoid"):
            raise ValueError(f"moe_router_score_function={self.moe_router_score_function!r} must be softmax or sigmoid")
        if self.moe_router_dtype not in (None, "fp32", "fp64"):
            raise ValueError(f"moe_router_dtype={self.moe_router_dtype!r} must be fp32, fp64 or None")
        if self.moe_router_topk == 1 and self.moe_router_score_function == "softmax" and not self.moe_router_pre_softmax:
            raise ValueError(
                "moe_router_topk=1 with softmax needs moe_router_pre_softmax=True, else every weight is 1 and the router learns nothing"
            )
        if self.moe_aux_loss_coeff < 0:
            raise ValueError(f"moe_aux_loss_coeff={self.moe_aux_loss_coeff} must not be negative")
