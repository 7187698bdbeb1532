# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Initial values."""

import math

import pytest
import torch
from torch import Tensor, nn

from mcore_parallel import ParallelPlan, ProcessGroups, ShardSpec, named_shards
from mcore_parallel.models import GPTModel, Site, TransformerConfig, init_parameters

CONFIG = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2, vocab_size=64, init_method_std=0.1)


class Experts(nn.Module):
    """Stacked feed-forward weights of 4 experts, cut over ep."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        hidden_size = site.config.hidden_size
        self.specs = {
            "up": ShardSpec(shape=(4, 2, 8, hidden_size), view="expert", shards={"ep": 0, "tp": 2}),
            "down": ShardSpec(shape=(4, hidden_size, 8), view="expert", shards={"ep": 0, "tp": 2}),
        }
        for name, spec in self.specs.items():
            self.register_parameter(name, nn.Parameter(torch.empty(spec.local_shape(site.groups))))

    def shard_specs(self) -> dict[str, ShardSpec]:
        return self.specs


class Mixture(nn.Module):
    def __init__(self, site: Site) -> None:
        super().__init__()
        self.experts = Experts(site)
        self.bias = nn.Parameter(torch.empty(4))


class Decay(nn.Module):
    """Draws its own values."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.rate = nn.Parameter(torch.empty(6))
        self.other = nn.Parameter(torch.empty(40, 50))

    def initial_value(self, name: str, shape: tuple[int, ...], generator: torch.Generator, config: TransformerConfig) -> Tensor | None:
        return torch.rand(shape, generator=generator) + config.num_layers if name == "rate" else None


def check_same_values(plan: ParallelPlan) -> None:
    groups = ProcessGroups.build(plan)
    whole = {shard.name: shard.parameter for shard in named_shards(GPTModel(CONFIG, ProcessGroups.single(), feed_forward=Mixture, seed=3))}
    shards = list(named_shards(GPTModel(CONFIG, groups, feed_forward=Mixture, seed=3)))
    assert shards
    for shard in shards:
        assert torch.equal(shard.parameter, whole[shard.name][shard.spec.slices(groups)]), shard.name


@pytest.mark.world(2, shared=True)
@pytest.mark.parametrize("degrees", [{"tp": 2}, {"pp": 2}, {"dp": 2, "ep": 2}, {"tp": 2, "etp": 2}, {"tp": 2, "ep": 2}])
def test_every_layout_has_the_same_global_values(world, degrees: dict[str, int]) -> None:
    world(check_same_values, plan=ParallelPlan(**degrees))


def test_widths_of_the_distributions() -> None:
    config = TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=4, vocab_size=256, init_method_std=0.1)
    weights = {
        shard.name: shard.parameter.detach() for shard in named_shards(GPTModel(config, ProcessGroups.single(), feed_forward=Mixture))
    }
    narrow = {name for name in weights if name.endswith(("out.weight", "experts.down"))}
    assert len(narrow) == 4
    for name, weight in weights.items():
        if name.endswith("norm.weight"):
            assert weight.eq(1).all()
        elif name.endswith("bias"):
            assert weight.eq(0).all()
        else:
            std = 0.1 / math.sqrt(4) if name in narrow else 0.1
            assert abs(weight.std().item() / std - 1) < 6 / math.sqrt(weight.numel()), name
            assert abs(weight.mean().item() / std) < 6 / math.sqrt(weight.numel()), name


def test_values_differ_between_names_indices_and_seeds() -> None:
    models = [GPTModel(CONFIG, ProcessGroups.single(), feed_forward=Mixture, seed=seed) for seed in (0, 0, 1)]
    first, again, other = ({shard.name: shard.parameter for shard in named_shards(model)} for model in models)
    drawn = [name for name in first if not name.endswith(("norm.weight", "bias"))]
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in drawn)
    assert not torch.equal(first["layers.0.attention.qkv.weight"], first["layers.1.attention.qkv.weight"])
    up = first["layers.0.mlp.experts.up"]
    assert len({tuple(expert.flatten().tolist()) for expert in up}) == 4


def test_a_module_can_draw_its_own_values() -> None:
    model = GPTModel(CONFIG, ProcessGroups.single(), feed_forward=Decay)
    rates = [model.layers[layer].mlp.rate for layer in "01"]
    assert all(((rate >= 2) & (rate < 3)).all() for rate in rates)
    assert not torch.equal(*rates)
    assert abs(model.layers["0"].mlp.other.std().item() - 0.1) < 0.01


def test_initial_values_need_memory() -> None:
    model = GPTModel(CONFIG, ProcessGroups.single(), device="meta", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"embedding\.weight is on the meta device; call model\.to_empty"):
        init_parameters(model, 0)
    init_parameters(model.to_empty(device="cpu"), 0)
    wide = GPTModel(CONFIG, ProcessGroups.single(), seed=0)
    assert all(torch.equal(a, b.bfloat16()) for a, b in zip(model.parameters(), wide.parameters(), strict=True))
