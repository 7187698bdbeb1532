# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Frozen weights in eight bits: what adapters beside them learn, what they take, and what is refused."""

import functools
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.backends import Fp8Config, choose_backend, quantize_base
from mcore_parallel.backends._quantize import quantize_rows
from mcore_parallel.backends._quantized_base import StoredProducts
from mcore_parallel.comm import gather_from_tensor_model_parallel_region
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.nn import LatentAttentionConfig, LatentCache, LatentSelfAttention, RecomputeConfig, Step
from mcore_parallel.optim import MegatronOptimizer, OptimizerConfig
from mcore_parallel.tensor_parallel import (
    ColumnParallelLinear,
    LoraConfig,
    ReplicatedLinear,
    RowParallelLinear,
    adapted_layers,
    add_lora,
    is_adapter,
    merge_lora,
)
from mcore_parallel.training import Batch, CrossEntropyObjective, TensorShard, model_state, train_step

E4M3 = torch.float8_e4m3fn
SINGLE = ProcessGroups.single()
CONFIG = TransformerConfig(
    num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=64, vocab_size=64, init_method_std=0.3
)
BaseDtype = Literal["fp8", "fp8_weight_only"]
BOTH: tuple[BaseDtype, ...] = ("fp8", "fp8_weight_only")


def relative(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


def value(layer: Any) -> Tensor:
    """The rounded weight."""
    assert isinstance(layer.products, StoredProducts)
    return (layer.weight.flatten(0, -2).double() * layer.products.inverse_O1.double()).view(layer.weight.shape)


def quantized(layer: nn.Module, base_dtype: BaseDtype) -> nn.Module:
    add_lora(nn.ModuleDict({"layer": layer}), LoraConfig(rank=2, targets=("layer",), base_dtype=base_dtype), SINGLE)
    assert quantize_base(nn.ModuleDict({"layer": layer})) == ["layer"]
    return layer


def test_a_weight_is_rounded_to_the_nearest_value_under_powers_of_two() -> None:
    layer = ColumnParallelLinear(64, (2, 24), SINGLE)
    with torch.no_grad():
        layer.weight.mul_(torch.logspace(-6, 6, 48).view(2, 24, 1))
        layer.weight[0, 0] = 0
        layer.weight[0, 1, 0], layer.weight[0, 2, 0] = 448.0, torch.inf
    before = layer.weight.detach().clone()
    quantized(layer, "fp8")
    after, inverse = value(layer), layer.products.inverse_O1
    assert layer.weight.dtype == E4M3 and layer.weight.shape == before.shape
    good = torch.ones(2, 24, dtype=torch.bool)
    good[0, 2] = False
    # Half a step of three mantissa bits; below the smallest normal number, 2^-6, steps are constant.
    bound = (before.abs() * 2**-4).clamp(min=(inverse * 2.0**-10).view(2, 24, 1))
    assert bool(((after - before).abs() <= bound)[good].all())
    largest = layer.weight.float().abs().flatten(0, -2).amax(-1)[1:].view(-1)
    assert bool((largest[good.flatten()[1:]] > 208).all()) and after[0, 0].abs().max() == 0
    assert torch.equal(torch.frexp(inverse[good.flatten()])[0], torch.full((47, 1), 0.5))
    assert inverse[1] == 1.0 and not bool(torch.isfinite(after[0, 2]).any())
    # Exact in the dtype of a model.
    assert torch.equal(after[good].to(torch.bfloat16).double(), after[good])


@pytest.mark.parametrize("base_dtype", BOTH)
@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear, ReplicatedLinear])
def test_outputs_and_gradients_are_those_of_the_rounded_weight(kind: Any, base_dtype: BaseDtype) -> None:
    layer = quantized(kind(64, 48, SINGLE, dtype=torch.float64), base_dtype)
    assert isinstance(layer, ColumnParallelLinear | RowParallelLinear | ReplicatedLinear) and layer.lora is not None
    nn.init.normal_(layer.lora.B)
    for tokens in (32, 17):
        x = torch.randn(tokens, 64, dtype=torch.float64, requires_grad=True)
        grad = torch.randn(tokens, 48, dtype=torch.float64)
        own = torch.autograd.grad(layer.lora(x), x, grad)[0]
        y = layer(x)
        y.backward(grad)
        assert x.grad is not None and layer.weight.grad is None and layer.lora.A.grad is not None
        base = (y - layer.lora(x)).detach(), x.grad - own
        weight = value(layer)
        dense = x.detach() @ weight.t(), grad @ weight
        if base_dtype == "fp8" and tokens % 16 == 0:
            # Those of the cast factors, which are near.
            assert all(1e-4 < relative(found, expected) < 0.05 for found, expected in zip(base, dense, strict=True))
            scaled = grad * layer.products.inverse_O1.t().double()
            codes = layer.weight.flatten(0, -2).double()
            dense = (
                quantize_rows(x.detach(), E4M3).value(torch.float64) @ weight.t(),
                quantize_rows(scaled, E4M3).value(torch.float64) @ codes,
            )
        for found, expected in zip(base, dense, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def build(groups: ProcessGroups, base_dtype: BaseDtype | None, *, dtype: torch.dtype = torch.float64, **options: Any) -> GPTModel:
    model = GPTModel(CONFIG, groups, dtype=dtype, seed=3, **options)
    add_lora(model, LoraConfig(rank=2, alpha=8.0, base_dtype=base_dtype), groups, seed=5)
    quantize_base(model)
    return model


@pytest.mark.parametrize("base_dtype", BOTH)
def test_a_model_takes_a_byte_a_frozen_weight_and_is_near_the_plain_one(base_dtype: BaseDtype) -> None:
    tokens = torch.arange(32) * 7 % 64
    wide, narrow = (build(SINGLE, choice, dtype=torch.bfloat16) for choice in (None, base_dtype))
    linear = sum(layer.weight.numel() for _, layer in adapted_layers(wide))
    nbytes = [sum(parameter.nbytes for parameter in model.parameters()) for model in (wide, narrow)]
    assert nbytes[0] - nbytes[1] == linear > 0.7 * nbytes[1] / 2
    outputs = [model(tokens, Step.causal(2, 16))[0].logits().float() for model in (wide, narrow)]
    assert 1e-3 < relative(outputs[1], outputs[0]) < 0.25


# Losses and gradient norms, and the parameters.
Run = tuple[list[float], dict[str, Any]]


def train(groups: ProcessGroups, base_dtype: BaseDtype, **options: Any) -> Run:
    """Two steps of two micro-batches."""
    model = build(groups, base_dtype, **options)
    sync = DistributedDataParallel(DistributedDataParallelConfig(), model, groups)
    optimizer = MegatronOptimizer(OptimizerConfig(lr=1.0, clip_grad=0.5), sync, groups)
    assert all(is_adapter(name) for name in sync.gradients())
    numbers: list[float] = []
    for step in range(2):
        tokens = torch.randint(0, 64, (2, 2, 17), generator=torch.Generator().manual_seed(step))
        batches = [Batch(tokens=x[:, :-1], labels=x[:, 1:], loss_mask=torch.ones(2, 16)) for x in tokens]
        report = train_step(model, batches, CrossEntropyObjective(), sync, optimizer, lr=0.02, groups=groups)
        numbers += [report.loss, report.grad_norm]
    return numbers, model_state(model, groups)


@functools.cache
def serial(base_dtype: BaseDtype) -> Run:
    return train(SINGLE, base_dtype)


def check_layouts(expected: dict[BaseDtype, Run]) -> None:
    plans = [ParallelPlan(tp=2, sequence_parallel=sequence_parallel) for sequence_parallel in (False, True)] + [ParallelPlan(pp=2)]
    for plan in plans:
        groups = ProcessGroups.build(plan)
        for base_dtype, run in expected.items():
            numbers, state = train(groups, base_dtype)
            torch.testing.assert_close(numbers, run[0], rtol=1e-9, atol=1e-12)
            for name, shard in state.items():
                assert isinstance(shard, TensorShard)
                part = tuple(slice(begin, begin + size) for begin, size in zip(shard.offset, shard.data.shape, strict=True))
                whole = run[1][name].data[part]
                if shard.data.dtype == E4M3:
                    assert torch.equal(shard.data.view(torch.uint8), whole.view(torch.uint8)), name
                else:
                    torch.testing.assert_close(shard.data, whole, rtol=1e-8, atol=1e-10)
        x = torch.arange(32) * 7 % 64
        if groups.tp.size > 1:
            y = gather_from_tensor_model_parallel_region(build(groups, "fp8")(x, Step.causal(2, 16))[0].logits(), groups.tp)
            torch.testing.assert_close(y, build(SINGLE, "fp8")(x, Step.causal(2, 16))[0].logits(), rtol=1e-9, atol=1e-12)


@pytest.mark.journey
@pytest.mark.world(2)
def test_every_layout_rounds_and_trains_as_one_rank(world) -> None:
    assert serial("fp8")[0] != serial("fp8_weight_only")[0]
    world(check_layouts, expected={base_dtype: serial(base_dtype) for base_dtype in BOTH})


@pytest.mark.parametrize("base_dtype", BOTH)
def test_only_adapters_change_and_recomputation_changes_no_bit(base_dtype: BaseDtype) -> None:
    before, (numbers, after) = model_state(build(SINGLE, base_dtype), SINGLE), serial(base_dtype)
    changed = [name for name in after if not torch.equal(before[name].data.float(), after[name].data.float())]
    assert changed == [name for name in after if is_adapter(name)]
    again = train(SINGLE, base_dtype, recompute=RecomputeConfig(granularity="full"))
    assert again[0] == numbers


@pytest.mark.parametrize("base_dtype", BOTH)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_cache_of_latents_absorbs_the_rounded_weight(base_dtype: BaseDtype, dtype: torch.dtype) -> None:
    sizes = LatentAttentionConfig(kv_lora_rank=8, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5)
    module, step = LatentSelfAttention(16, 2, sizes, SINGLE, dtype=dtype), Step.causal(1, 8)
    add_lora(module, LoraConfig(rank=2, targets=("q", "kv_up"), base_dtype=base_dtype), SINGLE)
    assert quantize_base(module) == ["q", "kv_up"]
    x = torch.randn(8, 16, dtype=dtype)
    with torch.no_grad():
        for adapter in (module.q.lora, module.kv_up.lora):
            nn.init.normal_(adapter.B)
        plain = module(x, step)
        module.core = LatentCache(sizes, num_layers=1, batch_size=1, max_length=8, dtype=dtype)
        assert relative(module(x, step), plain) < (1e-12 if dtype == torch.float64 else 0.03)


def test_what_cannot_be_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"base_dtype='int8' must be \"fp8\", \"fp8_weight_only\" or None"):
        LoraConfig(base_dtype="int8")  # pyright: ignore[reportArgumentType]
    model = GPTModel(CONFIG, SINGLE, backend=choose_backend("torch", fp8=Fp8Config()))
    add_lora(model, LoraConfig(base_dtype="fp8"), SINGLE)
    with pytest.raises(ValueError, match=r"base_dtype='fp8' computes the products of layers\.0\.attention\.qkv, and so does Fp8Products"):
        quantize_base(model)
    model = build(SINGLE, "fp8")
    with pytest.raises(ValueError, match=r"layers\.0\.attention\.qkv\.weight is in fp8"):
        merge_lora(model)
    assert quantize_base(model) == [] and all(layer.lora is not None for _, layer in adapted_layers(model))


def test_a_gpu_without_units_is_told_what_to_use_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(ValueError, match=r'this GPU has 8\.0; use base_dtype="fp8_weight_only"'):
        build(SINGLE, "fp8")
    assert next(adapted_layers(build(SINGLE, "fp8_weight_only")))[1].weight.dtype == E4M3
