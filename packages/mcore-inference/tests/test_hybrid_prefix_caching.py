# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Shared beginnings of models with recurrent layers: snapshots of states save computation and change no token and no log-probability."""

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
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
    PagedAttention,
    SamplingParams,
    get_mamba_inference_state_config_from_model,
)
from mcore_parallel import ParallelPlan, ProcessGroups, named_shards
from mcore_parallel.models import GPTModel, TransformerConfig, hybrid_config
from mcore_parallel.nn import GatedDeltaNetConfig, MambaConfig

MAMBA = MambaConfig(state_dim=6, head_dim=8, num_groups=2, chunk_size=4)
DELTA = GatedDeltaNetConfig(num_key_heads=2, num_value_heads=4, key_head_dim=6, value_head_dim=5, chunk_size=4)
SYSTEM = list(range(10))
"""Two blocks of four and a half one."""
ONCE = SamplingParams(temperature=0.0, num_tokens_to_generate=1)
SETTINGS = [
    SamplingParams(temperature=0.0, num_tokens_to_generate=9, return_log_probs=True),
    SamplingParams(temperature=1.0, seed=1, num_tokens_to_generate=14, return_log_probs=True, frequency_penalty=0.5),
    SamplingParams(temperature=0.7, seed=2, num_tokens_to_generate=3, return_log_probs=True, skip_prompt_log_probs=False),
]


@functools.cache
def make_model(pattern: str = "M*M-", groups: ProcessGroups | None = None, dtype: torch.dtype = torch.float64, seed: int = 0) -> GPTModel:
    sizes = {"hidden_size": 16, "num_attention_heads": 4, "num_query_groups": 2, "vocab_size": 64, "init_method_std": 0.4}
    mixers = {"mamba": MAMBA if "M" in pattern else None, "delta_net": DELTA if "G" in pattern else None}
    config = hybrid_config(pattern, **mixers, **sizes)
    return GPTModel(config, groups or ProcessGroups.single(), attention_core=PagedAttention(), dtype=dtype, seed=seed).eval()


def build(
    model: GPTModel, shares: bool = True, *, snapshots: int | None = None, run_ahead: bool = False, **sizes: Any
) -> DynamicInferenceEngine:
    sizes = {"max_sequence_length": 96, "num_blocks": 64, "block_size_tokens": 4, "max_requests": 8, "max_tokens": 64} | sizes
    if snapshots is not None and shares:
        states = get_mamba_inference_state_config_from_model(model)
        assert states is not None
        sizes["prefix_caching_mamba_gb"] = snapshots * states.bytes_per_request / 2**30
    context = DynamicInferenceContext.for_model(model, InferenceConfig(enable_prefix_caching=shares, **sizes))
    return DynamicInferenceEngine(model, context, execution=ExecutionConfig(run_ahead=run_ahead))


def computed(engine: DynamicInferenceEngine, *prompts: Sequence[int], params: SamplingParams = ONCE) -> int:
    """Tokens that went through the model for these prompts."""
    before = engine.stats()["computed_tokens"]
    engine.generate(prompts, params)
    return int(engine.stats()["computed_tokens"] - before)


def num_snapshots(engine: DynamicInferenceEngine) -> int:
    return int(engine.stats()["state_snapshots"])


def check_equal(
    records: Sequence[DynamicInferenceRequestRecord], wanted: Sequence[DynamicInferenceRequestRecord], tolerance: float = 1e-9
) -> None:
    for one, other in zip(records, wanted, strict=True):
        assert one.generated_tokens == other.generated_tokens and one.finish_reason is other.finish_reason
        torch.testing.assert_close(one.generated_log_probs, other.generated_log_probs, rtol=tolerance, atol=tolerance)
        assert (one.prompt_log_probs is None) == (other.prompt_log_probs is None)
        if one.prompt_log_probs is not None:
            torch.testing.assert_close(one.prompt_log_probs, other.prompt_log_probs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("pattern", "run_ahead", "sizes"),
    [
        ("M*M-", False, {}),
        pytest.param("M*M-", True, {"num_blocks": 11, "max_tokens": 9}, marks=pytest.mark.journey),
        ("M*M-", True, {"snapshots": 2, "max_tokens": 9}),
        ("M*M-", False, {"block_size_tokens": 1, "num_blocks": 200}),
        ("G*-G", True, {"snapshots": 2}),
        pytest.param("G*-G", False, {"num_blocks": 11, "max_tokens": 9}, marks=pytest.mark.journey),
        pytest.param("MM", True, {"num_blocks": 11, "max_tokens": 9}, marks=pytest.mark.journey),
    ],
)
def test_tokens_and_log_probs_are_those_of_an_engine_that_shares_nothing(pattern: str, run_ahead: bool, sizes: dict[str, Any]) -> None:
    model, rng = make_model(pattern), random.Random(0)
    alone, engine = build(model, False, run_ahead=run_ahead, **sizes), build(model, run_ahead=run_ahead, **sizes)
    beginning = list(range(20))
    wanted, records = [], []
    for number in range(14):
        prompt = beginning[: rng.choice([3, 8, 12, 16, 20])] + [rng.randrange(64) for _ in range(rng.choice([0, 1, 4]))]
        # Some end early; ahead, they are computed once more in vain.
        params = replace(SETTINGS[number % 3], seed=number, stop_token_ids=range(0, 64, 16))
        wanted += alone.generate([prompt], params)
        engine.add_request(prompt, params, request_id=number)
        if rng.random() < 0.6:
            records += engine.step()
        if number == 9:
            engine.add_request(beginning, SETTINGS[1], request_id=99)
            records += [*engine.step(), *engine.step()]
            assert engine.abort(99) is not None
    while engine.has_unfinished_requests():
        records += engine.step()
    check_equal(sorted(records, key=lambda record: record.request_id), wanted)
    assert {record.finish_reason for record in records} == {FinishReason.STOP, FinishReason.LENGTH}
    stats = engine.stats()
    assert stats["prefix_cache_hits"] > 30 and alone.stats()["prefix_cache_queries"] == 0
    if "num_blocks" in sizes and sizes["num_blocks"] < 64:
        assert engine.num_preemptions and stats["evicted_blocks"]
    if "snapshots" in sizes:
        assert stats["evicted_snapshots"] and stats["state_snapshots"] == 2
    assert stats["used_blocks"] == 0 < stats["idle_blocks"]


def test_float32_draws_the_same_from_snapshots() -> None:
    model = make_model("M*M-", dtype=torch.float32)
    prompts = [[*SYSTEM, number, 7, 7] for number in range(5)]
    wanted = [record for prompt in prompts for record in build(model, False).generate([prompt], SETTINGS[0])]
    engine = build(model, max_tokens=9)
    check_equal([record for prompt in prompts for record in engine.generate([prompt], SETTINGS[0])], wanted, 1e-4)
    assert engine.stats()["prefix_cache_hits"] == 3 * 8


def test_a_second_request_computes_only_what_is_behind_the_last_full_block() -> None:
    engine = build(make_model(), max_tokens=9)
    prompt = list(range(30))
    assert computed(engine, prompt) == 30
    assert computed(engine, prompt) == 2
    # Its blocks end at 28; the next turn goes on there.
    assert computed(engine, [*prompt, 5, 6, 7, 8]) == 6
    assert computed(engine, [*prompt, 5, 6, 7, 8]) == 2
    # A prompt of whole blocks keeps its last one to compute.
    assert computed(engine, prompt[:28]) == 28, "of 24 tokens nobody kept the states"
    assert computed(engine, prompt[:28]) == 4
    stats = engine.stats()
    assert (stats["prefix_cache_hits"], stats["prefix_cache_queries"]) == (28 + 28 + 32 + 24, 30 + 30 + 34 + 34 + 28 + 28)


def test_the_second_request_of_a_system_prompt_keeps_its_states_for_all_others() -> None:
    engine = build(make_model())
    prompts = [[*SYSTEM, *[50 + number] * 7] for number in range(5)]
    # The first does not know what is shared; the second finds its blocks, and no states.
    assert [computed(engine, prompt) for prompt in prompts] == [17, 17, 9, 9, 9]
    record = engine.generate([[*SYSTEM, 33]], ONCE)[0]
    assert record.cached_prompt_tokens == 8


def test_a_conversation_computes_its_last_answer_and_keeps_one_snapshot_a_turn() -> None:
    engine, prompt = build(make_model()), list(range(30))
    for turn in range(3):
        (record,) = engine.generate([prompt], SETTINGS[0])
        assert num_snapshots(engine) == turn + 1
        assert record.cached_prompt_tokens == (0, 28, 40)[turn]
        prompt = [*prompt, *record.generated_tokens, 1, 2, 3]
    # Another continuation parts from the conversation behind 53 tokens.
    other = [*prompt[:53], 60, 61, 62, 63, 60]
    assert [computed(engine, other), computed(engine, [*prompt[:53], 50, 51, 52, 53, 50])] == [58 - 52, 58 - 52]


def test_requests_that_arrive_together_wait_for_the_one_that_keeps_the_states() -> None:
    prompts = [[*SYSTEM, *[50 + number] * 7] for number in range(5)]
    engine = build(make_model())
    # The second waits for blocks of the first, the others for the states of the second.
    assert computed(engine, *prompts) == 17 + 17 + 3 * 9
    # Answers to one prompt are computed once.
    assert computed(build(make_model()), *[prompts[0]] * 5) == 17 + 4
    # So they are where the first one takes several steps.
    assert computed(build(make_model(), max_tokens=9, max_requests=5), *[prompts[0]] * 5) == 17 + 4


def test_nobody_waits_for_prompts_that_are_computed_again_and_keep_no_states() -> None:
    engine, prompt = build(make_model(), max_tokens=20), list(range(20))
    # Its blocks are known, and the only snapshot is behind all of them.
    engine.generate([prompt], ONCE)
    scored = SamplingParams(num_tokens_to_generate=0, return_log_probs=True, skip_prompt_log_probs=False)
    engine.add_request([50 + number % 3 for number in range(15)], scored)
    # Of each of these five tokens are computed in one step and the others in the next, so that one of them is always at the beginning.
    engine.add_request(prompt, scored)
    engine.step()
    waiting, records = engine.add_request([*prompt[:8], *[60] * 5], ONCE), list[DynamicInferenceRequestRecord]()
    for _ in range(8):
        engine.add_request(prompt, scored)
        records += engine.step()
    assert waiting in [record.request_id for record in records]


def test_the_snapshot_used_longest_ago_gives_way_and_one_goes_with_its_block() -> None:
    engine = build(make_model(), snapshots=2, num_blocks=20)
    first, second, third = ([number] * 9 for number in range(3))
    assert [computed(engine, prompt) for prompt in (first, second, first, third)] == [9, 9, 1, 9]
    assert num_snapshots(engine) == 2 and engine.stats()["evicted_snapshots"] == 1
    # The second one's blocks are there, and nothing to go on from; its new snapshot takes the place of the first one's.
    assert [computed(engine, prompt) for prompt in (second, third, first)] == [9, 1, 9]
    # All blocks get other tokens.
    computed(engine, [9] * 80)
    assert engine.stats()["evicted_blocks"] >= 6 and num_snapshots(engine) == 1
    assert computed(engine, third) == 9


def test_a_preempted_request_goes_on_from_its_prompt() -> None:
    model, prompts = make_model("G*-G"), [[number, *range(20, 35)] for number in range(3)]
    # 16 tokens and 12 more are 7 blocks: two requests fit when they end, three when they begin.
    engines = [build(model, shares, num_blocks=18, run_ahead=True, watermark=0.0) for shares in (False, True)]
    params = replace(SETTINGS[0], num_tokens_to_generate=12)
    alone, shared = (engine.generate(prompts, params) for engine in engines)
    check_equal(shared, alone)
    assert all(engine.num_preemptions for engine in engines)
    assert engines[1].stats()["prefix_cache_hits"] >= 12
    assert engines[1].stats()["computed_tokens"] < engines[0].stats()["computed_tokens"]


@pytest.mark.parametrize("change", ["recompute", "keep", "in place"])
def test_new_weights_find_no_old_states(change: Any) -> None:
    old, new = make_model(seed=1), make_model(seed=2)
    served = GPTModel(old.config, ProcessGroups.single(), attention_core=PagedAttention(), dtype=torch.float64, seed=1).eval()
    prompt = [*SYSTEM, 1, 2, 3]
    wanted = build(new, False).generate([prompt], SETTINGS[0])
    engine = build(served)
    assert [computed(engine, each) for each in (prompt, prompt)] == [13, 1]
    running = engine.add_request([*prompt, *range(40, 60)], replace(SETTINGS[0], num_tokens_to_generate=30))
    engine.step()
    assert num_snapshots(engine) == 2
    if change == "in place":
        served.load_state_dict(new.state_dict())
        engine.reset_prefix_cache()
    else:
        engine.load_weights([(shard.name, shard.parameter.detach().clone()) for shard in named_shards(new)], in_flight=change)
    assert num_snapshots(engine) == 0
    if change == "keep":
        # What it computes now is behind states of the old weights.
        engine.step()
        assert num_snapshots(engine) == 0
    engine.abort(running)
    hits = engine.stats()["prefix_cache_hits"]
    check_equal(engine.generate([prompt], SETTINGS[0]), wanted)
    assert engine.stats()["prefix_cache_hits"] == hits and num_snapshots(engine) == 1
    check_equal(engine.generate([prompt], SETTINGS[0]), wanted)
    assert engine.stats()["prefix_cache_hits"] == hits + 12


def test_a_suspended_engine_forgets_its_snapshots() -> None:
    engine = build(make_model())
    wanted = engine.generate([SYSTEM], SETTINGS[0])
    assert num_snapshots(engine) == 1
    engine.suspend()
    assert num_snapshots(engine) == 0
    engine.resume()
    assert engine.context.states is not None
    for state in engine.context.states.layers.values():
        state.memory.fill_(torch.nan)
        state.conv.fill_(torch.nan)
    check_equal(engine.generate([SYSTEM], SETTINGS[0]), wanted)
    check_equal(engine.generate([SYSTEM], SETTINGS[0]), wanted)
    assert engine.stats()["prefix_cache_hits"] == 8
    engine.context.reset()
    assert num_snapshots(engine) == 0


def test_snapshots_are_a_part_of_the_memory() -> None:
    model = make_model()
    states = get_mamba_inference_state_config_from_model(model)
    assert states is not None
    per_state = states.bytes_per_request

    def held(bytes_: int, **asked: Any) -> tuple[int, int, int]:
        asked = {"max_sequence_length": 40, "block_size_tokens": 4, "buffer_size_gb": bytes_ / 2**30} | asked
        made = DynamicInferenceContext.for_model(model, InferenceConfig(enable_prefix_caching=True, **asked))
        assert made.states is not None and made.states.num_bytes + made.cache.num_bytes <= bytes_
        num_snapshots = made.allocator.snapshots.total_count
        assert made.states.num_bytes == (made.max_requests + num_snapshots) * per_state
        return made.max_requests, num_snapshots, made.allocator.usable_count

    block = build(model).context.cache.num_bytes // 65
    per_request = per_state + 10 * block
    assert held(3 * per_request + block + 5 * per_state, prefix_caching_mamba_gb=5.5 * per_state / 2**30) == (3, 5, 30)
    # By default one for each request, if that is no more than a quarter of all.
    assert held(12 * per_state, max_requests=2) == (2, 2, 20)
    assert held(12 * per_state, max_requests=4) == (4, 3, 40)
    assert held(4 * per_state, max_requests=2, max_sequence_length=4) == (2, 1, 2)
    assert held(per_state + per_request + block) == (1, 1, 10), "at least one"
    num_requests, num_snapshots, num_blocks = held(100 * per_request)
    assert num_requests == (100 * per_request - num_snapshots * per_state - block) // per_request and num_blocks == 10 * num_requests
    assert num_snapshots == 100 * per_request // 4 // per_state < num_requests
    # Long sequences take so much that snapshots for all requests are less.
    num_requests, num_snapshots, _ = held(100 * per_request, max_sequence_length=400)
    assert num_requests >= num_snapshots == (100 * per_request - block) // (2 * per_state + 100 * block)
    assert build(model, max_requests=3).context.allocator.snapshots.total_count == 3
    assert build(model, False).context.allocator.snapshots.total_count == 0
    with pytest.raises(ValueError, match=r"max_requests=2 and of 7 snapshots \(prefix_caching_mamba_gb\) take"):
        held(8 * per_state, max_requests=2, prefix_caching_mamba_gb=7 * per_state / 2**30)
    with pytest.raises(ValueError, match=r"prefix_caching_mamba_gb=.* one snapshot of the recurrent states takes .*; raise it"):
        held(8 * per_state, prefix_caching_mamba_gb=(per_state - 1) / 2**30)


def test_what_snapshots_cannot_have_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="enable_chunked_prefill=False and enable_prefix_caching=True exclude each other"):
        build(make_model(), enable_chunked_prefill=False)
    for wanted in (False, None):
        sizes = InferenceConfig(prefix_caching_mamba_gb=1, enable_prefix_caching=wanted)
        with pytest.raises(ValueError, match=r"prefix_caching_mamba_gb=1 is memory of .*; set enable_prefix_caching=True"):
            DynamicInferenceContext.for_model(make_model(), sizes)
    with pytest.raises(ValueError, match="prefix_caching_mamba_gb=0 must be a number"):
        InferenceConfig(prefix_caching_mamba_gb=0, enable_prefix_caching=True)
    attention = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, vocab_size=8)
    config = InferenceConfig(num_blocks=8, block_size_tokens=4, prefix_caching_mamba_gb=1.0, enable_prefix_caching=True)
    with pytest.raises(ValueError, match=r"prefix_caching_mamba_gb=1\.0 .* no layer keeps one"):
        DynamicInferenceContext(attention, config)
    engine = build(make_model())
    engine.generate([SYSTEM], ONCE)
    with pytest.raises(ValueError, match="no states are kept behind block 0"):
        engine.context.add_request(7, [0])
    assert engine.stats()["used_blocks"] == engine.stats()["active_requests"] == 0


def check_split() -> list[list[int]]:
    split = build(make_model(groups=ProcessGroups.build(ParallelPlan(tp=2, sequence_parallel=False))), max_tokens=9, snapshots=4)
    whole = build(make_model(), False)
    records = []
    for number in range(4):
        prompts = [[*SYSTEM, *[50 + number] * 3], [number] * 9]
        mine = split.generate(prompts, SETTINGS[0])
        check_equal(mine, whole.generate(prompts, SETTINGS[0]))
        records += [record.generated_tokens for record in mine]
    assert split.stats()["prefix_cache_hits"] and split.stats()["evicted_snapshots"]
    return records


@pytest.mark.journey
@pytest.mark.world(2, shared=True)
def test_two_tensor_parallel_ranks_keep_the_same_snapshots(world: Callable[..., Any]) -> None:
    one, two = world(check_split)
    assert one == two
