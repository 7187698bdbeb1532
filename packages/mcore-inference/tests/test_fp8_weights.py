# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Weights in fp8: what is computed, how far the log-probabilities move, and how new weights come."""

import dataclasses
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_inference import (
    DynamicInferenceContext,
    DynamicInferenceEngine,
    ExecutionConfig,
    ExpertBalancing,
    IncompleteWeightsError,
    InferenceConfig,
    MtpSpeculation,
    NgramSpeculation,
    PagedAttention,
    SamplingParams,
    WeightLoadError,
    WeightSlice,
)
from mcore_inference.decoder import FusedDecoder, fp8_parameters
from mcore_inference.decoder._decoder import _matrix, _product
from mcore_parallel import ParallelPlan, ProcessGroups, named_shards
from mcore_parallel.backends import choose_backend
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.nn import GatedDeltaNetConfig, LatentAttentionConfig

Make = Callable[..., Any]
PROMPTS = [[number * 7 % 64 for number in range(first, first + 20 + first)] for first in range(5)]
SCORED = SamplingParams(temperature=0, num_tokens_to_generate=12, return_log_probs=True, skip_prompt_log_probs=False)
LATENT = LatentAttentionConfig(q_lora_rank=16, kv_lora_rank=32, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10)
LATENTS: dict[str, dict[str, Any]] = {
    "low rank": {"latent_attention": LATENT, "num_query_groups": None},
    "full queries": {"latent_attention": dataclasses.replace(LATENT, q_lora_rank=None), "num_query_groups": None},
}


def rounded(weight: Tensor) -> Tensor:
    """The nearest values of e4m3 times a power of two for each row, by a table of all values."""
    # Ties go to the even code, which comes first.
    codes = torch.cat([torch.arange(0, 127, 2), torch.arange(1, 127, 2)])
    table = codes.to(torch.uint8).view(torch.float8_e4m3fn).double()
    rows = weight.double().flatten(0, -2)
    scales = torch.exp2(torch.ceil(torch.log2(rows.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 448)))
    nearest = table[(rows.abs()[..., None] / scales[..., None] - table).abs().argmin(-1)]
    return (nearest * scales * rows.sign()).view(weight.shape).to(weight.dtype)


def is_rounded(name: str) -> bool:
    return not name.endswith("kv_up.weight") and name.endswith(("qkv.weight", "out.weight", "up.weight", "down.weight", ".q.weight"))


def copies(model: GPTModel) -> dict[str, Tensor]:
    return {shard.name: shard.parameter.detach().clone() for shard in named_shards(model)}


def rounded_model(make_model: Make, **fields: Any) -> GPTModel:
    """The model whose weights are those that an engine in fp8 stands for, in its own dtype."""
    model = make_model(**fields)
    for shard in named_shards(model):
        if is_rounded(shard.name):
            shard.parameter.data = rounded(shard.parameter.detach())
    return model


def results(engine: Any, params: SamplingParams = SCORED) -> list[Any]:
    return [(r.generated_tokens, r.generated_log_probs, r.prompt_log_probs) for r in engine.generate(PROMPTS, params)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_weight_only_computes_the_model_with_rounded_weights(make_engine: Make, make_model: Make, dtype: torch.dtype) -> None:
    engine = make_engine(make_model(dtype=dtype), weight_dtype="fp8_weight_only")
    parameters = fp8_parameters(engine.model)
    assert len(parameters) == 8 and all(parameter.dtype == torch.float8_e4m3fn for parameter in parameters)
    # Of other calls of torch where the weights are no bytes.
    for found, wanted in zip(results(engine), results(make_engine(rounded_model(make_model, dtype=dtype))), strict=True):
        assert found[0] == wanted[0]
        for values, others in zip(found[1:], wanted[1:], strict=True):
            assert values == pytest.approx(others, abs=1e-12)
    assert results(engine) != results(make_engine(make_model(dtype=dtype)))


@pytest.mark.parametrize("kind", LATENTS)
def test_latent_attention_is_the_model_with_rounded_projections(make_engine: Make, make_model: Make, kind: str) -> None:
    model = make_model(**LATENTS[kind])
    engine = make_engine(model, weight_dtype="fp8_weight_only")
    queries = ("q_down", "q_up") if kind == "low rank" else ("q",)
    rounded_names = {f"attention.{name}" for name in (*queries, "kv_down", "out")} | {"mlp.up", "mlp.down"}
    stored = {name for name, parameter in model.named_parameters() if parameter.dtype == torch.float8_e4m3fn}
    # The weight that queries absorb keeps its dtype.
    assert stored == {f"layers.{layer}.{name}.weight" for layer in range(2) for name in rounded_names}
    exact = make_engine(rounded_model(make_model, **LATENTS[kind]))
    for found, wanted in zip(results(engine), results(exact), strict=True):
        assert found[0] == wanted[0]
        for values, others in zip(found[1:], wanted[1:], strict=True):
            assert values == pytest.approx(others, abs=1e-12)


def test_weights_of_latent_attention_in_fp8_move_log_probabilities_little(make_engine: Make, make_model: Make) -> None:
    prompts, params = [[number * 7 % 64 for number in range(40)]], dataclasses.replace(SCORED, num_tokens_to_generate=1)
    fields, values = LATENTS["low rank"] | {"init_method_std": 0.1}, {}
    for weight_dtype in (None, "fp8_weight_only", "fp8"):
        model = make_model(dtype=torch.bfloat16, **fields)
        [record] = make_engine(model, weight_dtype=weight_dtype).generate(prompts, params)
        values[weight_dtype] = torch.tensor(record.prompt_log_probs)
    errors = {name: (value - values[None]).abs() for name, value in values.items() if name is not None}
    assert all(0 < error.mean() < 0.05 and error.max() < 0.25 for error in errors.values())
    assert not torch.equal(values["fp8"], values["fp8_weight_only"]), "a step of more than 32 tokens multiplies in fp8"


def test_new_weights_of_latent_attention_are_rounded(make_engine: Make, make_model: Make) -> None:
    fields = LATENTS["low rank"]
    engine = make_engine(make_model(**fields), weight_dtype="fp8_weight_only", kv_cache_dtype="fp8")
    engine.load_weights(copies(make_model(seed=1, **fields)).items())
    wanted = make_engine(make_model(seed=1, **fields), weight_dtype="fp8_weight_only", kv_cache_dtype="fp8")
    assert results(engine) == results(wanted)


def test_a_batch_invariant_engine_rounds_projections_of_latent_attention(make_engine: Make, make_model: Make) -> None:
    def build(*, rounds: bool) -> DynamicInferenceEngine:
        config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, vocab_size=64, latent_attention=LATENT)
        backend = choose_backend(batch_invariant=True)
        model = GPTModel(config, ProcessGroups.single(), attention_core=PagedAttention(), backend=backend)
        if not rounds:
            for shard in named_shards(model):
                if is_rounded(shard.name):
                    shard.parameter.data = rounded(shard.parameter.detach())
        return make_engine(model, weight_dtype="fp8_weight_only" if rounds else None)

    params = dataclasses.replace(SCORED, num_tokens_to_generate=3)
    engine, wanted = build(rounds=True), build(rounds=False).generate(PROMPTS[:2], params)
    alone, together = [engine.generate([prompt], params)[0] for prompt in PROMPTS[:2]], engine.generate(PROMPTS[:2], params)
    for one, other, exact in zip(alone, together, wanted, strict=True):
        assert one.generated_log_probs == other.generated_log_probs == exact.generated_log_probs


def test_steps_of_few_tokens_are_those_of_rounded_weights_and_others_differ_little(make_engine: Make, make_model: Make) -> None:
    few = make_engine(make_model(), weight_dtype="fp8", max_tokens=32, enable_prefix_caching=False)
    exact = make_engine(rounded_model(make_model))
    expected = results(exact)
    for (tokens, values, _), (same_tokens, same_values, _) in zip(results(few), expected, strict=True):
        assert tokens == same_tokens and values == pytest.approx(same_values, abs=1e-9)
    many = results(make_engine(make_model(), weight_dtype="fp8", max_tokens=64))
    errors = torch.tensor(
        [a - b for (_, _, ours), (_, _, theirs) in zip(many, expected, strict=True) for a, b in zip(ours, theirs, strict=True)]
    )
    # Weights of std 0.3 at width 32 make logits of large variance.
    assert 0 < errors.abs().mean() < 0.3


@pytest.mark.parametrize("weight_dtype", [None, "fp8", "fp8_weight_only"])
def test_matmuls_of_the_fused_decoder_are_those_of_the_layers(make_engine: Make, weight_dtype: Any) -> None:
    model = make_engine(weight_dtype=weight_dtype).model
    decoder = FusedDecoder(model, 8)
    torch.manual_seed(0)
    with torch.no_grad():
        for tokens, (up, down) in itertools.product((3, 40), ((layer.mlp.up, layer.mlp.down) for layer in model.layers.values())):
            x, y = torch.randn(tokens, 32, dtype=torch.float64), torch.randn(tokens, down.in_features, dtype=torch.float64)
            assert torch.equal(_product(x, up), up(x))
            torch.testing.assert_close(decoder._add_product(x.clone(), y, down), x + down(y), rtol=1e-12, atol=1e-12)
            widened = _matrix(up) if weight_dtype is None else _matrix(up).value(torch.float64)
            error = (x @ widened.T - up(x)).abs().max()
            assert (error > 1e-3) == (weight_dtype == "fp8" and tokens > 16)


@pytest.mark.journey
def test_a_batch_invariant_engine_gives_the_same_bits_in_any_company() -> None:
    config = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=64, init_method_std=0.3)

    def build(max_tokens: int, weight_dtype: Any) -> DynamicInferenceEngine:
        backend = choose_backend(batch_invariant=True)
        model = GPTModel(config, ProcessGroups.single(), attention_core=PagedAttention(), backend=backend, dtype=torch.bfloat16)
        sizes = InferenceConfig(
            max_sequence_length=64, num_blocks=40, block_size_tokens=8, max_requests=5, max_tokens=max_tokens, weight_dtype=weight_dtype
        )
        return DynamicInferenceEngine(model, DynamicInferenceContext.for_model(model, sizes))

    engine = build(64, "fp8_weight_only")
    alone = [engine.generate([prompt], SCORED)[0] for prompt in PROMPTS]
    together = build(9, "fp8_weight_only").generate(PROMPTS, SCORED)
    for one, other in zip(alone, together, strict=True):
        assert one.generated_tokens == other.generated_tokens and one.generated_log_probs == other.generated_log_probs
    with pytest.raises(ValueError, match='weight_dtype="fp8" rounds the activations of large steps only'):
        build(64, "fp8")


def test_proposals_are_verified_by_the_rounded_model(make_engine: Make, make_model: Make) -> None:
    model = make_model()
    sizes = InferenceConfig(max_sequence_length=96, num_blocks=64, block_size_tokens=8, max_requests=8, weight_dtype="fp8_weight_only")
    execution = ExecutionConfig(speculation=NgramSpeculation())
    engine = DynamicInferenceEngine(model, DynamicInferenceContext.for_model(model, sizes), execution=execution)
    greedy = SamplingParams(temperature=0, num_tokens_to_generate=20)
    expected = make_engine(rounded_model(make_model)).generate(PROMPTS, greedy)
    assert [r.generated_tokens for r in engine.generate(PROMPTS, greedy)] == [r.generated_tokens for r in expected]


# -- new weights -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_a_load_in_parts_gives_what_a_new_engine_rounds(make_engine: Make, make_model: Make, seed: int) -> None:
    rng = random.Random(seed)
    engine = make_engine(make_model(seed=0), weight_dtype="fp8")
    parameters = fp8_parameters(engine.model)
    addresses = [memory.data_ptr() for parameter, fp8 in parameters.items() for memory in (parameter, fp8.inverse_O1)]
    chunks: list[Any] = []
    for name, tensor in copies(make_model(seed=1)).items():
        cut = rng.randrange(1, len(tensor))
        zeros = (0,) * (tensor.dim() - 1)
        chunks += [(name, WeightSlice(tensor=tensor[at], offsets=(at.start, *zeros))) for at in (slice(0, cut), slice(cut, len(tensor)))]
    rng.shuffle(chunks)
    engine.weights = type(engine.weights)(engine.model, bucket_bytes=rng.choice([1, 5000, 2**30]))
    engine.load_weights(iter(chunks))
    assert addresses == [memory.data_ptr() for parameter, fp8 in parameters.items() for memory in (parameter, fp8.inverse_O1)]
    assert results(engine) == results(make_engine(make_model(seed=1), weight_dtype="fp8"))


def test_a_load_that_fails_is_refused_by_name_and_can_be_repeated(make_engine: Make, make_model: Make) -> None:
    engine, new = make_engine(make_model(seed=0), weight_dtype="fp8_weight_only"), copies(make_model(seed=1))
    expected, name = results(engine), "layers.0.mlp.up.weight"
    with pytest.raises(WeightLoadError, match=f"1 parameters did not come, among them .*{name}"):
        engine.load_weights((one, tensor) for one, tensor in new.items() if one != name)
    with pytest.raises(WeightLoadError, match=f"{name} has dtype torch.float8_e4m3fn"):
        engine.load_weights({**new, name: new[name].to(torch.float8_e4m3fn)}.items())
    assert results(engine) == expected, "nothing was written"
    engine.weights = type(engine.weights)(engine.model, bucket_bytes=1)
    with pytest.raises(WeightLoadError):
        engine.load_weights((one, tensor) for one, tensor in new.items() if one != name)
    with pytest.raises(IncompleteWeightsError):
        results(engine)
    engine.load_weights(new.items())
    assert results(engine) == results(make_engine(make_model(seed=1), weight_dtype="fp8_weight_only"))


# -- layouts and families ----------------------------------------------------------------------------------------------


def check_split() -> None:
    config = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2, vocab_size=64, init_method_std=0.3)
    sizes = InferenceConfig(max_sequence_length=64, num_blocks=40, block_size_tokens=8, max_requests=8, weight_dtype="fp8_weight_only")
    groups = ProcessGroups.build(ParallelPlan(tp=2, sequence_parallel=False))
    engines = [
        DynamicInferenceEngine(model, DynamicInferenceContext.for_model(model, sizes))
        for layout in (groups, ProcessGroups.single())
        for model in [GPTModel(config, layout, attention_core=PagedAttention(), dtype=torch.float64, seed=0)]
    ]
    for part, whole in zip(*(engine.generate(PROMPTS, SCORED) for engine in engines), strict=True):
        assert part.generated_tokens == whole.generated_tokens
        # Scales of a rank's columns round values near zero otherwise.
        torch.testing.assert_close(part.generated_log_probs, whole.generated_log_probs, rtol=1e-2, atol=1e-2)
    single = ProcessGroups.single()
    new = [(shard.name, shard.parameter.detach()) for shard in named_shards(GPTModel(config, single, dtype=torch.float64, seed=1))]
    for engine in engines:
        engine.load_weights(new)
    for part, whole in zip(*(engine.generate(PROMPTS, SCORED) for engine in engines), strict=True):
        assert part.generated_tokens == whole.generated_tokens


@pytest.mark.journey
@pytest.mark.world(2)
def test_ranks_of_a_split_model_round_their_parts(world: Callable[..., Any]) -> None:
    world(check_split)


def model_of(backend: Any = None, **fields: Any) -> GPTModel:
    config = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=64, **fields)
    return GPTModel(config, ProcessGroups.single(), attention_core=PagedAttention(), backend=backend)


SIZES = InferenceConfig(num_blocks=8, block_size_tokens=8, max_sequence_length=32, max_requests=2, weight_dtype="fp8")


def test_hybrid_models_keep_their_projections_in_fp8() -> None:
    delta = GatedDeltaNetConfig(key_head_dim=16, value_head_dim=16, num_key_heads=2, num_value_heads=2)
    model = model_of(hybrid_layer_pattern="G*", delta_net=delta)
    engine = DynamicInferenceEngine(model, DynamicInferenceContext.for_model(model, SIZES))
    assert engine.generate([[1, 2, 3]], SamplingParams(num_tokens_to_generate=4))[0].num_generated == 4
    assert model.layers["0"].mixer.in_proj.weight.dtype == torch.float8_e4m3fn


def test_what_has_no_fp8_form_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="weight_dtype='fp4' is unknown"):
        InferenceConfig(weight_dtype="fp4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match='weight_dtype="fp8" rounds the activations of large steps only'):
        DynamicInferenceContext.for_model(model_of(choose_backend(batch_invariant=True), latent_attention=LATENT), SIZES)
    model = model_of()
    model.layers["1"].mlp = torch.nn.Identity()
    with pytest.raises(ValueError, match="weight_dtype='fp8': layers.1.mlp is a Identity, whose weights have no fp8 form"):
        DynamicInferenceContext.for_model(model, SIZES)
    model = model_of()
    context = DynamicInferenceContext.for_model(model, SIZES)
    trained = model.layers["1"].mlp.up.weight
    trained.grad = torch.zeros_like(trained)
    with pytest.raises(ValueError, match=r"layers.1.mlp.up.weight, which is being trained: it has a gradient"):
        DynamicInferenceEngine(model, context)
    assert not fp8_parameters(model)
    trained.grad = None
    DynamicInferenceEngine(model, context)
    other = dataclasses.replace(SIZES, weight_dtype="fp8_weight_only")
    with pytest.raises(ValueError, match="is 'fp8' of another engine"):
        DynamicInferenceEngine(model, DynamicInferenceContext.for_model(model, other))


def test_a_refused_engine_leaves_weights_and_context_as_they_were(make_model: Make) -> None:
    model = make_model()
    sizes = InferenceConfig(num_blocks=16, block_size_tokens=8, max_sequence_length=64)
    plain = DynamicInferenceContext.for_model(model, sizes)
    rounds = DynamicInferenceContext.for_model(model, dataclasses.replace(sizes, weight_dtype="fp8_weight_only"))
    engine, before = DynamicInferenceEngine(model, plain), copies(model)
    wanted = engine.generate(PROMPTS[:1], SCORED)[0].generated_tokens
    for context in (plain, rounds):
        for execution, words in (
            (ExecutionConfig(use_graphs=True), "use_graphs=True: graphs need a GPU"),
            (ExecutionConfig(use_cuda_graphs_for_non_decode_steps=True), "use_cuda_graphs_for_non_decode_steps=True: graphs need a GPU"),
            (ExecutionConfig(speculation=MtpSpeculation()), "MtpSpeculation needs heads"),
            (ExecutionConfig(record_routing=True), "record_routing=True, and no layer of the model has experts"),
            (ExecutionConfig(expert_balancing=ExpertBalancing()), "no layer of the model has experts"),
        ):
            with pytest.raises(ValueError, match=words):
                DynamicInferenceEngine(model, context, execution=execution)
    assert not fp8_parameters(model) and all(torch.equal(tensor, before[name]) for name, tensor in copies(model).items())
    assert engine.generate(PROMPTS[:1], SCORED)[0].generated_tokens == wanted


def test_rounded_weights_are_not_served_as_if_they_were_not(make_model: Make) -> None:
    model = make_model()
    sizes = {"num_blocks": 16, "block_size_tokens": 8, "max_sequence_length": 64}
    rounds = DynamicInferenceContext.for_model(model, InferenceConfig(weight_dtype="fp8_weight_only", **sizes))
    DynamicInferenceEngine(model, rounds)
    with pytest.raises(ValueError, match=r"weight_dtype=None and layers.0.* is 'fp8_weight_only' of another engine; use that, or build"):
        DynamicInferenceEngine(model, DynamicInferenceContext.for_model(model, InferenceConfig(**sizes)))
    DynamicInferenceEngine(model, rounds)
