# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Adapters of a Llama by PEFT and transformers, as a training step."""

import contextlib
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from mcore_parallel.models import TransformerConfig
from mcore_parallel.tensor_parallel import LoraConfig

# cuDNN's kernel is the fastest for training on Hopper; transformers by itself takes torch's choice.
_KERNELS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_NAMES = {"qkv": ("q_proj", "k_proj", "v_proj"), "out": ("o_proj",), "up": ("gate_proj", "up_proj"), "down": ("down_proj",)}


def peft_step(
    config: TransformerConfig,
    lora: LoraConfig,
    batches: list[Tensor],
    device: torch.device,
    *,
    lr: float,
    checkpoint: bool,
    compile_layers: bool,
) -> tuple[Callable[[], float], int]:
    """A training step with bf16 weights and adapters, fused AdamW and scaled-dot-product attention.

    Args:
        config: a dense Llama with rotary embedding.
        lora: rank, alpha and targets.
        batches: token ids [B, S] of each micro-batch of a step.
        device: of all.
        lr: of AdamW.
        checkpoint: recompute each layer in its backward.
        compile_layers: compile each decoder layer.

    Returns:
        The step, which returns its loss, and the number of trained parameters.
    """
    peft, transformers = importlib.import_module("peft"), importlib.import_module("transformers")
    sizes: dict[str, Any] = {
        "vocab_size": config.vocab_size, "hidden_size": config.hidden_size, "intermediate_size": config.ffn_hidden_size,
        "num_hidden_layers": config.num_layers, "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_query_groups, "rms_norm_eps": config.norm_epsilon, "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rotary_base}, "use_cache": False,
    }  # fmt: skip
    torch.manual_seed(0)
    with device:
        base = transformers.AutoModelForCausalLM.from_config(
            transformers.LlamaConfig(**sizes), dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    if checkpoint:
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        base.enable_input_require_grads()
    targets = [name for target in lora.targets for name in _NAMES[target]]
    chosen = peft.LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=targets, lora_dropout=lora.dropout, task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, chosen, autocast_adapter_dtype=False)
    model.train()
    if compile_layers:
        for layer in base.model.layers:
            layer.compile()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr, weight_decay=0.0, fused=device.type == "cuda")

    def step() -> float:
        total = torch.zeros((), device=device)
        with sdpa_kernel(_KERNELS, set_priority=True) if device.type == "cuda" else contextlib.nullcontext():
            for tokens in batches:
                loss = model(input_ids=tokens, labels=tokens).loss / len(batches)
                loss.backward()
                total += loss.detach()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total.item()

    return step, sum(parameter.numel() for parameter in trained)
