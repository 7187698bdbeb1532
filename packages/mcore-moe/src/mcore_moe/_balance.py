# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What keeps the experts equally busy: auxiliary losses, the bias of the selection, Sinkhorn's balanced assignment."""

import torch
from torch import Tensor

from mcore_moe._limits import check_not_negative, check_score_function, check_shape
from mcore_moe._routing import Routing, check_topk_of, score, top
from mcore_moe._stability import experimental_api

# T tokens, E experts, K experts a token, S sequences.


@experimental_api
def switch_load_balancing_loss_func(
    probs: Tensor, tokens_per_expert: Tensor, total_num_tokens: int | Tensor, topk: int, num_experts: int, moe_aux_loss_coeff: float
) -> Tensor:
    """Load-balancing loss of the Switch Transformer (Fedus et al. 2021, equation 4) for k choices a token.

    loss = c * E / (k * N^2) * sum_e (sum_t p_te) * n_e. It equals c for a perfectly even router.

    Args:
        probs: [T, E] scores over all experts of this rank's tokens.
        tokens_per_expert: [E] n_e, summed over all N tokens.
        total_num_tokens: N, the tokens that n_e counts, a scalar when only the device knows; the losses of the ranks that share N add up.
        topk: k.
        num_experts: E.
        moe_aux_loss_coeff: c.

    Raises:
        ValueError: shapes that are not those of ``num_experts``, no expert or no choice, a negative number of tokens or coefficient.
    """
    if num_experts < 1 or topk < 1:
        raise ValueError(f"num_experts={num_experts} and topk={topk} must be at least 1")
    check_shape("probs", probs.shape, (len(probs), num_experts), "tokens, num_experts")
    check_shape("tokens_per_expert", tokens_per_expert.shape, (num_experts,), "num_experts")
    check_not_negative("moe_aux_loss_coeff", moe_aux_loss_coeff, "0 switches the loss off")
    share = probs.sum(0) * tokens_per_expert.to(probs.dtype)
    if isinstance(total_num_tokens, Tensor):
        return share.sum() * (num_experts * moe_aux_loss_coeff / topk) / total_num_tokens.to(probs.dtype).clamp(min=1).square()
    check_not_negative("total_num_tokens", total_num_tokens, "count the tokens")
    return share.sum() * (num_experts * moe_aux_loss_coeff / (topk * max(total_num_tokens, 1) ** 2))


@experimental_api
def compute_routing_scores_for_aux_loss(logits: Tensor, topk: int, score_function: str) -> tuple[Tensor, Tensor]:
    """What load-balancing losses are computed of: without groups, bias of the experts or weights' scaling.

    Returns:
        routing_map [T, E] bool of the topk best, and scores [T, E] whose rows sum to 1, float32 or wider.

    Raises:
        ValueError: a function or a number of experts that there is not.
    """
    check_topk_of(logits, topk)
    check_score_function(score_function)
    scores_TE = balance_scores(logits, score_function)
    chosen = torch.zeros_like(scores_TE, dtype=torch.bool).scatter(-1, top(scores_TE.detach(), topk), True)
    return chosen, scores_TE


def balance_scores(logits_TE: Tensor, score_function: str) -> Tensor:
    """[T, E] scores whose rows sum to 1, float32 or wider."""
    logits_TE = logits_TE if logits_TE.dtype == torch.float64 else logits_TE.float()
    if score_function == "softmax":
        return logits_TE.softmax(-1)
    scores_TE = score(logits_TE, score_function)
    return scores_TE / (scores_TE.sum(-1, keepdim=True) + 1e-20)


def score_entropies(logits_TE: Tensor, score_function: str) -> Tensor:
    """[T], of each token's scores over all experts: 0 where one has all of them, log E where they are equal."""
    return torch.special.entr(balance_scores(logits_TE, score_function)).sum(-1)


@experimental_api
def z_loss_func(logits: Tensor, z_loss_coeff: float) -> Tensor:
    """Mean over tokens of the squared log-sum-exp of the logits (Zoph et al. 2022), times the coefficient; in float32 or wider.

    Raises:
        ValueError: a coefficient that is negative or not finite.
    """
    check_not_negative("z_loss_coeff", z_loss_coeff, "0 switches the loss off")
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return logits.logsumexp(-1).square().mean() * z_loss_coeff


@experimental_api
def get_updated_expert_bias(tokens_per_expert: Tensor, expert_bias: Tensor, expert_bias_update_rate: float) -> Tensor:
    """The bias of experts with more tokens than the mean falls by the rate, of those with fewer it rises (Wang et al. 2024).

    Args:
        tokens_per_expert: [..., E], over the whole global batch.
        expert_bias: [..., E] float32.
        expert_bias_update_rate: of one update.

    Raises:
        ValueError: a rate that is negative or not finite, or tensors of different shapes.
    """
    check_shape("tokens_per_expert", tokens_per_expert.shape, expert_bias.shape, "that of expert_bias")
    check_not_negative("expert_bias_update_rate", expert_bias_update_rate, "0 freezes the bias")
    counts = tokens_per_expert.double()
    return expert_bias + (counts.mean(-1, keepdim=True) - counts).sign().to(expert_bias.dtype) * expert_bias_update_rate


def quantile_bias(scores_TE: Tensor, bias_E: Tensor, topk: int, valid_T: Tensor | None) -> Tensor:
    """[E] float32, the bias with which no expert is chosen by more than its even share of these tokens, T * topk / E rounded down.

    What the best topk of a token must beat is taken to stay as it is with ``bias_E``.

    Args:
        scores_TE: of the selection; one token at least.
        bias_E: of the selection now.
        topk: below E.
        valid_T: bool, tokens that count; without any the result is infinite. None for all.
    """
    margins_TE = scores_TE - (scores_TE + bias_E).topk(topk + 1).values[:, topk:]
    if valid_T is None:
        valid_T = torch.ones_like(margins_TE[:, 0], dtype=torch.bool)
    margins_TE = margins_TE.masked_fill(~valid_T.unsqueeze(-1), float("-inf"))
    share_1 = valid_T.sum(0, keepdim=True) * topk // scores_TE.shape[1]
    # A number of the device: as a plain index the host would read it.
    return -margins_TE.sort(dim=0, descending=True).values.index_select(0, share_1).squeeze(0).float()


@experimental_api
def sinkhorn(cost: Tensor, tol: float = 1e-4, *, max_iterations: int = 100, valid: Tensor | None = None) -> Tensor:
    """exp(cost) with rows and columns scaled so that rows sum to 1 / T and columns to 1 / E (Clark et al. 2022).

    The number of iterations is fixed and results stay as they are once columns change by no more than ``tol``, so nothing waits for
    the device.

    Args:
        cost: [T, E] logits.
        tol: mean absolute change of the columns' factors.
        max_iterations: at most so many.
        valid: [T] bool, rows that take part, whatever the others hold; None for all.

    Raises:
        ValueError: a cost that is no [T, E] with an expert, a negative tolerance, no iteration, or a ``valid`` of another length.
    """
    if cost.dim() != 2 or not cost.shape[1]:
        raise ValueError(f"cost has shape {list(cost.shape)}, must be [tokens, experts] with an expert at least")
    check_not_negative("tol", tol, "0 runs all iterations")
    if max_iterations < 1:
        raise ValueError(f"max_iterations={max_iterations} must be at least 1")
    if valid is not None:
        check_shape("valid", valid.shape, cost.shape[:1], "one bool a token")
    cost = cost if cost.dtype == torch.float64 else cost.float()
    # A row's factor swallows what is subtracted from the row.
    kernel_TE = (cost - cost.amax(-1, keepdim=True)).exp()
    if valid is not None:
        kernel_TE = kernel_TE.masked_fill(~valid.unsqueeze(-1), 0.0)
    num_rows = max(cost.shape[0], 1) if valid is None else valid.sum().clamp(min=1)
    num_experts = cost.shape[1]
    rows_T, columns_E = kernel_TE.new_ones(cost.shape[0]), kernel_TE.new_ones(num_experts)
    done = torch.zeros((), dtype=torch.bool, device=cost.device)
    for _ in range(max_iterations):
        new_T = 1 / (num_rows * (kernel_TE @ columns_E + 1e-8))
        new_E = 1 / (num_experts * (new_T @ kernel_TE + 1e-8))
        rows_T = torch.where(done, rows_T, new_T)
        change = (new_E - columns_E).abs().mean()
        columns_E = torch.where(done, columns_E, new_E)
        done = done | (change <= tol)
    return rows_T.unsqueeze(-1) * kernel_TE * columns_E


def sinkhorn_routing(logits_TE: Tensor, topk: int, *, balanced: bool, scaling_factor: float | None, valid_T: Tensor | None) -> Routing:
    """The best of the balanced assignment (of the logits unless ``balanced``), weighed by sigmoid (topk = 1) or softmax over all experts.

    The assignment is balanced among the tokens of this rank.
    """
    logits_TE = logits_TE if logits_TE.dtype == torch.float64 else logits_TE.float()
    scores_TE = logits_TE.sigmoid() if topk == 1 else logits_TE.softmax(-1)
    with torch.no_grad():
        experts_TK = top(sinkhorn(logits_TE, valid=valid_T) if balanced else scores_TE, topk)
    probs_TK = scores_TE.gather(-1, experts_TK)
    return Routing(experts_TK, probs_TK if scaling_factor is None else probs_TK * scaling_factor)
