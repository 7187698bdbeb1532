# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A small random model of transformers for every family, with what it computes."""

import copy
import inspect
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

BATCH, LENGTH, VOCABULARY = 2, 16, 48

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
_NO_GROUPS = {name: value for name, value in _SIZES.items() if name != "num_key_value_heads"}
_NO_LAYERS = {name: value for name, value in _SIZES.items() if name != "num_hidden_layers"}
_NEMOTRON = {
    "head_dim": 8, "ssm_state_size": 6, "mamba_num_heads": 8, "mamba_head_dim": 4, "n_groups": 4, "chunk_size": 8,
    "use_mamba_kernels": False,
}  # fmt: skip
_THETA = {"rope_theta": 500.0}
_LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 8.0, "beta_slow": 1.0}
_LATENT = {"kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5, "first_k_dense_replace": 2}
_ENCODER = {**_NO_GROUPS, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_DROPOUT = ("hidden_dropout_prob", "attention_probs_dropout_prob")
_NO_CONTEXT = "heads that read the first token of each sequence, so context parallelism is refused"
ALL_LAYOUTS = ("tp1", "tp2", "pp2", "tp2 x cp2")
NO_CONTEXT = ALL_LAYOUTS[:3]


@dataclass(frozen=True, kw_only=True)
class Reference:
    """One architecture as transformers builds it."""

    title: str
    family: str
    """Our name of the family."""
    kind: str
    """What precedes "Config" and "ForCausalLM" in transformers' class names."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """What its config says, beside the sizes that all share."""
    sizes: Mapping[str, Any] = field(default_factory=lambda: _SIZES)
    config_class: str = ""
    model_class: str = ""
    layouts: tuple[str, ...] = ALL_LAYOUTS
    """Those in which the model is defined."""
    note: str = ""
    """Why a layout is missing, to stand below the table."""
    published: str = ""
    """Folder of a model of the kind, for the command in its row; a variant has no row."""

    ignored: tuple[str, ...] = ()
    """Entries of the published config.json that the command passes over."""

    @property
    def shown(self) -> bool:
        """Whether it is a row of the table."""
        return bool(self.published)


REFERENCES: Mapping[str, Reference] = {
    "llama3": Reference(
        title="Llama 3, 3.1, 3.2", published="Llama-3.1-8B", family="llama", kind="Llama", config={"rope_parameters": _THETA | _LLAMA3},
    ),
    "llama_tied": Reference(title="Llama, tied", family="llama", kind="Llama", config={"tie_word_embeddings": True}),
    "llama_linear": Reference(
        title="Llama, linear scaling, biases", family="llama", kind="Llama",
        config={"rope_parameters": _THETA | {"rope_type": "linear", "factor": 2.0}, "attention_bias": True, "mlp_bias": True},
    ),
    "mistral": Reference(
        title="Mistral", published="Mistral-7B-v0.3", family="mistral", kind="Mistral", config={"sliding_window": 5, "head_dim": 6},
    ),
    "qwen2": Reference(
        title="Qwen2, Qwen2.5", published="Qwen2.5-7B", family="qwen2", kind="Qwen2",
        config={"rope_parameters": {"rope_type": "default", **_THETA}},
    ),
    "qwen2_window": Reference(
        title="Qwen2 with windows and YaRN", family="qwen2", kind="Qwen2",
        config={"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "rope_parameters": _THETA | _YARN},
    ),
    "qwen3": Reference(
        title="Qwen3", published="Qwen3-8B", family="qwen3", kind="Qwen3", config={"head_dim": 6, "tie_word_embeddings": True},
    ),
    "gemma": Reference(
        title="Gemma", published="gemma-2b", family="gemma", kind="Gemma", config={"head_dim": 8, "num_key_value_heads": 1},
    ),
    "gemma2": Reference(
        title="Gemma 2", published="gemma-2-2b", family="gemma2", kind="Gemma2",
        config={
            "head_dim": 8, "num_hidden_layers": 3, "sliding_window": 5, "query_pre_attn_scalar": 12, "attn_logit_softcapping": 0.5,
            "final_logit_softcapping": 0.7,
        },
        layouts=NO_CONTEXT, note="no attention core over several context-parallel ranks caps scores",
    ),
    "gemma3": Reference(
        title="Gemma 3 (text)", published="gemma-3-1b-pt", family="gemma3", kind="Gemma3", config_class="Gemma3TextConfig",
        config={
            "head_dim": 8, "num_hidden_layers": 3, "sliding_window": 5, "query_pre_attn_scalar": 12,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
    ),
    "deepseek2": Reference(
        title="DeepSeek-V2 (dense layers)", published="deepseek-v2-dense", family="deepseek2", kind="DeepseekV2", sizes=_NO_GROUPS,
        config={
            **_LATENT, "q_lora_rank": 8, "num_key_value_heads": 4,
            "rope_parameters": _THETA | _YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "deepseek2_lite": Reference(
        title="DeepSeek-V2 Lite (dense layers)", family="deepseek2", kind="DeepseekV2", sizes=_NO_GROUPS,
        config={**_LATENT, "q_lora_rank": None, "num_key_value_heads": 4},
    ),
    "deepseek3": Reference(
        title="DeepSeek-V3 with dense layers only", family="deepseek3", kind="DeepseekV3", sizes=_NO_GROUPS,
        config={
            **_LATENT, "q_lora_rank": 8, "num_key_value_heads": 4,
            "rope_parameters": _THETA | _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "mamba2": Reference(
        title="Mamba-2", published="Mamba-Codestral-7B-v0.1", family="mamba2", kind="Mamba2",
        sizes={"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "initializer_range": 0.3},
        config={"num_heads": 8, "head_dim": 4, "state_size": 6, "n_groups": 4, "expand": 2, "chunk_size": 8},
    ),
    "nemotron_h": Reference(
        title="Nemotron-H", published="Nemotron-H-8B-Base-8K", family="nemotron_h", kind="NemotronH",
        sizes=_NO_LAYERS, config={**_NEMOTRON, "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"]},
    ),
    "nemotron_h_moe": Reference(
        title="Nemotron 3 Nano (Nemotron-H with experts)", published="NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", family="nemotron_h",
        kind="NemotronH", sizes=_NO_LAYERS,
        config={
            **_NEMOTRON, "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "moe"], "n_routed_experts": 4,
            "num_experts_per_tok": 2, "moe_intermediate_size": 12, "moe_shared_expert_intermediate_size": 14, "routed_scaling_factor": 2.5,
        },
    ),
    "nemotron_h_latent": Reference(
        title="Nemotron-H with narrower experts in groups", family="nemotron_h", kind="NemotronH", sizes=_NO_LAYERS,
        config={
            **_NEMOTRON, "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"], "n_routed_experts": 8,
            "num_experts_per_tok": 4, "moe_intermediate_size": 12, "moe_shared_expert_intermediate_size": 14, "moe_latent_size": 8,
            "n_group": 4, "topk_group": 2,
        },
    ),
    "bamba": Reference(
        title="Bamba", published="Bamba-9B-v2", family="bamba", kind="Bamba",
        config={
            "attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 4, "mamba_n_groups": 4, "mamba_d_state": 6,
            "mamba_chunk_size": 8, "num_key_value_heads": 4,
        },
        note="tp must divide the groups of states, of which published models have one",
    ),
    "bamba_one": Reference(
        title="Bamba with one group of states, as published", family="bamba", kind="Bamba",
        config={
            "attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 4, "mamba_n_groups": 1, "mamba_d_state": 6,
            "mamba_chunk_size": 8,
        },
        layouts=("tp1", "pp2"),
    ),
    "bert": Reference(
        title="BERT", published="bert-base-uncased", family="bert", kind="Bert", model_class="BertForPreTraining",
        sizes=_ENCODER, layouts=NO_CONTEXT, note=_NO_CONTEXT, ignored=_DROPOUT,
    ),
    "bert_masked": Reference(
        title="BERT without the sentence-pair head", family="bert", kind="Bert", model_class="BertForMaskedLM", sizes=_ENCODER,
        config={"hidden_act": "gelu_pytorch_tanh"}, layouts=NO_CONTEXT,
    ),
    "megatron_bert": Reference(
        title="Megatron-BERT", published="megatron-bert-uncased-345m", family="megatron_bert", kind="MegatronBert",
        model_class="MegatronBertForPreTraining", sizes=_ENCODER, layouts=NO_CONTEXT, note=_NO_CONTEXT, ignored=_DROPOUT,
    ),
    "mixtral": Reference(
        title="Mixtral", published="Mixtral-8x7B-v0.1", family="mixtral", kind="Mixtral",
        config={"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "qwen2_moe": Reference(
        title="Qwen1.5 MoE, Qwen2 MoE", published="Qwen1.5-MoE-A2.7B", family="qwen2_moe", kind="Qwen2Moe",
        config={
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 14,
            "num_hidden_layers": 4, "mlp_only_layers": [0],
        },
    ),
    "qwen3_moe_mixed": Reference(
        title="Qwen3 MoE with dense layers, weights not renormalised", family="qwen3_moe", kind="Qwen3Moe",
        config={
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "norm_topk_prob": False, "decoder_sparse_step": 2,
            "num_hidden_layers": 4,
        },
    ),
    "deepseek3_moe": Reference(
        title="DeepSeek-V3", published="DeepSeek-V3", family="deepseek3", kind="DeepseekV3", sizes=_NO_GROUPS,
        config={
            **_LATENT, "q_lora_rank": 8, "num_key_value_heads": 4, "first_k_dense_replace": 1, "num_hidden_layers": 2,
            "n_routed_experts": 8, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "n_shared_experts": 2,
            "moe_intermediate_size": 8, "routed_scaling_factor": 2.5,
            "rope_parameters": _THETA | _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "gpt_oss": Reference(
        title="gpt-oss", published="gpt-oss-20b", family="gpt_oss", kind="GptOss",
        config={
            "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 6, "sliding_window": 5, "swiglu_limit": 0.7,
            "rope_parameters": _THETA | _YARN | {"truncate": False},
        },
    ),
    "olmoe": Reference(
        title="OLMoE", published="OLMoE-1B-7B-0924", family="olmoe", kind="Olmoe",
        config={"num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4},
    ),
    "olmoe_grouped": Reference(
        title="OLMoE with grouped queries, weights renormalised, tied", family="olmoe", kind="Olmoe",
        config={"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True, "tie_word_embeddings": True},
    ),
    "qwen3_moe": Reference(
        title="Qwen3 MoE", published="Qwen3-30B-A3B", family="qwen3_moe", kind="Qwen3Moe",
        config={"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "norm_topk_prob": True, "head_dim": 6},
    ),
}  # fmt: skip


def build(name: str, **changes: Any) -> Any:
    """The random model, of its config with some changes: weights of a size that matters everywhere, biases and norms too."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    reference = REFERENCES[name]
    config = getattr(transformers, reference.config_class or f"{reference.kind}Config")(
        **{**reference.sizes, **reference.config, **changes}
    )
    config._attn_implementation = "eager"
    torch.manual_seed(sum(map(ord, name)))
    model = getattr(transformers, reference.model_class or f"{reference.kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(torch.randn_like(buffer) * 0.1)
    return model


def draw_batch(name: str) -> dict[str, Tensor]:
    """Tokens, labels and token types [B, S], which of two sentences follow one another [B].

    The first few token ids are left out: transformers gives padding no gradient.
    """
    generator = torch.Generator().manual_seed(len(name))
    tokens, labels = torch.randint(3, VOCABULARY, (2, BATCH, LENGTH), generator=generator)
    types = (torch.arange(LENGTH) >= LENGTH // 2).long().repeat(BATCH, 1)
    return {"tokens": tokens, "labels": labels, "token_types": types, "follows": torch.arange(BATCH) % 2}


def apply(model: Any, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The model's logits: of the tokens [B, S, V], and of the sentence pairs [B, 2] if it has them."""
    given = {"use_cache": False, "token_type_ids": batch["token_types"]}
    known = inspect.signature(model.forward).parameters
    output = model(input_ids=batch["tokens"], **{name: value for name, value in given.items() if name in known})
    if hasattr(output, "prediction_logits"):
        return {"logits": output.prediction_logits, "pair_logits": output.seq_relationship_logits}
    return {"logits": output.logits}


def write(name: str, folder: Path) -> None:
    """The model as ``folder/weights``, the gradients of its summed loss as ``folder/gradients`` in the same form, its logits."""
    from safetensors.torch import save_file

    model = build(name)
    batch = draw_batch(name)
    found = apply(model, batch)
    loss = torch.nn.functional.cross_entropy(found["logits"].flatten(0, 1), batch["labels"].flatten(), reduction="sum")
    if "pair_logits" in found:
        loss = loss + torch.nn.functional.cross_entropy(found["pair_logits"], batch["follows"], reduction="sum")
    loss.backward()
    model.save_pretrained(folder / "weights")
    gradients = copy.deepcopy(model)
    with torch.no_grad():
        for ours, parameter in zip(gradients.parameters(), model.parameters(), strict=True):
            assert parameter.grad is not None, "a parameter of the reference takes no part"
            ours.copy_(parameter.grad)
    gradients.save_pretrained(folder / "gradients")
    tensors = batch | {key: value.detach() for key, value in found.items()}
    save_file({key: value.contiguous() for key, value in tensors.items()}, folder / "expected.safetensors")
