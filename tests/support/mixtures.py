# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Layers of experts, picks and routings of tests, and one way of tokens through them."""

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_inference import DynamicInferenceRequestRecord
from mcore_moe import MoEConfig, MoELayer, Routing, TopKRouter
from mcore_parallel import ProcessGroups, named_shards
from mcore_parallel.comm import all_reduce
from mcore_parallel.models import GPTModel, Site, TransformerConfig
from mcore_parallel.nn import Step

# T tokens, D model, K picks.


def filled_layer(config: TransformerConfig, mixture: MoEConfig, groups: ProcessGroups) -> MoELayer:
    """A layer in float64, with the same parameters in every layout."""
    layer = MoELayer(mixture, Site(layer=0, local_layer=0, config=config, groups=groups), dtype=torch.float64)
    with torch.no_grad():
        for shard in named_shards(layer):
            values = torch.randn(shard.spec.shape, generator=torch.Generator().manual_seed(len(shard.name)), dtype=torch.float64)
            shard.parameter.copy_(0.5 * values[shard.spec.slices(groups)])
    return layer


def equal_to_one_rank(
    config: TransformerConfig, mixture: MoEConfig, groups: ProcessGroups, parts: list[Tensor], valid: list[Tensor] | None = None
) -> None:
    """Output, gradients of tokens and parameters, losses and counts of the ranks' parts are those of one rank with all of them."""
    rank, losses = groups.world.rank, groups.tp_cp.size == groups.world.size
    layer, alone = (filled_layer(config, mixture, place) for place in (groups, ProcessGroups.single()))
    mine, whole = parts[rank].clone().requires_grad_(), torch.cat(parts).requires_grad_()
    # Under sequence parallelism a step speaks of the tokens of all tp ranks.
    everything = torch.cat(valid) if valid else None
    step = Step.causal(1, len(whole) if groups.tp.size > 1 else len(mine))
    y, aux = layer(mine, dataclasses.replace(step, valid=everything))
    expected, expected_aux = alone(whole, dataclasses.replace(Step.causal(1, len(whole)), valid=everything))
    torch.testing.assert_close(y, expected.split([len(part) for part in parts])[rank], rtol=1e-10, atol=1e-12)
    assert all_reduce(aux.counts[0], groups.world).tolist() == expected_aux.counts[0].tolist()
    if losses:
        for key, loss in expected_aux.losses.items():
            torch.testing.assert_close(
                all_reduce(aux.losses[key].value.detach(), groups.world), loss.value.detach(), rtol=1e-10, atol=1e-12
            )
    (y.square().sum() + (aux.total() if losses else 0)).backward()
    (expected.square().sum() + (expected_aux.total() if losses else 0)).backward()
    torch.testing.assert_close(mine.grad, whole.grad.split([len(part) for part in parts])[rank], rtol=1e-10, atol=1e-12)
    serial = {shard.name: shard.parameter.grad for shard in named_shards(alone)}
    for shard in named_shards(layer):
        grad = all_reduce(shard.parameter.grad, groups.data(shard.spec.view))
        for axis in shard.spec.partial:
            grad = all_reduce(grad, groups.axis(shard.spec.view, axis))
        torch.testing.assert_close(grad, serial[shard.name][shard.spec.slices(groups)], rtol=1e-10, atol=1e-12, msg=shard.name)


def random_picks(tokens: int, num_experts: int, topk: int, generator: torch.Generator, *, skewed: bool = False) -> Tensor:
    """int32 [T, K], distinct within a row; some are no expert."""
    keys = torch.rand(tokens, num_experts, generator=generator)
    keys[:, 0] += 2 * skewed
    experts = keys.argsort(-1)[:, :topk]
    return torch.where(torch.rand(experts.shape, generator=generator) < 0.8, experts, -1).to(torch.int32)


def random_routing(tokens: int, num_experts: int, topk: int, seed: int, *, skewed: bool = False) -> Routing:
    """Distinct experts a token, in float64; some tokens are padding, some picks dropped, one weight has underflowed."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.rand(tokens, num_experts, generator=generator)
    keys[:, 0] += 2 * skewed
    probs = torch.rand(tokens, topk, generator=generator, dtype=torch.float64)
    probs[:1] = 0.0
    valid, picked = (torch.rand(size, generator=generator) < 0.8 for size in ((tokens,), (tokens, topk)))
    return Routing(keys.argsort(-1)[:, :topk], probs.requires_grad_(), valid, picked)


def pass_through(dispatcher: Any, experts: Any, x_TD: Tensor, routing: Routing) -> list[Tensor]:
    """The sums [T, D], and the gradients of tokens, weights [T, K] and parameters."""
    x_TD = x_TD.detach().requires_grad_()
    sent = dispatcher.dispatch(x_TD, routing)
    y_TD = dispatcher.combine(experts(sent.rows_RD, sent.ends_N, sent.weights_R), sent, routing)
    assert y_TD.shape == x_TD.shape
    weigh = torch.arange(y_TD.numel(), dtype=y_TD.dtype).view_as(y_TD) / 7
    return [y_TD.detach(), *torch.autograd.grad((y_TD * weigh).sum(), [x_TD, routing.probs_TK, *experts.parameters()])]


def compare_records(
    reference: GPTModel,
    prompts: list[list[int]],
    recorded: list[DynamicInferenceRequestRecord],
    plain: list[DynamicInferenceRequestRecord],
) -> int:
    """Log-probabilities of a mixture's greedy tokens by recorded steps are those by plain ones, in bfloat16, as long as rounding exchanges
    nothing: how many tokens that are."""
    compared = 0
    for text, one, other in zip(prompts, recorded, plain, strict=True):
        pairs = zip(one.generated_tokens, other.generated_tokens, strict=True)
        same = next((i for i, pair in enumerate(pairs) if len(set(pair)) > 1), len(other.generated_tokens))
        # Padding changes how products are tiled: a near tie of two experts, and then of two tokens, may fall otherwise.
        settled = settled_places(reference, [*text, *other.generated_tokens]) - len(text) + 1
        same = max(0, min(same, settled))
        compared += same
        # Logits of 4 to 8 in bfloat16 are 1/32 apart, and either may be some of these off.
        torch.testing.assert_close(one.generated_log_probs[:same], other.generated_log_probs[:same], rtol=0, atol=4 / 32)
    return compared


def settled_places(model: GPTModel, tokens: list[int]) -> int:
    """Leading tokens whose experts no rounding exchanges."""
    gaps: list[torch.Tensor] = []

    def measure(router: TopKRouter, inputs: tuple[torch.Tensor, ...], _: object) -> None:
        best = F.linear(inputs[0], router.weight, router.bias).topk(3, dim=-1).values
        gaps.append(best[:, 1] - best[:, 2])

    hooks = [module.register_forward_hook(measure) for module in model.modules() if isinstance(module, TopKRouter)]
    with torch.no_grad():
        model(torch.tensor(tokens), Step.causal(1, len(tokens)))
    for hook in hooks:
        hook.remove()
    close = torch.stack(gaps).amin(0) < 0.02
    return int(close.int().argmax()) if close.any() else len(tokens)
