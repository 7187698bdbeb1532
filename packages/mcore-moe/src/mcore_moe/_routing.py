# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Which experts a token goes to, and with what weight: pure functions of the router's logits."""

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_moe._limits import check_above_zero, check_groups, check_score_function, check_shape, check_topk
from mcore_moe._stability import experimental_api
from mcore_parallel.tensor_parallel import aligned_rows

# T tokens, E experts, G groups of them, K experts a token.


@dataclass(frozen=True, kw_only=True)
class RoutedSums:
    """Sums over the valid tokens of a choice, which the kernel that chooses makes on its way."""

    scores_E: Tensor
    """Of ``balance_scores``; differentiable."""
    squares: Tensor
    """Of the log-sum-exp of the logits; a differentiable scalar."""
    counts_E: Tensor
    """int64, tokens that chose each expert."""
    experts_TK: Tensor
    """The choice itself."""
    valid_T: Tensor | None
    """Which tokens are valid; None where every token is."""


@experimental_api
@dataclass(frozen=True)
class Routing:
    """The choice for T tokens; slot 0 holds the highest score."""

    experts_TK: Tensor
    """int64 expert numbers, distinct within a row."""
    probs_TK: Tensor
    """Weight of each chosen expert, differentiable, float32 or wider; 0 where a token is not valid."""
    valid_T: Tensor | None = None
    """bool, False where a token goes to no expert, whatever its row says; None where every token counts."""
    kept_TK: Tensor | None = None
    """bool, False where the expert's capacity drops the pick; None where every pick is kept."""
    capacity: int | None = None
    """Rows each expert gets of these tokens, filled up with zeros; None for as many as it keeps."""
    sums: RoutedSums | None = None
    """Where they were asked for, and a kernel chose; None once ``experts_TK`` or ``valid_T`` are others than those that they are of."""

    def __post_init__(self) -> None:
        sums = self.sums
        if sums is not None and (sums.experts_TK is not self.experts_TK or sums.valid_T is not self.valid_T):
            object.__setattr__(self, "sums", None)

    def counts(self, num_experts: int) -> Tensor:
        """[E] int64, tokens that chose each expert, whether it keeps them or not."""
        return count_experts(self.experts_TK, num_experts, self.valid_T) if self.sums is None else self.sums.counts_E

    def destinations(self, num_experts: int) -> Tensor:
        """[T, K] int64, the expert each pick goes to; ``num_experts`` where it goes to none."""
        experts_TK = self.experts_TK
        if self.valid_T is not None:
            experts_TK = experts_TK.masked_fill(~self.valid_T.unsqueeze(-1), num_experts)
        return experts_TK if self.kept_TK is None else experts_TK.masked_fill(~self.kept_TK, num_experts)

    def share(self, place: int, num_places: int) -> "Routing":
        """The same choice, of which every ``num_places``-th token from ``place`` on goes to its experts and the others go to none."""
        share_T = torch.arange(len(self.experts_TK), device=self.experts_TK.device) % num_places == place
        return replace(self, valid_T=share_T if self.valid_T is None else share_T & self.valid_T)


def count_experts(experts_TK: Tensor, num_experts: int, valid_T: Tensor | None = None) -> Tensor:
    """[E] int64, how often each expert was chosen by valid tokens; nothing waits for the device."""
    picks_P = experts_TK.flatten().long()
    ones_P = torch.ones_like(picks_P) if valid_T is None else valid_T.long().repeat_interleave(experts_TK.shape[1])
    return picks_P.new_zeros(num_experts).scatter_add_(0, picks_P, ones_P)


@experimental_api
def choose_experts(
    logits_TE: Tensor,
    topk: int,
    *,
    pre_softmax: bool = False,
    score_function: str = "softmax",
    num_groups: int | None = None,
    group_topk: int | None = None,
    scaling_factor: float | None = None,
    expert_bias: Tensor | None = None,
    experts_TK: Tensor | None = None,
    batch_invariant: bool = False,
) -> Routing:
    """Score, select and weight.

    softmax: the weights are the softmax over the chosen logits, or with ``pre_softmax`` the chosen entries of the
    softmax over all experts. sigmoid and sqrtsoftplus: the chosen scores divided by their sum (topk > 1). Scores are float32 or wider.
    Of equal scores the expert with the lowest number wins.

    Args:
        logits_TE: [T, E].
        topk: experts a token.
        num_groups: with ``group_topk``, choose only among the experts of each token's best groups. A group is as good as the sum of its
            best topk // group_topk scores.
        group_topk: groups a token; it divides ``topk``.
        scaling_factor: multiplies the weights.
        expert_bias: [E], added to the scores of the selection, not to the weights.
        experts_TK: a choice that was made before, whose weights are computed; a row with a negative number is chosen here.
        batch_invariant: choice and weights of a token have the bits that they have without the others: on a CPU each token is computed
            alone, on a GPU sums have one order.

    Raises:
        ValueError: arguments that `MoEConfig` refuses in its fields too, and tensors of other shapes.
    """
    check_topk_of(logits_TE, topk)
    check_groups(logits_TE.shape[1], topk, num_groups, group_topk)
    check_score_function(score_function, pre_softmax=pre_softmax)
    if scaling_factor is not None:
        check_above_zero("scaling_factor", scaling_factor, "leave it out for 1")
    if expert_bias is not None:
        check_shape("expert_bias", expert_bias.shape, logits_TE.shape[1:], "one number an expert")
    if experts_TK is not None:
        check_shape("experts_TK", experts_TK.shape, (len(logits_TE), topk), "tokens, topk")
    return route(
        logits_TE,
        topk,
        pre_softmax=pre_softmax,
        score_function=score_function,
        num_groups=num_groups,
        group_topk=group_topk,
        scaling_factor=scaling_factor,
        expert_bias=expert_bias,
        experts_TK=experts_TK,
        batch_invariant=batch_invariant,
    )


def route(logits_TE: Tensor, topk: int, *, valid_T: Tensor | None = None, with_sums: bool = False, **options: Any) -> Routing:
    """``choose_experts`` of arguments that are checked; with ``Routing.sums`` where they are asked for and a kernel chooses."""
    if logits_TE.is_cuda and logits_TE.dtype != torch.float64 and not torch.compiler.is_compiling():
        from mcore_moe import _triton_router

        if logits_TE.shape[1] <= _triton_router.MOST_EXPERTS:
            return _route_by_kernel(logits_TE.float(), topk, valid_T=valid_T, with_sums=with_sums, **options)
    batch_invariant, experts_TK = options.pop("batch_invariant"), options.pop("experts_TK")
    if batch_invariant and not logits_TE.is_cuda and len(logits_TE) > 1:
        # Functions of vectors are not those of what is left over, so where a row begins would have a part in its bits.
        recorded = [None] * len(logits_TE) if experts_TK is None else experts_TK.split(1)
        rows = [row.clone(memory_format=torch.contiguous_format) for row in logits_TE.split(1)]
        parts = [_choose(row, topk, experts_TK=own, in_order=True, **options) for row, own in zip(rows, recorded, strict=True)]
        return Routing(torch.cat([part.experts_TK for part in parts]), torch.cat([part.probs_TK for part in parts]))
    return _choose(logits_TE, topk, experts_TK=experts_TK, in_order=batch_invariant, **options)


def _choose(
    logits_TE: Tensor,
    topk: int,
    *,
    pre_softmax: bool,
    score_function: str,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None,
    expert_bias: Tensor | None,
    experts_TK: Tensor | None,
    in_order: bool,
) -> Routing:
    """By functions of torch; sums over the picks of a token one after the other, or as torch takes them."""
    scores_TE = selection_scores(logits_TE, score_function, pre_softmax=pre_softmax)
    with torch.no_grad():
        chosen_TK = top(_keys(scores_TE.detach(), topk, expert_bias, num_groups, group_topk, in_order=in_order), topk)
        if experts_TK is not None:
            chosen_TK = torch.where(experts_TK.min(-1, keepdim=True).values < 0, chosen_TK, experts_TK.to(chosen_TK.dtype))
    probs_TK = scores_TE.gather(-1, chosen_TK)
    if score_function != "softmax":
        probs_TK = probs_TK / (_total(probs_TK, in_order=in_order) + 1e-20) if topk > 1 else probs_TK
    elif not pre_softmax:
        probs_TK = probs_TK.softmax(-1)
    return Routing(chosen_TK, probs_TK if scaling_factor is None else probs_TK * scaling_factor)


def _route_by_kernel(
    logits_TE: Tensor,
    topk: int,
    *,
    pre_softmax: bool,
    score_function: str,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None,
    expert_bias: Tensor | None,
    experts_TK: Tensor | None,
    batch_invariant: bool,
    valid_T: Tensor | None,
    with_sums: bool,
) -> Routing:
    """Rows know nothing of each other there, so that every choice is batch-invariant once the sums of its groups are, and the memory of
    all logits begins alike, by which kernels are compiled."""
    from mcore_moe import _triton_router

    logits_TE = aligned_rows(logits_TE) if batch_invariant else logits_TE
    keys_TE = None
    expert_bias = None if expert_bias is None else expert_bias.detach().float().contiguous()
    if num_groups is not None and group_topk is not None:
        with torch.no_grad():
            scores_TE = selection_scores(logits_TE, score_function, pre_softmax=pre_softmax)
            keys_TE = _keys(scores_TE, topk, expert_bias, num_groups, group_topk, in_order=batch_invariant)
    settings = _triton_router.ChoiceSettings(
        topk=topk, score_function=score_function, pre_softmax=pre_softmax, scaling_factor=scaling_factor
    )
    chosen_TK, probs_TK, scores_E, squares, counts_E = _triton_router.Choose.apply(
        logits_TE, keys_TE, expert_bias, experts_TK, valid_T, settings, with_sums
    )
    if not with_sums:
        return Routing(chosen_TK, probs_TK)
    sums = RoutedSums(scores_E=scores_E, squares=squares, counts_E=counts_E, experts_TK=chosen_TK, valid_T=valid_T)
    return Routing(chosen_TK, probs_TK, valid_T, sums=sums)


def _keys(
    scores_TE: Tensor, topk: int, expert_bias: Tensor | None, num_groups: int | None, group_topk: int | None, *, in_order: bool
) -> Tensor:
    """[T, E], by whose order experts are chosen."""
    keys_TE = scores_TE if expert_bias is None else scores_TE + expert_bias
    if num_groups is None or group_topk is None:
        return keys_TE
    return limit_to_groups(keys_TE, topk, num_groups, group_topk, in_order=in_order)


def _total(values: Tensor, *, in_order: bool) -> Tensor:
    """[..., K] -> [..., 1], added up one after the other, or as torch takes them."""
    if not in_order:
        return values.sum(-1, keepdim=True)
    first, *rest = values.split(1, dim=-1)
    return functools.reduce(torch.add, rest, first)


def check_topk_of(logits_TE: Tensor, topk: int) -> None:
    """Of logits, [T, E].

    Raises:
        ValueError: other logits, or so many experts that there are not.
    """
    if logits_TE.dim() != 2:
        raise ValueError(f"logits have shape {list(logits_TE.shape)}, must be [tokens, experts]; flatten the dimensions of the tokens")
    check_topk(logits_TE.shape[1], topk)


def selection_scores(logits_TE: Tensor, score_function: str, *, pre_softmax: bool) -> Tensor:
    """[T, E] that bias and groups turn into the keys of the choice; float32 or wider."""
    logits_TE = logits_TE if logits_TE.dtype == torch.float64 else logits_TE.float()
    return logits_TE.softmax(-1) if pre_softmax and score_function == "softmax" else score(logits_TE, score_function)


def score(logits_TE: Tensor, score_function: str) -> Tensor:
    """[T, E] of each expert by itself; softmax leaves the logits, whose order it keeps."""
    if score_function == "sigmoid":
        return logits_TE.sigmoid()
    return F.softplus(logits_TE).sqrt() if score_function == "sqrtsoftplus" else logits_TE


def top(keys_TE: Tensor, topk: int) -> Tensor:
    """[T, K] int64 of the highest keys, best first; of equal ones the lowest number."""
    if keys_TE.is_cuda and keys_TE.dtype == torch.float32:
        from mcore_moe import _triton_router

        if keys_TE.shape[1] <= _triton_router.MOST_EXPERTS:
            return _triton_router.top(keys_TE, topk)
    return keys_TE.sort(dim=-1, descending=True, stable=True).indices[:, :topk]


def limit_to_groups(keys_TE: Tensor, topk: int, num_groups: int, group_topk: int, *, in_order: bool) -> Tensor:
    """The keys, -inf outside the best groups of each token; ``in_order`` adds up the scores of a group one after the other."""
    keys_TGM = keys_TE.unflatten(-1, (num_groups, -1))
    groups_TG = _total(keys_TGM.sort(dim=-1, descending=True).values[..., : topk // group_topk], in_order=in_order).squeeze(-1)
    outside_TG = torch.ones_like(groups_TG, dtype=torch.bool).scatter(-1, top(groups_TG, group_topk), False)
    return keys_TGM.masked_fill(outside_TG.unsqueeze(-1), float("-inf")).flatten(-2)


@experimental_api
def topk_routing_with_score_function(
    logits: Tensor,
    topk: int,
    use_pre_softmax: bool = False,
    num_groups: int | None = None,
    group_topk: int | None = None,
    scaling_factor: float | None = None,
    score_function: str = "softmax",
    expert_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The same choice in dense form.

    Returns:
        routing_probs [T, E] in the dtype of ``logits``, zero where unrouted, and routing_map [T, E] bool.

    Raises:
        ValueError: as of `choose_experts`.
    """
    routing = choose_experts(
        logits,
        topk,
        pre_softmax=use_pre_softmax,
        score_function=score_function,
        num_groups=num_groups,
        group_topk=group_topk,
        scaling_factor=scaling_factor,
        expert_bias=expert_bias,
    )
    probs = torch.zeros_like(logits).scatter(-1, routing.experts_TK, routing.probs_TK.to(logits.dtype))
    chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, routing.experts_TK, True)
    return probs, chosen
