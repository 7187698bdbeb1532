# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The recipes there are."""

import difflib
from collections.abc import Callable, Mapping
from types import MappingProxyType

from mcore_moe import MoEConfig
from mcore_parallel.data import MaskedTokensConfig
from mcore_parallel.models import TransformerConfig
from mcore_parallel.optim import OptimizerConfig
from tools.recipes._config import RunConfig, TrainConfig
from tools.recipes._override import RecipeError


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


RECIPES: Mapping[str, Callable[[], RunConfig]] = MappingProxyType({"bert_tiny": bert_tiny, "gpt_tiny": gpt_tiny, "moe_tiny": moe_tiny})


def recipe(name: str) -> RunConfig:
    """The configuration of a named run.

    Raises:
        RecipeError: no such recipe; names the nearest and all there are.
    """
    if name not in RECIPES:
        near = difflib.get_close_matches(name, RECIPES, 1)
        raise RecipeError(f"no recipe {name!r}; " + (f"did you mean {near[0]!r}? " if near else "") + f"there are: {', '.join(RECIPES)}")
    return RECIPES[name]()
