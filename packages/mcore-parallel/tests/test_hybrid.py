# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Models by pattern: every mixer in every layout, segments as stages, and the way from a plain model and back."""

import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.models import (
    Aux,
    AuxLoss,
    GPTModel,
    LayerPatternError,
    MambaModel,
    ModelOutput,
    Site,
    TransformerConfig,
    as_pattern,
    dense_feed_forward,
    hybrid_config,
    pattern_name,
    place_layers,
    plain_name,
)
from mcore_parallel.nn import GatedDeltaNetConfig, LatentAttentionConfig, MambaConfig, RecomputeConfig, Step
from mcore_parallel.pipeline import PipelineConfig, PipelineLayout
from mcore_parallel.training import Batch, CrossEntropyObjective
from tests.support.layouts import Curve, check_curve, train_in

B, S, V = 2, 8, 16
SIZES: dict[str, Any] = {"hidden_size": 8, "num_attention_heads": 2, "ffn_hidden_size": 12, "vocab_size": V, "init_method_std": 0.3}
MAMBA = MambaConfig(head_dim=4, num_groups=2, state_dim=3, chunk_size=4)
DELTA = GatedDeltaNetConfig(num_key_heads=2, num_value_heads=4, key_head_dim=4, value_head_dim=3, chunk_size=4)
LATENT = LatentAttentionConfig(kv_lora_rank=6, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=4)
STATES: dict[str, Any] = {**SIZES, "mamba": MAMBA, "delta_net": DELTA}
# Segments for four virtual stages, one of which is empty.
PATTERNS: dict[str, tuple[str, dict[str, Any]]] = {
    "states and attention": ("MG-||*M|-", STATES),
    "latent attention with a depth": (
        "M+|-||+E/+-",
        {**SIZES, "mamba": MAMBA, "latent_attention": LATENT, "position_embedding_type": "rope", "activation": "squared_relu"},
    ),
}


def given_feed_forward(site: Site) -> nn.Module:
    """A feed-forward that is not the model's own one."""
    return dense_feed_forward(dataclasses.replace(site, config=dataclasses.replace(site.config, ffn_hidden_size=4)))


def config_of(name: str, *, num_segments: int) -> TransformerConfig:
    """The pattern in 4, 2 or 1 segments."""
    pattern, sizes = PATTERNS[name]
    trunk, *depths = pattern.split("/")
    parts = trunk.split("|")
    each = len(parts) // num_segments
    trunk = "|".join("".join(parts[first : first + each]) for first in range(0, len(parts), each))
    return hybrid_config("/".join([trunk, *depths]), **sizes)


def build(groups: ProcessGroups, config: TransformerConfig, **options: Any) -> MambaModel:
    pattern = config.hybrid_layer_pattern or ""
    more = {"feed_forward": given_feed_forward} if "E" in pattern else {}
    return MambaModel(config, groups, dtype=torch.float64, **more, **options)


def batch(seed: int, *, packed: bool = False) -> Batch:
    tokens = torch.randint(0, V, (B, S + 1), generator=torch.Generator().manual_seed(seed))
    bounds = torch.tensor([0, 4, S, 2 * S]) if packed else None
    return Batch(tokens=tokens[:, :-1], labels=tokens[:, 1:], loss_mask=torch.ones(B, S, dtype=torch.float64), cu_seqlens=bounds)


def curve(groups: ProcessGroups, config: TransformerConfig, layout: PipelineLayout) -> Curve:
    steps = [[batch(micro, packed=micro == 1) for micro in range(2)]]
    return train_in(groups, layout, functools.partial(build, config=config), steps, CrossEntropyObjective())


@functools.cache
def serial(name: str) -> Curve:
    config = config_of(name, num_segments=1)
    return curve(ProcessGroups.single(), config, place_layers(config, PipelineConfig(), num_stages=1))


def check(degrees: dict[str, Any], expected: dict[str, Curve]) -> None:
    plan = ParallelPlan(**degrees)
    groups = ProcessGroups.build(plan)
    for name, whole in expected.items():
        config = config_of(name, num_segments=plan.pp * plan.vpp)
        layout = place_layers(config, PipelineConfig(), num_stages=plan.pp, num_chunks=plan.vpp)
        check_curve(curve(groups, config, layout), whole)


@pytest.mark.world(2, shared=True)
@pytest.mark.parametrize(
    "degrees",
    [pytest.param({"tp": 2}, marks=pytest.mark.journey), {"tp": 2, "sequence_parallel": False}, {"cp": 2}, {"pp": 2}, {"pp": 2, "vpp": 2}],
    ids=str,
)
def test_two_ranks_train_as_one(world: Any, degrees: dict[str, Any]) -> None:
    world(check, degrees=degrees, expected={name: serial(name) for name in PATTERNS})


@pytest.mark.journey
@pytest.mark.world(4)
def test_four_ranks_of_two_axes_train_as_one(world: Any) -> None:
    world(check, degrees={"tp": 2, "pp": 2, "vpp": 2}, expected={name: serial(name) for name in PATTERNS})


def logits(model: GPTModel, tokens: Tensor) -> Tensor:
    output, _ = model(tokens.flatten(), Step.causal(*tokens.shape))
    assert isinstance(output, ModelOutput)
    return output.logits()


PLAIN: dict[str, TransformerConfig] = {
    "windows": TransformerConfig(
        num_layers=3, **SIZES, window_size=(2, 0), window_attn_skip_freq="[1]*2+[0]", no_rope_freq=2, rotary_base_window=100.0
    ),
    "latent": TransformerConfig(num_layers=2, **SIZES, latent_attention=LATENT),
    "every second full": TransformerConfig(num_layers=4, **SIZES, window_size=(2, 0), window_attn_skip_freq=2, sandwich_norm=True),
}


@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_model_is_a_pattern_of_twice_as_many_layers(name: str) -> None:
    config = PLAIN[name]
    plain = GPTModel(config, ProcessGroups.single(), dtype=torch.float64)
    hybrid = MambaModel(as_pattern(config), ProcessGroups.single(), dtype=torch.float64, seed=None)
    state = plain.state_dict()
    hybrid.load_state_dict({pattern_name(key): value for key, value in state.items()})
    assert [plain_name(key) for key in hybrid.state_dict()] == list(state)
    tokens = batch(0).tokens
    assert torch.equal(logits(plain, tokens), logits(hybrid, tokens))


def test_depths_go_into_the_pattern_too() -> None:
    config = TransformerConfig(num_layers=2, **SIZES, mtp_num_layers=2)
    names = dict(GPTModel(config, ProcessGroups.single(), device="meta").named_parameters())
    changed = as_pattern(config)
    assert changed.hybrid_layer_pattern == "*-*-/*-/*-"
    assert set(map(pattern_name, names)) == set(dict(GPTModel(changed, ProcessGroups.single(), device="meta").named_parameters()))


def test_layers_that_run_again_give_the_same_gradients() -> None:
    config, tokens, found = config_of("states and attention", num_segments=1), batch(0).tokens, []
    for recompute in (None, RecomputeConfig(granularity="full", num_layers=2), RecomputeConfig(modules=("norm", "mlp"))):
        model = build(ProcessGroups.single(), config, recompute=recompute)
        logits(model, tokens).square().sum().backward()
        found.append([parameter.grad for parameter in model.parameters()])
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=0, atol=0)


class Costly(nn.Module):
    """A feed-forward with an auxiliary loss."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.number = site.layer + 1

    def forward(self, x: Tensor, step: Step) -> tuple[Tensor, Aux]:
        return x, Aux(losses={(self.number - 1, "cost"): AuxLoss(torch.tensor(float(self.number)), 1.0)})


def test_auxiliary_losses_of_e_layers_add_up() -> None:
    model = MambaModel(hybrid_config("*E-E", **SIZES), ProcessGroups.single(), feed_forward=Costly)
    _, aux = model(batch(0).tokens.flatten(), batch(0).step())
    assert aux is not None and aux.total().item() == 2 + 4 and sorted(aux.losses) == [(1, "cost"), (3, "cost")]


def test_patterns_and_feed_forwards_that_do_not_fit_are_errors() -> None:
    single = ProcessGroups.single()
    with pytest.raises(LayerPatternError, match="hybrid_layer_pattern=None; give MambaModel a pattern"):
        MambaModel(TransformerConfig(num_layers=1, **SIZES), single)
    with pytest.raises(LayerPatternError, match="has no E for the feed_forward that was given"):
        MambaModel(hybrid_config("*-", **SIZES), single, feed_forward=given_feed_forward)
    with pytest.raises(LayerPatternError, match="has E, whose feed_forward was not given"):
        MambaModel(hybrid_config("*E", **SIZES), single)
    with pytest.raises(LayerPatternError, match="is a pattern already"):
        as_pattern(hybrid_config("*-", **SIZES))


def test_a_pattern_of_segments_is_one_model_on_one_stage() -> None:
    name = "states and attention"
    cut, whole = (build(ProcessGroups.single(), config_of(name, num_segments=count)) for count in (4, 1))
    assert torch.equal(logits(cut, batch(0).tokens), logits(whole, batch(0).tokens))
