# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Latent attention on GPUs: head widths of 192 and 128, the core that is chosen for them, packed sequences, the cache, two ranks."""

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from mcore_parallel import ParallelPlan, ProcessGroups, named_shards
from mcore_parallel.models import Site, TransformerConfig, latent_attention
from mcore_parallel.nn import LatentAttentionConfig, LatentCache, LatentSelfAttention, Step, rotary_frequencies, rotary_tables
from tests.support.world import run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SIZES = LatentAttentionConfig(q_lora_rank=384, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
CONFIG = TransformerConfig(num_layers=1, hidden_size=1024, num_attention_heads=16, vocab_size=128, latent_attention=SIZES)


def build(dtype: torch.dtype, groups: ProcessGroups | None = None, *, backend: str = "auto") -> LatentSelfAttention:
    """The same values in every layout, rounded to bfloat16."""
    config = dataclasses.replace(CONFIG, attention_backend=backend)
    layout = ProcessGroups.single() if groups is None else groups
    mixer = latent_attention()(Site(layer=0, local_layer=0, config=config, groups=layout, dtype=dtype, device="cuda"))
    assert isinstance(mixer, LatentSelfAttention)
    generator = torch.Generator("cuda").manual_seed(0)
    with torch.no_grad():
        for shard in named_shards(mixer):
            whole = torch.randn(shard.spec.shape, generator=generator, device="cuda")
            if whole.dim() > 1:
                shard.parameter.copy_((whole * whole.shape[-1] ** -0.5).bfloat16()[shard.spec.slices(layout)])
    return mixer


def step_of(batch: int, length: int, packed: tuple[int, ...] = ()) -> Step:
    step = Step.causal(batch, length, device="cuda")
    if packed:
        bounds = torch.tensor([0, *packed]).cumsum(0)
        positions = torch.cat([torch.arange(part, device="cuda") for part in packed])
        step = dataclasses.replace(step, positions=positions, cu_seqlens=bounds)
    return dataclasses.replace(step, rotary=rotary_tables(step.positions, rotary_frequencies(SIZES.qk_rope_head_dim).cuda()))


def draw(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").bfloat16()


def result(module: nn.Module, x: Tensor, step: Step) -> list[Tensor]:
    """Output, gradients of input and parameters."""
    x = x.clone().requires_grad_()
    y = module(x, step)
    grads = torch.autograd.grad(y, (x, *module.parameters()), draw(*y.shape, seed=2).to(y.dtype))
    return [y.detach(), *grads]


def assert_near(found: list[Tensor], expected: list[Tensor], bound: float = 3e-2) -> None:
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        difference = float((ours.double() - theirs.double()).norm() / theirs.double().norm())
        assert difference < bound, f"tensor {number}: {difference}"


@pytest.mark.parametrize("packed", [(), (256, 1024, 768)])
def test_bfloat16_stays_near_the_definition_in_float32(packed: tuple[int, ...]) -> None:
    step = step_of(1, 2048, packed) if packed else step_of(2, 1024)
    x = draw(2048, 1024)
    expected = result(build(torch.float32, backend="reference"), x.float(), step)
    assert_near(result(build(torch.bfloat16), x, step), expected)


@pytest.mark.parametrize("backend", ["sdpa", "context_parallel"])
def test_each_core_takes_these_widths(backend: str) -> None:
    x, step = draw(1024, 1024), step_of(2, 512)
    expected = result(build(torch.float32, backend="reference"), x.float(), step)
    assert_near(result(build(torch.bfloat16, backend=backend), x, step), expected)


@pytest.mark.parametrize("packed", [(), (8000, 192)])
def test_the_chosen_core_holds_no_scores(packed: tuple[int, ...]) -> None:
    core, step = build(torch.bfloat16).core, step_of(1, 8192, packed)
    q, k, v = (draw(8192, 16, width, seed=seed).requires_grad_() for seed, width in enumerate((192, 192, 128)))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = core(q, k, v, 0, step)  # type: ignore[operator]
    torch.autograd.grad(out.float().square().sum(), (q, k, v))
    torch.cuda.synchronize()
    scores = 16 * 8192 * 8192 * 2
    assert torch.cuda.max_memory_allocated() - before < scores / 2


def test_a_cache_of_latents_continues_a_prompt() -> None:
    module = build(torch.bfloat16)
    x, whole = draw(2 * 128, 1024), step_of(2, 128)
    with torch.no_grad():
        expected = module(x, whole).unflatten(0, (2, -1))
        module.core = LatentCache(SIZES, num_layers=1, batch_size=2, max_length=128, dtype=torch.bfloat16, device="cuda")
        for start, end in ((0, 120), *((at, at + 1) for at in range(120, 128))):
            positions = torch.arange(start, end, device="cuda").repeat(2)
            rotary = rotary_tables(positions, rotary_frequencies(SIZES.qk_rope_head_dim).cuda())
            step = Step(batch_size=2, seq_len=end - start, positions=positions, rotary=rotary)
            found = module(x.unflatten(0, (2, -1))[:, start:end].flatten(0, 1), step).unflatten(0, (2, -1))
            assert_near([found], [expected[:, start:end]])


def check_two_ranks() -> None:
    x, step = draw(1024, 1024), step_of(1, 1024)
    groups = ProcessGroups.build(ParallelPlan(tp=2, sequence_parallel=False))
    expected = result(build(torch.float32, backend="reference"), x.float(), step)[:2]
    assert_near(result(build(torch.bfloat16, groups), x, step)[:2], expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_ranks_stay_near_one() -> None:
    run(check_two_ranks, 2, backend="nccl")
