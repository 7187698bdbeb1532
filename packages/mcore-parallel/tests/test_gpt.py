# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The decoder-only transformer as a whole and in stages."""

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from mcore_parallel import Group, ParallelPlan, ProcessGroups, named_shards
from mcore_parallel.models import Aux, AuxLoss, GPTModel, Site, TransformerConfig, dense_feed_forward, init_parameters, self_attention
from mcore_parallel.nn import Step, causal_attention

CONFIG = TransformerConfig(num_layers=2, hidden_size=16, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=24, vocab_size=32)
TOKENS = torch.arange(12) * 7 % 32
LAYER = ["input_norm.weight", "attention.qkv.weight", "attention.out.weight", "ffn_norm.weight", "mlp.up.weight", "mlp.down.weight"]


def stage_groups(pp: int, stage: int) -> ProcessGroups:
    """Groups of one stage, good for building a model but not for communication."""
    return dataclasses.replace(ProcessGroups.single(), plan=ParallelPlan(pp=pp), pp=Group(tuple(range(pp)), stage))


class Costly(nn.Module):
    """A feed-forward with an auxiliary loss that tells where it stands."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.inner, self.cost = dense_feed_forward(site), float(site.layer + 10 * site.local_layer + 1)
        self.layer = site.layer

    def forward(self, x: Tensor, step: Step) -> tuple[Tensor, Aux]:
        return self.inner(x, step)[0], Aux(losses={(self.layer, "cost"): AuxLoss(x.new_tensor(self.cost), 1.0)})


def test_parameter_names_and_shapes_are_stable() -> None:
    model = GPTModel(CONFIG, ProcessGroups.single(), device="meta")
    expected = [
        "embedding.weight",
        *(f"layers.{layer}.{name}" for layer in range(2) for name in LAYER),
        "final_norm.weight",
        "output.weight",
    ]
    assert [shard.name for shard in named_shards(model)] == expected
    shapes = {shard.name: shard.spec.shape for shard in named_shards(model)}
    assert shapes["layers.1.attention.qkv.weight"] == (2, 16, 16)
    assert shapes["layers.1.mlp.up.weight"] == (2, 24, 16)
    assert shapes["layers.1.mlp.down.weight"] == (16, 24)
    assert shapes["output.weight"] == (32, 16)


def test_stages_hold_disjoint_parts_under_global_names() -> None:
    whole = GPTModel(CONFIG, ProcessGroups.single())
    stages = [GPTModel(CONFIG, stage_groups(2, stage)) for stage in range(2)]
    names = [name for stage in stages for name in dict(stage.named_parameters())]
    assert sorted(names) == sorted(dict(whole.named_parameters()))
    assert [stage.stage_layers for stage in stages] == [range(1), range(1, 2)]
    assert [(stage.is_first, stage.is_last) for stage in stages] == [(True, False), (False, True)]
    step = Step.causal(2, 6)
    hidden, _ = stages[0](TOKENS, step)
    output, _ = stages[1](hidden, step)
    assert torch.equal(output.logits(), whole(TOKENS, step)[0].logits())


def test_chosen_layers_keep_their_global_numbers() -> None:
    model = GPTModel(CONFIG, ProcessGroups.single(), layers=range(1, 2), feed_forward=Costly)
    assert list(model.layers) == ["1"]
    assert float(model(TOKENS, Step.causal(2, 6))[1].total()) == 2.0
    with pytest.raises(ValueError, match=r"layers=range\(1, 3\) must lie in range\(0, num_layers=2\)"):
        GPTModel(CONFIG, ProcessGroups.single(), layers=range(1, 3))


def test_auxiliary_losses_of_the_layers_add_up() -> None:
    _, aux = GPTModel(CONFIG, ProcessGroups.single(), feed_forward=Costly)(TOKENS, Step.causal(2, 6))
    assert float(aux.total()) == (0 + 0 + 1) + (1 + 10 + 1)


def test_a_mixer_or_a_core_can_be_given_but_not_both() -> None:
    calls = []

    def core(q: Tensor, k: Tensor, v: Tensor, layer: int, step: Step) -> Tensor:
        calls.append(layer)
        return causal_attention(q, k, v, layer, step)

    step = Step.causal(2, 6)
    models = [GPTModel(CONFIG, ProcessGroups.single(), **slot) for slot in ({"attention_core": core}, {"mixer": self_attention(core)}, {})]
    logits = [model(TOKENS, step)[0].logits() for model in models]
    assert calls == [0, 1, 0, 1]
    assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])
    with pytest.raises(ValueError, match=r"mixer and attention_core exclude"):
        GPTModel(CONFIG, ProcessGroups.single(), mixer=self_attention(), attention_core=core)


def test_positions_of_the_step_reach_the_rotary_embedding() -> None:
    model = GPTModel(CONFIG, ProcessGroups.single())
    step = Step.causal(2, 6)
    plain, shifted, stretched = (
        model(TOKENS, dataclasses.replace(step, positions=positions))[0].logits()
        for positions in (step.positions, step.positions + 9, step.positions * 3)
    )
    torch.testing.assert_close(plain, shifted, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(plain, stretched, rtol=1e-4, atol=1e-5)


def test_tied_embeddings_are_one_parameter_with_both_gradients() -> None:
    config = dataclasses.replace(CONFIG, share_embeddings_and_output_weights=True)
    tied, untied = GPTModel(config, ProcessGroups.single()), GPTModel(CONFIG, ProcessGroups.single())
    assert "output.weight" not in dict(tied.named_parameters())
    with torch.no_grad():
        untied.output.weight.copy_(untied.embedding.weight)
    for model in (tied, untied):
        model(TOKENS, Step.causal(2, 6))[0].token_losses(TOKENS).sum().backward()
    torch.testing.assert_close(tied.embedding.weight.grad, untied.embedding.weight.grad + untied.output.weight.grad)
    moved = GPTModel(config, ProcessGroups.single(), device="meta").to_empty(device="cpu")
    init_parameters(moved, 0)
    assert torch.equal(moved(TOKENS, Step.causal(2, 6))[0].logits(), tied(TOKENS, Step.causal(2, 6))[0].logits())


def test_tied_embeddings_over_stages_begin_as_copies_under_one_name() -> None:
    config = dataclasses.replace(CONFIG, share_embeddings_and_output_weights=True)
    whole, first, last = (GPTModel(config, groups) for groups in (ProcessGroups.single(), stage_groups(2, 0), stage_groups(2, 1)))
    for stage in (first, last):
        assert "output.weight" not in stage.state_dict()
        assert torch.equal(stage.state_dict()["embedding.weight"], whole.embedding.weight)
    step = Step.causal(2, 6)
    assert torch.equal(last(first(TOKENS, step)[0], step)[0].logits(), whole(TOKENS, step)[0].logits())


def test_more_stages_than_layers_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"num_layers=2 .*lower pp"):
        GPTModel(CONFIG, stage_groups(3, 0))


def test_tokens_that_tp_does_not_divide_are_an_error() -> None:
    groups = dataclasses.replace(ProcessGroups.single(), plan=ParallelPlan(tp=2), tp=Group((0, 1), 0))
    model = GPTModel(CONFIG, groups, device="meta")
    with pytest.raises(ValueError, match=r"tp=2 must divide the 5 tokens"):
        model(torch.zeros(5, dtype=torch.int64, device="meta"), Step.causal(1, 5, "meta"))


@pytest.mark.journey
def test_the_whole_model_compiles_into_one_graph() -> None:
    model = GPTModel(CONFIG, ProcessGroups.single())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    results = []
    for run in (model, compiled):
        model.zero_grad()
        output, _ = run(TOKENS, Step.causal(2, 6))
        output.token_losses(TOKENS).sum().backward()
        results.append([output.hidden.detach(), *(parameter.grad for parameter in model.parameters())])
    torch.testing.assert_close(*results)
