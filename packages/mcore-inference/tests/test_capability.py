# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What an engine refuses to serve, before anything is allocated."""

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from mcore_inference import DynamicInferenceContext, DynamicInferenceEngine, EngineCapability, InferenceConfig, PagedAttention
from mcore_inference._capability import check_batch_invariant, check_expanded_latents, check_layout
from mcore_inference.attention import PageFormat
from mcore_parallel import Group, ProcessGroups
from mcore_parallel.backends import Fp8Config, TorchBackend
from mcore_parallel.models import BertModel, GPTModel, Site, TransformerConfig, self_attention
from mcore_parallel.nn import MLP, GatedDeltaNetConfig, LatentAttentionConfig, MambaConfig, SelfAttention

SIZES = InferenceConfig(num_blocks=4, block_size_tokens=8, max_sequence_length=32)
SHAPE: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 64}
MAMBA = MambaConfig(state_dim=8, head_dim=16, num_groups=1, chunk_size=8)
DELTA = GatedDeltaNetConfig(key_head_dim=16, value_head_dim=16, num_key_heads=2, num_value_heads=2)
LATENT = LatentAttentionConfig(kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8)


def make(model_class: type = GPTModel, *, options: dict[str, Any] | None = None, **fields: Any) -> nn.Module:
    options = {"attention_core": PagedAttention()} | (options or {})
    return model_class(TransformerConfig(**SHAPE | fields), ProcessGroups.single(), **{k: v for k, v in options.items() if v is not None})


class OwnAttention(SelfAttention):
    """A subclass, which may keep anything."""


def own_mixer(site: Site) -> nn.Module:
    mixer = self_attention(PagedAttention())(site)
    mixer.__class__ = OwnAttention
    return mixer


class Dropping(MLP):
    """A feed-forward whose result for a token depends on the others."""

    drops_tokens = True


def dropping(kind: bool = True) -> nn.Module:
    model = make()
    assert isinstance(model, GPTModel)
    model.layers["1"].mlp.__class__ = Dropping
    model.layers["1"].mlp.drops_tokens = kind
    return model


class Random(MLP):
    """A feed-forward that routes at random."""

    routes_at_random = True


def random_routes() -> nn.Module:
    model = make()
    assert isinstance(model, GPTModel)
    model.layers["1"].mlp.__class__ = Random
    return model


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "two states": (
        lambda: make(num_layers=3, hybrid_layer_pattern="MG*", mamba=MAMBA, delta_net=DELTA),
        "both 'M' and 'G', whose states differ in shape",
    ),
    "latent": (
        lambda: make(latent_attention=LATENT, options={"attention_core": None}),
        r"layers\.0\.attention\.core is .*PagedAttention",
    ),
    "subclass": (lambda: make(options={"mixer": own_mixer, "attention_core": None}), r"layers\.0\.attention is OwnAttention"),
    "no core": (lambda: make(options={"attention_core": None}), r"layers\.0\.attention\.core .*PagedAttention"),
    "sees ahead": (
        lambda: make(options={"mixer": self_attention(PagedAttention(), causal=False), "attention_core": None}),
        r"layers\.0\.attention\.core .*PagedAttention",
    ),
    "fp8": (lambda: make(options={"backend": TorchBackend(Fp8Config(recipe="tensorwise"))}), "fp8="),
    "drops tokens": (dropping, r"layers\.1\.mlp is a Dropping that drops tokens.*moe_expert_capacity_factor=None"),
    "routes at random": (random_routes, r"layers\.1\.mlp is a Random that routes at random.*moe_router_force_load_balancing=False"),
    "further tokens": (lambda: make(mtp_num_layers=1), r"mtp_num_layers=1.*model\.eval"),
    "encoder": (lambda: make(BertModel, options={"attention_core": None}, post_norm=True), "BertModel.*GPTModel"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_not_listed_is_refused_by_name_before_a_cache_is_made(kind: str) -> None:
    build, words = REFUSED[kind]
    model = build()
    with pytest.raises(ValueError, match=words):
        DynamicInferenceContext.for_model(model, SIZES)  # type: ignore[arg-type]
    fitting = make()
    with pytest.raises(ValueError, match=words):
        DynamicInferenceEngine(model, DynamicInferenceContext.for_model(fitting, SIZES))  # type: ignore[arg-type]


def test_a_feed_forward_that_could_drop_tokens_and_does_not_is_served() -> None:
    EngineCapability().check_model(dropping(False))


@pytest.mark.parametrize("ranks", [(2, 3), (4, 5)])
def test_experts_over_a_part_of_an_engine_and_others_are_refused_by_name(ranks: tuple[int, ...]) -> None:
    model, exchange = dropping(False), (0, 1, 2) if 2 in ranks else (3, 4, 5)
    groups = dataclasses.replace(ProcessGroups.single(), tp=Group(ranks, 0), ep=Group(exchange, 2), tp_ep=Group(exchange, 2))
    cut = SimpleNamespace(groups=groups, config=model.config, layers=model.layers)
    with pytest.raises(ValueError, match=r"ep=3 etp=1 exchange tokens over ranks .* cut the tp=2 ranks .*a multiple of tp"):
        check_layout(cut)  # type: ignore[arg-type]


def test_a_part_is_served_once_it_is_listed() -> None:
    model = make(options={"mixer": own_mixer, "attention_core": None})
    EngineCapability(mixers=(SelfAttention, OwnAttention)).check_model(model)
    with pytest.raises(ValueError, match="the backend is TorchBackend"):
        EngineCapability(backends=()).check_model(make())


def test_a_pattern_of_attention_and_feed_forward_is_served() -> None:
    model = make(hybrid_layer_pattern="*-").double()
    engine = DynamicInferenceEngine(model, DynamicInferenceContext.for_model(model, SIZES))  # type: ignore[arg-type]
    assert engine.generate([[1, 2, 3]])[0].num_generated > 1


def test_a_cache_made_for_another_model_is_refused() -> None:
    for other, words in (({"num_layers": 1}, "num_layers=1"), ({"num_query_groups": 2}, "4 key-value heads of 8 .*cache 2 of 8")):
        context = DynamicInferenceContext.for_model(make(**other), SIZES)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=words):
            DynamicInferenceEngine(make(), context)  # type: ignore[arg-type]
    learned = make(position_embedding_type="learned_absolute", max_position_embeddings=16)
    with pytest.raises(ValueError, match="max_sequence_length=32 exceeds max_position_embeddings=16"):
        DynamicInferenceEngine(learned, DynamicInferenceContext.for_model(learned, SIZES))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("dtype", "device", "block_size", "head_dim", "message"),
    [
        (torch.bfloat16, "cuda", 64, 1024, "heads of up to 512 channels in 16 bits and 256 in 32, and head_dim=1024 of torch.bfloat16"),
        (torch.float32, "cuda", 64, 320, "head_dim=320 of torch.float32; serve without batch_invariant"),
        (torch.float32, "cuda", 8, 64, "block_size_tokens=8 of torch.float32; set block_size_tokens=64"),
        (torch.float64, "cuda", 64, 64, "block_size_tokens=64 of torch.float64"),
        (torch.bfloat16, "cuda", 64, 512, None),
        (torch.float32, "cuda", 16, 256, None),
        (torch.float64, "cpu", 8, 1024, None),
    ],
)
def test_an_exact_engine_needs_kernels_of_attention_on_a_gpu(
    dtype: torch.dtype, device: str, block_size: int, head_dim: int, message: str | None
) -> None:
    pytest.importorskip("triton")
    pages = PageFormat(dtype=dtype, device=torch.device(device), block_size=block_size, head_dim=head_dim)
    if message is None:
        return check_batch_invariant(dtype, pages)
    with pytest.raises(ValueError, match=message):
        check_batch_invariant(dtype, pages)


@pytest.mark.parametrize(
    ("value", "num_heads", "device", "message"),
    [
        (17, 4, "cpu", "v_head_dim=17 is above the 16 channels of a key"),
        (11, 4, "cuda", "v_head_dim=11 and 16 channels of a key over 4 heads are not both a multiple of 16"),
        (11, 4, "cpu", None),
        (12, 4, "cuda", None),
    ],
)
def test_latents_that_a_cache_of_keys_and_values_cannot_hold_are_refused(
    value: int, num_heads: int, device: str, message: str | None
) -> None:
    sizes = LatentAttentionConfig(kv_lora_rank=8, qk_nope_head_dim=10, qk_rope_head_dim=6, v_head_dim=value)
    with nullcontext() if message is None else pytest.raises(ValueError, match=message):
        check_expanded_latents("layers.0.attention", sizes, num_heads, device)


@pytest.mark.parametrize(("built", "message"), [("cuda", None), ("meta", "v_head_dim=11 and 16 channels of a key")])
def test_expanded_latents_are_asked_for_where_the_parameters_are(built: str, message: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = LatentAttentionConfig(kv_lora_rank=8, qk_nope_head_dim=10, qk_rope_head_dim=6, v_head_dim=11)
    model = make(latent_attention=sizes, options={"backend": TorchBackend(batch_invariant=True)})
    mixer = model.layers["0"].mixer  # type: ignore[index, union-attr]
    mixer.spec = dataclasses.replace(mixer.spec, device=built)
    if message is not None:
        moved = iter([SimpleNamespace(device=torch.device("cuda"))])
        monkeypatch.setattr(mixer, "parameters", lambda: moved)
    with nullcontext() if message is None else pytest.raises(ValueError, match=message):
        EngineCapability().check_model(model)
