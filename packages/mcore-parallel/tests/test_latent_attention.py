# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Multi-head latent attention: against a plain loop and transformers, over layouts, and with a cache of latents."""

import dataclasses
import functools
import math

import pytest
import torch
from torch import Tensor

from mcore_parallel import Group, ParallelPlan, ProcessGroups, named_shards
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.models import GPTModel, Site, TransformerConfig, flops_per_token, latent_attention, num_parameters
from mcore_parallel.models._mixers import latent_softmax_scale
from mcore_parallel.nn import (
    LatentAttentionConfig,
    LatentCache,
    LatentSelfAttention,
    RecomputeConfig,
    Step,
    YarnScaling,
    apply_rotary,
    rotary_frequencies,
    rotary_tables,
)
from mcore_parallel.nn.positions._embeddings import RotaryConfig
from mcore_parallel.optim import MegatronOptimizer, OptimizerConfig
from mcore_parallel.tensor_parallel import ReplicatedLinear
from mcore_parallel.training import Batch, CrossEntropyObjective, TensorShard, model_state, train_step

SIZES = LatentAttentionConfig(q_lora_rank=12, kv_lora_rank=8, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5)
CONFIG = TransformerConfig(
    num_layers=2, hidden_size=16, num_attention_heads=4, ffn_hidden_size=24, vocab_size=32, init_method_std=0.3, latent_attention=SIZES
)
PACKED = (8, 16, 24)


def build(sizes: LatentAttentionConfig = SIZES, groups: ProcessGroups | None = None, **options: object) -> LatentSelfAttention:
    options = {"dtype": torch.float64, **options}
    return LatentSelfAttention(16, 4, sizes, groups or ProcessGroups.single(), **options)  # type: ignore[arg-type]


def with_rotary(step: Step, *, interleaved: bool = False) -> Step:
    tables = rotary_tables(step.positions, rotary_frequencies(SIZES.qk_rope_head_dim), interleaved=interleaved)
    return dataclasses.replace(step, rotary=tables)


def norm(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def slow_latent_attention(module: LatentSelfAttention, x: Tensor, step: Step) -> Tensor:
    """Head by head, token by token, from the formula; norm weights are one."""
    weights = {name: parameter.detach() for name, parameter in module.named_parameters()}
    sizes, out = module.latent, torch.zeros(len(x), 4, module.latent.v_head_dim, dtype=x.dtype)
    down = x @ weights["kv_down.weight"].T
    latent, shared = norm(down[:, : sizes.kv_lora_rank]), down[:, None, sizes.kv_lora_rank :]
    assert step.rotary is not None
    shared = apply_rotary(shared, step.rotary, interleaved=module.rotary_interleaved)[:, 0]
    for head in range(4):
        if sizes.q_lora_rank is None:
            q = x @ weights["q.weight"][head].T
        else:
            q = norm(x @ weights["q_down.weight"].T) @ weights["q_up.weight"][head].T
        plain, turned = q[:, : sizes.qk_nope_head_dim], q[:, None, sizes.qk_nope_head_dim :]
        turned = apply_rotary(turned, step.rotary, interleaved=module.rotary_interleaved)[:, 0]
        keys, values = (latent @ weights["kv_up.weight"][head].T).split((sizes.qk_nope_head_dim, sizes.v_head_dim), -1)
        for token in range(len(x)):
            start = token // step.seq_len * step.seq_len
            seen = slice(start, token + 1)
            scores = (keys[seen] @ plain[token] + shared[seen] @ turned[token]) / math.sqrt(sizes.qk_head_dim)
            out[token, head] = scores.softmax(0) @ values[seen]
    return out.flatten(1) @ weights["out.weight"].T


@pytest.mark.parametrize("q_lora_rank", [12, None])
@pytest.mark.parametrize("interleaved", [False, True])
def test_latent_attention_is_the_formula(q_lora_rank: int | None, interleaved: bool) -> None:
    torch.manual_seed(0)
    module = build(dataclasses.replace(SIZES, q_lora_rank=q_lora_rank), rotary_interleaved=interleaved)
    x, step = torch.randn(10, 16, dtype=torch.float64), with_rotary(Step.causal(2, 5), interleaved=interleaved)
    torch.testing.assert_close(module(x, step), slow_latent_attention(module, x, step), rtol=1e-10, atol=1e-12)


def test_the_parameters_are_those_that_checkpoints_name() -> None:
    shapes = {shard.name: (shard.spec.shape, dict(shard.spec.shards)) for shard in named_shards(build())}
    assert shapes == {
        "q_down.weight": ((12, 16), {}),
        "q_norm.weight": ((12,), {}),
        "q_up.weight": ((4, 10, 12), {"tp": 0}),
        "kv_down.weight": ((12, 16), {}),
        "kv_norm.weight": ((8,), {}),
        "kv_up.weight": ((4, 11, 8), {"tp": 0}),
        "out.weight": ((16, 20), {"tp": 1}),
    }
    assert {name for name, _ in build(dataclasses.replace(SIZES, q_lora_rank=None), out_bias=True).named_parameters()} == {
        "q.weight", "kv_down.weight", "kv_norm.weight", "kv_up.weight", "out.weight", "out.bias",
    }  # fmt: skip


@pytest.mark.parametrize("q_lora_rank", [12, None])
def test_parameters_and_operations_are_counted(q_lora_rank: int | None) -> None:
    config = with_rank(q_lora_rank)
    model = GPTModel(config, ProcessGroups.single(), seed=None)
    assert num_parameters(config) == sum(parameter.numel() for parameter in model.parameters())
    more = flops_per_token(config, 21) - flops_per_token(config, 1)
    assert more == 6 * config.num_layers * 4 * (SIZES.qk_head_dim + SIZES.v_head_dim) * 10


# -- over layouts: the whole model, one step of training


def micro_batch(packed: bool) -> Batch:
    generator = torch.Generator().manual_seed(3)
    B, S = (1, sum(PACKED)) if packed else (2, 16)
    tokens = torch.randint(0, 32, (B, S + 1), generator=generator)
    mask = (torch.rand(B, S, generator=generator) < torch.linspace(0.1, 1.0, S)).double()
    bounds = torch.tensor([0, *PACKED]).cumsum(0) if packed else None
    return Batch(tokens=tokens[:, :-1], labels=tokens[:, 1:], loss_mask=mask, cu_seqlens=bounds)


@dataclasses.dataclass(frozen=True)
class Run:
    """Loss and gradient norm, gradients, parameters after the update."""

    numbers: list[float]
    gradients: dict[str, Tensor]
    parameters: dict[str, TensorShard]


def train(groups: ProcessGroups, packed: bool, config: TransformerConfig = CONFIG, recompute: RecomputeConfig | None = None) -> Run:
    model = GPTModel(config, groups, recompute=recompute, dtype=torch.float64)
    sync = DistributedDataParallel(DistributedDataParallelConfig(), model, groups)
    optimizer = MegatronOptimizer(OptimizerConfig(lr=1.0, clip_grad=0.5, weight_decay=0.1), sync, groups)
    report = train_step(model, [micro_batch(packed)], CrossEntropyObjective(), sync, optimizer, lr=0.02)
    gradients = {name: grad.clone() for name, grad in sync.gradients().items()}
    return Run([report.loss, report.grad_norm, report.num_tokens], gradients, model_state(model, groups))


@functools.cache
def serial(q_lora_rank: int | None = 12) -> dict[bool, Run]:
    return {packed: train(ProcessGroups.single(), packed, with_rank(q_lora_rank)) for packed in (False, True)}


def with_rank(q_lora_rank: int | None) -> TransformerConfig:
    return dataclasses.replace(CONFIG, latent_attention=dataclasses.replace(SIZES, q_lora_rank=q_lora_rank))


def check_layout(plan: ParallelPlan, expected: dict[bool, Run], q_lora_rank: int | None, recompute: RecomputeConfig | None) -> None:
    groups = ProcessGroups.build(plan)
    for packed, wanted in expected.items():
        found = train(groups, packed, with_rank(q_lora_rank), recompute)
        torch.testing.assert_close(found.numbers, wanted.numbers, rtol=1e-9, atol=1e-12)
        assert found.parameters
        for key, shard in found.parameters.items():
            part = tuple(slice(begin, begin + size) for begin, size in zip(shard.offset, shard.data.shape, strict=True))
            torch.testing.assert_close(shard.data, wanted.parameters[key].data[part], rtol=1e-8, atol=1e-8)
            torch.testing.assert_close(found.gradients[key], wanted.gradients[key][part], rtol=1e-9, atol=1e-10)


def test_every_parameter_gets_a_gradient() -> None:
    assert all(grad.abs().max() > 0 for grad in serial()[False].gradients.values())


@pytest.mark.world(2, shared=True)
@pytest.mark.parametrize("plan", [ParallelPlan(tp=2), ParallelPlan(tp=2, sequence_parallel=False), ParallelPlan(cp=2), ParallelPlan(pp=2)])
@pytest.mark.parametrize("q_lora_rank", [12, None])
def test_two_ranks_train_as_one(world, plan: ParallelPlan, q_lora_rank: int | None) -> None:
    world(check_layout, plan=plan, expected=serial(q_lora_rank), q_lora_rank=q_lora_rank, recompute=None)


@pytest.mark.world(4)
def test_tensor_and_context_parallel_ranks_train_as_one(world) -> None:
    world(check_layout, plan=ParallelPlan(tp=2, cp=2), expected=serial(), q_lora_rank=12, recompute=None)


@pytest.mark.world(2)
@pytest.mark.parametrize("module", ["attention", "core_attention"])
def test_latent_attention_can_be_recomputed(world, module: str) -> None:
    recompute = RecomputeConfig(modules=(module,))
    world(check_layout, plan=ParallelPlan(tp=2), expected=serial(), q_lora_rank=12, recompute=recompute)


# -- a cache of latents


def check_cache(module_groups: ParallelPlan, expected: Tensor, q_lora_rank: int | None) -> None:
    groups = ProcessGroups.build(module_groups)
    config = with_rank(q_lora_rank)
    cache = LatentCache(SIZES, num_layers=2, batch_size=2, max_length=9, dtype=torch.float64)
    model = GPTModel(config, groups, mixer=latent_attention(cache), dtype=torch.float64)
    vocab = slice(16 * groups.tp.rank, 16 * (groups.tp.rank + 1)) if groups.tp.size > 1 else slice(None)
    with torch.no_grad():
        for start, end in ((0, 4), (4, 6), (6, 8)):
            length = end - start
            positions = torch.arange(start, end).repeat(2)
            output, _ = model(tokens_BS()[:, start:end].flatten(), Step(batch_size=2, seq_len=length, positions=positions))
            found = output.logits().unflatten(0, (2, -1))
            torch.testing.assert_close(found, expected[:, start:end, vocab], rtol=1e-9, atol=1e-11)


def tokens_BS() -> Tensor:
    return torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(1))


def whole_logits(q_lora_rank: int | None) -> Tensor:
    model = GPTModel(with_rank(q_lora_rank), ProcessGroups.single(), dtype=torch.float64)
    with torch.no_grad():
        return model(tokens_BS().flatten(), Step.causal(2, 8))[0].logits().unflatten(0, (2, -1))


@pytest.mark.parametrize("q_lora_rank", [12, None])
def test_a_prompt_in_parts_through_the_cache_equals_the_whole_sequence(q_lora_rank: int | None) -> None:
    check_cache(ParallelPlan(), whole_logits(q_lora_rank), q_lora_rank)


@pytest.mark.world(2)
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_the_cache_works_over_tensor_parallel_ranks(world, sequence_parallel: bool) -> None:
    world(
        check_cache,
        module_groups=ParallelPlan(tp=2, sequence_parallel=sequence_parallel),
        expected=whole_logits(12),
        q_lora_rank=12,
    )


def test_gradients_through_absorbed_queries_equal_those_of_expanded_keys() -> None:
    torch.manual_seed(0)
    module, step = build(), with_rotary(Step.causal(1, 5))
    x = torch.randn(5, 16, dtype=torch.float64, requires_grad=True)
    grads = []
    for core in (module.core, WholeLatents()):
        module.core = core
        out = module(x, step)
        grads.append(torch.autograd.grad((out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum(), [x, *module.parameters()]))
    for expanded, absorbed in zip(*grads, strict=True):
        torch.testing.assert_close(absorbed, expanded, rtol=1e-9, atol=1e-11)


class WholeLatents:
    """Latents of one step, one sequence."""

    def attend_latent(self, queries: Tensor, entries: Tensor, scale: float, layer: int, step: Step) -> Tensor:
        scores = torch.einsum("taw,sw->ats", queries, entries) * scale
        hidden = torch.ones(len(entries), len(entries), dtype=torch.bool).triu(1)
        return torch.einsum("ats,sc->tac", scores.masked_fill(hidden, float("-inf")).softmax(-1), entries[:, : SIZES.kv_lora_rank])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 1, "positions": torch.arange(4)}, r"batch_size=1 must have the 2 sequences"),
        ({"cu_seqlens": torch.tensor([0, 8])}, "not packed"),
        ({"seq_len": 10, "positions": torch.arange(10).repeat(2)}, r"seq_len=10 exceeds max_length=9"),
    ],
)
def test_the_cache_names_steps_it_has_no_place_for(change: dict, message: str) -> None:
    cache = LatentCache(SIZES, num_layers=1, batch_size=2, max_length=9)
    step = dataclasses.replace(Step.causal(2, 4), **change)
    tokens = step.batch_size * step.seq_len
    with pytest.raises(ValueError, match=message):
        cache.attend_latent(torch.zeros(tokens, 4, 12), torch.zeros(tokens, 12), 1.0, 0, step)


def test_a_cache_with_split_sequences_is_an_error() -> None:
    cache = LatentCache(SIZES, num_layers=1, batch_size=2, max_length=9)
    groups = dataclasses.replace(ProcessGroups.single(), cp=Group((0, 1), 0))
    with pytest.raises(ValueError, match="cp=2 splits sequences"):
        latent_attention(cache)(Site(layer=0, local_layer=0, config=CONFIG, groups=groups))


def test_windows_and_layers_without_rotary_embedding_are_followed() -> None:
    config = dataclasses.replace(CONFIG, window_size=(2, 0), window_attn_skip_freq=2, no_rope_freq=2)
    torch.manual_seed(0)
    x, step = torch.randn(10, 16, dtype=torch.float64), with_rotary(Step.causal(2, 5))
    windowed, whole = (
        latent_attention()(Site(layer=layer, local_layer=layer, config=config, groups=ProcessGroups.single(), dtype=torch.float64))
        for layer in (0, 1)
    )
    assert isinstance(windowed, LatentSelfAttention) and isinstance(whole, LatentSelfAttention)
    with torch.no_grad():
        for parameter, same in zip(windowed.parameters(), whole.parameters(), strict=True):
            same.copy_(parameter.normal_(0.0, 0.5))
    near, far = windowed(x, step), whole(x, step)
    assert not whole.rotary and not torch.allclose(near[1], far[1])
    # Within the window the two differ by the rotary embedding only; behind it a change is not seen.
    whole.rotary = True
    torch.testing.assert_close(whole(x, step)[:3], near[:3], rtol=1e-10, atol=1e-12)
    y = x.clone()
    y[0] += 1
    assert torch.equal(windowed(y, step)[4], near[4]) and not torch.allclose(whole(y, step)[4], whole(x, step)[4])


# -- transformers


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("q_lora_rank", [12, None])
@pytest.mark.parametrize("factor", [None, 4.0])
def test_latent_attention_equals_that_of_transformers(version: int, q_lora_rank: int | None, factor: float | None) -> None:
    import transformers
    from transformers.models.deepseek_v2 import modeling_deepseek_v2 as second
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as third

    torch.manual_seed(0)
    yarn = None
    rope: dict[str, object] = {"rope_theta": 500.0, "rope_type": "default"}
    if factor is not None:
        yarn = YarnScaling(factor=factor, original_max_position_embeddings=8, mscale=1.0, mscale_all_dim=0.7)
        rope |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": 8, "mscale": 1.0, "mscale_all_dim": 0.7}
    sizes = dataclasses.asdict(dataclasses.replace(SIZES, q_lora_rank=q_lora_rank))
    room, name = (second, "V2") if version == 2 else (third, "V3")
    theirs_config = getattr(transformers, f"Deepseek{name}Config")(
        hidden_size=16, num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=64, rope_parameters=rope,
        attn_implementation="eager", **sizes
    )  # fmt: skip
    theirs = getattr(room, f"Deepseek{name}Attention")(theirs_config, 0)
    turn = getattr(room, f"Deepseek{name}RotaryEmbedding")(theirs_config)
    config = dataclasses.replace(
        with_rank(q_lora_rank),
        norm_epsilon=1e-6,
        rotary_base=500.0,
        rotary_interleaved=True,
        position_embedding_type="rope" if yarn is None else "yarn",
        yarn=yarn,
    )
    site = Site(layer=0, local_layer=0, config=config, groups=ProcessGroups.single())
    ours = latent_attention()(site)
    assert isinstance(ours, LatentSelfAttention)
    for norm_of_theirs in (getattr(theirs, "q_a_layernorm", None), theirs.kv_a_layernorm):
        if norm_of_theirs is not None:
            torch.nn.init.uniform_(norm_of_theirs.weight, 0.5, 1.5)
    names = {
        "q_down": "q_a_proj", "q_norm": "q_a_layernorm", "q_up": "q_b_proj", "q": "q_proj",
        "kv_down": "kv_a_proj_with_mqa", "kv_norm": "kv_a_layernorm", "kv_up": "kv_b_proj", "out": "o_proj",
    }  # fmt: skip
    with torch.no_grad():
        for key, parameter in ours.named_parameters():
            parameter.copy_(theirs.get_parameter(f"{names[key.split('.')[0]]}.weight").view_as(parameter))

    x = torch.randn(2, 11, 16)
    positions = torch.arange(11).expand(2, -1)
    mask = torch.full((11, 11), float("-inf")).triu(1)[None, None]
    wanted, _ = theirs(x, attention_mask=mask, position_embeddings=turn(x, positions))
    step = Step.causal(2, 11)
    rotary = RotaryConfig(width=4, base=500.0, interleaved=True, scaling=yarn)
    found = ours(x.flatten(0, 1), dataclasses.replace(step, rotary=rotary.tables(step.positions)))
    torch.testing.assert_close(found, wanted.flatten(0, 1), rtol=1e-4, atol=1e-5)
    if yarn is not None:
        assert latent_softmax_scale(config) == pytest.approx((0.1 * 0.7 * math.log(4.0) + 1.0) ** 2 / math.sqrt(10))


# -- bad input


def test_a_tp_that_does_not_divide_the_heads_is_an_error() -> None:
    groups = dataclasses.replace(ProcessGroups.single(), tp=Group((0, 1, 2), 0))
    with pytest.raises(ValueError, match=r"tp=3 must divide num_attention_heads=4"):
        build(groups=groups)


@pytest.mark.parametrize(("field", "value"), [("kv_lora_rank", 0), ("q_lora_rank", -1), ("qk_rope_head_dim", 3), ("v_head_dim", 0)])
def test_sizes_that_cannot_be_are_named(field: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{field}={value} must be"):
        dataclasses.replace(SIZES, **{field: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"latent_attention": None}, "latent_attention=None"),
        ({"qk_layernorm": True}, "qk_layernorm=True is not there with latent attention"),
        ({"add_qkv_bias": True}, "add_qkv_bias=True"),
        ({"attention_output_gate": True}, "attention_output_gate=True"),
        ({"softmax_type": "learnable"}, "softmax_type='learnable'"),
        ({"rotary_base_window": 100.0, "window_size": (3, 0)}, "rotary_base_window=100.0"),
    ],
)
def test_a_config_that_latent_attention_cannot_follow_is_an_error(change: dict, message: str) -> None:
    config = dataclasses.replace(CONFIG, **change)
    with pytest.raises(ValueError, match=message):
        latent_attention()(Site(layer=0, local_layer=0, config=config, groups=ProcessGroups.single()))


# -- the replicated projection


def test_a_replicated_layer_adds_its_gradient_where_it_is_told() -> None:
    torch.manual_seed(0)
    layer, x = ReplicatedLinear(4, 3, ProcessGroups.single(), dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    (wanted,) = torch.autograd.grad(layer(x).square().sum(), layer.weight)
    seen = []

    class Grad:
        def add_product(self, grad: Tensor, inputs: Tensor) -> None:
            seen.append(grad.T @ inputs)

    layer.accumulate_weight_gradients_into({"weight": Grad()})  # type: ignore[dict-item]
    layer(x).square().sum().backward()
    assert layer.weight.grad is None
    torch.testing.assert_close(seen[0], wanted)
