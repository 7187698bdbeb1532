# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Several batches of requests in flight over the stages of a pipeline, against one engine over the whole model."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mcore_inference import (
    DynamicInferenceContext,
    DynamicInferenceEngine,
    DynamicInferenceRequestRecord,
    ExecutionConfig,
    InferenceConfig,
    PagedAttention,
    SamplingParams,
    StepFailedError,
)
from mcore_parallel import ParallelPlan, ProcessGroups, named_shards
from mcore_parallel.models import GPTModel, TransformerConfig
from tests.support.world import run

World = Callable[..., list[Any]]
CONFIG = TransformerConfig(num_layers=4, hidden_size=32, num_attention_heads=4, num_query_groups=2, vocab_size=64, init_method_std=0.3)
PROMPTS = [[1, 2, 3], [7], list(range(20)), [9, 9], [4] * 11, [30, 31]]


def make_engine(groups: ProcessGroups, seed: int = 0, *, run_ahead: bool | None = None, **sizes: Any) -> DynamicInferenceEngine:
    model = GPTModel(CONFIG, groups, attention_core=PagedAttention(), dtype=torch.float64, seed=seed).eval()
    sizes = {"max_sequence_length": 64, "num_blocks": 60, "block_size_tokens": 4, "max_tokens": 16, "max_requests": 6, **sizes}
    context = DynamicInferenceContext.for_model(model, InferenceConfig(**sizes))
    return DynamicInferenceEngine(model, context, execution=ExecutionConfig(run_ahead=run_ahead))


def staged(pp: int) -> ProcessGroups:
    return ProcessGroups.build(ParallelPlan(pp=pp))


def settings(count: int = len(PROMPTS), **more: Any) -> list[SamplingParams]:
    """Sampled and greedy, with penalties, log-probabilities and an end of their own."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.2, "presence_penalty": 0.5},
        {"temperature": 1.0, "skip_prompt_log_probs": False, "top_n_logprobs": 3},
        {"temperature": 1.0, "logit_bias": {5: 2.0}, "stop_token_ids": (7, 8, 9), "min_tokens": 3},
    ]
    common = {"num_tokens_to_generate": 8, "return_log_probs": True, **more}
    return [SamplingParams(seed=index, **{**common, **kinds[index % len(kinds)]}) for index in range(count)]


def num_in_flight(engine: DynamicInferenceEngine) -> int:
    """Steps that were launched, and whose results nobody has read."""
    return len(engine._loop._in_flight)


def weights_of(engine: DynamicInferenceEngine) -> list[tuple[str, torch.Tensor]]:
    return [(shard.name, shard.parameter.detach()) for shard in named_shards(engine.model)]


def until_two_are_in_flight(engine: DynamicInferenceEngine) -> list[DynamicInferenceRequestRecord]:
    """Steps until all requests have begun and one is in flight, while the next one would be launched."""
    ended = engine.step()
    while engine.num_waiting or not num_in_flight(engine):
        ended += engine.step()
    return ended


def to_the_end(engine: DynamicInferenceEngine) -> list[DynamicInferenceRequestRecord]:
    ended = []
    while engine.has_unfinished_requests():
        ended += engine.step()
    return ended


def check_equal(ours: Sequence[DynamicInferenceRequestRecord], theirs: Sequence[DynamicInferenceRequestRecord]) -> list[list[int]]:
    for one, other in zip(ours, theirs, strict=True):
        assert one.generated_tokens == other.generated_tokens and one.status is other.status
        for values, references in ((one.generated_log_probs, other.generated_log_probs), (one.prompt_log_probs, other.prompt_log_probs)):
            torch.testing.assert_close(values, references, rtol=1e-10, atol=1e-10)
        for ranked, reference in zip(one.generated_top_n_logprobs, other.generated_top_n_logprobs, strict=True):
            torch.testing.assert_close(ranked, reference, rtol=1e-10, atol=1e-10)
    return [record.generated_tokens for record in ours]


def check_equals_one_engine(pp: int, sizes: dict[str, Any]) -> list[list[int]]:
    split, whole = make_engine(staged(pp), **sizes), make_engine(ProcessGroups.single(), **sizes)
    numbers = [split.add_request(prompt, params) for prompt, params in zip(PROMPTS, settings(), strict=True)]
    ended, most = list[DynamicInferenceRequestRecord](), 0
    while split.has_unfinished_requests():
        ended += split.step()
        most = max(most, num_in_flight(split))
    assert most == pp - 1
    records = {record.request_id: record for record in ended}
    assert split.context.get_active_request_count() == 0 and num_in_flight(split) == 0
    return check_equal([records[number] for number in numbers], whole.generate(PROMPTS, settings()))


SIZES = {
    "room for all": {},
    "little room": {"num_blocks": 12, "max_tokens": 6},
    "prompts are not cut": {"enable_chunked_prefill": False, "max_tokens": 24},
    "two at once": {"max_requests": 2},
}


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.world(2, shared=True)
def test_two_batches_in_flight_draw_the_tokens_of_one_engine(world: World, sizes: str) -> None:
    one, two = world(functools.partial(check_equals_one_engine, 2, SIZES[sizes]))
    assert one == two


@pytest.mark.world(4, shared=True)
def test_four_batches_in_flight_do_so_too(world: World) -> None:
    ranks = world(functools.partial(check_equals_one_engine, 4, {}))
    assert ranks == ranks[:1] * 4


def check_unequal_stages(num_first: int, sizes: dict[str, Any]) -> list[list[int]]:
    """Three layers, the first so many of them on the first stage."""
    config, engines = dataclasses.replace(CONFIG, num_layers=3), list[DynamicInferenceEngine]()
    for groups in (staged(2), ProcessGroups.single()):
        here = range(3) if groups.pp.size == 1 else range(num_first) if groups.pp.is_first else range(num_first, 3)
        model = GPTModel(config, groups, attention_core=PagedAttention(), dtype=torch.float64, layers=here).eval()
        fields = {"max_sequence_length": 64, "block_size_tokens": 4, "max_tokens": 16, "max_requests": 6, **sizes}
        engines.append(DynamicInferenceEngine(model, DynamicInferenceContext.for_model(model, InferenceConfig(**fields))))
    split, whole = engines
    assert len(split.model.layers) == len(split.model.stage_layers) == split.context.cache.pages.shape[0] in (1, 2)
    # A stage of one layer has room for twice as many blocks as one of two, and uses as many.
    assert split.context.cache.pages.shape[2] == (61 if "num_blocks" in sizes else 30)
    for _ in range(2):
        tokens = check_equal(split.generate(PROMPTS, settings()), whole.generate(PROMPTS, settings()))
    return tokens


BYTES_OF_30_BLOCKS = 30 * (2 * 2 * 4 * 2 * 8 * 8)
"""Of two layers: keys and values of four tokens by two heads of eight numbers of eight bytes."""


@pytest.mark.parametrize("sizes", [{"num_blocks": 60}, {"buffer_size_gb": BYTES_OF_30_BLOCKS / 2**30}], ids=["blocks", "bytes"])
@pytest.mark.parametrize("num_first", [2, 1])
@pytest.mark.world(2, shared=True)
def test_stages_of_unequal_layers_draw_the_tokens_of_one_engine(world: World, num_first: int, sizes: dict[str, Any]) -> None:
    one, two = world(functools.partial(check_unequal_stages, num_first, sizes))
    assert one == two


def check_overlap(pp: int) -> int:
    """The last stage computes no step before the first has begun the one ``pp - 1`` steps later."""
    store, engine = dist.distributed_c10d._get_default_store(), make_engine(staged(pp))
    me, num_steps, begun = engine.model.groups.pp.rank, 6 * pp, 0

    def before(*_: object) -> None:
        nonlocal begun
        later = begun + pp - 1
        if me == 0:
            store.set(f"begun {begun}", "")
        elif me == pp - 1 and later < num_steps:
            store.wait([f"begun {later}"], timedelta(seconds=40))
        begun += 1

    engine.model.register_forward_pre_hook(before)
    params = SamplingParams(num_tokens_to_generate=6, ignore_eos=True)
    engine.generate([[1 + index] for index in range(pp)], params)
    assert engine.step_count == begun == num_steps
    return begun


@pytest.mark.world(2)
def test_a_stage_computes_the_next_batch_while_the_last_one_computes_the_one_before(world: World) -> None:
    world(functools.partial(check_overlap, 2))


@pytest.mark.world(4)
def test_as_many_batches_are_under_way_as_there_are_stages(world: World) -> None:
    world(functools.partial(check_overlap, 4))


def check_full_cache() -> float:
    """Batches in flight behind a step, on average, where requests wait for blocks."""
    engine, numbers = make_engine(staged(2), num_blocks=33, max_tokens=64, max_requests=32), list[int]()
    for index in range(40):
        engine.add_request([index, 1, 2, 3, 4], SamplingParams(num_tokens_to_generate=8 + index % 5, ignore_eos=True))
    while engine.has_unfinished_requests():
        engine.step()
        numbers.append(num_in_flight(engine))
    return sum(numbers) / len(numbers)


@pytest.mark.world(2, shared=True)
def test_requests_that_find_no_blocks_leave_batches_apart(world: World) -> None:
    assert min(world(check_full_cache)) > 0.9


def check_one_at_a_time() -> None:
    one = make_engine(staged(2), run_ahead=False)
    for prompt, params in zip(PROMPTS, settings(), strict=True):
        one.add_request(prompt, params)
    while one.has_unfinished_requests():
        one.step()
        assert num_in_flight(one) == 0


@pytest.mark.world(2, shared=True)
def test_without_running_ahead_one_batch_is_in_flight(world: World) -> None:
    world(check_one_at_a_time)


def check_aborts() -> list[list[int]]:
    split, whole = make_engine(staged(2), max_requests=4), make_engine(ProcessGroups.single())
    params = settings(6, ignore_eos=True)
    numbers = [split.add_request(prompt, each) for prompt, each in zip(PROMPTS[:4], params, strict=False)]
    ended = until_two_are_in_flight(split)
    in_flight = [entry.record.request_id for step in split._loop._in_flight for entry in step.entries]
    aborted = in_flight[-1]
    free_before = split.context.allocator.total_avail
    record = split.abort(aborted)
    # Its blocks and its line are another's at once.
    assert record is not None and split.context.allocator.total_avail > free_before
    later = [split.add_request(PROMPTS[4], params[4]), split.add_request(PROMPTS[5], params[5])]
    ended += to_the_end(split)
    records = {each.request_id: each for each in ended}
    theirs = whole.generate(PROMPTS, params)
    finished = [index for index, number in enumerate(numbers) if number != aborted]
    check_equal([records[numbers[index]] for index in finished], [theirs[index] for index in finished])
    assert aborted not in records and record.generated_tokens == theirs[numbers.index(aborted)].generated_tokens[: record.num_generated]
    return check_equal([records[number] for number in later], theirs[4:])


@pytest.mark.world(2, shared=True)
def test_an_abort_in_flight_harms_no_other_request(world: World) -> None:
    one, two = world(check_aborts)
    assert one == two


def check_suspend() -> list[list[int]]:
    split, whole = make_engine(staged(2)), make_engine(ProcessGroups.single())
    numbers = [split.add_request(prompt, params) for prompt, params in zip(PROMPTS, settings(), strict=True)]
    ended = until_two_are_in_flight(split)
    for _ in range(2):
        split.suspend()
        assert num_in_flight(split) == 0
        split.resume()
        ended += until_two_are_in_flight(split)
    ended += to_the_end(split)
    records = {each.request_id: each for each in ended}
    return check_equal([records[number] for number in numbers], whole.generate(PROMPTS, settings()))


@pytest.mark.world(2, shared=True)
def test_nothing_is_in_flight_at_a_suspend_and_nothing_is_lost(world: World) -> None:
    one, two = world(check_suspend)
    assert one == two


def check_load(policy: Any) -> list[list[int]]:
    split = make_engine(staged(2))
    old, new = (make_engine(ProcessGroups.single(), seed) for seed in (0, 1))
    params = SamplingParams(num_tokens_to_generate=12, temperature=0.0)
    numbers = [split.add_request(prompt, params) for prompt in PROMPTS]
    ended = until_two_are_in_flight(split)
    split.load_weights(weights_of(new), 5, in_flight=policy)
    assert num_in_flight(split) == 0
    ended += to_the_end(split)
    records = {each.request_id: each for each in ended}
    before = old.generate(PROMPTS, params)
    for number, prompt, reference in zip(numbers, PROMPTS, before, strict=True):
        tokens, versions = records[number].generated_tokens, dict(records[number].weight_versions)
        num_old = versions.get(0, 0)
        assert versions == ({0: 12} if policy == "drain" else {0: num_old, 5: 12 - num_old}) and num_old
        assert tokens[:num_old] == reference.generated_tokens[:num_old]
        if policy == "recompute":
            rest = SamplingParams(num_tokens_to_generate=12 - num_old, temperature=0.0)
            assert new.generate([prompt + tokens[:num_old]], rest)[0].generated_tokens == tokens[num_old:]
    return [records[number].generated_tokens for number in numbers]


@pytest.mark.parametrize("policy", ["recompute", "keep", "drain"])
@pytest.mark.world(2, shared=True)
def test_new_weights_come_when_nothing_is_in_flight(world: World, policy: str) -> None:
    one, two = world(functools.partial(check_load, policy))
    assert one == two


def check_prefixes() -> float:
    split, whole = (make_engine(groups, enable_prefix_caching=True) for groups in (staged(2), ProcessGroups.single()))
    prompts = [[*range(20), 40 + index] for index in range(6)]
    for engine in (split, whole):
        # Under one set of weights, and again under what is known of it then.
        engine.generate([[1]], settings(1))
    for _ in range(2):
        check_equal(split.generate(prompts, settings(6)), whole.generate(prompts, settings(6)))
    assert split.stats()["prefix_cache_hits"] == whole.stats()["prefix_cache_hits"] > 100
    return split.stats()["prefix_cache_hits"]


@pytest.mark.world(2, shared=True)
def test_batches_share_what_begins_alike(world: World) -> None:
    world(check_prefixes)


def check_failure() -> list[int]:
    """A step that fails on all stages alike ends its requests, and no others."""
    split, whole = make_engine(staged(2)), make_engine(ProcessGroups.single())
    params = SamplingParams(num_tokens_to_generate=8, ignore_eos=True)
    for prompt in PROMPTS:
        split.add_request(prompt, params)
    ended = until_two_are_in_flight(split)
    launch, doomed = split._executor.launch, list[int]()

    def fail(work: Sequence[tuple[Any, Any]]) -> Any:
        doomed.extend(item.request_id for _, item in work)
        raise RuntimeError("no such kernel")

    split._executor.launch = fail  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="no such kernel"):
        split.step()
    split._executor.launch = launch  # type: ignore[method-assign]
    ended += to_the_end(split)
    records, theirs = {record.request_id: record for record in ended}, whole.generate(PROMPTS, params)
    assert len(ended) == len(records) == len(PROMPTS) and 0 < len(doomed) < len(PROMPTS)
    for number, reference in enumerate(theirs):
        if number in doomed:
            assert isinstance(records[number].error, StepFailedError)
        else:
            assert records[number].generated_tokens == reference.generated_tokens
    return doomed


@pytest.mark.world(2)
def test_a_step_that_fails_takes_nothing_from_those_in_flight(world: World) -> None:
    one, two = world(check_failure)
    assert one == two


def check_gpus() -> list[list[int]]:
    """Hidden states and tokens cross by one communicator, and the tokens of a batch reach the stage before while others are computed."""
    device, dtype = torch.device("cuda", dist.get_rank()), torch.float32
    config = dataclasses.replace(CONFIG, hidden_size=256, vocab_size=512)
    sizes = InferenceConfig(max_sequence_length=64, num_blocks=60, block_size_tokens=16, max_tokens=64, max_requests=6)
    engines = list[DynamicInferenceEngine]()
    for groups in (ProcessGroups.build(ParallelPlan(pp=2)), ProcessGroups.single()):
        model = GPTModel(config, groups, attention_core=PagedAttention(), dtype=dtype, device=device, seed=0).eval()
        engines.append(DynamicInferenceEngine(model, DynamicInferenceContext.for_model(model, sizes)))
    tokens = list[list[int]]()
    for _ in range(3):
        split, whole = (engine.generate(PROMPTS, settings()) for engine in engines)
        for one, other in zip(split, whole, strict=True):
            assert one.generated_tokens == other.generated_tokens
            torch.testing.assert_close(one.generated_log_probs, other.generated_log_probs, rtol=1e-3, atol=1e-3)
        tokens += [record.generated_tokens for record in split]
    return tokens


@pytest.mark.gpu
def test_batches_in_flight_over_two_gpus_draw_the_tokens_of_one() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    one, two = run(check_gpus, 2, backend="nccl", timeout_s=120.0)
    assert one == two
