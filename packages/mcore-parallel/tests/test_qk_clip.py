# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""QK-clip: the greatest logits are those of the definition, and after a clip none is above the threshold."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.backends import quantize_base
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.nn import (
    AttentionConfig,
    AttentionSpec,
    LatentAttentionConfig,
    LatentSelfAttention,
    LogitTracker,
    SelfAttention,
    Step,
    clip_qk,
    get_sliding_window_causal_mask,
    rotary_frequencies,
    rotary_tables,
    shared_key_factors,
    track_max_logits,
)
from mcore_parallel.optim import MegatronOptimizer, OptimizerConfig
from mcore_parallel.tensor_parallel import LoraConfig, add_lora
from mcore_parallel.training import Batch, CrossEntropyObjective, TensorShard, evaluate, model_state, train_step

ONE = ProcessGroups.single()
CONFIG = TransformerConfig(
    num_layers=2,
    hidden_size=16,
    num_attention_heads=4,
    num_query_groups=2,
    ffn_hidden_size=24,
    vocab_size=32,
    init_method_std=0.4,
    add_qkv_bias=True,
    window_size=(5, 0),
    window_attn_skip_freq=2,
)
LATENT = dataclasses.replace(
    CONFIG,
    num_query_groups=4,
    add_qkv_bias=False,
    window_size=None,
    window_attn_skip_freq=None,
    latent_attention=LatentAttentionConfig(kv_lora_rank=8, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5),
)
SHARED = dataclasses.replace(CONFIG, num_query_groups=1)
FAR = 1e9


def rotary_step(batch_size: int, seq_len: int, width: int) -> Step:
    step = Step.causal(batch_size, seq_len)
    cos, sin = rotary_tables(step.positions, rotary_frequencies(width))
    return dataclasses.replace(step, rotary=(cos.double(), sin.double()))


def slow_logits(q: Tensor, k: Tensor, lengths: list[int], bounds: tuple[int, int], scale: float) -> Tensor:
    """[A], with all scores of a sequence in memory."""
    found, start = [], 0
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    for length in lengths:
        rows = slice(start, start + length)
        scores = torch.einsum("iad,jad->aij", q[rows], k[rows]) * scale
        found.append(scores.masked_fill(get_sliding_window_causal_mask(length, length, bounds), float("-inf")).amax((1, 2)))
        start += length
    return torch.stack(found).amax(0)


@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, (3, 0)), (True, (0, 0)), (False, None), (False, (2, 5))])
@pytest.mark.parametrize("packed", [False, True])
def test_the_greatest_logits_are_those_of_the_definition(
    causal: bool, window: tuple[int, int] | None, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mcore_parallel.nn.attention._qk_clip.ROWS", 4)
    spec = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=6, causal=causal, window=window, softmax_scale=0.7, device="cpu")
    lengths = [5, 9, 1] if packed else [11, 11]
    step = Step.causal(1, 15) if packed else Step.causal(2, 11)
    if packed:
        step = dataclasses.replace(step, cu_seqlens=torch.tensor([0, *lengths]).cumsum(0))
    tracker, expected = LogitTracker(spec, ONE), []
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        q, k = (torch.randn(sum(lengths), heads, 6, dtype=torch.float64, generator=generator) for heads in (4, 2))
        tracker.see(q, k, step)
        expected.append(slow_logits(q, k, lengths, spec.bounds, 0.7))
    torch.testing.assert_close(tracker.greatest, torch.stack(expected).amax(0), rtol=1e-12, atol=0)
    tracker.reset()
    assert tracker.greatest is None


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_heads_that_share_a_key_shrink_each_by_its_own_factor(alpha: float) -> None:
    gamma = torch.tensor([1.0, 0.5, 0.2, 0.4, 0.1, 0.1], dtype=torch.float64)
    queries, keys = shared_key_factors(gamma, 3, alpha)
    torch.testing.assert_close((queries * keys[:, None]).flatten(), gamma)
    assert queries.max() <= 1 and keys.max() <= 1
    # A head that needs nothing keeps the key of its group.
    assert keys[0] == 1
    alone, own = shared_key_factors(gamma, 6, alpha)
    torch.testing.assert_close(alone.flatten(), gamma**alpha)
    torch.testing.assert_close(own, gamma ** (1 - alpha))


def check_attention(attention: SelfAttention | LatentSelfAttention, width: int, step: Step) -> None:
    """Logits above the threshold come down to it, others stay."""
    x = torch.randn(step.batch_size * step.seq_len, width, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    track_max_logits(attention)
    attention(x, step)
    before = clip_qk(attention, ONE, threshold=FAR).max_logits[""]
    threshold = float(before.sort().values[-3:-1].mean())
    attention(x, step)
    report = clip_qk(attention, ONE, threshold=threshold, alpha=0.3)
    assert report.clipped == 2
    torch.testing.assert_close(report.max_logits[""], before, rtol=1e-12, atol=0)
    attention(x, step)
    torch.testing.assert_close(clip_qk(attention, ONE, threshold=FAR).max_logits[""], before.clamp(max=threshold), rtol=1e-10, atol=0)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_clipped_heads_come_down_to_the_threshold_and_the_others_stay(kv_heads: int) -> None:
    torch.manual_seed(0)
    attention = SelfAttention(
        AttentionConfig(hidden_size=12, num_heads=4, num_kv_heads=kv_heads, head_dim=6, qkv_bias=True), ONE, dtype=torch.float64
    )
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter)
    values = attention.qkv.weight.detach()[:, -6:].clone()
    check_attention(attention, 12, rotary_step(2, 9, 6))
    assert torch.equal(attention.qkv.weight[:, -6:], values)


@pytest.mark.parametrize("q_lora_rank", [None, 8])
def test_latent_attention_keeps_the_key_that_all_heads_share(q_lora_rank: int | None) -> None:
    torch.manual_seed(0)
    sizes = LatentAttentionConfig(q_lora_rank=q_lora_rank, kv_lora_rank=8, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5)
    attention = LatentSelfAttention(12, 4, sizes, ONE, dtype=torch.float64)
    for name, parameter in attention.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter)
    shared, values = attention.kv_down.weight.detach().clone(), attention.kv_up.weight.detach()[:, 6:].clone()
    check_attention(attention, 12, rotary_step(2, 9, 4))
    assert torch.equal(attention.kv_down.weight, shared)
    assert torch.equal(attention.kv_up.weight[:, 6:], values)


@pytest.mark.parametrize("config", [CONFIG, LATENT], ids=["heads", "latent"])
def test_an_evaluation_has_no_part_in_the_greatest_logits(config: TransformerConfig) -> None:
    model, (tokens, others) = GPTModel(config, ONE, dtype=torch.float64, seed=4), torch.randint(0, 32, (2, 17)).unbind()
    track_max_logits(model)
    expected: dict[str, Tensor] = {}
    for evaluates in (False, True):
        model(tokens[:-1], Step.causal(1, 16))
        if evaluates:
            row = others[None]
            batch = Batch(tokens=row[:, :-1], labels=row[:, 1:], loss_mask=torch.ones(1, 16))
            evaluate(model, [batch], CrossEntropyObjective())
        maxima = clip_qk(model, ONE, threshold=FAR).max_logits
        expected = expected or maxima
        assert all(torch.equal(maxima[name], greatest) for name, greatest in expected.items())


def clipped(config: TransformerConfig, groups: ProcessGroups, threshold: float) -> tuple[dict[str, Tensor], int, dict[str, TensorShard]]:
    """What ``clip_qk`` reports after a forward over this rank's share of a batch, and the parameters then."""
    model = GPTModel(config, groups, dtype=torch.float64, seed=4)
    for name, parameter in model.named_parameters():
        if name.endswith("qkv.bias"):
            torch.nn.init.constant_(parameter, 0.1)
    track_max_logits(model)
    tokens = torch.randint(0, 32, (2, 17), generator=torch.Generator().manual_seed(6))[groups.dp.rank :: groups.dp.size]
    batch = Batch(tokens=tokens[:, :-1], labels=tokens[:, 1:], loss_mask=torch.ones(len(tokens), 16))
    share = batch.context_share(groups.cp)
    model(share.tokens.flatten(), share.step())
    report = clip_qk(model, groups, threshold=threshold, alpha=0.5)
    return report.max_logits, report.clipped, model_state(model, groups)


def check_layouts(cases: list[tuple[ParallelPlan, TransformerConfig, float, Any]]) -> None:
    for plan, config, threshold, (logits, count, parameters) in cases:
        found, clipped_heads, state = clipped(config, ProcessGroups.build(plan), threshold)
        assert clipped_heads == count
        for name, greatest in logits.items():
            torch.testing.assert_close(found[name], greatest, rtol=1e-10, atol=1e-12)
        for name, shard in state.items():
            part = tuple(slice(begin, begin + size) for begin, size in zip(shard.offset, shard.data.shape, strict=True))
            torch.testing.assert_close(shard.data, parameters[name].data[part], rtol=1e-10, atol=1e-12)


@pytest.mark.world(2)
def test_two_ranks_clip_as_one(world) -> None:
    """Over heads, heads that share a key between ranks, sequences and data."""
    cases = []
    for config, plans in (
        (CONFIG, [ParallelPlan(tp=2), ParallelPlan(cp=2), ParallelPlan(dp=2)]),
        (SHARED, [ParallelPlan(tp=2)]),
    ):
        logits, none, _ = clipped(config, ONE, FAR)
        assert none == 0 and sorted(logits) == ["layers.0.attention", "layers.1.attention"]
        # Between two of them, which rounding cannot bring past each other.
        threshold = float(torch.cat(list(logits.values())).sort().values[3:5].mean())
        expected = clipped(config, ONE, threshold)
        assert expected[1] == 4
        cases += [(plan, config, threshold, expected) for plan in plans]
    world(check_layouts, cases=cases)


def check_masters(options: dict[str, Any]) -> None:
    """Masters shrink with their parameters; every rank holds the same and trains on from it."""
    groups = ProcessGroups.build(ParallelPlan(dp=2))
    model = GPTModel(CONFIG, groups, dtype=torch.bfloat16, seed=4)
    track_max_logits(model)
    sync = DistributedDataParallel(DistributedDataParallelConfig(use_distributed_optimizer=True), model, groups)
    optimizer = MegatronOptimizer(OptimizerConfig(lr=1e-2, use_distributed_optimizer=True, **options), sync, groups)
    tokens = torch.randint(0, 32, (2, 17), generator=torch.Generator().manual_seed(6))[groups.dp.rank :][:1]
    batch = Batch(tokens=tokens[:, :-1], labels=tokens[:, 1:], loss_mask=torch.ones(1, 16))

    def masters() -> dict[tuple[str, Any], Tensor]:
        found = {}
        for name, parts in optimizer.state_shards().items():
            for part in parts if isinstance(parts, list) else [parts]:
                found[name, part.offset] = part.tensor.clone()
        optimizer.load_step_count(optimizer.step_count)
        return found

    train_step(model, [batch], CrossEntropyObjective(), sync, optimizer, lr=1e-2)
    before, old = masters(), {name: parameter.detach().float() for name, parameter in model.named_parameters()}
    report = clip_qk(model, groups, threshold=1e-3, alpha=0.5, optimizer=optimizer, sync=sync)
    assert report.clipped > 4
    after, new = masters(), {name: parameter.detach().float() for name, parameter in model.named_parameters()}
    for (name, offset), value in after.items():
        if "qkv" not in name or "master" not in name:
            assert torch.equal(value, before[name, offset]), name
    shrunk = [key for key, value in after.items() if not torch.equal(value, before[key])]
    assert shrunk and all("master.layers" in name and "qkv" in name for name, _ in shrunk)
    for name, value in new.items():
        assert torch.equal(value, old[name]) == ("qkv" not in name), name
        both = [torch.empty_like(value) for _ in range(2)]
        torch.distributed.all_gather(both, value)
        assert torch.equal(*both), name
    # Greatest logits come down, and what the optimizer writes next begins from the smaller masters.
    model(batch.tokens.flatten(), batch.step())
    second = clip_qk(model, groups, threshold=FAR)
    assert all(float(greatest.max()) < 2e-3 for greatest in second.max_logits.values())
    train_step(model, [batch], CrossEntropyObjective(), sync, optimizer, lr=1e-30)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach().float(), new[name], rtol=2**-7, atol=0, msg=name)


@pytest.mark.world(2)
@pytest.mark.parametrize("options", [{}, {"use_precision_aware_optimizer": True}])
def test_masters_of_a_distributed_optimizer_shrink_too(world, options: dict[str, Any]) -> None:
    world(check_masters, options=options)


def test_what_cannot_be_clipped_is_refused() -> None:
    attention = SelfAttention(AttentionConfig(hidden_size=8, num_heads=4, num_kv_heads=2, head_dim=2), ONE)
    with pytest.raises(ValueError, match=r"logits of '' are not tracked; call track_max_logits"):
        clip_qk(attention, ONE)
    with pytest.raises(ValueError, match=r"Linear has no attention"):
        track_max_logits(torch.nn.Linear(2, 2))
    for options in ({"threshold": 0.0}, {"threshold": float("nan")}, {"alpha": 1.5}):
        with pytest.raises(ValueError, match=r"threshold=.* must be positive and alpha=.* in \[0, 1\]"):
            clip_qk(attention, ONE, **options)
    normed = SelfAttention(AttentionConfig(hidden_size=8, num_heads=4, num_kv_heads=2, head_dim=2, qk_norm=True), ONE)
    track_max_logits(normed)
    normed(torch.ones(3, 8), Step.causal(1, 3))
    with pytest.raises(ValueError, match=r"qk_layernorm=True normalises queries and keys .* QK-clip has no effect"):
        clip_qk(normed, ONE)
    track_max_logits(normed, enabled=False)
    assert normed.logits is None


def check_rank_without_data(dtype: torch.dtype) -> None:
    """It clips what the others saw."""
    groups = ProcessGroups.build(ParallelPlan(dp=2))
    attention = SelfAttention(AttentionConfig(hidden_size=8, num_heads=4, num_kv_heads=2, head_dim=2), groups, dtype=dtype)
    track_max_logits(attention)
    if groups.dp.rank == 0:
        attention(torch.ones(3, 8, dtype=dtype), Step.causal(1, 3))
    maxima = clip_qk(attention, groups, threshold=FAR).max_logits[""]
    assert maxima.shape == (4,) and maxima.isfinite().all()


@pytest.mark.world(2, shared=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_rank_without_data_takes_part(world: Any, dtype: torch.dtype) -> None:
    world(check_rank_without_data, dtype=dtype)


def check_frozen(base_dtype: str | None) -> None:
    """Refused on the rank without data, too, and nothing has changed."""
    groups = ProcessGroups.build(ParallelPlan(dp=2))
    attention = SelfAttention(AttentionConfig(hidden_size=16, num_heads=4, num_kv_heads=2, head_dim=4), groups)
    add_lora(attention, LoraConfig(rank=2, targets=("qkv",), base_dtype=base_dtype), groups)
    quantize_base(attention)
    track_max_logits(attention)
    before = [parameter.detach().clone() for parameter in attention.parameters()]
    if groups.dp.rank == 0:
        attention(torch.ones(3, 16), Step.causal(1, 3))
    with pytest.raises(ValueError, match=r"qkv\.lora\.A is of an adapter, which no factor reaches"):
        clip_qk(attention, groups, threshold=1e-9)
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(attention.parameters(), before, strict=True))


@pytest.mark.world(2, shared=True)
@pytest.mark.parametrize("base_dtype", [None, "fp8_weight_only"])
def test_frozen_weights_beside_adapters_are_refused_on_every_rank(world: Any, base_dtype: str | None) -> None:
    world(check_frozen, base_dtype=base_dtype)


def test_frozen_attention_keeps_its_weights_beside_others() -> None:
    model = GPTModel(dataclasses.replace(CONFIG, num_layers=2), ONE).double()
    track_max_logits(model)
    layers = [f"layers.{number}." for number in range(2)]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(layers[0]))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    model(torch.arange(6), Step.causal(1, 6))
    report = clip_qk(model, ONE, threshold=1e-9)
    assert len(report.max_logits) == 2 and report.clipped == sum(
        int((logits > 1e-9).sum()) for name, logits in report.max_logits.items() if name.startswith(layers[1])
    )
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed == {name for name in before if name.startswith(layers[1]) and name.endswith("qkv.weight")}
    bias = next(parameter for name, parameter in model.named_parameters() if name.startswith(layers[1]) and name.endswith("qkv.bias"))
    bias.requires_grad_(False)
    with pytest.raises(ValueError, match=r"qkv\.bias is frozen, and .*qkv\.weight is not; freeze all or none"):
        clip_qk(model, ONE, threshold=1e-9)


def test_steps_in_evaluation_mode_leave_nothing_to_clip_by() -> None:
    attention = SelfAttention(AttentionConfig(hidden_size=8, num_heads=4, num_kv_heads=2, head_dim=2), ONE).eval()
    track_max_logits(attention)
    attention(torch.ones(3, 8), Step.causal(1, 3))
    with pytest.raises(ValueError, match=r"no logits were noted on any rank since the last call.* call model\.train\(\) before the steps"):
        clip_qk(attention, ONE, threshold=1e-9)
    attention.train()(torch.ones(3, 8), Step.causal(1, 3))
    assert clip_qk(attention, ONE, threshold=1e-9).max_logits[""].isfinite().all()
