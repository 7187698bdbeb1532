# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Sizes and choices of a mixture-of-experts layer."""

from dataclasses import dataclass

import torch

from mcore_parallel import ParallelPlan, check_field_types
from mcore_parallel.backends import check_grouped_width
from mcore_parallel.models import TransformerConfig


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
    """Precision of the gating matmul: fp32, fp64, or None for that of the parameters."""
    moe_aux_loss_coeff: float = 0.0
    """Weight of the load-balancing loss; 0 switches it off."""

    def __post_init__(self) -> None:
        check_field_types(self)
        if self.moe_ffn_hidden_size is not None and self.moe_ffn_hidden_size < 1:
            raise ValueError(
                f"moe_ffn_hidden_size={self.moe_ffn_hidden_size} must be at least 1; leave it out for the model's ffn_hidden_size"
            )
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

    @property
    def loss_names(self) -> tuple[str, ...]:
        """Auxiliary losses of a layer."""
        return ("load_balancing_loss",) if self.moe_aux_loss_coeff else ()


def check_experts(
    config: MoEConfig, model: TransformerConfig, plan: ParallelPlan, *, dtype: torch.dtype, device: torch.device | str
) -> None:
    """Whether a layout can divide the experts of a layer, and the device multiply them; costs no tensor.

    Args:
        config: the mixture.
        model: the layer's; its width, and that of experts that have none of their own.
        plan: ep and etp are read, and whether tp ranks share the tokens.
        dtype: of the parameters.
        device: of the parameters.

    Raises:
        ValueError: names field, value and what to change.
    """
    width, etp = config.moe_ffn_hidden_size or model.ffn_size, plan.expert_tp
    if config.num_moe_experts % plan.ep:
        raise ValueError(f"ep={plan.ep} must divide num_moe_experts={config.num_moe_experts}; lower ep or change num_moe_experts")
    if width % etp:
        raise ValueError(f"etp={etp} must divide the expert width {width}; lower etp or change moe_ffn_hidden_size")
    if plan.tp > 1 and not plan.sequence_parallel and plan.tp % (plan.ep * etp):
        raise ValueError(
            f"ep={plan.ep} and etp={etp} spread the experts beyond the tp={plan.tp} ranks that hold the same tokens; "
            "set sequence_parallel=True, or lower ep or etp"
        )
    check_grouped_width("hidden_size", model.hidden_size, dtype, device)
    check_grouped_width("moe_ffn_hidden_size", width // etp, dtype, device)
