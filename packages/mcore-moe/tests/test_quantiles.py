# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Quantile balancing: the bias of the selection becomes what would have given each expert its even share."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mcore_moe import MoEConfig, MoELayer
from mcore_moe._balance import quantile_bias
from mcore_parallel import ParallelPlan, ProcessGroups, named_buffer_shards
from mcore_parallel.models import TransformerConfig
from mcore_parallel.nn import Step
from tests.support.mixtures import filled_layer

D, E, K = 8, 6, 2
F64 = torch.float64
ALONE = ProcessGroups.single()
MODEL = TransformerConfig(num_layers=1, hidden_size=D, num_attention_heads=2, vocab_size=16, ffn_hidden_size=4)
QUANTILES: dict[str, Any] = {
    "num_moe_experts": E,
    "moe_router_topk": K,
    "moe_router_load_balancing_type": "quantile_balancing",
    "moe_router_enable_expert_bias": True,
}
NO = torch.tensor(False)


def tokens_of(seed: int, tokens: int) -> Tensor:
    return torch.randn(tokens, D, generator=torch.Generator().manual_seed(seed), dtype=F64) + 1


def end(layer: MoELayer, skipped: Tensor = NO) -> Tensor:
    layer.end_of_batch(torch.zeros(E), skipped)
    assert layer.router.expert_bias is not None
    return layer.router.expert_bias.clone()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("tokens", [1, 7, 60])
def test_no_expert_beats_the_bar_of_more_than_its_even_share_of_tokens(tokens: int, masked: bool) -> None:
    generator = torch.Generator().manual_seed(tokens)
    scores, before = (torch.randn(*shape, generator=generator, dtype=F64) for shape in ((tokens, E), (E,)))
    valid = torch.arange(tokens) % 3 != 1 if masked else None
    after = quantile_bias(scores, before, K, valid)
    rows = [row for row in range(tokens) if valid is None or valid[row]]
    for expert in range(E):
        margins = [(scores[row, expert] - sorted((scores[row] + before).tolist(), reverse=True)[K]).item() for row in rows]
        # Where the expert is the first that is left out, its margin is the bias that it has.
        beyond, at_least = (sum(margin + after[expert].item() > edge for margin in margins) for edge in (1e-6, -1e-6))
        assert beyond <= len(rows) * K // E < at_least
    assert after.dtype == torch.float32


@pytest.mark.parametrize(
    "choices", [{}, {"moe_router_pre_softmax": True}, {"moe_router_score_function": "sigmoid"}], ids=["softmax", "pre", "sigmoid"]
)
def test_loads_of_a_stationary_stream_become_even(choices: dict[str, Any]) -> None:
    layer = filled_layer(MODEL, MoEConfig(**QUANTILES, **choices), ALONE)
    loads = []
    for seed in range(8):
        for microbatch in range(2):
            _, aux = layer(tokens_of(2 * seed + microbatch, 600), Step.causal(1, 600))
            loads.append((aux.counts[0].max() / aux.counts[0].double().mean()).item())
        end(layer)
    assert loads[0] > 1.5 and max(loads[-4:]) < 1.2, loads


def test_weights_are_those_of_the_scores_and_a_skipped_update_moves_nothing() -> None:
    layer = filled_layer(MODEL, MoEConfig(**QUANTILES), ALONE)
    x = tokens_of(0, 20)
    layer(x, Step.causal(1, 20))
    assert not end(layer, torch.tensor(True)).any()
    # What was asked for a skipped update is forgotten.
    assert not end(layer).any()
    layer(x, Step.causal(1, 20))
    bias = end(layer)
    assert bias.any() and bias.sum().abs() < 1e-5 and [state.name for state in named_buffer_shards(layer)] == ["router.expert_bias"]
    routing, _ = layer.router(x, Step.causal(1, 20))
    logits = x @ layer.router.weight.t()
    assert torch.equal(routing.experts_TK, (logits + bias).sort(dim=-1, descending=True, stable=True).indices[:, :K])
    torch.testing.assert_close(routing.probs_TK, logits.gather(1, routing.experts_TK).softmax(-1))
    frozen = filled_layer(MODEL, MoEConfig(**QUANTILES, moe_router_bias_decay_steps=1), ALONE)
    biases: list[Tensor] = []
    for step in range(3):
        frozen(tokens_of(step, 12), Step.causal(1, 12))
        frozen.end_of_batch(torch.zeros(E), NO, step)
        biases.append(frozen.router.expert_bias.clone())
    assert biases[0].any() and torch.equal(biases[0], biases[2])
    for part in (layer.eval(), filled_layer(MODEL, MoEConfig(**QUANTILES, moe_router_bias_update_rate=0.0), ALONE)):
        before = part.router.expert_bias.clone()
        part(x, Step.causal(1, 20))
        assert torch.equal(end(part), before)


def test_a_recomputation_asks_for_nothing_and_padding_neither() -> None:
    results = []
    for recomputed in (False, True):
        layer = filled_layer(MODEL, MoEConfig(**QUANTILES), ALONE)
        for microbatch in range(2):
            x, step = tokens_of(microbatch, 20).requires_grad_(), Step.causal(1, 20)
            y, _ = checkpoint(layer, x, step, use_reentrant=False) if recomputed else layer(x, step)
            y.sum().backward()
        results.append(end(layer))
    assert torch.equal(*results) and results[0].any()
    layer, valid = filled_layer(MODEL, MoEConfig(**QUANTILES), ALONE), torch.arange(20) % 4 != 0
    layer(tokens_of(0, 20), dataclasses.replace(Step.causal(1, 20), valid=valid))
    layer(tokens_of(1, 20), dataclasses.replace(Step.causal(1, 20), valid=torch.zeros(20, dtype=torch.bool)))
    few = filled_layer(MODEL, MoEConfig(**QUANTILES), ALONE)
    few(tokens_of(0, 20)[valid], Step.causal(1, 15))
    assert torch.equal(end(layer), end(few))


def test_a_run_that_went_wrong_asks_for_nothing() -> None:
    layer = filled_layer(MODEL, MoEConfig(**QUANTILES), ALONE)
    step, tokens = Step.causal(1, 20), tokens_of(3, 20)
    layer(tokens, step)
    expected = end(layer)
    assert layer.router.expert_bias is not None
    layer.router.expert_bias.zero_()
    # As `Rerun` does of a step whose loss is not finite: it runs again, and its update is made.
    layer(tokens.index_fill(0, torch.tensor([4]), float("nan")), step)
    layer(tokens, step)
    assert torch.equal(end(layer), expected) and expected.any()


def test_what_is_asked_for_is_added_up_in_one_place_wherever_the_model_was_made() -> None:
    # A graph adds to what was there before it was recorded.
    layer, moved = (filled_layer(MODEL, MoEConfig(**QUANTILES), ALONE) for _ in range(2))
    place = layer.router._bias_sums
    moved.router._bias_sums = place.to("meta")
    for one in (layer, moved):
        one(tokens_of(0, 20), Step.causal(1, 20))
    assert layer.router._bias_sums is place and place[-1] == 1
    assert torch.equal(end(layer), end(moved)) and not place.any()


def check_layout(plan: ParallelPlan) -> None:
    """Micro-batches of the ranks of dp are as many of one rank; tp ranks ask together. A rank without tokens asks for nothing."""
    groups = ProcessGroups.build(plan)
    layer, alone = (filled_layer(MODEL, MoEConfig(**QUANTILES), those) for those in (groups, ALONE))
    for batch in range(2):
        for number in range(groups.dp.size):
            alone(tokens_of(10 * batch + number, 24), Step.causal(1, 24))
        mine = tokens_of(10 * batch + groups.dp.rank, 24)
        if groups.sequence_parallel:
            mine = mine.chunk(groups.tp.size)[groups.tp.rank]
        layer(mine, Step.causal(1, 24))
        torch.testing.assert_close(end(layer), end(alone), rtol=1e-6, atol=1e-7)
    if plan.dp > 1:
        held = 24 * groups.dp.rank
        layer(tokens_of(50, held), Step.causal(1, held))
        alone(tokens_of(50, 24), Step.causal(1, 24))
        torch.testing.assert_close(end(layer), end(alone), rtol=1e-6, atol=1e-7)


@pytest.mark.world(2, shared=True)
@pytest.mark.parametrize(
    "plan", [ParallelPlan(dp=2, ep=2), ParallelPlan(tp=2, ep=2), ParallelPlan(tp=2, ep=2, etp=1, sequence_parallel=False)],
    ids=["dp", "tp", "replicated"],
)  # fmt: skip
def test_every_layout_has_one_bias(world, plan: ParallelPlan) -> None:
    world(check_layout, plan=plan)
