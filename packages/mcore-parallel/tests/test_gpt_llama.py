# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The model against the Llama of transformers."""

import functools

import pytest
import torch
from torch import Tensor

from mcore_parallel import ParallelPlan, ProcessGroups, named_shards
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.nn import Step

CONFIG = TransformerConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    num_query_groups=2,
    ffn_hidden_size=48,
    vocab_size=64,
    norm_epsilon=1e-6,
    rotary_base=500.0,
)


def qkv(state: dict[str, Tensor], prefix: str) -> Tensor:
    """Rows by key-value group: its query heads, its key, its value."""
    parts = [state[f"{prefix}.{name}_proj.weight"].unflatten(0, (CONFIG.kv_heads, -1)) for name in "qkv"]
    return torch.cat(parts, 1)


def renamed(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Llama's tensors (weights or gradients) under our names and in our shapes."""
    ours = {
        "embedding.weight": state["model.embed_tokens.weight"],
        "final_norm.weight": state["model.norm.weight"],
        "output.weight": state["lm_head.weight"],
    }
    for layer in range(CONFIG.num_layers):
        theirs, here = f"model.layers.{layer}", f"layers.{layer}"
        ours |= {
            f"{here}.input_norm.weight": state[f"{theirs}.input_layernorm.weight"],
            f"{here}.attention.qkv.weight": qkv(state, f"{theirs}.self_attn"),
            f"{here}.attention.out.weight": state[f"{theirs}.self_attn.o_proj.weight"],
            f"{here}.ffn_norm.weight": state[f"{theirs}.post_attention_layernorm.weight"],
            f"{here}.mlp.up.weight": torch.stack([state[f"{theirs}.mlp.{name}_proj.weight"] for name in ("gate", "up")]),
            f"{here}.mlp.down.weight": state[f"{theirs}.mlp.down_proj.weight"],
        }
    return ours


@functools.cache
def llama() -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor, Tensor, Tensor]:
    """Weights and gradients in our names, tokens [2, 7], labels, logits."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_theta": 500.0, "rope_type": "default"},
        max_position_embeddings=64,
        tie_word_embeddings=False,
        initializer_range=0.2,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config)
    tokens, labels = torch.randint(0, 64, (2, 2, 7))
    logits = model(tokens).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return renamed(weights), renamed(grads), tokens, labels, logits.detach()


def load(model: GPTModel, weights: dict[str, Tensor]) -> None:
    shards = {shard.name: shard for shard in named_shards(model)}
    with torch.no_grad():
        for name, shard in shards.items():
            shard.parameter.copy_(weights[name][shard.spec.slices(model.groups)])


def test_logits_and_gradients_equal_those_of_llama() -> None:
    weights, grads, tokens, labels, logits = llama()
    model = GPTModel(CONFIG, ProcessGroups.single(), seed=None)
    assert set(dict(model.named_parameters())) == set(weights)
    load(model, weights)
    output, aux = model(tokens.flatten(), Step.causal(2, 7))
    assert aux is None
    torch.testing.assert_close(output.logits().view(2, 7, 64), logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(output.logits(torch.tensor([6, 13])), logits[:, -1], rtol=1e-4, atol=1e-5)
    expected = torch.log_softmax(logits / 2, -1).gather(-1, labels[..., None]).flatten()
    torch.testing.assert_close(output.log_probs(labels.flatten(), temperature=2.0), expected, rtol=1e-4, atol=1e-5)
    output.token_losses(labels.flatten()).sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, grads[name], rtol=1e-3, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


def check_sharded(
    weights: dict[str, Tensor], grads: dict[str, Tensor], tokens: Tensor, labels: Tensor, logits: Tensor, sequence_parallel: bool
) -> None:
    groups = ProcessGroups.build(ParallelPlan(tp=2, sequence_parallel=sequence_parallel))
    model = GPTModel(CONFIG, groups, seed=None)
    load(model, weights)
    output, _ = model(tokens.flatten(), Step.causal(2, 7))
    columns = slice(32 * groups.tp.rank, 32 * (groups.tp.rank + 1))
    torch.testing.assert_close(output.logits().view(2, 7, 32), logits[..., columns], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(output.logits(torch.tensor([6, 13])), logits[:, -1, columns], rtol=1e-4, atol=1e-5)
    output.token_losses(labels.flatten()).sum().backward()
    for shard in named_shards(model):
        grad = shard.parameter.grad
        assert grad is not None
        if shard.spec.partial:
            torch.distributed.all_reduce(grad)
        torch.testing.assert_close(
            grad, grads[shard.name][shard.spec.slices(groups)], rtol=1e-3, atol=1e-4, msg=lambda text, name=shard.name: f"{name}: {text}"
        )


@pytest.mark.world(2)
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_logits_and_gradients_over_tp_equal_those_of_llama(world, sequence_parallel: bool) -> None:
    names = ("weights", "grads", "tokens", "labels", "logits")
    world(check_sharded, **dict(zip(names, llama(), strict=True)), sequence_parallel=sequence_parallel)
