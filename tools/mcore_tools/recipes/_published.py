# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Pre-training of models in published sizes, with a layout for each number of GPUs; layouts for tuning these models."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal

from mcore_moe import MoEConfig
from mcore_parallel.models import TransformerConfig, hybrid_config
from mcore_parallel.nn import LatentAttentionConfig, Llama3Scaling, MambaConfig, YarnScaling
from mcore_parallel.optim import OptimizerConfig
from mcore_tools.recipes._config import RunConfig
from mcore_tools.recipes._train import TrainConfig

_FSDP = ("data_parallel=fsdp",)
_SLICED = ("optimizer.use_distributed_optimizer=true",)
_FULL = ("recompute.granularity=full",)
# Moments of two bytes instead of four.
_NARROW = ("optimizer.use_precision_aware_optimizer=true", "optimizer.exp_avg_dtype=bfloat16", "optimizer.exp_avg_sq_dtype=bfloat16")
# Masters and moments in host memory, where the optimizer steps.
_HOSTED = ("optimizer.optimizer_cpu_offload=true", "optimizer.optimizer_offload_fraction=1.0")
# Main gradients of two bytes instead of four: the last resort, because each micro-batch is rounded as it is added.
_NARROW_GRADS = ("ddp.grad_reduce_in_fp32=false", "ddp.use_distributed_optimizer=false")
_NARROW_SLICED = ("ddp.grad_reduce_in_fp32=false", "ddp.use_distributed_optimizer=true", *_SLICED)
_NORM, _NORM_MLP = ("recompute.modules=[norm]",), ("recompute.modules=[norm,mlp]",)
_EXPERT_ADAPTERS = ("lora.targets=[qkv,out,experts]",)
_LATENT_ADAPTERS = ("lora.targets=[q_down,q_up,kv_down,kv_up,out,experts]", "moe.moe_router_bias_update_rate=0")


def _run(
    name: str, model: TransformerConfig, moe: MoEConfig | None = None, *, seq_len: int = 8192, batch: int = 128, lr: float
) -> RunConfig:
    """In bfloat16, about a million tokens a step."""
    train = TrainConfig(
        steps=100_000,
        seq_len=seq_len,
        micro_batch_size=1,
        global_batch_size=batch,
        warmup_steps=2000,
        eval_interval=1000,
        checkpoint_interval=1000,
        dtype="bfloat16",
    )
    optimizer = OptimizerConfig(lr=lr, min_lr=lr / 10, weight_decay=0.1, clip_grad=1.0, adam_beta2=0.95)
    return RunConfig(model=model, moe=moe, train=train, optimizer=optimizer, output=f"runs/{name}")


def _llama3(name: str, num_layers: int, hidden_size: int, num_heads: int, ffn_hidden_size: int, lr: float) -> RunConfig:
    model = TransformerConfig(
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_attention_heads=num_heads,
        num_query_groups=8,
        ffn_hidden_size=ffn_hidden_size,
        vocab_size=128_256,
        rotary_base=500_000.0,
        rope_scaling=Llama3Scaling(),
        max_position_embeddings=131_072,
    )
    return _run(name, model, lr=lr)


def llama3_8b() -> RunConfig:
    """Llama 3.1 8B."""
    return _llama3("llama3_8b", 32, 4096, 32, 14_336, 3e-4)


def llama3_70b() -> RunConfig:
    """Llama 3.1 70B."""
    return _llama3("llama3_70b", 80, 8192, 64, 28_672, 1.5e-4)


def _qwen3(num_layers: int, hidden_size: int, num_heads: int, num_groups: int, ffn_hidden_size: int, **more: Any) -> TransformerConfig:
    return TransformerConfig(
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_attention_heads=num_heads,
        num_query_groups=num_groups,
        kv_channels=128,
        ffn_hidden_size=ffn_hidden_size,
        vocab_size=151_936,
        qk_layernorm=True,
        norm_epsilon=1e-6,
        rotary_base=1e6,
        max_position_embeddings=40_960,
        **more,
    )


def qwen3_0_6b() -> RunConfig:
    """Qwen3 0.6B."""
    return _run("qwen3_0_6b", _qwen3(28, 1024, 16, 8, 3072, share_embeddings_and_output_weights=True), lr=6e-4)


def qwen3_1_7b() -> RunConfig:
    """Qwen3 1.7B."""
    return _run("qwen3_1_7b", _qwen3(28, 2048, 16, 8, 6144, share_embeddings_and_output_weights=True), lr=5e-4)


def qwen3_4b() -> RunConfig:
    """Qwen3 4B."""
    return _run("qwen3_4b", _qwen3(36, 2560, 32, 8, 9728, share_embeddings_and_output_weights=True), lr=4e-4)


def qwen3_14b() -> RunConfig:
    """Qwen3 14B."""
    return _run("qwen3_14b", _qwen3(40, 5120, 40, 8, 17_408), lr=2.5e-4)


def qwen3_32b() -> RunConfig:
    """Qwen3 32B."""
    return _run("qwen3_32b", _qwen3(64, 5120, 64, 8, 25_600), lr=2e-4)


def qwen3_8b() -> RunConfig:
    """Qwen3 8B."""
    return _run("qwen3_8b", _qwen3(36, 4096, 32, 8, 12_288), lr=3e-4)


def qwen3_30b_a3b() -> RunConfig:
    """Qwen3 30B-A3B: 128 experts, of which a token meets eight."""
    experts = MoEConfig(
        num_moe_experts=128,
        moe_router_topk=8,
        moe_ffn_hidden_size=768,
        moe_router_load_balancing_type="global_aux_loss",
        moe_aux_loss_coeff=1e-3,
    )
    return _run("qwen3_30b_a3b", _qwen3(48, 2048, 32, 4, 6144), experts, lr=3e-4)


def gpt_oss_20b() -> RunConfig:
    """gpt-oss 20B: sinks, a window in every other layer, 32 experts with biases."""
    model = TransformerConfig(
        num_layers=24,
        hidden_size=2880,
        num_attention_heads=64,
        num_query_groups=8,
        kv_channels=64,
        ffn_hidden_size=2880,
        vocab_size=201_088,
        add_bias_linear=True,
        add_qkv_bias=True,
        activation="quick_geglu",
        glu_linear_offset=1.0,
        activation_func_clamp_value=7.0,
        softmax_type="learnable",
        window_size=(127, 0),
        window_attn_skip_freq=2,
        rotary_base=150_000.0,
        position_embedding_type="yarn",
        yarn=YarnScaling(factor=32.0, original_max_position_embeddings=4096, correction_range_round_to_int=False),
        max_position_embeddings=131_072,
    )
    experts = MoEConfig(num_moe_experts=32, moe_router_topk=4, moe_ffn_hidden_size=2880, moe_router_bias=True, moe_aux_loss_coeff=1e-3)
    return _run("gpt_oss_20b", model, experts, lr=3e-4)


def deepseek_v3() -> RunConfig:
    """DeepSeek-V3: latent attention, three dense layers, then 256 experts in groups, balanced by biases."""
    model = TransformerConfig(
        num_layers=61,
        hidden_size=7168,
        num_attention_heads=128,
        ffn_hidden_size=18_432,
        vocab_size=129_280,
        norm_epsilon=1e-6,
        latent_attention=LatentAttentionConfig(
            q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
        ),
        max_position_embeddings=4096,
    )
    experts = MoEConfig(
        num_moe_experts=256,
        moe_router_topk=8,
        moe_ffn_hidden_size=2048,
        moe_layer_freq=(0,) * 3 + (1,) * 58,
        moe_shared_expert_intermediate_size=2048,
        moe_router_score_function="sigmoid",
        moe_router_topk_scaling_factor=2.5,
        moe_router_num_groups=8,
        moe_router_group_topk=4,
        moe_router_enable_expert_bias=True,
        moe_router_load_balancing_type="seq_aux_loss",
        moe_aux_loss_coeff=1e-4,
    )
    return _run("deepseek_v3", model, experts, seq_len=4096, batch=1024, lr=2.2e-4)


def nemotron_h_8b() -> RunConfig:
    """Nemotron-H 8B: Mamba-2 with four layers of attention, and squared ReLU."""
    model = hybrid_config(
        "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
        hidden_size=4096,
        num_attention_heads=32,
        num_query_groups=8,
        kv_channels=128,
        ffn_hidden_size=21_504,
        vocab_size=131_072,
        activation="squared_relu",
        position_embedding_type="none",
        mamba=MambaConfig(state_dim=128, head_dim=64, num_groups=8),
    )
    return _run("nemotron_h_8b", model, lr=3e-4)


PUBLISHED: Mapping[str, Callable[[], RunConfig]] = MappingProxyType(
    {
        make.__name__: make
        for make in (
            *(deepseek_v3, gpt_oss_20b, llama3_70b, llama3_8b, nemotron_h_8b),
            *(qwen3_0_6b, qwen3_1_7b, qwen3_4b, qwen3_8b, qwen3_14b, qwen3_32b, qwen3_30b_a3b),
        )
    }
)

LAYOUTS: Mapping[str, Mapping[int, tuple[str, ...]]] = MappingProxyType(
    {
        "llama3_8b": {
            1: _NORM_MLP,
            2: (*_FSDP, "plan.dp=2"),
            8: (*_FSDP, "plan.dp=8"),
            64: (*_FSDP, "plan.dp=64"),
        },
        "llama3_70b": {
            4: (*_HOSTED, *_NARROW_GRADS, *_FULL, "plan.tp=4"),
            8: (*_FSDP, *_FULL, *_NARROW, "plan.dp=8"),
            64: (*_SLICED, *_NORM, "plan.tp=2", "plan.pp=4", "plan.vpp=4", "plan.dp=8"),
        },
        "qwen3_0_6b": {1: (), 2: (*_FSDP, "plan.dp=2"), 8: (*_FSDP, "plan.dp=8"), 64: (*_FSDP, "plan.dp=64")},
        "qwen3_1_7b": {1: (), 2: (*_FSDP, "plan.dp=2"), 8: (*_FSDP, "plan.dp=8"), 64: (*_FSDP, "plan.dp=64")},
        "qwen3_4b": {1: (), 2: (*_FSDP, "plan.dp=2"), 8: (*_FSDP, "plan.dp=8"), 64: (*_FSDP, "plan.dp=64")},
        "qwen3_8b": {1: _FULL, 2: (*_FSDP, "plan.dp=2"), 8: (*_FSDP, "plan.dp=8"), 64: (*_FSDP, "plan.dp=64")},
        "qwen3_14b": {
            1: (*_HOSTED, *_FULL),
            2: (*_FSDP, *_FULL, "plan.dp=2"),
            8: (*_FSDP, "plan.dp=8"),
            64: (*_FSDP, "plan.dp=64"),
        },
        "qwen3_32b": {
            1: (*_HOSTED, *_NARROW_GRADS, *_FULL),
            2: (*_HOSTED, *_NORM_MLP, "plan.tp=2"),
            8: (*_FSDP, *_NORM_MLP, "plan.dp=8"),
            64: (*_FSDP, "plan.dp=64"),
        },
        "qwen3_30b_a3b": {
            1: (*_HOSTED, *_NARROW_GRADS, *_FULL),
            2: (*_HOSTED, *_NARROW_GRADS, *_NORM_MLP, "plan.pp=2"),
            8: (*_SLICED, "plan.tp=2", "plan.pp=2", "plan.ep=2", "plan.dp=2"),
            64: (*_SLICED, "plan.ep=8", "plan.pp=2", "plan.dp=32"),
        },
        "gpt_oss_20b": {
            1: (*_HOSTED, *_FULL),
            2: (*_HOSTED, *_NORM_MLP, "plan.pp=2"),
            8: (*_FSDP, "plan.pp=4", "plan.vpp=2", "plan.dp=2"),
            64: (*_SLICED, "plan.ep=8", "plan.dp=64"),
        },
        "deepseek_v3": {
            32: (*_HOSTED, *_NARROW_GRADS, *_NORM, "plan.tp=4", "plan.pp=8", "plan.ep=4"),
            64: (*_HOSTED, *_SLICED, *_FULL, "plan.tp=2", "plan.pp=16", "plan.ep=4", "plan.dp=2"),
            256: (*_SLICED, *_FULL, "plan.tp=2", "plan.pp=4", "plan.ep=64", "plan.dp=32"),
        },
        "nemotron_h_8b": {1: _FULL, 2: (*_FSDP, "plan.dp=2"), 8: (*_FSDP, "plan.dp=8"), 64: (*_FSDP, "plan.dp=64")},
    }
)
"""Recipe -> number of GPUs -> the fields of a layout that fits GPUs of 141 GiB by the planner's estimate, with a margin of 6 %."""

Job = Literal["sft", "lora", "rl"]
"""What a published model is tuned by: all weights on conversations, adapters on conversations, all weights by rewards."""


def _replicas(sync: tuple[str, ...], one: tuple[str, ...] = (), *more: str) -> dict[int, tuple[str, ...]]:
    """One GPU, and 2, 8 and 64 that each have a share of the batch."""
    batch = "train.global_batch_size=64"
    return {1: (*more, *one), **{gpus: (*sync, *more, f"plan.dp={gpus}", *[batch] * (gpus == 64)) for gpus in (2, 8, 64)}}


def _rewarded(*one: str) -> dict[int, tuple[str, ...]]:
    """One GPU, and 2, 8 and 64 of which each trains a share and draws answers to its own problems."""
    wide = ("rl.num_groups=64", "train.global_batch_size=512")
    return {1: one, **{gpus: (*_FSDP, f"plan.dp={gpus}", *(wide if gpus == 64 else ())) for gpus in (2, 8, 64)}}


_STREAM = ("rl.memory.stream_optimizer=true",)
_STREAMED = (*_FULL, *_STREAM)

TUNING: Mapping[Job, Mapping[str, Mapping[int, tuple[str, ...]]]] = MappingProxyType(
    {
        "sft": {
            "llama3_8b": _replicas(_FSDP, _FULL),
            "llama3_70b": {
                4: (*_HOSTED, *_NARROW_GRADS, *_NORM_MLP, "plan.tp=4"),
                8: (*_FSDP, *_FULL, *_NARROW, "plan.dp=8"),
                64: (*_FSDP, "plan.dp=64", "train.global_batch_size=64"),
            },
            "qwen3_0_6b": _replicas(_FSDP),
            "qwen3_1_7b": _replicas(_FSDP),
            "qwen3_4b": _replicas(_FSDP),
            "qwen3_8b": _replicas(_FSDP, _FULL),
            "qwen3_14b": {**_replicas(_FSDP, (*_HOSTED, *_FULL)), 2: (*_FSDP, *_FULL, "plan.dp=2")},
            "qwen3_32b": {
                **_replicas(_FSDP, (*_HOSTED, *_NARROW_GRADS, *_FULL)),
                2: (*_HOSTED, *_NORM_MLP, "plan.tp=2"),
            },
            "qwen3_30b_a3b": {
                1: (*_HOSTED, *_NARROW_GRADS, *_FULL),
                2: (*_HOSTED, *_NARROW_GRADS, *_NORM, "plan.tp=2", "plan.ep=2"),
                8: (*_FSDP, "plan.ep=8", "plan.dp=8"),
                64: (*_FSDP, "plan.ep=8", "plan.dp=64", "train.global_batch_size=64"),
            },
            "gpt_oss_20b": {
                1: (*_HOSTED, *_FULL),
                2: (*_HOSTED, *_NORM, "plan.tp=2", "plan.ep=2"),
                8: (*_FSDP, "plan.ep=8", "plan.dp=8"),
                64: (*_FSDP, "plan.ep=8", "plan.dp=64", "train.global_batch_size=64"),
            },
            "deepseek_v3": {
                32: (
                    *(*_HOSTED, *_NARROW_SLICED, *_NORM, "train.global_batch_size=32"),
                    *("plan.tp=4", "plan.pp=4", "plan.ep=8", "plan.dp=2"),
                ),
                64: (*_HOSTED, *_SLICED, *_FULL, "train.global_batch_size=64", "plan.tp=4", "plan.pp=8", "plan.ep=8", "plan.dp=2"),
            },
            "nemotron_h_8b": _replicas(_FSDP, _FULL),
        },
        # Replicas of frozen weights have nothing to exchange but adapters.
        "lora": {
            "llama3_8b": _replicas(()),
            "llama3_70b": {
                2: (*_FSDP, *_FULL, "plan.dp=2"),
                8: (*_FSDP, "plan.dp=8"),
                64: (*_FSDP, "plan.dp=64", "train.global_batch_size=64"),
            },
            "qwen3_0_6b": _replicas(()),
            "qwen3_1_7b": _replicas(()),
            "qwen3_4b": _replicas(()),
            "qwen3_8b": _replicas(()),
            "qwen3_14b": _replicas(()),
            "qwen3_32b": _replicas(()),
            "qwen3_30b_a3b": _replicas((), (), *_EXPERT_ADAPTERS),
            "gpt_oss_20b": _replicas((), (), *_EXPERT_ADAPTERS),
            "deepseek_v3": {
                16: (
                    *(*_LATENT_ADAPTERS, "lora.base_dtype=fp8_weight_only", "train.global_batch_size=16"),
                    *("plan.tp=4", "plan.pp=2", "plan.ep=8", "plan.dp=2"),
                ),
                64: (*_LATENT_ADAPTERS, "train.global_batch_size=64", "plan.tp=4", "plan.pp=16", "plan.ep=4"),
            },
            "nemotron_h_8b": _replicas(()),
        },
        # Every rank has an engine with whole weights, where rl.engine_tp does not divide it.
        "rl": {
            "llama3_8b": _rewarded(*_STREAMED),
            "llama3_70b": {
                4: (*_STREAM, *_NARROW_GRADS, *_NORM_MLP, "plan.tp=4", "rl.engine_tp=4"),
                8: (*_STREAM, *_NORM, "plan.tp=8", "rl.engine_tp=8"),
                64: (*_rewarded()[64], "rl.engine_tp=8"),
            },
            "qwen3_0_6b": _rewarded(),
            "qwen3_1_7b": _rewarded(),
            "qwen3_4b": _rewarded(),
            "qwen3_8b": _rewarded(*_STREAMED),
            "qwen3_14b": {**_rewarded(*_STREAMED), 2: (*_STREAM, *_NORM, "plan.pp=2")},
            "qwen3_32b": {
                2: (*_STREAM, *_NARROW_GRADS, *_NORM, "plan.tp=2"),
                8: (*_FSDP, *_FULL, *_NARROW, "plan.dp=8"),
                64: _rewarded()[64],
            },
            "qwen3_30b_a3b": {
                2: (*_STREAM, *_NARROW_GRADS, *_NORM, "plan.pp=2"),
                8: (*_FSDP, *_FULL, "plan.ep=8", "plan.dp=8"),
                64: (*_FSDP, "plan.ep=8", "plan.dp=64", "rl.num_groups=64", "train.global_batch_size=512"),
            },
            "gpt_oss_20b": {
                1: (*_STREAM, *_NARROW_GRADS, *_NORM_MLP),
                2: (*_STREAM, *_NORM, "plan.pp=2"),
                8: (*_FSDP, "plan.ep=8", "plan.dp=8"),
                64: (*_FSDP, "plan.ep=8", "plan.dp=64", "rl.num_groups=64", "train.global_batch_size=512"),
            },
            "nemotron_h_8b": _rewarded(*_STREAMED),
        },
    }
)
"""Job -> model -> number of GPUs -> the fields of a layout that fits, as in LAYOUTS: rows of 4,096 tokens, with rl of 1,024."""
