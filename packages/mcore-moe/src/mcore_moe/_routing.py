# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Which experts a token goes to, and with what weight: pure functions of the router's logits."""

from dataclasses import dataclass

import torch
from torch import Tensor

# T tokens, E experts, K experts a token.


@dataclass(frozen=True)
class Routing:
    """The choice for T tokens; slot 0 holds the highest score."""

    experts_TK: Tensor
    """int64 expert numbers, distinct within a row."""
    probs_TK: Tensor
    """Weight of each chosen expert, differentiable."""

    def counts(self, num_experts: int) -> Tensor:
        """[E] int64, tokens each expert receives."""
        picks_P = self.experts_TK.flatten()
        # Of a size known to the host, so nothing waits for the device.
        return picks_P.new_zeros(num_experts).scatter_add_(0, picks_P, torch.ones_like(picks_P))


def choose_experts(
    logits_TE: Tensor, topk: int, *, pre_softmax: bool = False, score_function: str = "softmax", scaling_factor: float | None = None
) -> Routing:
    """Score, select and weight.

    softmax: the weights are the softmax over the chosen logits, or with ``pre_softmax`` the chosen entries of the
    softmax over all experts. sigmoid: the chosen sigmoids divided by their sum (topk > 1). Scores are float32 or wider.
    Of equal scores the expert with the lowest number wins.

    Args:
        logits_TE: [T, E].
        topk: experts a token.
        scaling_factor: multiplies the weights.
    """
    logits_TE = logits_TE if logits_TE.dtype == torch.float64 else logits_TE.float()
    if score_function == "sigmoid":
        keys_TE = logits_TE.sigmoid()
    else:
        keys_TE = logits_TE.softmax(-1) if pre_softmax else logits_TE
    experts_TK = keys_TE.detach().sort(dim=-1, descending=True, stable=True).indices[:, :topk]
    probs_TK = keys_TE.gather(-1, experts_TK)
    if score_function == "sigmoid":
        probs_TK = probs_TK / (probs_TK.sum(-1, keepdim=True) + 1e-20) if topk > 1 else probs_TK
    elif not pre_softmax:
        probs_TK = probs_TK.softmax(-1)
    return Routing(experts_TK, probs_TK if scaling_factor is None else probs_TK * scaling_factor)


def topk_routing_with_score_function(
    logits: Tensor, topk: int, use_pre_softmax: bool = False, scaling_factor: float | None = None, score_function: str = "softmax"
) -> tuple[Tensor, Tensor]:
    """The same choice in dense form.

    Returns:
        routing_probs [T, E] in the dtype of ``logits``, zero where unrouted, and routing_map [T, E] bool.
    """
    routing = choose_experts(logits, topk, pre_softmax=use_pre_softmax, score_function=score_function, scaling_factor=scaling_factor)
    probs = torch.zeros_like(logits).scatter(-1, routing.experts_TK, routing.probs_TK.to(logits.dtype))
    chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, routing.experts_TK, True)
    return probs, chosen


def switch_load_balancing_loss_func(
    probs: Tensor, tokens_per_expert: Tensor, total_num_tokens: int, topk: int, num_experts: int, moe_aux_loss_coeff: float
) -> Tensor:
    """Load-balancing loss of the Switch Transformer (Fedus et al. 2021, equation 4) for k choices a token.

    loss = c * E / (k * N^2) * sum_e (sum_t p_te) * n_e. It equals c for a perfectly even router.

    Args:
        probs: [T, E] scores over all experts of this rank's tokens.
        tokens_per_expert: [E] n_e, summed over all N tokens.
        total_num_tokens: N, the tokens that n_e counts; the losses of the ranks that share N add up.
    """
    share = probs.sum(0) * tokens_per_expert.to(probs.dtype)
    return share.sum() * (num_experts * moe_aux_loss_coeff / (topk * max(total_num_tokens, 1) ** 2))
