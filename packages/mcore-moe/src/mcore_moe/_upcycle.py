# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The weights of a mixture from those of a dense model, so that training goes on where the dense model stopped."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_moe._config import MoEConfig
from mcore_moe._stability import experimental_api

# E experts, F feed-forward width of the dense model, G slices that it is cut into, D model, K experts a token.

_EXPERTS = {"up": "up.weight", "down": "down.weight", "up_bias": "up.bias", "down_bias": "down.bias"}
"""Parameter of the experts -> that of the dense feed-forward."""


@experimental_api
def upcycle_state_dict(dense: Mapping[str, Tensor], mixture: Mapping[str, Tensor], config: MoEConfig) -> dict[str, Tensor]:
    """The state of a mixture whose logits are those of a dense model (He et al. 2024, "virtual group initialization").

    Experts of the dense model's width are copies of its feed-forward. Narrower ones, of a G-th of that width, are its slices: G experts
    in a row hold all of it and share one row of the router, so a token goes to all of them or to none. The second projection makes up
    for the weights of the router. Where those add up to a fixed number (softmax over the selected experts; other scores with topk > 1)
    the logits are exact for every activation. Where they do not (``moe_router_pre_softmax``) the factor is that of a router that scores
    all experts alike. ``moe_expert_capacity_factor`` drops picks, and ``moe_dispatch_fwd_dtype`` rounds what travels: with them logits are
    those of the dense model but for that.

    Args:
        dense: whole tensors by name, of a model with as many layers.
        mixture: the same of the mixture, freshly initialised. Routers are read; of the rest only names, shapes and dtypes, so it may lie
            on the meta device.
        config: of the mixture.

    Returns:
        New tensors by the names of ``mixture``, in its dtypes. Those without experts are the tensors of ``dense`` where dtypes agree.

    Raises:
        ValueError: a tensor that one of the two lacks, or a shape that does not fit, by name; a router whose weights add up to no known
            number.

    Example:
        >>> dense = {"mlp.up.weight": torch.ones(6, 4), "mlp.down.weight": torch.ones(4, 6)}
        >>> mixture = {"mlp.experts.up": torch.empty(4, 3, 4), "mlp.experts.down": torch.empty(4, 4, 3)}
        >>> mixture["mlp.router.weight"] = torch.rand(4, 4)
        >>> upcycle_state_dict(dense, mixture, MoEConfig(num_moe_experts=4))["mlp.experts.down"][3, 0]
        tensor([2., 2., 2.])
    """
    prefixes = [name.removesuffix("experts.up") for name in mixture if name.endswith(".experts.up")]
    if not prefixes:
        raise ValueError("mixture has no parameter named ...experts.up; pass the state of a model with experts")
    if config.moe_latent_size is not None:
        raise ValueError(f"moe_latent_size={config.moe_latent_size} has no part in a dense model; leave it out")
    if config.moe_apply_probs_on_input:
        raise ValueError(
            "moe_apply_probs_on_input=True scales the input of the activation, which no factor behind it makes up for; leave it out"
        )
    if config.moe_router_force_load_balancing:
        raise ValueError(
            "moe_router_force_load_balancing=True sends a token to experts at random, which hold parts of one feed-forward; leave it out"
        )
    if shared := next((name for name in mixture if ".shared_expert" in name), None):
        raise ValueError(f"{shared} has no part in a dense model; leave moe_shared_expert_intermediate_size out")
    state, read = dict[str, Tensor](), set[str]()
    for prefix in prefixes:
        layer = _Layer.of(prefix, dense, mixture, config)
        state |= layer.experts(dense, mixture) | layer.router(mixture)
        read |= {prefix + source for source in _EXPERTS.values()}
    for name, wanted in mixture.items():
        if name in state:
            continue
        if name not in dense:
            raise ValueError(f"{name} is in the mixture, not in the dense model; give both the same TransformerConfig")
        _check_shape(name, dense[name], wanted)
        state[name] = dense[name].to(wanted.dtype)
        read.add(name)
    if unread := sorted(set(dense) - read):
        raise ValueError(f"{unread[0]} is in the dense model, not in the mixture; give both the same TransformerConfig")
    return {name: state[name] for name in mixture}


@dataclass(frozen=True)
class _Layer:
    """One feed-forward that becomes experts."""

    prefix: str
    num_experts: int
    slices: int
    """G."""
    weight_sum: float
    """What the weights of a token's experts add up to."""

    @classmethod
    def of(cls, prefix: str, dense: Mapping[str, Tensor], mixture: Mapping[str, Tensor], config: MoEConfig) -> "_Layer":
        name, source = f"{prefix}experts.down", f"{prefix}down.weight"
        if source not in dense:
            raise ValueError(f"{name} needs {source} of the dense model, which has none; give both the same TransformerConfig")
        E, width, narrow, topk = len(mixture[name]), dense[source].shape[-1], mixture[name].shape[-1], config.moe_router_topk
        if config.num_moe_experts != E:
            raise ValueError(f"num_moe_experts={config.num_moe_experts}, but {name} has {E} experts; pass whole tensors, not shards")
        if not narrow or width % narrow:
            raise ValueError(f"moe_ffn_hidden_size={narrow} of {name} must divide the dense width {width} of {source}")
        slices = width // narrow
        groups = config.moe_router_num_groups or 1
        for what, number in (("moe_router_topk", topk), ("num_moe_experts", E), ("num_moe_experts / moe_router_num_groups", E // groups)):
            if number % slices:
                raise ValueError(
                    f"{what}={number} must be a multiple of {slices}, the experts that hold one dense feed-forward of {source}"
                )
        return cls(prefix, E, slices, _weight_sum(config))

    def experts(self, dense: Mapping[str, Tensor], mixture: Mapping[str, Tensor]) -> dict[str, Tensor]:
        state: dict[str, Tensor] = {}
        for part, source in _EXPERTS.items():
            name, source = f"{self.prefix}experts.{part}", self.prefix + source
            if (name in mixture) != (source in dense):
                raise ValueError(f"one of {name} and {source} is missing; give both models the same add_bias_linear")
            if name not in mixture:
                continue
            copies = self._copies(part, _wide(dense[source]))
            _check_shape(name, copies, mixture[name])
            state[name] = copies.to(mixture[name].dtype)
        return state

    def router(self, mixture: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Every G rows are the same; the experts' bias of the selection is zero."""
        state: dict[str, Tensor] = {}
        for name in (f"{self.prefix}router.{part}" for part in ("weight", "bias", "expert_bias")):
            if name in mixture:
                rows = mixture[name][: self.num_experts // self.slices]
                state[name] = rows.repeat_interleave(self.slices, 0)
        return state

    def _copies(self, part: str, value: Tensor) -> Tensor:
        """[E, ...]: expert j has slice j % G."""
        if part == "down_bias":
            # A token's experts all add the whole of it.
            return (value / self.weight_sum).expand(self.num_experts, *value.shape).clone()
        if part == "down":
            value = value * (self.slices / self.weight_sum)
        axis = value.dim() - (2 if part == "up" else 1)
        cut = value.unflatten(axis, (self.slices, -1)).movedim(axis, 0)
        return cut.repeat(self.num_experts // self.slices, *[1] * value.dim())


def _weight_sum(config: MoEConfig) -> float:
    """What the router's weights of one token add up to."""
    topk, kind = config.moe_router_topk, config.moe_router_score_function
    factor = 1.0 if config.moe_router_topk_scaling_factor is None else config.moe_router_topk_scaling_factor
    sinkhorn = config.moe_router_load_balancing_type in ("sinkhorn", ("sinkhorn",))
    if topk == 1 and (sinkhorn or kind != "softmax"):
        way = "sinkhorn" if sinkhorn else f"moe_router_score_function={kind!r}"
        raise ValueError(
            f"moe_router_topk=1 with {way} weighs an expert by its own score, which no factor makes up for; "
            "use softmax with moe_router_pre_softmax=True, or topk=2"
        )
    if sinkhorn or config.moe_router_pre_softmax:
        return factor * topk / config.num_moe_experts
    return factor


def _wide(value: Tensor) -> Tensor:
    return value.to(torch.promote_types(value.dtype, torch.float32))


def _check_shape(name: str, value: Tensor, wanted: Tensor) -> None:
    if value.shape != wanted.shape:
        raise ValueError(
            f"{name} would be {tuple(value.shape)}, the mixture has {tuple(wanted.shape)}; give both the same TransformerConfig"
        )
