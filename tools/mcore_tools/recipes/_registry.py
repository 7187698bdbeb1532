# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The recipes there are."""

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from types import MappingProxyType

from mcore_moe import MoEConfig
from mcore_parallel.data import MaskedTokensConfig, SpanCorruptionConfig
from mcore_parallel.models import TransformerConfig, hybrid_config
from mcore_parallel.nn import MambaConfig
from mcore_parallel.optim import OptimizerConfig
from mcore_rl import GenericGenerationArgs
from mcore_rl.envs import ArithmeticConfig, CountdownConfig
from mcore_tools.recipes._config import RunConfig
from mcore_tools.recipes._data import DataConfig
from mcore_tools.recipes._fit import Kind, layouts_of, missing_layout
from mcore_tools.recipes._override import RecipeError, override
from mcore_tools.recipes._published import LAYOUTS, PUBLISHED, Job
from mcore_tools.recipes._rl import RLConfig
from mcore_tools.recipes._train import TrainConfig


def moe_tiny() -> RunConfig:
    """A mixture of experts that learns Python source on two CPU cores within minutes."""
    return RunConfig(
        model=TransformerConfig(
            num_layers=4,
            hidden_size=128,
            num_attention_heads=4,
            num_query_groups=2,
            ffn_hidden_size=256,
            vocab_size=2048,
            norm_epsilon=1e-5,
        ),
        moe=MoEConfig(num_moe_experts=4, moe_router_topk=2, moe_aux_loss_coeff=0.01),
        train=TrainConfig(steps=200, seq_len=128, micro_batch_size=8, global_batch_size=16, warmup_steps=20, eval_interval=50),
        optimizer=OptimizerConfig(lr=3e-3, min_lr=3e-4, weight_decay=0.1, clip_grad=1.0),
        output="runs/moe_tiny",
    )


def qwen3_moe_tiny() -> RunConfig:
    """Qwen3's mixture, as small as moe_tiny: normed queries and keys, fine-grained experts, losses for balance and for the logits' size."""
    tiny = moe_tiny()
    mixture = MoEConfig(
        num_moe_experts=16,
        moe_router_topk=4,
        moe_ffn_hidden_size=64,
        moe_router_load_balancing_type=("global_aux_loss", "aux_loss"),
        moe_aux_loss_coeff=(0.01, 0.001),
        moe_z_loss_coeff=1e-3,
    )
    model = dataclasses.replace(tiny.model, qk_layernorm=True, norm_epsilon=1e-6)
    return dataclasses.replace(tiny, model=model, moe=mixture, output="runs/qwen3_moe_tiny")


def gpt_tiny() -> RunConfig:
    """The dense sibling of moe_tiny."""
    return RunConfig(
        model=TransformerConfig(
            num_layers=4, hidden_size=128, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=384, vocab_size=2048
        ),
        train=TrainConfig(steps=200, seq_len=128, micro_batch_size=8, global_batch_size=16, warmup_steps=20, eval_interval=50),
        optimizer=OptimizerConfig(lr=3e-3, min_lr=3e-4, weight_decay=0.1, clip_grad=1.0),
        output="runs/gpt_tiny",
    )


def countdown_tiny() -> RunConfig:
    """A dense model that imitates a few well-formed answers of Countdown, right or wrong, and learns from rewards which are right; two CPU
    cores, minutes."""
    countdown = CountdownConfig.small(max_number=5, operators="+-*")
    return RunConfig(
        model=TransformerConfig(
            num_layers=2,
            hidden_size=64,
            num_attention_heads=4,
            num_query_groups=2,
            ffn_hidden_size=192,
            vocab_size=320,
            init_method_std=0.1,
        ),
        rl=RLConfig(
            environment="countdown",
            countdown=countdown,
            imitation_steps=18,
            imitation_lr=2e-3,
            kl_beta=0.03,
            num_epochs=2,
            num_groups=16,
            group_size=8,
            generation_args=GenericGenerationArgs(temperature=1.0, max_tokens=8),
            cache_gb=0.05,
        ),
        train=TrainConfig(
            steps=200,
            seq_len=24,
            micro_batch_size=64,
            global_batch_size=64,
            warmup_steps=0,
            lr_schedule="constant",
            eval_interval=20,
            checkpoint_interval=20,
        ),
        optimizer=OptimizerConfig(lr=1e-3, min_lr=5e-5, weight_decay=0.0, clip_grad=1.0, adam_beta2=0.95),
        output="runs/countdown_tiny",
    )


def arithmetic_tiny() -> RunConfig:
    """A dense model that imitates answers to sums, few of which are worked out, and learns from rewards to work them out; two CPU cores,
    minutes."""
    return RunConfig(
        model=TransformerConfig(
            num_layers=2,
            hidden_size=64,
            num_attention_heads=4,
            num_query_groups=2,
            ffn_hidden_size=192,
            vocab_size=264,
            init_method_std=0.1,
        ),
        rl=RLConfig(
            environment="arithmetic",
            arithmetic=ArithmeticConfig(num_numbers=(3, 3), operators="+-", worked=0.4, slips=0.5, held_out=0.2),
            imitation_steps=700,
            imitation_lr=3e-3,
            imitation_lr_schedule="cosine",
            num_groups=32,
            group_size=8,
            generation_args=GenericGenerationArgs(temperature=1.0, max_tokens=12),
            eval_samples=4,
            eval_on_start=True,
            cache_gb=0.05,
        ),
        data=DataConfig(tokenizer="byte"),
        train=TrainConfig(
            steps=40,
            seq_len=20,
            micro_batch_size=128,
            global_batch_size=128,
            warmup_steps=0,
            lr_schedule="constant",
            eval_interval=20,
            eval_batches=8,
        ),
        optimizer=OptimizerConfig(lr=2e-4, min_lr=2e-5, weight_decay=0.0, clip_grad=1.0, adam_beta2=0.95),
        output="runs/arithmetic_tiny",
    )


def arithmetic_100m() -> RunConfig:
    """104 million parameters that learn sums of three to five numbers up to 99 as arithmetic_tiny does; minutes on one GPU."""
    tiny = arithmetic_tiny()
    assert tiny.rl is not None
    sums = ArithmeticConfig(
        num_numbers=(3, 5), max_number=99, operators="+-*", max_value=999, worked=0.2, slips=0.25, held_out=0.1, format_reward=0.0
    )
    rl = dataclasses.replace(
        tiny.rl,
        arithmetic=sums,
        imitation_steps=2200,
        imitation_lr=6e-4,
        num_groups=128,
        generation_args=GenericGenerationArgs(temperature=1.0, max_tokens=40),
        cache_gb=2.0,
        max_requests=512,
    )
    return RunConfig(
        model=TransformerConfig(
            num_layers=12, hidden_size=768, num_attention_heads=12, num_query_groups=4, ffn_hidden_size=3072, vocab_size=264
        ),
        rl=rl,
        data=tiny.data,
        train=TrainConfig(
            steps=100,
            seq_len=56,
            micro_batch_size=512,
            global_batch_size=512,
            warmup_steps=5,
            lr_schedule="constant",
            eval_interval=10,
            dtype="bfloat16",
        ),
        optimizer=OptimizerConfig(lr=2e-5, min_lr=2e-6, weight_decay=0.0, clip_grad=1.0, adam_beta2=0.95),
        output="runs/arithmetic_100m",
    )


def _gpt(name: str, num_layers: int, hidden_size: int, num_heads: int, ffn_hidden_size: int, lr: float) -> RunConfig:
    """A dense model of the Llama family in bfloat16 on sequences of 2048 tokens, half a million tokens a step."""
    model = TransformerConfig(
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_attention_heads=num_heads,
        num_query_groups=num_heads // 4,
        ffn_hidden_size=ffn_hidden_size,
        vocab_size=32768,
    )
    train = TrainConfig(
        steps=20_000,
        seq_len=2048,
        micro_batch_size=4,
        global_batch_size=256,
        warmup_steps=500,
        eval_interval=500,
        checkpoint_interval=1000,
        dtype="bfloat16",
    )
    return RunConfig(
        model=model,
        train=train,
        optimizer=OptimizerConfig(lr=lr, min_lr=lr / 10, weight_decay=0.1, clip_grad=1.0, adam_beta2=0.95, use_distributed_optimizer=True),
        output=f"runs/{name}",
    )


def gpt_100m() -> RunConfig:
    """125 million parameters; one GPU."""
    return _gpt("gpt_100m", 12, 768, 12, 2048, 6e-4)


def gpt_1b() -> RunConfig:
    """1.1 billion parameters; one GPU or more (plan.dp)."""
    return _gpt("gpt_1b", 22, 2048, 32, 5632, 3e-4)


def gpt_7b() -> RunConfig:
    """7.2 billion parameters; eight GPUs (plan.tp, plan.pp, plan.dp)."""
    return _gpt("gpt_7b", 32, 4096, 32, 14336, 3e-4)


def hybrid_tiny() -> RunConfig:
    """State spaces with an attention layer among them, as small as gpt_tiny."""
    tiny = gpt_tiny()
    model = hybrid_config(
        "M-M*-M-",
        hidden_size=128,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=384,
        vocab_size=2048,
        mamba=MambaConfig(state_dim=16, head_dim=32, num_groups=2, chunk_size=32),
    )
    return dataclasses.replace(tiny, model=model, output="runs/hybrid_tiny")


def bert_tiny() -> RunConfig:
    """A BERT that learns hidden tokens; its tokenizer has at most 2048 of them, the one behind these is the mask."""
    return RunConfig(
        model=TransformerConfig(
            num_layers=4,
            hidden_size=128,
            num_attention_heads=4,
            ffn_hidden_size=512,
            vocab_size=2112,
            normalization="LayerNorm",
            norm_epsilon=1e-12,
            post_norm=True,
            add_bias_linear=True,
            add_qkv_bias=True,
            activation="gelu",
            position_embedding_type="learned_absolute",
            max_position_embeddings=128,
            share_embeddings_and_output_weights=True,
        ),
        masked=MaskedTokensConfig(mask_token=2048),
        train=TrainConfig(steps=200, seq_len=128, micro_batch_size=8, global_batch_size=16, warmup_steps=20, eval_interval=50),
        optimizer=OptimizerConfig(lr=1e-3, min_lr=1e-4, weight_decay=0.01, clip_grad=1.0),
        output="runs/bert_tiny",
    )


def t5_tiny() -> RunConfig:
    """A T5 that learns to write out spans of its text; 32 sentinels and two ends lie behind its 2048 tokens."""
    return RunConfig(
        model=TransformerConfig(
            num_layers=2,
            hidden_size=128,
            num_attention_heads=4,
            ffn_hidden_size=384,
            vocab_size=2112,
            share_embeddings_and_output_weights=True,
        ),
        spans=SpanCorruptionConfig(sentinels=tuple(range(2048, 2080)), bos_token=2080, eos_token=2081, decoder_length=48),
        train=TrainConfig(steps=200, seq_len=128, micro_batch_size=8, global_batch_size=16, warmup_steps=20, eval_interval=50),
        optimizer=OptimizerConfig(lr=3e-3, min_lr=3e-4, weight_decay=0.1, clip_grad=1.0),
        output="runs/t5_tiny",
    )


RECIPES: Mapping[str, Callable[[], RunConfig]] = MappingProxyType(
    {
        make.__name__: make
        for make in (
            arithmetic_100m,
            arithmetic_tiny,
            bert_tiny,
            countdown_tiny,
            gpt_100m,
            gpt_1b,
            gpt_7b,
            gpt_tiny,
            hybrid_tiny,
            moe_tiny,
            qwen3_moe_tiny,
            t5_tiny,
        )
    }
    | dict(PUBLISHED)
)


def recipe(name: str) -> RunConfig:
    """The configuration of a named run; ``llama3_8b@8`` has the layout for eight GPUs.

    Raises:
        RecipeError: no such recipe, or no layout for so many GPUs; names the nearest and all there are.
    """
    name, at, gpus = name.partition("@")
    if name not in RECIPES:
        near = difflib.get_close_matches(name, RECIPES, 1)
        raise RecipeError(f"no recipe {name!r}; " + (f"did you mean {near[0]!r}? " if near else "") + f"there are: {', '.join(RECIPES)}")
    if at and name not in LAYOUTS:
        raise RecipeError(f"recipe {name!r} has no layouts, found @{gpus}; leave it out and set the fields of plan, as mcore plan advises")
    return override(RECIPES[name](), _fields("pretrain", name, gpus)) if at else RECIPES[name]()


def layout(name: str, job: Job) -> tuple[str, ...]:
    """Fields of a run that tunes a published model, by the recipe of that model and a number of GPUs: ``llama3_8b@8``.

    Args:
        name: recipe and GPUs.
        job: what the model is tuned by.

    Raises:
        RecipeError: no layout of that name; one that cannot fit is said with its memory, and what does fit.
    """
    name, _, gpus = name.partition("@")
    if name not in PUBLISHED:
        near = difflib.get_close_matches(name, PUBLISHED, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise RecipeError(f"no layout of {job} for {name!r}; {hint}there are: {', '.join(PUBLISHED)}, each with @GPUS")
    return _fields(job, name, gpus)


def _fields(kind: Kind, name: str, gpus: str) -> tuple[str, ...]:
    layouts = layouts_of(kind, name)
    if not gpus.isdecimal():
        raise RecipeError(f"{kind} {name!r} wants a number of GPUs, found @{gpus}; there are: {', '.join(f'{name}@{n}' for n in layouts)}")
    if int(gpus) not in layouts:
        raise RecipeError(missing_layout(name, kind, int(gpus)))
    return layouts[int(gpus)]
