# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The learned gate of a mixture-of-experts layer."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from mcore_moe._config import MoEConfig
from mcore_moe._routing import Routing, choose_experts, switch_load_balancing_loss_func
from mcore_parallel import ProcessGroups, ShardSpec
from mcore_parallel.comm import all_reduce
from mcore_parallel.models import AuxLoss

_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


class TopKRouter(nn.Module):
    """Scores tokens against experts and picks the best k.

    Args:
        config: routing choices.
        hidden_size: D.
        groups: the tp and cp ranks share the statistics of the load-balancing loss.
        dtype: of the weight [E, D].
    """

    def __init__(
        self,
        config: MoEConfig,
        hidden_size: int,
        groups: ProcessGroups,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.config = config
        self.groups = groups
        self.weight = nn.Parameter(torch.empty(config.num_moe_experts, hidden_size, dtype=dtype, device=device))

    def shard_specs(self) -> Mapping[str, ShardSpec]:
        # Every rank weighs its own share of the tokens, or of their picks, so gradients over tp add up.
        partial = ("tp",) if self.groups.tp.size > 1 else ()
        return {"weight": ShardSpec(shape=tuple(self.weight.shape), partial=partial)}

    def forward(self, x_TD: Tensor) -> tuple[Routing, dict[str, AuxLoss]]:
        """The routing of [T, D] tokens, and this rank's part of the auxiliary losses by name; none outside training."""
        config = self.config
        dtype = torch.promote_types(_DTYPES.get(config.moe_router_dtype or "", x_TD.dtype), x_TD.dtype)
        logits_TE = x_TD.to(dtype) @ self.weight.to(dtype).t()
        routing = choose_experts(
            logits_TE,
            config.moe_router_topk,
            pre_softmax=config.moe_router_pre_softmax,
            score_function=config.moe_router_score_function,
            scaling_factor=config.moe_router_topk_scaling_factor,
        )
        if not config.moe_aux_loss_coeff or not torch.is_grad_enabled() or not self.training:
            return routing, {}
        return routing, {"load_balancing_loss": AuxLoss(self._balance_loss(logits_TE, routing), config.moe_aux_loss_coeff)}

    def _balance_loss(self, logits_TE: Tensor, routing: Routing) -> Tensor:
        config = self.config
        if config.moe_router_score_function == "sigmoid":
            scores_TE = logits_TE.sigmoid()
            scores_TE = scores_TE / (scores_TE.sum(-1, keepdim=True) + 1e-20)
        else:
            scores_TE = logits_TE.softmax(-1)
        counts_E = all_reduce(routing.counts(config.num_moe_experts), self.groups.tp_cp)
        total = logits_TE.shape[0] * self.groups.tp_cp.size
        return switch_load_balancing_loss_func(scores_TE, counts_E, total, config.moe_router_topk, config.num_moe_experts, 1.0)
