# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Steps of latent attention and of recurrent layers by kernels and as graphs: the engine's tokens are those of whole sequences.

In the interpreter a step is computed from the tensors that a graph would replay; on a GPU it is a graph.
"""

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_inference import (
    DynamicInferenceContext,
    DynamicInferenceEngine,
    ExecutionConfig,
    InferenceConfig,
    PagedAttention,
    SamplingParams,
)
from mcore_parallel import ProcessGroups
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.nn import GatedDeltaNetConfig, LatentAttentionConfig, MambaConfig, Step
from tests.support.decode_graphs import record_eagerly
from tests.support.interpreter import run_interpreted

LATENT = LatentAttentionConfig(q_lora_rank=10, kv_lora_rank=8, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5)
MAMBA = MambaConfig(state_dim=6, head_dim=8, num_groups=2, chunk_size=4)
DELTA = GatedDeltaNetConfig(num_key_heads=2, num_value_heads=4, key_head_dim=6, value_head_dim=5, chunk_size=4)
KINDS: dict[str, dict[str, Any]] = {
    "latent": {"num_layers": 2, "latent_attention": LATENT},
    "mamba": {"num_layers": 4, "hybrid_layer_pattern": "M*M-", "mamba": MAMBA, "num_query_groups": 2},
    "delta net": {"num_layers": 4, "hybrid_layer_pattern": "G*-G", "delta_net": DELTA, "num_query_groups": 2},
    "states alone": {"num_layers": 2, "hybrid_layer_pattern": "MM", "mamba": MAMBA},
    "both": {"num_layers": 3, "hybrid_layer_pattern": "M+-", "mamba": MAMBA, "latent_attention": LATENT},
}
ATTENTION: dict[str, Any] = {"num_layers": 2, "num_query_groups": 2, "window_size": (20, 0), "window_attn_skip_freq": 2}
# Models that the fused decoder leaves to their own forward, whose attention takes the projection's result.
PACKED: dict[str, dict[str, Any]] = {
    "qwen2": {"num_layers": 2, "num_query_groups": 2, "add_qkv_bias": True, "share_embeddings_and_output_weights": True},
    "gpt-oss": {**ATTENTION, "add_bias_linear": True, "softmax_type": "learnable", "activation": "quick_geglu"},
    "gates and norms": {**ATTENTION, "qk_layernorm": True, "layernorm_zero_centered_gamma": True, "attention_output_gate": True},
}
PACKED["soft caps"] = {**ATTENTION, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 3.0, "activation": "geglu_tanh"}
PACKED["all of them"] = PACKED["gpt-oss"] | PACKED["gates and norms"]
REAL: dict[str, dict[str, Any]] = {
    "latent": {
        "num_layers": 2,
        "latent_attention": LatentAttentionConfig(
            q_lora_rank=256, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
        ),
    },
    "mamba": {"num_layers": 4, "hybrid_layer_pattern": "M*M-", "mamba": MambaConfig(), "num_query_groups": 4},
    "delta net": {
        "num_layers": 4,
        "hybrid_layer_pattern": "G*-G",
        "delta_net": GatedDeltaNetConfig(num_key_heads=4, num_value_heads=8),
        "num_query_groups": 4,
    },
}
# One of one token, whose slot must be cleared by a decode step; more than the engine has slots, so that these are used again.
PROMPTS = [[1, 2, 3], [7], list(range(20)), [9, 9], [5] * 17, [30, 31], [11]]


def check(fields: dict[str, Any], device: str, dtype: torch.dtype, gap: float, *, hidden_size: int = 16, **execution: Any) -> None:
    """Every token is the best one of the model's forward over the whole sequence, up to ``gap``."""
    mixed, use_graphs = execution.get("use_cuda_graphs_for_non_decode_steps", False), execution["use_graphs"]
    shared = {"num_attention_heads": 4, "vocab_size": 64, "init_method_std": 0.4}
    config = TransformerConfig(hidden_size=hidden_size, **{**shared, **fields})
    model = GPTModel(config, ProcessGroups.single(), attention_core=PagedAttention(), device=device, dtype=dtype).eval()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
    plain = GPTModel(config, ProcessGroups.single(), dtype=torch.float64).eval()
    plain.load_state_dict({name: value.cpu() for name, value in model.state_dict().items()})
    # Slots are given out from the end and come back in the order of the requests' ends.
    sizes = InferenceConfig(max_sequence_length=64, num_blocks=24, block_size_tokens=16, max_requests=5, max_tokens=13)
    context = DynamicInferenceContext.for_model(model, sizes)
    assert context.builder.has_kernel
    engine = DynamicInferenceEngine(model, context, execution=ExecutionConfig(**execution))
    counts = [3, 5, 2, 4, 3, 5, 4]
    settings = [SamplingParams(temperature=0, num_tokens_to_generate=count) for count in counts]
    for prompt, count, record in zip(PROMPTS, counts, engine.generate(PROMPTS, settings), strict=True):
        tokens = torch.tensor([*prompt, *record.generated_tokens])
        with torch.no_grad():
            scores = plain(tokens, Step.causal(1, len(tokens)))[0].logits()[len(prompt) - 1 : -1]
        assert len(record.generated_tokens) == count
        picked = scores.gather(1, tokens[len(prompt) :, None])[:, 0]
        assert (scores.amax(1) - picked).max() <= gap * scores.std()
    replayed = engine.cuda_graph_request_count_map
    assert (sum(replayed.values()) > 3 and set(replayed) <= {1, 2, 4, 5}) if use_graphs is not False else not replayed
    # Steps of 13 tokens at most, prompts or chunks among them.
    assert engine.stats()["graph_steps"] - sum(replayed.values()) == (engine.step_count - sum(replayed.values()) if mixed else 0)
    assert engine.stats()["active_requests"] == engine.stats()["used_blocks"] == 0


@pytest.mark.journey
def test_steps_of_graphs_give_the_tokens_of_whole_sequences_in_the_interpreter() -> None:
    run_interpreted(__file__)


@pytest.mark.gpu
@pytest.mark.parametrize("use_graphs", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_graphs_give_the_tokens_of_whole_sequences_on_a_gpu(kind: str, use_graphs: bool) -> None:
    check(KINDS[kind], "cuda", torch.float32, 1e-3, use_graphs=use_graphs, use_cuda_graphs_for_non_decode_steps=False)


def check_packed(kind: str, device: str, dtype: torch.dtype, gap: float, **execution: Any) -> None:
    """As ``check``, of a model whose own forward hands attention the projection's result in every step of every layer."""
    forwards: Counter[str] = Counter()

    def counted(name: str) -> Callable[..., Tensor]:
        method = getattr(PagedAttention, name)

        def call(*inputs: Any, **options: Any) -> Tensor:
            forwards[name] += 1
            return method(*inputs, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("forward", "attend_packed"):
            patch.setattr(PagedAttention, name, counted(name))
        check(PACKED[kind], device, dtype, gap, **execution)
    assert forwards["attend_packed"] > 0 and not forwards["forward"]


@pytest.mark.journey
def test_packed_heads_of_a_models_own_forward_give_the_tokens_of_whole_sequences_in_the_interpreter() -> None:
    # Biases, sinks, windows and norms of heads.
    run_interpreted(__file__, "all of them")


@pytest.mark.slow
def test_packed_heads_of_several_models_give_the_tokens_of_whole_sequences_in_the_interpreter() -> None:
    run_interpreted(__file__, "gpt-oss", "gates and norms", "soft caps")


@pytest.mark.gpu
@pytest.mark.parametrize("use_graphs", [False, True])
@pytest.mark.parametrize("kind", PACKED)
def test_packed_heads_of_a_models_own_forward_give_the_tokens_of_whole_sequences_on_a_gpu(kind: str, use_graphs: bool) -> None:
    execution = {"use_graphs": use_graphs, "use_cuda_graphs_for_non_decode_steps": use_graphs or None}
    check_packed(kind, "cuda", torch.float32, 1e-3, **execution)


def check_narrow_latents(device: str) -> None:
    """Over a cache of latents in fp8, in graphs too, kernels give what torch gives."""
    config = TransformerConfig(hidden_size=16, num_attention_heads=4, vocab_size=64, init_method_std=0.4, **KINDS["latent"])
    params = SamplingParams(temperature=0, num_tokens_to_generate=4, return_log_probs=True, skip_prompt_log_probs=False)
    sizes = InferenceConfig(
        max_sequence_length=64, num_blocks=24, block_size_tokens=16, max_requests=5, max_tokens=13, kv_cache_dtype="fp8"
    )
    results = []
    for backend in ("torch", None):
        model = GPTModel(config, ProcessGroups.single(), attention_core=PagedAttention(backend=backend), device=device).eval()
        context = DynamicInferenceContext.for_model(model, sizes)
        assert context.builder.has_kernel == (backend is None) and context.cache.rotary is not None
        results.append(DynamicInferenceEngine(model, context).generate(PROMPTS[:5], params))
    for wanted, record in zip(*results, strict=True):
        assert record.generated_tokens == wanted.generated_tokens
        for name in ("prompt_log_probs", "generated_log_probs"):
            torch.testing.assert_close(*(torch.tensor(getattr(one, name)) for one in (record, wanted)), rtol=0, atol=5e-3)


@pytest.mark.journey
def test_kernels_over_latents_in_fp8_give_what_torch_gives_in_the_interpreter() -> None:
    run_interpreted(__file__, "latents in fp8")


@pytest.mark.gpu
def test_kernels_over_latents_in_fp8_give_what_torch_gives_on_a_gpu() -> None:
    check_narrow_latents("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("softmax_type", ["vanilla", "learnable"])
def test_recorded_steps_with_prompts_give_the_tokens_of_whole_sequences_on_a_gpu(softmax_type: str) -> None:
    execution = {"use_graphs": True, "use_cuda_graphs_for_non_decode_steps": True}
    check(ATTENTION | {"softmax_type": softmax_type}, "cuda", torch.float32, 1e-3, **execution)
    # By the fused decoder; the copy engine brings keys.
    wide = ATTENTION | {"softmax_type": softmax_type, "normalization": "RMSNorm", "activation": "swiglu", "init_method_std": 0.05}
    check(wide, "cuda", torch.bfloat16, 0.3, hidden_size=512, **execution)


@pytest.mark.gpu
@pytest.mark.parametrize("use_graphs", [False, True])
@pytest.mark.parametrize("kind", REAL)
def test_graphs_give_the_tokens_of_whole_sequences_at_real_sizes(kind: str, use_graphs: bool) -> None:
    # Beside double precision bfloat16 may exchange tokens that are nearly as good.
    execution = {"use_graphs": use_graphs, "use_cuda_graphs_for_non_decode_steps": False}
    check({**REAL[kind], "init_method_std": 0.05}, "cuda", torch.bfloat16, 0.3, hidden_size=512, **execution)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_recorded_steps_with_prompts_of_every_family_give_the_tokens_of_whole_sequences_on_a_gpu(kind: str) -> None:
    execution = {"use_graphs": True, "use_cuda_graphs_for_non_decode_steps": True}
    check(KINDS[kind], "cuda", torch.float32, 1e-3, **execution)
    if kind in REAL:
        check({**REAL[kind], "init_method_std": 0.05}, "cuda", torch.bfloat16, 0.3, hidden_size=512, **execution)


if __name__ == "__main__":
    from mcore_inference.attention import _backends, _core
    from mcore_parallel.nn.mixers import _linear_mixer

    # The kernels of this test in the interpreter; all else stays with torch.
    _backends.has_kernels = _core.has_kernels = lambda *_: True
    _linear_mixer.has_kernel = lambda _: True
    record_eagerly()
    narrow = sys.argv[1:] == ["latents in fp8"]
    if narrow:
        check_narrow_latents("cpu")
    for each in sys.argv[1:] if not narrow else ():
        check_packed(each, "cpu", torch.float32, 1e-3, use_graphs=None, use_cuda_graphs_for_non_decode_steps=True)
    if not sys.argv[1:]:
        for fields in (KINDS["delta net"], KINDS["both"], ATTENTION):
            check(fields, "cpu", torch.float32, 1e-3, use_graphs=None, use_cuda_graphs_for_non_decode_steps=True)
    print("same")
