# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Shared beginnings save computation and change no token and no log-probability."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from mcore_inference import (
    DynamicInferenceContext,
    DynamicInferenceEngine,
    ExecutionConfig,
    InferenceConfig,
    NgramSpeculation,
    PagedAttention,
    SamplingParams,
)
from mcore_inference._capability import shares_prefixes
from mcore_parallel import ProcessGroups, named_shards
from mcore_parallel.models import GPTModel, TransformerConfig, TransformerLayer
from mcore_parallel.nn import GatedDeltaNet, GatedDeltaNetConfig

Make = Callable[..., Any]
PROMPT = list(range(20))
SETTINGS = [
    SamplingParams(temperature=0.0, num_tokens_to_generate=9, return_log_probs=True),
    SamplingParams(temperature=1.0, seed=1, num_tokens_to_generate=14, return_log_probs=True, frequency_penalty=0.5),
    SamplingParams(temperature=0.7, seed=2, num_tokens_to_generate=3, return_log_probs=True, skip_prompt_log_probs=False),
]


def build(model: GPTModel, shares: bool | None = None, execution: ExecutionConfig | None = None, **sizes: Any) -> DynamicInferenceEngine:
    sizes = {"max_sequence_length": 96, "num_blocks": 64, "block_size_tokens": 4, "max_requests": 8, "max_tokens": 64} | sizes
    context = DynamicInferenceContext.for_model(model, InferenceConfig(enable_prefix_caching=shares, **sizes))
    return DynamicInferenceEngine(model, context, execution=execution)


def hits(engine: DynamicInferenceEngine) -> tuple[float, float]:
    stats = engine.stats()
    return stats["prefix_cache_hits"], stats["prefix_cache_queries"]


def check_equal(records: list[Any], wanted: list[Any]) -> None:
    for one, other in zip(records, wanted, strict=True):
        assert one.generated_tokens == other.generated_tokens and one.finish_reason is other.finish_reason
        torch.testing.assert_close(one.generated_log_probs, other.generated_log_probs, rtol=1e-10, atol=1e-10)
        assert (one.prompt_log_probs is None) == (other.prompt_log_probs is None)
        if one.prompt_log_probs is not None:
            torch.testing.assert_close(one.prompt_log_probs, other.prompt_log_probs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "execution", [ExecutionConfig(run_ahead=False), ExecutionConfig(run_ahead=True), ExecutionConfig(speculation=NgramSpeculation())],
    ids=["in turn", "ahead", "speculation"],
)  # fmt: skip
@pytest.mark.parametrize("sizes", [{}, {"num_blocks": 14, "max_tokens": 9}, {"block_size_tokens": 1, "num_blocks": 200}])
def test_tokens_and_log_probs_are_those_of_an_engine_that_shares_nothing(
    make_model: Make, execution: ExecutionConfig, sizes: dict[str, Any]
) -> None:
    model, rng = make_model(), random.Random(0)
    alone, engine = build(model, False, execution, **sizes), build(model, True, execution, **sizes)
    wanted, records = [], []
    for number in range(14):
        prompt = PROMPT[: rng.choice([3, 8, 12, 16, 20])] + [rng.randrange(64) for _ in range(rng.choice([0, 1, 4]))]
        params = replace(SETTINGS[number % 3], seed=number)
        wanted += alone.generate([prompt], params)
        engine.add_request(prompt, params, request_id=number)
        if rng.random() < 0.6:
            records += engine.step()
        if number == 9:
            # Its blocks stay known, those of the tokens drawn too.
            engine.add_request(PROMPT, SETTINGS[1], request_id=99)
            records += [*engine.step(), *engine.step()]
            assert engine.abort(99) is not None
    while engine.has_unfinished_requests():
        records += engine.step()
    check_equal(sorted(records, key=lambda record: record.request_id), wanted)
    assert hits(alone) == (0, 0) and hits(engine)[0] > 40
    if "num_blocks" in sizes and sizes["num_blocks"] < 64:
        assert engine.num_preemptions and engine.stats()["evicted_blocks"]
    assert engine.context.allocator.total_used == 0
    assert engine.context.allocator.num_idle > 0 == alone.context.allocator.num_idle


def test_hits_are_counted_exactly(make_model: Make) -> None:
    engine = build(make_model())
    greedy = SETTINGS[0]
    (first,) = engine.generate([PROMPT], greedy)
    assert hits(engine) == (0, 20) and first.cached_prompt_tokens == 0
    # 28 tokens of 29 are in blocks: the last one drawn was never computed.
    turn = first.prompt_tokens + first.generated_tokens
    (second,) = engine.generate([[*turn, 5]], greedy)
    assert hits(engine) == (28, 50) and second.merge().cached_prompt_tokens == 28
    # One token of the second block differs, then one of the first.
    engine.generate([[*PROMPT[:5], 63, *PROMPT[6:]], [63, *PROMPT[1:]]], greedy)
    assert hits(engine) == (32, 90)
    # The last token of whole blocks is computed.
    engine.generate([PROMPT], greedy)
    assert hits(engine) == (48, 110)
    # Log-probabilities of a prompt need all of it; it is not looked up.
    (scored,) = engine.generate([PROMPT], SETTINGS[2])
    assert len(scored.prompt_log_probs or []) == 19 and hits(engine) == (48, 110)


def test_a_hit_computes_only_what_is_missing(make_model: Make) -> None:
    engine, lengths = build(make_model()), []
    host_step = engine.context.host_step
    engine.context.host_step = lambda work: lengths.append(sum(len(tokens) for _, tokens in work)) or host_step(work)  # type: ignore[method-assign]
    once = replace(SETTINGS[0], num_tokens_to_generate=1)
    engine.generate([PROMPT], once)
    engine.generate([[*PROMPT, 1, 2]] * 5, once)
    # Five blocks are shared, and the last two tokens are each request's own.
    assert lengths == [20, 10]


def test_n_completions_share_the_prompt_and_draw_by_seeds_of_their_own(make_model: Make) -> None:
    model = make_model()
    engine, alone = build(model), build(model, False)
    params = SamplingParams(n=4, seed=2**63 - 2, num_tokens_to_generate=8, return_log_probs=True)
    records = engine.generate([PROMPT, [7, 8]], [params, SETTINGS[0]])
    seeds = [2**63 - 2, 2**63 - 1, -(2**63), -(2**63) + 1]
    check_equal(records, alone.generate([PROMPT] * 4 + [[7, 8]], [*(replace(params, n=1, seed=seed) for seed in seeds), SETTINGS[0]]))
    assert len({tuple(record.generated_tokens) for record in records}) == 5
    assert hits(engine) == (3 * 16, 4 * 20 + 2)
    # Without a seed each has one by its number.
    free = engine.generate([PROMPT], SamplingParams(n=3, num_tokens_to_generate=8))
    assert len({tuple(record.generated_tokens) for record in free}) == 3
    refused = engine.generate([[64], [1]], SamplingParams(n=2, num_tokens_to_generate=1))
    assert [record.error is None for record in refused] == [False, False, True, True]
    with pytest.raises(ValueError, match=r"n=2 completions.*choices"):
        engine.add_request([1], SamplingParams(n=2))
    for bad in (0, True, 1.5, None, 2**16 + 1):
        with pytest.raises(ValueError, match="n="):
            SamplingParams(n=bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("change", ["load_weights", "in place"])
def test_new_weights_find_no_old_block(make_model: Make, change: str) -> None:
    old, new = make_model(seed=0), make_model(seed=1)
    wanted = build(new, False).generate([PROMPT], SETTINGS[0])
    engine = build(old)
    engine.generate([PROMPT], SETTINGS[0])
    running = engine.add_request([*PROMPT, 9], replace(SETTINGS[1], num_tokens_to_generate=30))
    engine.step()
    assert hits(engine)[0] == 20 and engine.context.allocator.num_idle
    if change == "load_weights":
        engine.load_weights((shard.name, shard.parameter.detach()) for shard in named_shards(new))
    else:
        old.load_state_dict(new.state_dict())
        engine.reset_prefix_cache()
    assert engine.context.allocator.num_idle == engine.context.allocator.total_used == 0
    engine.abort(running)
    check_equal(engine.generate([PROMPT], SETTINGS[0]), wanted)
    assert hits(engine)[0] == 20


def test_a_suspended_engine_forgets_and_one_that_is_reset_too(make_model: Make) -> None:
    engine = build(make_model())
    (wanted,) = engine.generate([PROMPT], SETTINGS[0])
    engine.suspend()
    engine.resume()
    check_equal(engine.generate([PROMPT], SETTINGS[0]), [wanted])
    assert hits(engine)[0] == 0 and engine.context.allocator.num_idle
    engine.context.reset()
    assert engine.context.allocator.num_idle == 0


def test_mixers_of_no_known_kind_are_refused_by_name(make_model: Make) -> None:
    delta_net = GatedDeltaNetConfig(key_head_dim=16, value_head_dim=16, num_key_heads=2, num_value_heads=2)
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=64, hybrid_layer_pattern="*G", delta_net=delta_net
    )
    hybrid = GPTModel(config, ProcessGroups.single(), attention_core=PagedAttention())
    assert shares_prefixes(hybrid, True) and not shares_prefixes(hybrid, None) and not shares_prefixes(hybrid, False)
    assert isinstance(hybrid.layers["1"], TransformerLayer)
    hybrid.layers["1"].mixer.__class__ = type("OtherNet", (GatedDeltaNet,), {})
    with pytest.raises(ValueError, match=r"enable_prefix_caching=True: layers\.1 is a OtherNet"):
        shares_prefixes(hybrid, True)
    assert not shares_prefixes(hybrid, None)
    assert shares_prefixes(make_model(), None) and not shares_prefixes(make_model(), False)
    with pytest.raises(ValueError, match="enable_prefix_caching=1 must be"):
        InferenceConfig(enable_prefix_caching=1)  # type: ignore[arg-type]
