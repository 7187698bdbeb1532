# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Rotary embeddings with their scalings, learned positions, and how a model uses them."""

import dataclasses
import gc
import math
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_parallel import Group, ParallelPlan, ProcessGroups, named_shards
from mcore_parallel.context_parallel import zigzag_indices
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.models._cores import layer_rotary, rotary_config
from mcore_parallel.nn import (
    LearnedPositions,
    Llama3Scaling,
    RotaryConfig,
    RotaryEmbedding,
    Step,
    YarnRotaryEmbedding,
    YarnScaling,
    rotary_frequencies,
    rotary_tables,
)

GPT_OSS = YarnScaling(factor=32.0, correction_range_round_to_int=False)
SIZES: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "num_query_groups": 2, "ffn_hidden_size": 24, "vocab_size": 32
}  # fmt: skip
TOKENS = torch.arange(12) * 7 % 32


def yarn_in_float64(width: int, base: float, scaling: YarnScaling) -> Tensor:
    """Frequencies one by one, in Python's own numbers."""
    found = []
    bounds = []
    for turns in (scaling.beta_fast, scaling.beta_slow):
        bounds.append(width * math.log(scaling.original_max_position_embeddings / (2 * math.pi * turns)) / (2 * math.log(base)))
    low, high = bounds
    if scaling.correction_range_round_to_int:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    for number in range(width // 2):
        plain = base ** (-2 * number / width)
        ramp = min(max((number - low) / (high - low), 0.0), 1.0)
        found.append(plain / scaling.factor * ramp + plain * (1 - ramp))
    return torch.tensor(found, dtype=torch.float64)


@pytest.mark.parametrize("rounds", [True, False])
@pytest.mark.parametrize(("width", "base", "factor"), [(64, 150_000.0, 32.0), (128, 1e4, 4.0), (32, 1e6, 40.0)])
def test_yarn_equals_an_independent_table(width: int, base: float, factor: float, rounds: bool) -> None:
    scaling = YarnScaling(factor=factor, correction_range_round_to_int=rounds)
    config = RotaryConfig(width=width, base=base, scaling=scaling)
    wanted = yarn_in_float64(width, base, scaling)
    torch.testing.assert_close(config.frequencies().double(), wanted, rtol=2e-6, atol=0)
    positions = torch.tensor([0, 1, 7, 300])
    cos, sin = config.tables(positions)
    angles = torch.cat([positions[:, None] * wanted] * 2, dim=-1)
    torch.testing.assert_close(cos.double(), angles.cos() * (0.1 * math.log(factor) + 1), rtol=0, atol=5e-4)
    torch.testing.assert_close(sin.double(), angles.sin() * (0.1 * math.log(factor) + 1), rtol=0, atol=5e-4)


def test_yarn_of_factor_one_is_the_plain_embedding_exactly() -> None:
    plain, yarn = (RotaryConfig(width=64, base=150_000.0, scaling=scaling) for scaling in (None, YarnScaling()))
    positions = torch.arange(50)
    for a, b in zip(plain.tables(positions), yarn.tables(positions), strict=True):
        assert torch.equal(a, b)


def test_slow_channels_are_stretched_and_fast_ones_kept() -> None:
    plain = RotaryConfig(width=64, base=150_000.0).frequencies()
    ratios = plain / RotaryConfig(width=64, base=150_000.0, scaling=GPT_OSS).frequencies()
    low, high = GPT_OSS.ramp(64, 150_000.0)
    numbers = torch.arange(32)
    torch.testing.assert_close(ratios[numbers <= low], torch.ones(int(low) + 1))
    torch.testing.assert_close(ratios[numbers >= high], torch.full((31 - int(high),), 32.0))
    rounded = dataclasses.replace(GPT_OSS, correction_range_round_to_int=True)
    assert rounded.ramp(64, 150_000.0) == (math.floor(low), math.ceil(high))
    assert rounded.concentration == GPT_OSS.concentration


def test_concentrations() -> None:
    assert GPT_OSS.concentration == pytest.approx(1.34657, abs=5e-6)
    assert dataclasses.replace(GPT_OSS, mscale=None).concentration == GPT_OSS.concentration
    assert dataclasses.replace(GPT_OSS, mscale=0.707, mscale_all_dim=0.707).concentration == 1.0
    both = YarnScaling(factor=40.0, mscale=1.0, mscale_all_dim=0.707)
    assert both.concentration == pytest.approx((0.1 * math.log(40) + 1) / (0.0707 * math.log(40) + 1))
    assert both.softmax_factor == pytest.approx((0.0707 * math.log(40) + 1) ** 2)
    assert YarnScaling(factor=0.5).concentration == 1.0


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (None, {"rope_type": "default"}),
        (
            Llama3Scaling(),
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        ),
        (GPT_OSS, {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}),
        (
            YarnScaling(factor=40.0, mscale=1.0, mscale_all_dim=0.707),
            {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096},
        ),
    ],
    ids=["default", "llama3", "gpt-oss", "deepseek"],
)
@pytest.mark.filterwarnings("ignore")
def test_tables_equal_those_of_transformers(ours: Llama3Scaling | YarnScaling | None, theirs: dict[str, Any]) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=256, num_attention_heads=2, max_position_embeddings=131_072, rope_parameters={"rope_theta": 500_000.0, **theirs}
    )
    positions = torch.tensor([0, 1, 5, 100, 4000])
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    found = RotaryConfig(width=128, base=500_000.0, scaling=ours).tables(positions)
    # Float32 frequencies of two roundings, times a position.
    for a, b in zip(found, (cos[0], sin[0]), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1.5e-3)


def test_llama_wavelengths_follow_the_three_rules() -> None:
    plain, scaling = rotary_frequencies(128, 500_000.0).double(), Llama3Scaling()
    scaled = scaling.scaled(plain)
    for before, after in zip(plain.tolist(), scaled.tolist(), strict=True):
        wavelength = 2 * math.pi / before
        smooth = (8192 / wavelength - 1) / 3
        wanted = before / 8 if wavelength > 8192 else before if wavelength < 2048 else (1 - smooth) * before / 8 + smooth * before
        assert after == pytest.approx(wanted, rel=1e-12)


def test_the_default_has_the_bits_of_the_plain_tables() -> None:
    model = GPTModel(TransformerConfig(**SIZES), ProcessGroups.single(), device="meta")
    positions = torch.tensor([5, 0, 1000])
    found = model.rotary(positions)
    assert found is not None and model.rotary(positions, window=True) is None
    for a, b in zip(found, rotary_tables(positions, rotary_frequencies(4, 10_000.0)), strict=True):
        assert torch.equal(a, b)


def test_percent_and_interpolation_hold_under_yarn_too() -> None:
    for kind in (RotaryEmbedding, YarnRotaryEmbedding):
        options = {"scaling_factor": 8.0} if kind is YarnRotaryEmbedding else {}
        whole, stretched, narrow = (
            kind(32, use_cpu_initialization=True, **options, **more)(8)
            for more in ({}, {"seq_len_interpolation_factor": 2.0}, {"rotary_percent": 0.5})
        )
        if kind is YarnRotaryEmbedding:
            whole, stretched, narrow = whole[0], stretched[0], narrow[0]
        assert whole.shape == (8, 1, 1, 32) and narrow.shape == (8, 1, 1, 16)
        torch.testing.assert_close(stretched[::2], whole[:4])


def test_interleaved_tables_say_the_same_of_neighbours() -> None:
    for scaling in (None, GPT_OSS):
        halves, neighbours = (RotaryConfig(width=8, interleaved=flag, scaling=scaling).angles(torch.arange(5)) for flag in (False, True))
        assert torch.equal(neighbours[:, ::2], halves[:, :4]) and torch.equal(neighbours[:, 1::2], halves[:, :4])
    angles, factor = YarnRotaryEmbedding(8, rotary_interleaved=True, scaling_factor=32.0)(4)
    assert torch.equal(angles[..., ::2], angles[..., 1::2]) and factor == pytest.approx(1.34657, abs=5e-6)


def test_the_classes_give_a_context_parallel_rank_its_share() -> None:
    whole = RotaryEmbedding(8, rope_scaling=True)(16, offset=3)
    assert torch.equal(whole[:, 0, 0], RotaryConfig(width=8, scaling=Llama3Scaling()).angles(torch.arange(3, 19)))
    for rank in range(2):
        group = Group((0, 1), rank)
        share = RotaryEmbedding(8, rope_scaling=True, cp_group=group)(16, offset=3)
        assert torch.equal(share, whole[zigzag_indices(16, 2, rank)])
        yarn = YarnRotaryEmbedding(8, scaling_factor=4.0, cp_group=group)
        assert torch.equal(yarn(16)[0], YarnRotaryEmbedding(8, scaling_factor=4.0)(16)[0][zigzag_indices(16, 2, rank)])
        assert yarn(16, packed_seq=True)[0].shape[0] == 16


def test_nothing_keeps_an_embedding_alive() -> None:
    module = YarnRotaryEmbedding(8, scaling_factor=4.0)
    module(16)
    module(16)
    assert not list(module.parameters()) and not list(module.buffers())
    gone = weakref.ref(module)
    del module
    gc.collect()
    assert gone() is None


def test_sections_follow_the_components_of_a_position() -> None:
    config = RotaryConfig(width=16, sections=(2, 3, 3))
    positions = torch.tensor([[0, 1, 2, 3], [5, 6, 7, 8], [9, 9, 0, 0]])
    angles = config.angles(positions)
    each = [RotaryConfig(width=16).angles(row) for row in positions]
    for start in (0, 8):
        assert torch.equal(angles[:, start : start + 2], each[0][:, start : start + 2])
        assert torch.equal(angles[:, start + 2 : start + 5], each[1][:, start + 2 : start + 5])
        assert torch.equal(angles[:, start + 5 : start + 8], each[2][:, start + 5 : start + 8])
    # Text has equal components.
    assert torch.equal(config.angles(positions[0].expand(3, -1)), each[0])
    assert torch.equal(config.angles(positions[0]), each[0])
    with pytest.raises(ValueError, match=r"positions of shape \(2, 4\) must be \[T\] or \[3, T\]"):
        config.angles(positions[:2])
    with pytest.raises(ValueError, match=r"positions of shape \(3, 4\) must be \[T\] for mrope_section=None"):
        RotaryConfig(width=16).angles(positions)


@pytest.mark.filterwarnings("ignore")
def test_sections_equal_those_of_transformers() -> None:
    from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding

    parameters = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
    config = Qwen2VLTextConfig(hidden_size=32, num_attention_heads=2, num_key_value_heads=2, rope_parameters=parameters)
    positions = torch.randint(0, 50, (3, 6), generator=torch.Generator().manual_seed(0))
    wanted = Qwen2VLRotaryEmbedding(config)(torch.zeros(1), positions[:, None])
    found = RotaryConfig(width=16, base=1e6, sections=(2, 3, 3)).tables(positions)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"position_embedding_type": "none"},
        {"position_embedding_type": "learned_absolute", "max_position_embeddings": 8},
        {"position_embedding_type": "rope", "rope_scaling": Llama3Scaling(original_max_position_embeddings=16)},
        {"position_embedding_type": "yarn", "yarn": GPT_OSS},
        {"position_embedding_type": "mrope", "mrope_section": (1, 1)},
        {"rotary_percent": 0.5},
        {"rotary_interleaved": True},
        {"seq_len_interpolation_factor": 4.0},
        {"rotary_base": 500.0},
    ],
    ids=lambda options: "-".join(options),
)
def test_every_kind_of_position_changes_the_model_and_only_where_it_should(options: dict[str, Any]) -> None:
    config = TransformerConfig(**(SIZES | {"init_method_std": 0.4} | options))
    model = GPTModel(config, ProcessGroups.single())
    step = Step.causal(2, 6)
    logits = model(TOKENS, step)[0].logits()
    plain = GPTModel(TransformerConfig(**(SIZES | {"init_method_std": 0.4})), ProcessGroups.single())
    if options.get("position_embedding_type") == "mrope":
        assert torch.equal(logits, plain(TOKENS, step)[0].logits())
        step = dataclasses.replace(step, positions=torch.stack([step.positions, step.positions // 2]))
        logits = model(TOKENS, step)[0].logits()
    assert not torch.allclose(logits, plain(TOKENS, Step.causal(2, 6))[0].logits(), rtol=1e-3)
    assert torch.isfinite(logits).all()
    # What is causal stays so.
    later = TOKENS.clone()
    later[5] = later[11] = 1
    again = model(later, step)[0].logits()
    torch.testing.assert_close(again.view(2, 6, -1)[:, :5], logits.view(2, 6, -1)[:, :5])


def test_learned_positions_are_added_to_the_embeddings() -> None:
    options = {"position_embedding_type": "learned_absolute", "max_position_embeddings": 8, "embedding_multiplier": 3.0}
    model = GPTModel(TransformerConfig(**SIZES, **options), ProcessGroups.single())
    assert model.position_embedding is not None and model.embedding is not None
    assert [shard.name for shard in named_shards(model)][:2] == ["embedding.weight", "position_embedding.weight"]
    table = model.position_embedding.weight
    assert table.shape == (8, 16) and 0.01 < table.std() < 0.03
    step = Step.causal(2, 6)
    torch.testing.assert_close(model.embed(TOKENS, step), 3.0 * model.embedding.weight[TOKENS] + table[step.positions])
    with pytest.raises(ValueError, match=r"positions 0 to 8 must lie in \[0, max_position_embeddings=8\)"):
        model(torch.zeros(9, dtype=torch.int64), Step.causal(1, 9))
    with pytest.raises(ValueError, match=r"max_position_embeddings=0 must be at least 1"):
        LearnedPositions(0, 4, ProcessGroups.single())


def check_learned(sequence_parallel: bool) -> tuple[Tensor, Tensor]:
    """Output and the gradient of the table, summed where it is partial."""
    groups = ProcessGroups.build(ParallelPlan(tp=2, sequence_parallel=sequence_parallel))
    learned = LearnedPositions(8, 3, groups, dtype=torch.float64)
    with torch.no_grad():
        learned.weight.copy_(torch.arange(24.0).view(8, 3))
    positions = torch.tensor([0, 5, 5, 7])
    y, weights = learned(positions), torch.arange(1.0, 13.0, dtype=torch.float64).view(4, 3)
    if sequence_parallel:
        weights = weights.chunk(2)[groups.tp.rank]
    (y * weights).sum().backward()
    (shard,) = named_shards(learned)
    grad = learned.weight.grad
    assert grad is not None
    if "tp" in shard.spec.partial:
        torch.distributed.all_reduce(grad, group=groups.tp.pg)
    return y.detach(), grad


@pytest.mark.world(2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_learned_positions_under_tensor_parallelism_equal_one_rank(world, sequence_parallel: bool) -> None:
    results = world(check_learned, sequence_parallel=sequence_parallel)
    table = torch.arange(24.0, dtype=torch.float64).view(8, 3)
    outputs = torch.cat([y for y, _ in results]) if sequence_parallel else results[1][0]
    assert torch.equal(outputs, table[[0, 5, 5, 7]])
    wanted = torch.zeros(8, 3, dtype=torch.float64)
    wanted.index_add_(0, torch.tensor([0, 5, 5, 7]), torch.arange(1.0, 13.0, dtype=torch.float64).view(4, 3))
    for _, grad in results:
        assert torch.equal(grad, wanted)


def test_layers_choose_their_tables() -> None:
    config = TransformerConfig(**(SIZES | {"num_layers": 4}), no_rope_freq=2, window_size=(4, 0), window_attn_skip_freq=(1, 1, 0, 0),
                               rotary_base_window=50.0, rotary_base=500.0, rope_scaling=Llama3Scaling())  # fmt: skip
    assert [layer_rotary(config, layer) for layer in range(4)] == ["window", None, "default", None]
    listed = dataclasses.replace(config, no_rope_freq=(0, 1, 1, 0), rotary_base_window=None)
    assert [layer_rotary(listed, layer) for layer in range(4)] == ["default", None, None, "default"]
    # Long contexts are none of a window's business.
    assert rotary_config(config) == RotaryConfig(width=4, base=500.0, scaling=Llama3Scaling())
    assert rotary_config(config, window=True) == RotaryConfig(width=4, base=50.0)
    assert rotary_config(listed, window=True) is None


def test_zigzag_positions_of_a_step_give_the_rows_of_the_whole_sequence() -> None:
    config = RotaryConfig(width=8, scaling=GPT_OSS, interpolation_factor=2.0)
    whole = config.tables(torch.arange(16))
    for rank in range(4):
        held = zigzag_indices(16, 4, rank)
        for part, table in zip(config.tables(held), whole, strict=True):
            assert torch.equal(part, table[held])


@pytest.mark.parametrize("options", [{"embedding_multiplier": 12.0}, {"output_multiplier": 0.25}])
def test_multipliers_reach_every_way_of_using_the_logits(options: dict[str, float]) -> None:
    plain, scaled = (GPTModel(TransformerConfig(**SIZES, **more), ProcessGroups.single(), dtype=torch.float64) for more in ({}, options))
    step, labels = Step.causal(2, 6), TOKENS.roll(-1)
    if "embedding_multiplier" in options:
        assert plain.embedding is not None
        with torch.no_grad():
            plain.embedding.weight.mul_(12.0)
        wanted, factor = plain(TOKENS, step)[0], 1.0
    else:
        wanted, factor = plain(TOKENS, step)[0], 0.25
    logits = wanted.logits() * factor
    output = scaled(TOKENS, step)[0]
    torch.testing.assert_close(output.logits(), logits)
    losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    for fused in (False, True):
        torch.testing.assert_close(output.token_losses(labels, fused=fused), losses)
        torch.testing.assert_close(output.log_probs(labels, fused=fused), -losses)
    torch.testing.assert_close(output.loss_sum(labels, torch.ones(12)), losses.sum())


def test_bad_numbers_are_named() -> None:
    for make, message in (
        (lambda: RotaryConfig(width=5), "rotary width=5 must be even"),
        (lambda: RotaryConfig(width=4, base=1.0), r"rotary_base=1.0 must exceed 1"),
        (lambda: RotaryConfig(width=4, interpolation_factor=0.0), "seq_len_interpolation_factor=0.0 must be positive"),
        (lambda: RotaryConfig(width=8, sections=(1, 2)), r"mrope_section=\(1, 2\) must be positive and add up to half .* 4"),
        (lambda: RotaryEmbedding(8, rotary_percent=0.0), r"rotary_percent=0.0 must lie in \(0, 1\]"),
        (lambda: YarnRotaryEmbedding(8, rotary_percent=1.5), r"rotary_percent=1.5 must lie in \(0, 1\]"),
        (lambda: YarnScaling(factor=0.0), "factor=0.0 of YarnScaling must be positive"),
        (lambda: YarnScaling(beta_fast=0.5), "beta_fast=0.5 must be at least beta_slow=1.0"),
        (lambda: Llama3Scaling(high_freq_factor=1.0), "high_freq_factor=1.0 must exceed low_freq_factor=1.0"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
