# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The learned gate of a mixture-of-experts layer."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from mcore_moe._balance import (
    balance_scores,
    get_updated_expert_bias,
    quantile_bias,
    score_entropies,
    sinkhorn_routing,
    switch_load_balancing_loss_func,
)
from mcore_moe._capacity import expert_capacity, limit_to_capacity
from mcore_moe._config import LOSS_NAMES, MoEConfig
from mcore_moe._gating import apply_random_logits, gate, jittered
from mcore_moe._routing import Routing, count_experts, route, selection_scores, top
from mcore_moe._tokens import LocalTokens
from mcore_parallel import Group, ProcessGroups, ShardSpec, in_backward
from mcore_parallel.comm import all_gather, all_reduce
from mcore_parallel.models import AuxLoss
from mcore_parallel.nn import Step
from mcore_parallel.tensor_parallel import BatchInvariantMatmul

# T tokens of this rank, D model, E experts, K experts a token, S sequences, R rows that add up to those of the tokens.
_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


class TopKRouter(nn.Module):
    """Scores tokens against experts and picks the best k.

    With ``moe_router_enable_expert_bias`` it owns ``expert_bias`` [E], a persistent buffer that stays float32 when the model is cast, or
    given a state of another dtype.

    Args:
        config: routing choices.
        hidden_size: D.
        groups: the tp and cp ranks share the statistics of the load-balancing loss.
        layer: global number.
        bias: whether the logits have a learned bias; ``config.moe_router_bias`` wins.
        batch_invariant: compute logits and choice of every token as if it were alone.
        dtype: of the weight [E, D].
    """

    expert_bias: Tensor | None

    def __init__(
        self,
        config: MoEConfig,
        hidden_size: int,
        groups: ProcessGroups,
        *,
        layer: int = 0,
        bias: bool = False,
        batch_invariant: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.config, self.groups, self.layer = config, groups, layer
        self.batch_invariant = batch_invariant
        self._matmul = BatchInvariantMatmul() if batch_invariant else None
        # Ranks that hold the same tokens.
        self.replicas = Group.single() if groups.sequence_parallel else groups.tp
        num_experts = config.num_moe_experts
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size, dtype=dtype, device=device))
        biased = bias if config.moe_router_bias is None else config.moe_router_bias
        self.bias = nn.Parameter(torch.empty(num_experts, dtype=dtype, device=device)) if biased else None
        expert_bias = torch.zeros(num_experts, dtype=torch.float32, device=device) if config.moe_router_enable_expert_bias else None
        self.register_buffer("expert_bias", expert_bias)
        # Of quantile balancing: the biases that the micro-batches of this global batch ask for, added up, and their number. [E + 1]. Made
        # here, because what a graph makes it makes again at every replay.
        self._bias_sums = torch.zeros(num_experts + 1, dtype=torch.float32, device=device)
        if config.moe_router_force_load_balancing:
            warnings.warn("moe_router_force_load_balancing=True routes at random: for benchmarks only", stacklevel=2)

    @property
    def noise_fields(self) -> str:
        """As ``mcore_parallel.nn.DrawsNoise``."""
        return self.config.noise_fields

    @property
    def training_fields(self) -> str:
        """Of the configuration, by which its forward in training is another one than in evaluation."""
        return self.config.training_fields

    def shard_specs(self) -> Mapping[str, ShardSpec]:
        # Every rank weighs its own share of the tokens, or of their picks, so gradients over tp add up.
        partial = ("tp",) if self.groups.tp.size > 1 else ()
        specs = {"weight": ShardSpec(shape=tuple(self.weight.shape), partial=partial)}
        return specs if self.bias is None else {**specs, "bias": ShardSpec(shape=tuple(self.bias.shape), partial=partial)}

    def forward(self, x_TD: Tensor, step: Step) -> tuple[Routing, dict[str, AuxLoss]]:
        """The routing of [T, D] tokens, and this rank's part of the auxiliary losses by name; none outside training.

        Losses, counts and recorded routing are those before the drop, whose share of the picks is the value ``drop_rate``.
        """
        config = self.config
        learns = self.training and torch.is_grad_enabled()
        tokens = LocalTokens.of(step, self.groups, len(x_TD))
        dtype = torch.promote_types(_DTYPES.get(config.moe_router_dtype or "", x_TD.dtype), x_TD.dtype)
        if config.moe_input_jitter_eps and self.training:
            x_TD = jittered(x_TD, config.moe_input_jitter_eps, self.replicas)
        logits_TE = gate(x_TD, self.weight, self.bias, dtype, tokens.valid_T, self._matmul)
        chosen_TE = apply_random_logits(logits_TE, self.replicas) if config.moe_router_force_load_balancing else logits_TE
        # Random logits choose, but losses are of the gate's own.
        with_sums = learns and bool(config.loss_names) and chosen_TE is logits_TE
        routing = self._routing(chosen_TE, step, tokens, with_sums=with_sums)
        if learns and config.moe_router_load_balancing_type == "quantile_balancing":
            self._add_quantile_bias(chosen_TE, tokens)
        if step.routing_recorder is not None:
            step.routing_recorder(self.layer, routing.experts_TK, routing.probs_TK.detach())
        routing = self._limited(routing)
        return routing, self._losses(logits_TE, routing, step, tokens) if learns and config.loss_names else {}

    @torch.no_grad()
    def update_expert_bias(self, counts_E: Tensor, skipped: Tensor, step: int | None = None) -> None:
        """Move the bias by the loads of a global batch, or to what its micro-batches asked for (quantile balancing).

        Args:
            counts_E: tokens of each expert, over all ranks.
            skipped: scalar bool; True leaves the bias as it is.
            step: of the training, counted from 0; None where nobody knows it.

        Raises:
            ValueError: no step, and ``moe_router_bias_decay_steps`` asks for it.
        """
        bias_E = self.expert_bias
        if bias_E is None or not self.training:
            return
        rate = self.config.bias_update_rate(step)
        if not rate:
            self._bias_sums.zero_()
            return
        if self.config.moe_router_load_balancing_type == "quantile_balancing":
            moved_E = self._mean_quantile_bias(bias_E)
        else:
            moved_E = get_updated_expert_bias(counts_E, bias_E, rate)
        bias_E.copy_(torch.where(skipped, bias_E, moved_E))

    @torch.no_grad()
    def _add_quantile_bias(self, logits_TE: Tensor, tokens: LocalTokens) -> None:
        """Add the bias that the tokens of this micro-batch ask for, those of the tp and cp ranks together."""
        config, bias_E, group = self.config, self.expert_bias, self.groups.tp_cp
        if bias_E is None or not config.moe_router_bias_update_rate or not len(logits_TE) or in_backward():
            return
        scores_TE = selection_scores(logits_TE, config.moe_router_score_function, pre_softmax=config.moe_router_pre_softmax)
        valid_T = None if tokens.valid_T is None else all_gather(tokens.valid_T.to(torch.uint8), group).bool()
        scores_TE = all_gather(scores_TE, group)
        quantile_E = quantile_bias(scores_TE, bias_E, config.moe_router_topk, valid_T)
        # Infinite without a valid token. Scores that are no numbers are a fault, which another run of the step may make good.
        is_sound = quantile_E.isfinite().all() & scores_TE.isfinite().all()
        self._bias_sums_on(bias_E.device).add_(torch.where(is_sound, torch.cat([quantile_E, quantile_E.new_ones(1)]), 0))

    def _mean_quantile_bias(self, bias_E: Tensor) -> Tensor:
        """Of all micro-batches and ranks, around 0; the bias as it is where none asked."""
        sums = self._bias_sums_on(bias_E.device)
        total = all_reduce(sums, self.groups.tp_dp_cp)
        mean_E = total[:-1] / total[-1].clamp(min=1)
        moved_E = torch.where(total[-1] > 0, mean_E - mean_E.mean(), bias_E)
        sums.zero_()
        return moved_E

    def _bias_sums_on(self, device: torch.device) -> Tensor:
        """``_bias_sums`` where the bias is, which moves with the model, or is given a place there later."""
        if self._bias_sums.device != device:
            self._bias_sums = torch.zeros_like(self._bias_sums, device=device)
        return self._bias_sums

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        before = self.expert_bias
        super()._apply(fn, recurse)
        if before is not None and self.expert_bias is not None and self.expert_bias.dtype != torch.float32:
            self.expert_bias = before.to(self.expert_bias.device)
        return self

    def _load_from_state_dict(self, *arguments: Any, **options: Any) -> None:
        super()._load_from_state_dict(*arguments, **options)
        # With assign=True it is what the state holds.
        if self.expert_bias is not None:
            self.expert_bias = self.expert_bias.float()

    def _routing(self, logits_TE: Tensor, step: Step, tokens: LocalTokens, *, with_sums: bool) -> Routing:
        config = self.config
        experts_TK, weights_TK = tokens.replayed(self.layer, len(logits_TE), config.num_moe_experts, config.moe_router_topk)
        if config.moe_router_load_balancing_type == "sinkhorn":
            if step.routed_experts is not None:
                raise ValueError(
                    "moe_router_load_balancing_type='sinkhorn' routes a whole batch at once, and step.routed_experts replays tokens; "
                    "choose another type, or replay nothing"
                )
            routing = sinkhorn_routing(
                logits_TE,
                config.moe_router_topk,
                balanced=self.training,
                scaling_factor=config.moe_router_topk_scaling_factor,
                valid_T=tokens.valid_T,
            )
        else:
            routing = route(
                logits_TE,
                config.moe_router_topk,
                pre_softmax=config.moe_router_pre_softmax,
                score_function=config.moe_router_score_function,
                num_groups=config.moe_router_num_groups,
                group_topk=config.moe_router_group_topk,
                scaling_factor=config.moe_router_topk_scaling_factor,
                expert_bias=self.expert_bias,
                experts_TK=experts_TK,
                batch_invariant=self.batch_invariant,
                valid_T=tokens.valid_T,
                with_sums=with_sums,
            )
        probs_TK = routing.probs_TK
        if experts_TK is not None and weights_TK is not None:
            # The weights of a fresh choice are its own.
            fresh_T1 = (experts_TK < 0).any(-1, keepdim=True)
            probs_TK = torch.where(fresh_T1, probs_TK, weights_TK.to(probs_TK.dtype))
        if tokens.valid_T is not None:
            probs_TK = probs_TK.masked_fill(~tokens.valid_T.unsqueeze(-1), 0.0)
        return Routing(routing.experts_TK, probs_TK, tokens.valid_T, sums=routing.sums)

    def _limited(self, routing: Routing) -> Routing:
        """What the experts have room for. The bound is one of this rank's tokens, so no rank asks another."""
        config, num_tokens = self.config, len(routing.experts_TK)
        if config.moe_expert_capacity_factor is None:
            return routing
        E, K = config.num_moe_experts, config.moe_router_topk
        capacity = expert_capacity(num_tokens, K, E, config.moe_expert_capacity_factor)
        pad = config.moe_pad_expert_input_to_capacity
        return limit_to_capacity(routing, E, capacity, config.moe_token_drop_policy, pad=pad)

    def _losses(self, logits_TE: Tensor, routing: Routing, step: Step, tokens: LocalTokens) -> dict[str, AuxLoss]:
        config, group = self.config, self.groups.tp_cp
        total = len(logits_TE) * group.size if tokens.valid_T is None else all_reduce(tokens.valid_T.sum(), group)
        losses: dict[str, AuxLoss] = {}
        sums, kinds = routing.sums, config.loss_coefficients
        if kinds:
            # By their scores alone tokens choose what they are routed to, unless something else has a say in that.
            plain = (
                not (config.moe_router_num_groups or config.moe_router_enable_expert_bias or config.moe_router_force_load_balancing)
                and step.routed_experts is None
            )
            by_token = "seq_aux_loss" in kinds or ("aux_loss" in kinds and not plain)
            # Other losses need only what the rows add up to.
            if sums is None or by_token:
                scores_RE = tokens.masked(balance_scores(logits_TE, config.moe_router_score_function))
            else:
                scores_RE = sums.scores_E.unsqueeze(0)
            chosen = routing
            if by_token and not plain:
                chosen = replace(routing, experts_TK=top(scores_RE.detach(), config.moe_router_topk))
            for kind, weight in kinds.items():
                if kind == "global_aux_loss":
                    value = self._global_loss(scores_RE, routing, total, step)
                elif kind in ("device_aux_loss", "comm_aux_loss"):
                    value = self._device_loss(scores_RE, routing, total, by_tokens=kind == "comm_aux_loss")
                elif kind == "seq_aux_loss":
                    value = self._sequence_loss(scores_RE, chosen, total, tokens)
                else:
                    value = self._batch_loss(scores_RE, chosen, total)
                losses[LOSS_NAMES[kind]] = AuxLoss(value, weight)
        if config.moe_z_loss_coeff:
            squares = tokens.masked(_wide(logits_TE).logsumexp(-1).square()).sum() if sums is None else sums.squares
            losses["z_loss"] = AuxLoss(squares / _at_least_one(total), config.moe_z_loss_coeff)
        if config.moe_router_report_entropy:
            entropies_T = score_entropies(logits_TE.detach(), config.moe_router_score_function)
            losses["router_entropy"] = AuxLoss(tokens.masked(entropies_T).sum() / _at_least_one(total), 0.0)
        if routing.kept_TK is not None:
            dropped = routing.counts(config.num_moe_experts).sum() - routing.kept_TK.sum()
            losses["drop_rate"] = AuxLoss(dropped.to(logits_TE.dtype) / _at_least_one(total) / config.moe_router_topk, 0.0)
        return losses

    def _batch_loss(self, scores_RE: Tensor, chosen: Routing, total: int | Tensor) -> Tensor:
        config = self.config
        counts_E = all_reduce(chosen.counts(config.num_moe_experts), self.groups.tp_cp)
        return switch_load_balancing_loss_func(scores_RE, counts_E, total, config.moe_router_topk, config.num_moe_experts, 1.0)

    def _sequence_loss(self, scores_TE: Tensor, chosen: Routing, total: int | Tensor, tokens: LocalTokens) -> Tensor:
        """The loss of each sequence by itself, and the mean of those with a token."""
        E, K = self.config.num_moe_experts, self.config.moe_router_topk
        sequence_T, S = tokens.sequences()
        picks_TK = sequence_T.unsqueeze(-1) * E + chosen.experts_TK
        counts_SE = all_reduce(count_experts(picks_TK, S * E, tokens.valid_T), self.groups.tp_cp).view(S, E).to(scores_TE.dtype)
        scores_SE = scores_TE.new_zeros(S, E).index_add(0, sequence_T, scores_TE)
        tokens_S = counts_SE.sum(-1) / K
        losses_S = (scores_SE * counts_SE).sum(-1) * (E / K) / tokens_S.clamp(min=1).square()
        return losses_S.sum() / (tokens_S > 0).sum().clamp(min=1)

    def _device_loss(self, scores_RE: Tensor, routing: Routing, total: int | Tensor, *, by_tokens: bool) -> Tensor:
        """By the picks of each device, or by the tokens that are sent to it, as they are routed (DeepSeek-V2, section 2.2.3)."""
        config = self.config
        num_devices, topk = config.num_balanced_devices, config.most_devices_of_token if by_tokens else config.moe_router_topk
        devices_TK = routing.experts_TK.div(config.num_moe_experts // num_devices, rounding_mode="floor")
        if by_tokens:
            sent_TD = devices_TK.new_zeros((len(devices_TK), num_devices)).scatter(1, devices_TK, 1)
            counts_D = (sent_TD if routing.valid_T is None else sent_TD * routing.valid_T.unsqueeze(-1)).sum(0)
        else:
            counts_D = count_experts(devices_TK, num_devices, routing.valid_T)
        scores_RD = scores_RE.unflatten(-1, (num_devices, -1)).sum(-1)
        counts_D = all_reduce(counts_D, self.groups.tp_cp)
        return switch_load_balancing_loss_func(scores_RD, counts_D, total, topk, num_devices, 1.0)

    def _global_loss(self, scores_RE: Tensor, routing: Routing, total: int | Tensor, step: Step) -> Tensor:
        """By the loads of all ranks in the micro-batches of the global batch so far; its size does not depend on dp."""
        E = self.config.num_moe_experts
        counts_E = routing.counts(E)
        counts_E = counts_E if self.replicas.is_first else torch.zeros_like(counts_E)
        if self.layer in step.counts:
            counts_E = counts_E + step.counts[self.layer]
        counts_E = all_reduce(counts_E, self.groups.tp_dp_cp).to(scores_RE.dtype)
        share_E = counts_E / counts_E.sum().clamp(min=1)
        return (scores_RE.sum(0) * share_E).sum() * E / _at_least_one(total)


def _wide(logits_TE: Tensor) -> Tensor:
    return logits_TE if logits_TE.dtype == torch.float64 else logits_TE.float()


def _at_least_one(total: int | Tensor) -> int | Tensor:
    return total.clamp(min=1) if isinstance(total, Tensor) else max(total, 1)
