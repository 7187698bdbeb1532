# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Whole models of every kind on a GPU: the losses and gradients of the processor in float32, training in bfloat16."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from mcore_parallel import ProcessGroups
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.models import BertModel, GPTModel, MambaModel, TransformerConfig, hybrid_config
from mcore_parallel.nn import GatedDeltaNetConfig, LatentAttentionConfig, MambaConfig, RecomputeConfig, Step
from mcore_parallel.optim import MegatronOptimizer, OptimizerConfig
from mcore_parallel.training import Batch, BertObjective, CrossEntropyObjective, Objective, train_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # Of torch's compiler, about itself.
    pytest.mark.filterwarnings("default"),
]
B, S, V = 2, 192, 128
ENDS: dict[str, Any] = {"hidden_size": 128, "num_attention_heads": 4, "vocab_size": V, "init_method_std": 0.1}
SIZES: dict[str, Any] = {"num_layers": 3, "ffn_hidden_size": 192, **ENDS}
MAMBA: dict[str, Any] = {"mamba": MambaConfig(head_dim=32, num_groups=2, state_dim=32, chunk_size=64)}
DELTA: dict[str, Any] = {
    "delta_net": GatedDeltaNetConfig(num_key_heads=2, num_value_heads=4, key_head_dim=32, value_head_dim=32, chunk_size=64)
}
LATENT = LatentAttentionConfig(q_lora_rank=48, kv_lora_rank=32, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32)
LEARNED: dict[str, Any] = {"position_embedding_type": "learned_absolute", "max_position_embeddings": S}
Build = Callable[..., nn.Module]


def gpt(**options: Any) -> Build:
    config = TransformerConfig(**SIZES, **options)
    return lambda **place: GPTModel(config, ProcessGroups.single(), **place)


def hybrid(pattern: str, **options: Any) -> Build:
    config = hybrid_config(pattern, ffn_hidden_size=192, **ENDS, **options)
    return lambda **place: MambaModel(config, ProcessGroups.single(), **place)


def bert() -> Build:
    biases = {"normalization": "LayerNorm", "add_bias_linear": True, "add_qkv_bias": True, "activation": "gelu", "post_norm": True}
    config = TransformerConfig(**SIZES, **biases, **LEARNED)
    return lambda **place: BertModel(config, ProcessGroups.single(), **place)


KINDS: dict[str, Build] = {
    "window, sinks, gate, norms of heads": gpt(
        num_query_groups=2,
        window_size=(40, 0),
        window_attn_skip_freq=3,
        softmax_type="learnable",
        attention_output_gate=True,
        qk_layernorm=True,
    ),
    "norms across heads": gpt(num_query_groups=2, qk_layernorm=True, qk_layernorm_across_heads=True),
    "further tokens, tied": gpt(mtp_num_layers=2, share_embeddings_and_output_weights=True),
    "latent": gpt(latent_attention=LATENT),
    "sandwich, squared relu, recomputed": lambda **place: GPTModel(
        TransformerConfig(**SIZES, sandwich_norm=True, activation="squared_relu", layernorm_zero_centered_gamma=True),
        ProcessGroups.single(),
        recompute=RecomputeConfig(modules=("norm", "mlp")),
        **place,
    ),
    "states": hybrid("M-M*-", **MAMBA),
    "delta net, a further token": hybrid("G-*/G-", **DELTA, position_embedding_type="rope"),
    "bert": bert(),
}


def batches(device: str) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(2):
        tokens = torch.randint(V, (B, S + 1), generator=generator)
        mask = (torch.rand(B, S, generator=generator) < 0.8).float()
        parts = (tokens[:, :-1], tokens[:, 1:], mask)
        tokens, labels, mask = (part.contiguous().to(device) for part in parts)
        found.append(Batch(tokens=tokens, labels=labels, loss_mask=mask))
    return found


def objective(kind: str) -> Objective:
    return BertObjective() if kind == "bert" else CrossEntropyObjective()


def trained(kind: str, device: str, dtype: torch.dtype, steps: int) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses, gradient norms, and how far each parameter moved."""
    groups = ProcessGroups.single()
    model = KINDS[kind](dtype=dtype, device=device)
    before = {name: parameter.detach().float().cpu().clone() for name, parameter in model.named_parameters()}
    sync = DistributedDataParallel(DistributedDataParallelConfig(), model, groups)
    plain = OptimizerConfig(optimizer="sgd", lr=1.0, clip_grad=0.0, weight_decay=0.0)
    optimizer = MegatronOptimizer(plain if dtype == torch.float32 else OptimizerConfig(lr=1.0, weight_decay=0.0), sync, groups)
    lr = 0.1 if dtype == torch.float32 else 3e-3
    data = batches(device)
    reports = [train_step(model, data, objective(kind), sync, optimizer, lr=lr, groups=groups) for _ in range(steps)]
    moved = {name: parameter.detach().float().cpu() - before[name] for name, parameter in model.named_parameters()}
    return [report.loss for report in reports], [report.grad_norm for report in reports], moved


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_on_a_gpu_are_those_of_the_processor(kind: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    found, wanted = (trained(kind, device, torch.float32, 1) for device in ("cuda", "cpu"))
    assert found[0] == pytest.approx(wanted[0], rel=1e-4)
    assert found[1] == pytest.approx(wanted[1], rel=1e-3)
    largest = max(float(moved.abs().max()) for moved in wanted[2].values())
    for name, moved in wanted[2].items():
        scale = max(float(moved.abs().max()), 1e-3 * largest)
        assert float((found[2][name] - moved).abs().max()) < 5e-3 * scale, name


@pytest.mark.parametrize("kind", KINDS)
def test_models_learn_in_bfloat16(kind: str) -> None:
    losses, norms, _ = trained(kind, "cuda", torch.bfloat16, 40)
    exact, _, _ = trained(kind, "cuda", torch.float32, 1)
    assert losses[0] == pytest.approx(exact[0], rel=0.02)
    assert losses[-1] < 0.8 * losses[0], losses
    assert all(norm == norm for norm in norms)


def test_a_compiled_hybrid_is_the_plain_one() -> None:
    config = hybrid_config("M-*-", ffn_hidden_size=192, **ENDS, **MAMBA)
    tokens = torch.arange(B * S, device="cuda") * 7 % V
    model = MambaModel(config, ProcessGroups.single(), device="cuda")
    step = Step.causal(B, S, torch.device("cuda"))
    with torch.no_grad():
        plain = model(tokens, step)[0].logits()
        compiled = torch.compile(model)(tokens, step)[0].logits()
    torch.testing.assert_close(compiled, plain, rtol=1e-3, atol=1e-3 * float(plain.abs().max()))
