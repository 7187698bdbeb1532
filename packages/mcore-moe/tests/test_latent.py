# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Experts that are narrower than the model: against a loop, in every layout, and in a model."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from mcore_moe import MoEConfig, moe_feed_forward
from mcore_parallel import ParallelPlan, ProcessGroups, named_shards
from mcore_parallel.comm import all_reduce
from mcore_parallel.models import GPTModel, TransformerConfig, check_layout
from mcore_parallel.nn import Step
from mcore_parallel.planner import ExpertSizes, ModelSizes, PlannerError, Workload
from tests.support.mixtures import filled_layer

D, L = 8, 4
F64 = torch.float64
MODEL = TransformerConfig(num_layers=2, hidden_size=D, num_attention_heads=2, vocab_size=16, ffn_hidden_size=6, init_method_std=0.5)
MIXTURE = MoEConfig(num_moe_experts=4, moe_router_topk=2, moe_latent_size=L, moe_shared_expert_intermediate_size=6, moe_aux_loss_coeff=0.1)


def test_the_router_and_the_shared_experts_read_the_token_and_the_experts_its_latent() -> None:
    layer = filled_layer(MODEL, MIXTURE, ProcessGroups.single())
    assert layer.latent_down.weight.shape == (L, D) and layer.latent_up.weight.shape == (D, L)
    assert layer.experts.up.shape == (4, 2, 6, L) and layer.experts.down.shape == (4, L, 6) and layer.router.weight.shape == (4, D)
    x = torch.randn(7, D, dtype=F64, requires_grad=True)
    y, _ = layer(x, Step.causal(1, 7))
    probs, chosen = (x @ layer.router.weight.t()).topk(2)
    up, down = layer.shared_experts.up.weight, layer.shared_experts.down.weight
    rows = []
    for token, experts, weights in zip(x, chosen.tolist(), probs.softmax(-1), strict=True):
        latent, total = layer.latent_down.weight @ token, torch.zeros(L, dtype=F64)
        for expert, weight in zip(experts, weights, strict=True):
            gate, value = layer.experts.up[expert] @ latent
            total = total + weight * (layer.experts.down[expert] @ (F.silu(gate) * value))
        rows.append(layer.latent_up.weight @ total + down @ (F.silu(up[0] @ token) * (up[1] @ token)))
    expected = torch.stack(rows)
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-12)
    leaves = [x, *layer.parameters()]
    ours, theirs = (torch.autograd.grad(result.square().sum(), leaves) for result in (y, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def check_ranks(plan: ParallelPlan, exchange: str) -> None:
    """As one rank with the tokens of all; without sequence parallelism the ranks of tp share theirs."""
    groups = ProcessGroups.build(plan)
    mixture = dataclasses.replace(MIXTURE, moe_token_dispatcher_type=exchange, moe_shared_expert_intermediate_size=None)
    layer, alone = (filled_layer(MODEL, mixture, place) for place in (groups, ProcessGroups.single()))
    source = groups.world if groups.sequence_parallel else groups.dp_cp
    x = torch.randn(source.size, 5, D, generator=torch.Generator().manual_seed(1), dtype=F64)
    mine, whole = x[source.rank].clone().requires_grad_(), x.clone().requires_grad_()
    y, _ = layer(mine, Step.causal(1, 5))
    expected, _ = alone(whole.flatten(0, 1), Step.causal(1, 5 * source.size))
    torch.testing.assert_close(y, expected.unflatten(0, (-1, 5))[source.rank], rtol=1e-10, atol=1e-12)
    y.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(mine.grad, whole.grad[source.rank], rtol=1e-10, atol=1e-12)
    serial = {shard.name: shard.parameter.grad for shard in named_shards(alone)}
    for shard in named_shards(layer):
        grad = all_reduce(shard.parameter.grad, groups.data(shard.spec.view))
        for axis in shard.spec.partial:
            grad = all_reduce(grad, groups.axis(shard.spec.view, axis))
        torch.testing.assert_close(grad, serial[shard.name][shard.spec.slices(groups)], rtol=1e-10, atol=1e-12, msg=shard.name)


@pytest.mark.world(2, shared=True)
@pytest.mark.parametrize(
    ("plan", "exchange"),
    [
        (ParallelPlan(tp=2, ep=2), "alltoall"),
        (ParallelPlan(dp=2, ep=2), "allgather"),
        (ParallelPlan(tp=2, ep=1, etp=2), "alltoall"),
        (ParallelPlan(tp=2, ep=2, etp=1, sequence_parallel=False), "alltoall"),
        (ParallelPlan(tp=2, ep=1, etp=1, sequence_parallel=False), "alltoall"),
    ],
    ids=["tp-ep", "dp-ep", "etp", "replicated-ep", "replicated"],
)
def test_two_ranks_equal_one(world, plan: ParallelPlan, exchange: str) -> None:
    world(check_ranks, plan=plan, exchange=exchange)


def test_a_model_initialises_and_trains_its_projections() -> None:
    model = GPTModel(MODEL, ProcessGroups.single(), feed_forward=moe_feed_forward(MIXTURE))
    tokens = torch.arange(10) % 7
    output, aux = model(tokens, Step.causal(2, 5))
    (output.token_losses(tokens).sum() + aux.total()).backward()
    for name, parameter in model.named_parameters():
        if "latent" in name:
            assert parameter.std() > 0 and parameter.grad is not None and parameter.grad.any()
    up, down = (model.get_parameter(f"layers.0.mlp.latent_{part}.weight") for part in ("up", "down"))
    # What writes into the residual stream starts smaller by the root of twice the layers.
    assert up.std() < 0.8 * down.std()


def test_the_planner_counts_parameters_and_operations_and_estimates_nothing_else() -> None:
    experts = ExpertSizes(num_experts=4, topk=2, ffn_hidden_size=6, shared_ffn_hidden_size=6, latent_size=L)
    sizes = ModelSizes(config=MODEL, experts=experts)
    model = GPTModel(MODEL, ProcessGroups.single(), feed_forward=moe_feed_forward(MIXTURE), device="meta")
    assert sizes.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    wide = ModelSizes(config=MODEL, experts=dataclasses.replace(experts, latent_size=0))
    # Of each of two experts a token three matrices are narrower, and there are two projections.
    saved = MODEL.num_layers * (2 * 3 * 6 * (D - L) - 2 * D * L)
    assert wide.flops_per_token(8) - sizes.flops_per_token(8) == 6 * saved
    with pytest.raises(PlannerError, match="latent_size=-1 must not be negative"):
        dataclasses.replace(experts, latent_size=-1)
    with pytest.raises(PlannerError, match="latent_size=4 of the experts: time and memory are not estimated"):
        Workload(model=sizes, sequence=8, global_batch=1)


def test_what_cannot_be_is_named() -> None:
    biased = dataclasses.replace(MODEL, add_bias_linear=True)
    with pytest.raises(ValueError, match="moe_latent_size=4 does not go with add_bias_linear=True: its projections have no biases"):
        check_layout(biased, ParallelPlan(), feed_forward=moe_feed_forward(MIXTURE))
    with pytest.raises(ValueError, match="moe_latent_size=4 on a rank must be a multiple of 8"):
        check_layout(
            dataclasses.replace(MODEL, ffn_hidden_size=8), ParallelPlan(), feed_forward=moe_feed_forward(MIXTURE),
            dtype=torch.bfloat16, device="cuda",
        )  # fmt: skip
