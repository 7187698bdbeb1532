# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A mixture of experts that fits a transformer layer's feed-forward slot."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mcore_moe._config import MoEConfig, check_experts
from mcore_moe._experts import GroupedMLP
from mcore_moe._router import TopKRouter
from mcore_moe.dispatch import MoEAlltoAllTokenDispatcher, ReplicatedTokenDispatcher
from mcore_parallel import Group, ParallelPlan
from mcore_parallel.backends import special_products
from mcore_parallel.comm import copy_to_tensor_model_parallel_region, reduce_from_tensor_model_parallel_region
from mcore_parallel.models import FeedForwardBuilder, Site, TransformerConfig
from mcore_parallel.nn import Activation, Step


class MoELayer(nn.Module):
    """Router, exchange, experts, exchange back.

    The experts are as the model's dense feed-forward would be: its activation with offset and clamp, and its biases. Tensor-parallel
    ranks hold different tokens under sequence parallelism. Without, they hold the same: each computes the picks of its own experts,
    and the results are summed over them.

    ``tokens_per_expert`` [E] int64 counts the picks of this rank's tokens since it was last reset (`pop_expert_load`); of tokens
    that several ranks hold, on the first of them. A pick counts when its gradient has come, so once however often its forward runs.

    Args:
        config: the mixture.
        site: where in the model it stands.
        dtype: of the parameters.
        pause: called while tokens travel (``mcore_parallel.pipeline.Overlap.pause``); None waits for them.

    Raises:
        ValueError: ep does not divide the experts, or etp their width; a backend that the experts cannot be computed by; experts
            spread beyond the tp ranks that hold the same tokens.
    """

    tokens_per_expert: Tensor

    def __init__(
        self,
        config: MoEConfig,
        site: Site,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        pause: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        groups = site.groups
        if (matmuls := special_products(site.layers)) is not None:
            raise ValueError(
                f"the layers are computed by {matmuls}, experts only by torch in the dtype of their weights; "
                'build the model with backend="torch" and fp8=None, or without experts'
            )
        check_experts(config, site.config, groups.plan, dtype=dtype, device=device)
        hidden_size = site.config.hidden_size
        self.router = TopKRouter(config, hidden_size, groups, dtype=dtype, device=device)
        # Ranks that hold the same tokens, and sum their parts of the result.
        self.replicas = Group.single() if groups.sequence_parallel else groups.tp
        self.dispatcher: Any = (
            MoEAlltoAllTokenDispatcher(config.num_moe_experts, groups.ep, groups.expt_tp, pause=pause)
            if self.replicas.size == 1
            else ReplicatedTokenDispatcher(config.num_moe_experts, groups)
        )
        self.experts = GroupedMLP(
            config.num_moe_experts,
            hidden_size,
            config.moe_ffn_hidden_size or site.config.ffn_size,
            groups,
            activation=Activation(
                name=site.config.activation, offset=site.config.glu_linear_offset, clamp=site.config.activation_func_clamp_value
            ),
            bias=site.config.add_bias_linear,
            memory=site.memory,
            dtype=dtype,
            device=device,
        )
        counts = torch.zeros(config.num_moe_experts, dtype=torch.int64, device=device)
        self.register_buffer("tokens_per_expert", counts, persistent=False)

    def forward(self, x_TD: Tensor, step: Step) -> tuple[Tensor, Tensor | None]:
        """[T, D] -> ([T, D], this rank's part of the load-balancing loss or None)."""
        x_TD = copy_to_tensor_model_parallel_region(x_TD, self.replicas)
        routing, aux = self.router(x_TD)
        sent = self.dispatcher.dispatch(x_TD, routing)
        rows_RD = self.experts(sent.rows_RD, sent.tokens_per_expert)
        y_TD = reduce_from_tensor_model_parallel_region(self.dispatcher.combine(rows_RD, sent, routing), self.replicas)
        if self.training and self.replicas.is_first and y_TD.requires_grad:
            y_TD = _CountInBackward.apply(y_TD, routing.counts(len(self.tokens_per_expert)), self.tokens_per_expert)
        return y_TD, aux


class _CountInBackward(torch.autograd.Function):
    """Identity whose backward adds ``counts`` to ``total``.

    The graph of a forward that runs again for its saved tensors is never walked, so what it counts is dropped.
    """

    @staticmethod
    def forward(ctx: Any, y_TD: Tensor, counts_E: Tensor, total_E: Tensor) -> Tensor:
        ctx.counts_E, ctx.total_E = counts_E, total_E
        return y_TD.view_as(y_TD)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.total_E += ctx.counts_E
        return grads[0], None, None


def moe_feed_forward(config: MoEConfig, *, pause: Callable[[], None] | None = None) -> FeedForwardBuilder:
    """A feed-forward builder for `GPTModel` that puts the mixture into every layer.

    With ``pause=overlap.pause`` the all-to-alls of one micro-batch hide behind the computation of another, in the pairs of
    ``combined_one_f_one_b``.
    """

    return _MixtureBuilder(config, pause)


@dataclass(frozen=True)
class _MixtureBuilder:
    """Builds a layer, and says before (``mcore_parallel.models.LayoutChecked``) whether a layout can divide it."""

    config: MoEConfig
    pause: Callable[[], None] | None

    def __call__(self, site: Site) -> nn.Module:
        return MoELayer(self.config, site, dtype=site.dtype, device=site.device, pause=self.pause)

    def check_layout(self, config: TransformerConfig, plan: ParallelPlan, *, dtype: torch.dtype, device: torch.device | str) -> None:
        check_experts(self.config, config, plan, dtype=dtype, device=device)


def pop_expert_load(model: nn.Module) -> dict[str, Tensor]:
    """Module name -> [E] trained picks of each expert on this rank since the last call, for every mixture in ``model``."""
    load = {}
    for name, module in model.named_modules():
        if isinstance(module, MoELayer):
            load[name] = module.tokens_per_expert.clone()
            module.tokens_per_expert.zero_()
    return load
