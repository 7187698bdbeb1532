# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What the config.json of published models says, understood: as many parameters as they are known to have."""

import math

import pytest

from mcore_ckpt import CheckpointingException
from mcore_ckpt.hf._config import complete, from_hf_config, measure, to_hf_config
from mcore_ckpt.hf._rules import sites

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
QWEN_WINDOW = {"use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 28}
NEMOTRON = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"

FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"],
}
NANO = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"


def decoder(kind, layers, hidden, ffn, heads, groups, vocabulary, **more):
    sizes = {
        "model_type": kind, "num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": ffn, "num_attention_heads": heads,
        "num_key_value_heads": groups, "vocab_size": vocabulary, "hidden_act": "silu", "rms_norm_eps": 1e-5, "initializer_range": 0.02,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True, "bos_token_id": 1, "eos_token_id": 2,
        "attention_dropout": 0.0, "max_position_embeddings": 32768,
    }  # fmt: skip
    return sizes | more


PUBLISHED = {
    "Llama-3.1-8B": (
        decoder("llama", 32, 4096, 14336, 32, 8, 128256, rope_theta=5e5, rope_scaling=LLAMA3, attention_bias=False, mlp_bias=False),
        8_030_261_248,
    ),
    "Llama-3.2-1B": (
        decoder("llama", 16, 2048, 8192, 32, 8, 128256, rope_theta=5e5, rope_scaling=LLAMA3, head_dim=64, tie_word_embeddings=True),
        1_235_814_400,
    ),
    "Mistral-7B-v0.1": (decoder("mistral", 32, 4096, 14336, 32, 8, 32000, rope_theta=1e4, sliding_window=4096), 7_241_732_096),
    "Qwen2.5-7B": (decoder("qwen2", 28, 3584, 18944, 28, 4, 152064, rope_theta=1e6, **QWEN_WINDOW), 7_615_616_512),
    "Qwen3-8B": (
        decoder("qwen3", 36, 4096, 12288, 32, 8, 151936, head_dim=128, rope_theta=1e6, rope_scaling=None, attention_bias=False),
        8_190_735_360,
    ),
    "gemma-2b": (
        decoder(
            "gemma", 18, 2048, 16384, 8, 1, 256000, head_dim=256, hidden_act="gelu", hidden_activation=None,
            tie_word_embeddings=True,
        ),
        2_506_172_416,
    ),
    "gemma-2-2b": (
        decoder(
            "gemma2", 26, 2304, 9216, 8, 4, 256000, head_dim=256, hidden_act="gelu_pytorch_tanh", hidden_activation="gelu_pytorch_tanh",
            query_pre_attn_scalar=256, rope_theta=1e4, sliding_window=4096, attn_logit_softcapping=50.0, final_logit_softcapping=30.0,
            attention_bias=False, tie_word_embeddings=True, cache_implementation="hybrid",
        ),
        2_614_341_888,
    ),
    "gemma-3-1b-pt": (
        decoder(
            "gemma3_text", 26, 1152, 6912, 4, 1, 262144, head_dim=256, hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=256,
            rope_theta=1e6, rope_local_base_freq=1e4, rope_scaling=None, sliding_window=512, sliding_window_pattern=6,
            attn_logit_softcapping=None, final_logit_softcapping=None, attention_bias=False, tie_word_embeddings=True,
        ),
        999_885_952,
    ),
    "Mixtral-8x7B-v0.1": (
        decoder("mixtral", 32, 4096, 14336, 32, 8, 32000, num_local_experts=8, num_experts_per_tok=2, sliding_window=None, rope_theta=1e6),
        46_702_792_704,
    ),
    "Qwen3-30B-A3B": (
        decoder(
            "qwen3_moe", 48, 2048, 6144, 32, 4, 151936, head_dim=128, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8,
            norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[], rope_theta=1e6, use_sliding_window=False, sliding_window=None,
        ),
        30_532_122_624,
    ),
    "OLMoE-1B-7B-0924": (
        decoder(
            "olmoe", 16, 2048, 1024, 16, 16, 50304, num_experts=64, num_experts_per_tok=8, norm_topk_prob=False, clip_qkv=None,
            attention_bias=False, rope_theta=1e4, rope_scaling=None, router_aux_loss_coef=0.01, output_router_logits=False,
        ),
        6_919_161_856,
    ),
    "Qwen1.5-MoE-A2.7B": (
        decoder(
            "qwen2_moe", 24, 2048, 5632, 16, 16, 151936, moe_intermediate_size=1408, shared_expert_intermediate_size=5632, num_experts=60,
            num_experts_per_tok=4, norm_topk_prob=False, decoder_sparse_step=1, rope_theta=1e6, **QWEN_WINDOW,
        ),
        14.3e9,
    ),
    "DeepSeek-V3": (
        decoder(
            "deepseek_v3", 61, 7168, 18432, 128, 128, 129280, rms_norm_eps=1e-6, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128,
            qk_rope_head_dim=64, v_head_dim=128, first_k_dense_replace=3, n_routed_experts=256, n_shared_experts=1, n_group=8, topk_group=4,
            num_experts_per_tok=8, moe_intermediate_size=2048, moe_layer_freq=1, norm_topk_prob=True, scoring_func="sigmoid", ep_size=1,
            topk_method="noaux_tc", routed_scaling_factor=2.5, num_nextn_predict_layers=1, rope_theta=1e4, attention_bias=False,
            aux_loss_alpha=0.001, seq_aux=True, quantization_config=FP8,
            rope_scaling={
                "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 4096,
            },
        ),
        671.0e9,
    ),
    "gpt-oss-20b": (
        decoder(
            "gpt_oss", 24, 2880, 2880, 64, 8, 201088, head_dim=64, num_local_experts=32, num_experts_per_tok=4, experts_per_token=4,
            sliding_window=128, layer_types=["sliding_attention", "full_attention"] * 12, swiglu_limit=7.0, attention_bias=True,
            quantization_config=MXFP4, initial_context_length=4096, rope_theta=150000, router_aux_loss_coef=0.9, output_router_logits=False,
            rope_scaling={
                "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        ),
        20.9e9,
    ),
    "Mamba-Codestral-7B-v0.1": (
        {
            "model_type": "mamba2", "num_hidden_layers": 64, "hidden_size": 4096, "vocab_size": 32768, "num_heads": 128, "head_dim": 64,
            "state_size": 128, "n_groups": 8, "expand": 2, "conv_kernel": 4, "chunk_size": 256, "use_conv_bias": True, "use_bias": False,
            "hidden_act": "silu", "layer_norm_epsilon": 1e-5, "tie_word_embeddings": False, "time_step_limit": [0.0, math.inf],
        },
        7_285_403_648,
    ),
    "Nemotron-H-8B-Base-8K": (
        decoder(
            "nemotron_h", 52, 4096, 21504, 32, 8, 131072, head_dim=128, hybrid_override_pattern=NEMOTRON, mlp_hidden_act="relu2",
            ssm_state_size=128, mamba_num_heads=128, mamba_head_dim=64, n_groups=8, expand=2, conv_kernel=4, layer_norm_epsilon=1e-5,
        ),
        8.1e9,
    ),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": (
        decoder(
            "nemotron_h", 52, 2688, 1856, 32, 2, 131072, head_dim=128, hybrid_override_pattern=NANO, mlp_hidden_act="relu2", norm_eps=1e-5,
            ssm_state_size=128, mamba_num_heads=64, mamba_head_dim=64, n_groups=8, expand=2, conv_kernel=4, layer_norm_epsilon=1e-5,
            n_routed_experts=128, num_experts_per_tok=6, n_shared_experts=1, moe_intermediate_size=1856, n_group=1, topk_group=1,
            moe_shared_expert_intermediate_size=3712, norm_topk_prob=True, routed_scaling_factor=2.5, rope_theta=10000,
            partial_rotary_factor=1.0, num_logits_to_keep=1, rescale_prenorm_residual=True, residual_in_fp32=False, mlp_bias=False,
        ),
        31.6e9,
    ),
    "Bamba-9B-v2": (
        decoder(
            "bamba", 32, 4096, 14336, 32, 8, 128256, attn_layer_indices=[9, 18, 27], mamba_d_state=128, mamba_d_head=64, mamba_n_heads=128,
            mamba_n_groups=1, mamba_d_conv=4, mamba_expand=2, mamba_chunk_size=256, partial_rotary_factor=0.5,
        ),
        9.8e9,
    ),
    "bert-base-uncased": (
        {
            "model_type": "bert", "architectures": ["BertForMaskedLM"], "num_hidden_layers": 12, "hidden_size": 768, "vocab_size": 30522,
            "intermediate_size": 3072, "num_attention_heads": 12, "hidden_act": "gelu", "layer_norm_eps": 1e-12, "type_vocab_size": 2,
            "max_position_embeddings": 512, "position_embedding_type": "absolute", "hidden_dropout_prob": 0.1,
        },
        109_514_298,
    ),
}  # fmt: skip


IGNORED = {"bert-base-uncased": ("hidden_dropout_prob", "attention_probs_dropout_prob")}
"""What the command in the table of models passes over."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_has_as_many_parameters_as_it_is_known_to_have(name):
    theirs, known = PUBLISHED[name]
    family, config = from_hf_config(theirs, IGNORED.get(name, ()))
    num_parameters = sum(math.prod(site.shape) for site in sites(family.rules, measure(config), config))
    assert (num_parameters if isinstance(known, int) else round(num_parameters, -8)) == known
    again = {"max_position_embeddings": 32768} | to_hf_config(config, family, "bfloat16")
    assert from_hf_config(again) == (family, config)


def test_what_a_family_does_not_describe_is_refused_by_the_name_of_its_setting():
    changes = {
        "Qwen3-30B-A3B": ({"mlp_only_layers": [*range(48)]}, "leaves no layer with experts"),
        "DeepSeek-V3": ({"topk_group": 2}, "topk_group=2 beside num_experts_per_tok=8 is not supported"),
        "OLMoE-1B-7B-0924": ({"clip_qkv": 8.0}, "clip_qkv=8.0 is not supported for olmoe; only None is"),
        "gpt-oss-20b": ({"swiglu_alpha": 1.0}, "swiglu_alpha=1.0 is not supported for gpt_oss; only 1.702 is"),
        "Qwen1.5-MoE-A2.7B": ({"qkv_bias": False}, "qkv_bias=False is not supported"),
        "Qwen2.5-7B": ({"layer_types": ["chunked_attention"] * 28, "use_sliding_window": True}, "layer_types='chunked_attention'"),
        "gemma-3-1b-pt": ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        "Llama-3.1-8B": ({"model_type": "gemma3"}, "not covered: the part that sees images"),
        "Nemotron-H-8B-Base-8K": ({"hybrid_override_pattern": "MG*-"}, "layers_block_type='G' is not supported"),
        "bert-base-uncased": ({"architectures": ["BertForQuestionAnswering"]}, "architectures='BertForQuestionAnswering'"),
        "Mamba-Codestral-7B-v0.1": ({"num_heads": 12}, "mamba.num_groups=8 must divide its num_heads=12"),
    }
    for name, (change, words) in changes.items():
        with pytest.raises(CheckpointingException) as caught:
            from_hf_config(PUBLISHED[name][0] | change, IGNORED.get(name, ()))
        assert words in str(caught.value), name


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"n_shared_experts": 2}, "n_shared_experts=2 is not supported; only 1 is"),
        ({"n_routed_experts": None}, "lacks n_routed_experts"),
        ({"norm_topk_prob": False}, "norm_topk_prob=False is not supported; only True is"),
        ({"num_experts_per_tok": 1}, "moe_router_topk=1 has no name there"),
        ({"n_group": 8, "topk_group": 2}, "topk_group=2 beside num_experts_per_tok=6 is not supported; only half of that is"),
        ({"mlp_bias": True}, "mlp_bias=True is not supported"),
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers=1 is not supported"),
    ],
)
def test_experts_of_a_hybrid_that_are_not_described_are_refused_by_name(change, words):
    with pytest.raises(CheckpointingException) as caught:
        from_hf_config(PUBLISHED["NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"][0] | change)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_moe_experts": None}, r"num_moe_experts=None is needed for the layers E of hybrid_layer_pattern='MEM"),
        ({"hybrid_layer_pattern": "M-" * 26}, r"hybrid_layer_pattern=.* has no E for num_moe_experts=128; leave that out"),
        ({"moe_shared_expert_intermediate_size": None}, "every mixture of this family has a shared expert"),
        ({"moe_shared_expert_gate": True}, "moe_shared_expert_gate=True cannot be expressed by family nemotron_h"),
        ({"moe_router_score_function": "softmax"}, "moe_router_score_function='softmax' has no name there; only 'sigmoid' has"),
        ({"activation": "swiglu"}, "activation='swiglu' has no name in mlp_hidden_act"),
    ],
)
def test_experts_of_a_hybrid_that_have_no_name_are_not_exported(change, words):
    family, config = from_hf_config(PUBLISHED["NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"][0])
    with pytest.raises(ValueError, match=words):
        complete({**config, **change}, family)


def test_a_hybrid_whose_experts_are_as_wide_as_its_feed_forward_says_both_widths():
    family, config = from_hf_config(PUBLISHED["NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"][0])
    short = {name: value for name, value in config.items() if name != "moe_ffn_hidden_size"}
    assert complete(short, family) == config and config["ffn_hidden_size"] == config["moe_ffn_hidden_size"] == 1856
