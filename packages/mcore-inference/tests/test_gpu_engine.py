# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The engine on a GPU gives what one request after the other gives there."""

import dataclasses
from typing import Any

import pytest
import torch

from mcore_inference import (
    DynamicInferenceContext,
    DynamicInferenceEngine,
    EagleSpeculation,
    ExecutionConfig,
    InferenceConfig,
    MtpSpeculation,
    PagedAttention,
    SamplingParams,
)
from mcore_inference.decoder import FusedDecoder, fp8_parameters
from mcore_parallel import ProcessGroups, named_shards
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.models.eagle import EagleConfig, EagleHead
from mcore_parallel.nn import LatentAttentionConfig, Step

pytestmark = pytest.mark.gpu

SIZES = TransformerConfig(num_layers=3, hidden_size=64, num_attention_heads=4, num_query_groups=2, vocab_size=128, init_method_std=0.2)
LATENT = LatentAttentionConfig(q_lora_rank=256, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
SMALL_LATENT = LatentAttentionConfig(q_lora_rank=64, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32)


def build(dtype: torch.dtype) -> DynamicInferenceEngine:
    model = GPTModel(SIZES, ProcessGroups.single(), attention_core=PagedAttention(), device="cuda", dtype=dtype).eval()
    sizes = InferenceConfig(max_sequence_length=96, max_requests=8, block_size_tokens=8, num_blocks=64)
    return DynamicInferenceEngine(model, DynamicInferenceContext(SIZES, sizes, dtype=dtype, device="cuda"))


def prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(128, (3 + 5 * i,), generator=generator).tolist() for i in range(count)]


def test_greedy_tokens_equal_those_of_full_recomputation() -> None:
    engine = build(torch.float64)
    records = engine.generate(prompts(6), SamplingParams(temperature=0, num_tokens_to_generate=12, return_log_probs=True))
    for prompt, record in zip(prompts(6), records, strict=True):
        tokens = list(prompt)
        for generated, logprob in zip(record.generated_tokens, record.generated_log_probs, strict=True):
            with torch.no_grad():
                x = torch.tensor(tokens, device="cuda")
                output, _ = engine.model(x, Step.causal(1, len(tokens), "cuda"))
                scores = output.logits()[-1].double().log_softmax(-1)
            assert scores.argmax().item() == generated
            assert scores[generated].item() == pytest.approx(logprob, abs=1e-4)
            tokens.append(generated)


def test_bfloat16_log_probs_depend_on_their_company_by_rounding_only() -> None:
    params = SamplingParams(temperature=0, num_tokens_to_generate=1, return_log_probs=True, skip_prompt_log_probs=False)
    engine = build(torch.bfloat16)
    together = [record.prompt_log_probs for record in engine.generate(prompts(6), params)]
    alone = [build(torch.bfloat16).generate([prompt], params)[0].prompt_log_probs for prompt in prompts(6)]
    errors = torch.cat([(torch.tensor(ours) - torch.tensor(own)).abs() for ours, own in zip(together, alone, strict=True)])
    assert len(errors) == sum(len(prompt) - 1 for prompt in prompts(6))
    # A request that reads what is another's is off by whole numbers.
    assert errors.max() < 0.4 and errors.mean() < 0.08


WINDOWS_AND_SINKS = {"window_size": (20, 0), "window_attn_skip_freq": 2, "softmax_type": "learnable"}


@pytest.mark.parametrize("use_graphs", [False, None])
@pytest.mark.parametrize("fields", [{}, WINDOWS_AND_SINKS], ids=["plain", "windows and sinks"])
def test_kernels_and_graphs_give_the_tokens_of_the_gathered_path(fields: dict[str, Any], use_graphs: bool | None) -> None:
    config = dataclasses.replace(SIZES, **fields)
    sizes = InferenceConfig(max_sequence_length=96, max_requests=8, max_tokens=40, block_size_tokens=16, num_blocks=30)
    temperatures = [0.0, 1.0, 0.0, 0.5, 0.0, 0.0]
    settings = [SamplingParams(temperature=t, num_tokens_to_generate=19 + i, return_log_probs=True) for i, t in enumerate(temperatures)]
    results = []
    for device in ("cpu", "cuda"):
        model = GPTModel(config, ProcessGroups.single(), attention_core=PagedAttention(), device=device).eval()
        context = DynamicInferenceContext(config, sizes, device=device)
        engine = DynamicInferenceEngine(model, context, execution=ExecutionConfig(use_graphs=use_graphs if device == "cuda" else None))
        results.append(engine.generate(prompts(6), settings))
        assert context.allocator.total_used == 0
        replayed = engine.cuda_graph_request_count_map
        assert set(replayed) <= {1, 2, 4, 8} and bool(replayed) == (device == "cuda" and use_graphs is None)
        graph_steps = engine.stats()["graph_steps"]
        # Steps with prompts are recorded too, and this engine has one size for them.
        assert sum(replayed.values()) <= graph_steps <= engine.step_count and (graph_steps > sum(replayed.values())) == bool(replayed)
    for wanted, record in zip(*results, strict=True):
        assert record.generated_tokens == wanted.generated_tokens
        assert record.generated_log_probs == pytest.approx(wanted.generated_log_probs, abs=1e-4)


def test_full_steps_of_prompts_are_graphs_and_give_the_tokens_of_launched_ones() -> None:
    generator = torch.Generator().manual_seed(1)
    many = [torch.randint(128, (500 + number,), generator=generator).tolist() for number in range(40)]
    params = SamplingParams(temperature=0, num_tokens_to_generate=40, return_log_probs=True)
    sizes = InferenceConfig(max_sequence_length=640, max_requests=40, max_tokens=4096, block_size_tokens=16, num_blocks=1700)
    results, shares = [], []
    for records_prompts in (False, None):
        model = GPTModel(SIZES, ProcessGroups.single(), attention_core=PagedAttention(), device="cuda").eval()
        execution = ExecutionConfig(use_cuda_graphs_for_non_decode_steps=records_prompts)
        engine = DynamicInferenceEngine(model, DynamicInferenceContext.for_model(model, sizes), execution=execution)
        results.append(engine.generate(many, params))
        shares.append(engine.stats()["graph_steps"] / engine.step_count)
        counts = engine._executor.mixed_graphs and engine._executor.mixed_graphs.step_counts
    # Prompts of 20,780 tokens fill five steps.
    assert counts and sum(count for size, count in counts.items() if size.token_count == 4096) == 5
    assert shares[0] < 0.9 and shares[1] > 0.95
    for wanted, record in zip(*results, strict=True):
        assert record.generated_tokens == wanted.generated_tokens
        assert record.generated_log_probs == pytest.approx(wanted.generated_log_probs, abs=1e-4)


def test_penalties_biases_and_least_numbers_of_tokens_are_drawn_in_graphs_and_a_step_ahead() -> None:
    kinds: list[dict[str, Any]] = [
        {"repetition_penalty": 1.5, "seed": 1},
        {},
        {"frequency_penalty": 0.8, "presence_penalty": 0.5, "top_p": 0.9},
        {"logit_bias": {3: 4.0, 100: 3.0}, "seed": 2},
        {"min_tokens": 12, "stop_token_ids": tuple(range(0, 128, 4))},
        {"temperature": 0.0, "frequency_penalty": 1.0, "logit_bias": {5: 2.0}},
    ]
    settings = [SamplingParams(**{"num_tokens_to_generate": 20, "return_log_probs": i % 2 == 0, **kind}) for i, kind in enumerate(kinds)]
    sizes = InferenceConfig(max_sequence_length=96, max_requests=8, block_size_tokens=16, num_blocks=30)
    results = []
    for device in ("cpu", "cuda"):
        model = GPTModel(SIZES, ProcessGroups.single(), attention_core=PagedAttention(), device=device).eval()
        engine = DynamicInferenceEngine(model, DynamicInferenceContext(SIZES, sizes, device=device))
        results.append(engine.generate(prompts(6), settings))
        alone = engine.generate(prompts(6)[:1], settings[0])
        assert alone[0].generated_tokens == results[-1][0].generated_tokens
        before = engine.num_preemptions
        for prompt, one in zip(prompts(6), settings, strict=True):
            engine.add_request(prompt, dataclasses.replace(one, seed=7))
        for _ in range(8):
            engine.step()
        engine.suspend()
        engine.resume()
        resumed = []
        while engine.has_unfinished_requests():
            resumed += engine.step()
        assert engine.num_preemptions == before + 6
        results.append(sorted(resumed, key=lambda record: record.request_id))
    assert sum(engine.cuda_graph_request_count_map.values()) > 40
    for first, second in ((0, 2), (1, 3)):
        for wanted, record in zip(results[first], results[second], strict=True):
            assert record.generated_tokens == wanted.generated_tokens
            assert record.generated_log_probs == pytest.approx(wanted.generated_log_probs, abs=1e-4)


@pytest.mark.parametrize("kind", ["mtp", "eagle"])
def test_heads_propose_by_kernels_what_they_propose_by_the_gathered_path(kind: str) -> None:
    config = dataclasses.replace(SIZES, num_layers=4, mtp_num_layers=2)
    sizes = InferenceConfig(max_sequence_length=96, max_requests=8, max_tokens=40, block_size_tokens=16, num_blocks=30)
    settings = [SamplingParams(temperature=t, num_tokens_to_generate=20, return_log_probs=True) for t in (0.0, 1.0, 0.0, 0.5, 0.0, 0.0)]
    results, drafted = [], []
    for device, speculates in (("cpu", False), ("cpu", True), ("cuda", True)):
        model = GPTModel(config, ProcessGroups.single(), attention_core=PagedAttention(), device=device).eval()
        architecture = EagleConfig.of_target(config)
        head = EagleHead(architecture, ProcessGroups.single(), attention_core=PagedAttention(), device=device, seed=5)
        speculation = MtpSpeculation(num_tokens=3) if kind == "mtp" else EagleSpeculation(head=head, num_tokens=3)
        context = DynamicInferenceContext.for_model(model, sizes)
        execution = ExecutionConfig(speculation=speculation if speculates else None)
        engine = DynamicInferenceEngine(model, context, execution=execution)
        results.append(engine.generate(prompts(6), settings))
        drafted.append((engine.num_drafted, engine.num_accepted))
        assert context.allocator.total_used == 0
    assert drafted[1] == drafted[2] and drafted[2][0] > 0
    for wanted, *others in zip(*results, strict=True):
        for record in others:
            assert record.generated_tokens == wanted.generated_tokens
            assert record.generated_log_probs == pytest.approx(wanted.generated_log_probs, abs=1e-4)


def log_prob_errors(engine: DynamicInferenceEngine, reference: GPTModel, count: int) -> torch.Tensor:
    """[requests, tokens], of the engine's log-probabilities against those of a model's forward."""
    params, asked, errors = SamplingParams(temperature=0, num_tokens_to_generate=16, return_log_probs=True), (prompts(6) * 4)[:count], []
    for prompt, record in zip(asked, engine.generate(asked, params), strict=True):
        tokens = torch.tensor([*prompt, *record.generated_tokens])
        with torch.no_grad():
            scores = reference(tokens, Step.causal(1, len(tokens)))[0].logits().log_softmax(-1)
        expected = scores[len(prompt) - 1 : -1].gather(1, tokens[len(prompt) :, None])[:, 0]
        errors.append((torch.tensor(record.generated_log_probs) - expected).abs())
    return torch.stack(errors)


@pytest.mark.parametrize("kind", ["heads", "latents"])
@pytest.mark.parametrize("use_graphs", [False, None])
def test_a_cache_in_fp8_moves_log_probs_little(use_graphs: bool | None, kind: str) -> None:
    fields: dict[str, Any] = {"num_query_groups": 2, "kv_channels": 128, "qk_layernorm": True}
    if kind == "latents":
        fields = {"num_query_groups": None, "latent_attention": LATENT}
    config = dataclasses.replace(SIZES, **fields, num_attention_heads=8, hidden_size=256, init_method_std=0.05)
    scored = SamplingParams(temperature=0, num_tokens_to_generate=8, return_log_probs=True, skip_prompt_log_probs=False)
    values = []
    for dtype in (None, "fp8"):
        model = GPTModel(config, ProcessGroups.single(), attention_core=PagedAttention(), device="cuda", dtype=torch.bfloat16).eval()
        sizes = InferenceConfig(max_sequence_length=96, max_requests=8, block_size_tokens=16, num_blocks=64, kv_cache_dtype=dtype)
        engine = DynamicInferenceEngine(
            model, DynamicInferenceContext.for_model(model, sizes), execution=ExecutionConfig(use_graphs=use_graphs)
        )
        records = engine.generate(prompts(6), scored)
        values.append(torch.tensor([number for record in records for number in record.prompt_log_probs or []]))
    errors = (values[0] - values[1]).abs()
    # A key or value that is another's moves them by whole numbers.
    assert 0 < errors.mean() < 0.1 and errors.max() < 0.5


@pytest.mark.parametrize(("weight_dtype", "count"), [("fp8", 8), ("fp8", 24), ("fp8_weight_only", 3), ("fp8_weight_only", 24)])
@pytest.mark.parametrize("use_graphs", [False, True])
@pytest.mark.parametrize("fields", [{}, {"num_query_groups": None, "latent_attention": SMALL_LATENT}], ids=["heads", "latents"])
def test_weights_in_fp8_agree_with_the_same_weights_in_float32(
    weight_dtype: Any, count: int, use_graphs: bool, fields: dict[str, Any]
) -> None:
    config = dataclasses.replace(SIZES, hidden_size=128, ffn_hidden_size=192, **fields)
    model = GPTModel(config, ProcessGroups.single(), attention_core=PagedAttention(), device="cuda", dtype=torch.bfloat16).eval()
    sizes = InferenceConfig(max_sequence_length=96, max_requests=32, block_size_tokens=16, num_blocks=200, weight_dtype=weight_dtype)
    execution = ExecutionConfig(use_graphs=use_graphs)
    engine = DynamicInferenceEngine(model, DynamicInferenceContext.for_model(model, sizes), execution=execution)
    for _ in range(2):
        assert FusedDecoder.fits(model) == (not fields)
        reference = GPTModel(config, ProcessGroups.single()).eval()
        rounded = fp8_parameters(model)
        ours = dict(model.named_parameters())
        for name, parameter in reference.named_parameters():
            scales = rounded.get(ours[name])
            wide = ours[name] if scales is None else scales.widened(ours[name].flatten(0, -2), torch.float32)
            parameter.data = wide.detach().float().cpu().view(parameter.shape)
        errors = log_prob_errors(engine, reference, count)
        if weight_dtype == "fp8":
            # Activations of large steps are rounded too, which moves so small a model by much: as much as on the processor.
            on_cpu = GPTModel(config, ProcessGroups.single(), attention_core=PagedAttention()).eval()
            on_cpu.load_state_dict(reference.state_dict())
            emulated = log_prob_errors(DynamicInferenceEngine(on_cpu, DynamicInferenceContext.for_model(on_cpu, sizes)), reference, count)
            assert errors.mean() < 1.5 * emulated.mean() + 0.05 and errors.max() < 2 * emulated.max() + 0.2
        else:
            assert errors.max() < 0.8 and errors.mean(1).max() < 0.15
        # Recorded graphs read the new weights.
        other = GPTModel(config, ProcessGroups.single(), attention_core=PagedAttention(), device="cuda", dtype=torch.bfloat16, seed=1)
        engine.load_weights((shard.name, shard.parameter.detach()) for shard in named_shards(other))


@pytest.mark.parametrize("fields", [{}, {"qk_layernorm": True, **WINDOWS_AND_SINKS}, {"share_embeddings_and_output_weights": True}])
def test_fused_decode_steps_agree_with_the_models_forward(fields: dict[str, Any]) -> None:
    config = dataclasses.replace(SIZES, hidden_size=128, ffn_hidden_size=192, **fields)
    model = GPTModel(config, ProcessGroups.single(), attention_core=PagedAttention(), device="cuda", dtype=torch.bfloat16).eval()
    assert FusedDecoder.fits(model)
    reference = GPTModel(config, ProcessGroups.single(), attention_core=PagedAttention()).eval()
    reference.load_state_dict(model.state_dict())
    sizes = InferenceConfig(max_sequence_length=96, max_requests=32, block_size_tokens=16, num_blocks=200)
    for count in (3, 20):
        engine = DynamicInferenceEngine(model, DynamicInferenceContext.for_model(model, sizes))
        params = SamplingParams(temperature=0, num_tokens_to_generate=16, return_log_probs=True)
        for prompt, record in zip(prompts(6) * 4, engine.generate((prompts(6) * 4)[:count], params), strict=False):
            tokens = torch.tensor([*prompt, *record.generated_tokens])
            with torch.no_grad():
                output, _ = reference(tokens, Step.causal(1, len(tokens)))
            wanted = output.logits().log_softmax(-1)[len(prompt) - 1 : -1].gather(1, tokens[len(prompt) :, None])[:, 0]
            # bfloat16 beside float32: apart by little, and on average by less.
            errors = (torch.tensor(record.generated_log_probs) - wanted).abs()
            assert errors.max() < 0.4 and errors.mean() < 0.08
