# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The engine over models with recurrent layers, against the same models run over whole sequences."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mcore_inference import (
    DynamicInferenceContext,
    DynamicInferenceEngine,
    DynamicInferenceRequestRecord,
    ExecutionConfig,
    FinishReason,
    InferenceConfig,
    MambaInferenceStateConfig,
    NgramSpeculation,
    PagedAttention,
    SamplingParams,
    get_mamba_inference_state_config_from_model,
)
from mcore_parallel import ParallelPlan, ProcessGroups, named_shards
from mcore_parallel.models import GPTModel, hybrid_config
from mcore_parallel.nn import GatedDeltaNetConfig, MambaConfig, Step
from tests.support.journeys import journeys_among

MAMBA = MambaConfig(state_dim=6, head_dim=8, num_groups=2, chunk_size=4)
DELTA = GatedDeltaNetConfig(num_key_heads=2, num_value_heads=4, key_head_dim=6, value_head_dim=5, chunk_size=4)
PATTERNS = ("M*M-", "G*-G", "MM")
PROMPTS = [[1, 2, 3], [7], list(range(20)), [9, 9], [5] * 11, [30, 31]]
GREEDY = SamplingParams(temperature=0, num_tokens_to_generate=8, return_log_probs=True, skip_prompt_log_probs=False)


@functools.cache
def make_model(pattern: str, groups: ProcessGroups | None = None, dtype: torch.dtype = torch.float64, seed: int = 0) -> GPTModel:
    sizes = {"hidden_size": 16, "num_attention_heads": 4, "num_query_groups": 2, "vocab_size": 64, "init_method_std": 0.4}
    mixers = {"mamba": MAMBA if "M" in pattern else None, "delta_net": DELTA if "G" in pattern else None}
    config = hybrid_config(pattern, **mixers, **sizes)
    return GPTModel(config, groups or ProcessGroups.single(), attention_core=PagedAttention(), dtype=dtype, seed=seed).eval()


def make_engine(model: GPTModel, *, run_ahead: bool | None = False, **sizes: Any) -> DynamicInferenceEngine:
    sizes = {"max_sequence_length": 40, "num_blocks": 40, "block_size_tokens": 4, "max_requests": 4, "max_tokens": 64} | sizes
    context = DynamicInferenceContext.for_model(model, InferenceConfig(**sizes))
    return DynamicInferenceEngine(model, context, execution=ExecutionConfig(run_ahead=run_ahead))


@functools.cache
def naive(model: GPTModel, prompt: tuple[int, ...], count: int = 8) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens behind a prompt, and the log-probabilities [T - 1] of all tokens but the first, each from a whole sequence."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            logits = model(torch.tensor(tokens), Step.causal(1, len(tokens)))[0].logits()
            tokens.append(int(logits[-1].argmax()))
        logits = model(torch.tensor(tokens), Step.causal(1, len(tokens)))[0].logits()
    return tokens[len(prompt) :], logits.double().log_softmax(-1)[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


def check(model: GPTModel, record: DynamicInferenceRequestRecord, prompt: list[int]) -> None:
    """Greedy tokens and all log-probabilities are those of whole sequences."""
    tokens, log_probs = naive(model, tuple(prompt))
    assert record.generated_tokens == tokens
    found = torch.tensor([*(record.prompt_log_probs or []), *record.generated_log_probs], dtype=torch.float64)
    torch.testing.assert_close(found, log_probs, rtol=1e-5, atol=1e-5)


def is_empty(engine: DynamicInferenceEngine) -> bool:
    stats = engine.stats()
    return stats["used_blocks"] == stats["active_requests"] == 0


@pytest.mark.parametrize("pattern", PATTERNS)
def test_one_request_equals_whole_sequences(pattern: str) -> None:
    model = make_model(pattern)
    check(model, make_engine(model).generate([PROMPTS[2]], GREEDY)[0], PROMPTS[2])


@pytest.mark.parametrize(("max_tokens", "run_ahead"), [(4, True), (5, False), (7, True), (64, False)])
@pytest.mark.parametrize("pattern", PATTERNS[:2])
def test_many_requests_in_chunks_of_any_size_equal_whole_sequences(pattern: str, max_tokens: int, run_ahead: bool) -> None:
    model = make_model(pattern)
    engine = make_engine(model, max_tokens=max_tokens, run_ahead=run_ahead)
    # More requests than slots: those of ended requests are used again.
    for prompt, record in zip(PROMPTS, engine.generate(PROMPTS, GREEDY), strict=True):
        check(model, record, prompt)
    assert is_empty(engine)


@pytest.mark.parametrize("pattern", PATTERNS[:2])
def test_preempted_requests_are_computed_again_from_nothing(pattern: str) -> None:
    model = make_model(pattern)
    engine = make_engine(model, num_blocks=9, max_tokens=8, run_ahead=True)
    for prompt, record in zip(PROMPTS, engine.generate(PROMPTS, GREEDY), strict=True):
        check(model, record, prompt)
    assert engine.num_preemptions > 0 and is_empty(engine)


def test_an_aborted_request_frees_its_slot_for_the_next() -> None:
    model = make_model("M*M-")
    engine = make_engine(model, max_requests=1, max_tokens=6)
    for steps in (1, 2, 5):
        number = engine.add_request(PROMPTS[2], GREEDY)
        for _ in range(steps):
            engine.step()
        record = engine.abort(number)
        assert record is not None and record.finish_reason == FinishReason.ABORT and is_empty(engine)
    check(model, engine.generate([PROMPTS[0]], GREEDY)[0], PROMPTS[0])


def test_a_failed_step_ends_its_requests_and_leaves_clean_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("G*-G")
    engine = make_engine(model)
    engine.add_request(PROMPTS[0], GREEDY)
    engine.step()
    engine.step()

    def fail(*_: Any) -> None:
        raise RuntimeError("of the last layer")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="of the last layer"):
        # Layers before it have written their states.
        patch.setattr(model.layers["3"].mixer, "_scan_step", fail)
        engine.step()
    assert [record.finish_reason for record in engine.take_finished()] == [FinishReason.ERROR] and is_empty(engine)
    check(model, engine.generate([PROMPTS[3]], GREEDY)[0], PROMPTS[3])


def test_states_are_dropped_by_suspend_and_by_new_weights_and_kept_on_wish() -> None:
    model = make_model("M*M-", seed=1)
    engine = make_engine(model)
    assert engine.context.states is not None
    number = engine.add_request(PROMPTS[0], GREEDY)
    for _ in range(3):
        engine.step()
    engine.suspend()
    assert all(state.memory.untyped_storage().size() == 0 for state in engine.context.states.layers.values())
    engine.resume()
    for state in engine.context.states.layers.values():
        state.memory.fill_(torch.nan)
        state.conv.fill_(torch.nan)
    records = []
    while engine.has_unfinished_requests():
        records += engine.step()
    assert records[0].request_id == number and len(records[0].requests) == 2
    check(model, records[0], PROMPTS[0])
    # Equal weights: kept states give the same tokens.
    for policy in ("keep", "recompute"):
        engine.add_request(PROMPTS[0], GREEDY)
        engine.step()
        engine.step()
        engine.load_weights([(shard.name, shard.parameter.detach().clone()) for shard in named_shards(model)], in_flight=policy)
        records = []
        while engine.has_unfinished_requests():
            records += engine.step()
        check(model, records[0], PROMPTS[0])


def test_draws_do_not_depend_on_the_company_in_float32() -> None:
    model = make_model("M*M-", dtype=torch.float32)
    params = [SamplingParams(temperature=1.0, seed=number, num_tokens_to_generate=8) for number in range(len(PROMPTS))]
    together = make_engine(model, max_tokens=7).generate(PROMPTS, params)
    for prompt, setting, record in zip(PROMPTS, params, together, strict=True):
        assert make_engine(model).generate([prompt], setting)[0].generated_tokens == record.generated_tokens


def test_only_attention_has_pages_and_states_count_as_memory() -> None:
    model = make_model("M*M-")
    sizes = get_mamba_inference_state_config_from_model(model)
    # Of each layer 3 tokens of 2 groups with 16 values and twice 6 shared channels, and 4 heads of 8 times 6; in float64.
    assert sizes == MambaInferenceStateConfig(
        layer_type_list="M*M-",
        mamba_conv_states_shape=(3, 2, 28),
        mamba_ssm_states_shape=(4, 8, 6),
        mamba_conv_states_dtype=torch.float64,
        mamba_ssm_states_dtype=torch.float64,
    )
    types = {"mamba_conv_states_dtype": torch.float64, "mamba_ssm_states_dtype": torch.float64}
    assert sizes == MambaInferenceStateConfig("M*M-", (3, 2, 28), (4, 8, 6), **types)
    with pytest.raises(TypeError, match="positional"):
        MambaInferenceStateConfig("M*M-", (3, 2, 28), (4, 8, 6), torch.float64)  # type: ignore[misc]
    assert sizes.bytes_per_request == 2 * 8 * (3 * 2 * 28 + 4 * 8 * 6)
    context = make_engine(model, max_requests=3).context
    assert context.states is not None and context.states.num_bytes == 3 * sizes.bytes_per_request
    assert context.cache.pages.shape[0] == 1 and context.cache.layers == (1,)
    block = context.cache.num_bytes // context.allocator.total_count

    def held(bytes_: int, **asked: Any) -> tuple[int, int]:
        asked = {"max_sequence_length": 40, "block_size_tokens": 4, "buffer_size_gb": bytes_ / 2**30} | asked
        made = DynamicInferenceContext.for_model(model, InferenceConfig(**asked))
        assert made.states is not None and made.states.num_bytes + made.cache.num_bytes <= bytes_
        return made.max_requests, made.allocator.usable_count

    assert held(5 * sizes.bytes_per_request + 12 * block, max_requests=5) == (5, 11)
    # Without a number: as many as fit with ten blocks each.
    assert held(3 * (sizes.bytes_per_request + 10 * block) + block) == (3, 30)
    with pytest.raises(ValueError, match=r"recurrent states of max_requests=5 take .* lower max_requests or raise buffer_size_gb"):
        held(5 * sizes.bytes_per_request + block, max_requests=5)


def test_what_states_exclude_is_refused_by_name() -> None:
    model = make_model("M*M-")
    context = DynamicInferenceContext.for_model(model, InferenceConfig(num_blocks=8, block_size_tokens=4, max_sequence_length=16))
    with pytest.raises(ValueError, match="speculation takes rejected tokens back, which recurrent states cannot"):
        DynamicInferenceEngine(model, context, execution=ExecutionConfig(speculation=NgramSpeculation()))
    with pytest.raises(ValueError, match="use_graphs=True: graphs need a GPU, .* and heads, latents and states of sizes that have kernels"):
        DynamicInferenceEngine(model, context, execution=ExecutionConfig(use_graphs=True))
    bare = DynamicInferenceContext(model.config, InferenceConfig(num_blocks=8, block_size_tokens=4), dtype=torch.float64)
    with pytest.raises(ValueError, match="states of mamba_inference_state_config=None and the model keeps MambaInferenceStateConfig"):
        DynamicInferenceEngine(model, bare)


@pytest.mark.parametrize(
    "arguments",
    [(["*", "-"], (3, 1, 8), (2, 4, 4)), (["M", "?"], (3, 1, 8), (2, 4, 4)), (["M"], (3, -1, 8), (2, 4, 4)), (["M"], (3, 1, 8), (0, 4, 4))],
)
def test_sizes_of_states_that_say_nothing_are_refused(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match=r"layer_type_list|layer 1|mamba_conv_states_shape|mamba_ssm_states_shape"):
        layers, conv, memory = arguments
        MambaInferenceStateConfig(layer_type_list=layers, mamba_conv_states_shape=conv, mamba_ssm_states_shape=memory)


def test_a_model_of_attention_keeps_no_states() -> None:
    model = make_model("*-")
    assert get_mamba_inference_state_config_from_model(model) is None and make_engine(model).context.states is None


def check_split(pattern: str) -> list[list[int]]:
    split = make_engine(make_model(pattern, ProcessGroups.build(ParallelPlan(tp=2, sequence_parallel=False))), max_tokens=7)
    whole = make_engine(make_model(pattern), max_tokens=7)
    assert split.context.states is not None and whole.context.states is not None
    assert split.context.states.num_bytes * 2 == whole.context.states.num_bytes
    records = split.generate(PROMPTS, GREEDY)
    for prompt, record in zip(PROMPTS, records, strict=True):
        check(make_model(pattern), record, prompt)
    return [record.generated_tokens for record in records]


@pytest.mark.world(2, shared=True)
@pytest.mark.parametrize("pattern", PATTERNS[:2])
def test_two_tensor_parallel_ranks_serve_the_tokens_of_one(world: Callable[..., Any], pattern: str) -> None:
    one, two = world(check_split, pattern=pattern)
    assert one == two


def staged(**plan: int) -> ProcessGroups:
    return ProcessGroups.build(ParallelPlan(**plan, sequence_parallel=False))


def check_stages(pattern: str, plan: dict[str, int], run_ahead: bool | None, sizes: dict[str, Any]) -> tuple[list[list[int]], int]:
    """What one rank draws for requests that come, are aborted, and wait out a suspension."""
    model, whole = make_model(pattern, staged(**plan)), make_model(pattern)
    engine = make_engine(model, run_ahead=run_ahead, max_tokens=7, **sizes)
    # A stage keeps the states of its own layers, and pages of its own layers of attention.
    symbols = pattern.replace("|", "")[model.stage_layers.start : model.stage_layers.stop]
    recurrent = [number for number, symbol in enumerate(symbols) if symbol in "MG"]
    assert ([] if engine.context.states is None else list(engine.context.states.layers)) == recurrent
    assert engine.context.states is None or engine.context.cache.pages.shape[0] == max(1, symbols.count("*"))
    for prompt, record in zip(PROMPTS, engine.generate(PROMPTS, GREEDY), strict=True):
        check(whole, record, prompt)
    # A request that is gone while its step is under way leaves a slot that the next one begins with zeros.
    numbers = [engine.add_request(prompt, GREEDY) for prompt in PROMPTS[:4]]
    for _ in range(4):
        engine.step()
    assert engine.abort(numbers[2]) is not None
    wanted = {number: prompt for number, prompt in zip(numbers, PROMPTS, strict=False) if number != numbers[2]}
    wanted[engine.add_request(PROMPTS[4], GREEDY)] = PROMPTS[4]
    ended = engine.step()
    engine.suspend()
    engine.resume()
    while engine.has_unfinished_requests():
        ended += engine.step()
    assert {record.request_id for record in ended} == set(wanted) and is_empty(engine)
    for record in ended:
        check(whole, record, wanted[record.request_id])
    sampled = [SamplingParams(seed=number, num_tokens_to_generate=8) for number in range(len(PROMPTS))]
    theirs = [record.generated_tokens for record in make_engine(whole).generate(PROMPTS, sampled)]
    assert [record.generated_tokens for record in engine.generate(PROMPTS, sampled)] == theirs
    return theirs, engine.num_preemptions


STAGES = {
    "no attention behind": ("M*M-", {"pp": 2}, None, {}),
    "one at a time": ("G*-G", {"pp": 2}, False, {}),
    "no states behind": ("M-|*-", {"pp": 2}, None, {}),
    "unequal": ("G|*-G*G", {"pp": 2}, None, {}),
    "no attention": ("MM", {"pp": 2}, None, {}),
    "preemption": ("M*M-", {"pp": 2}, None, {"num_blocks": 9}),
}


@pytest.mark.world(2, shared=True)
@pytest.mark.parametrize("stages", journeys_among(STAGES, "no attention behind", "no states behind", "unequal", "preemption"))
def test_two_stages_serve_the_tokens_of_one(world: Callable[..., Any], stages: str) -> None:
    one, two = world(functools.partial(check_stages, *STAGES[stages]))
    assert one == two and (one[1] > 0 or stages != "preemption")


@pytest.mark.journey
@pytest.mark.world(4, shared=True)
def test_two_stages_of_two_tp_ranks_do_so_too(world: Callable[..., Any]) -> None:
    ranks = world(functools.partial(check_stages, "M*M-", {"tp": 2, "pp": 2}, None, {}))
    assert ranks == ranks[:1] * 4


def check_scaled_stages() -> None:
    split, whole = (make_engine(make_model("M-|*-", groups), kv_cache_dtype="fp8") for groups in (staged(pp=2), None))
    theirs = [record.generated_tokens for record in whole.generate(PROMPTS, GREEDY)]
    assert [record.generated_tokens for record in split.generate(PROMPTS, GREEDY)] == theirs


@pytest.mark.world(2, shared=True)
def test_a_stage_with_attention_keeps_it_in_fp8_beside_one_without(world: Callable[..., Any]) -> None:
    world(check_scaled_stages)


def check_refusals() -> None:
    """On both stages alike, whichever holds the layer: one that went on would wait for the other."""
    model = make_model("*-|M-", staged(pp=2))
    with pytest.raises(ValueError, match="enable_prefix_caching=True and pp=2 exclude each other"):
        make_engine(model, enable_prefix_caching=True)
    engine = make_engine(model)
    with pytest.raises(ValueError, match="speculation takes rejected tokens back, which recurrent states cannot"):
        DynamicInferenceEngine(model, engine.context, execution=ExecutionConfig(speculation=NgramSpeculation()))
    # Equal beginnings are computed each for itself on both.
    for record in engine.generate([PROMPTS[2], PROMPTS[2]], GREEDY):
        check(make_model("*-|M-"), record, PROMPTS[2])
    assert engine.stats()["prefix_cache_queries"] == 0
    with pytest.raises(ValueError, match=r"hybrid_layer_pattern='M\*\|G-' holds both 'M' and 'G', whose states differ in shape"):
        make_engine(make_model("M*|G-", staged(pp=2)))
    with pytest.raises(ValueError, match="kv_cache_dtype='fp8': every layer keeps a state"):
        make_engine(make_model("MM", staged(pp=2)), kv_cache_dtype="fp8")


@pytest.mark.world(2, shared=True)
def test_all_stages_refuse_what_the_states_of_one_exclude(world: Callable[..., Any]) -> None:
    world(check_refusals)
