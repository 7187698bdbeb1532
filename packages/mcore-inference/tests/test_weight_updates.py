# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""New weights in a running engine: copied in parts, refused in time, and what becomes of requests in flight."""

import asyncio
import functools
import itertools
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_inference import (
    DynamicInferenceEngine,
    EngineRunner,
    IncompleteWeightsError,
    SamplingParams,
    WeightLoadError,
    WeightSlice,
)
from mcore_inference.engine._weights import ModelWeights
from mcore_parallel import named_shards
from mcore_parallel.backends import quantize_base
from mcore_parallel.models import GPTModel
from mcore_parallel.tensor_parallel import LoraConfig, add_lora
from tests.support.generation import naive_greedy

Make = Callable[..., Any]
GREEDY = SamplingParams(temperature=0, num_tokens_to_generate=10)
MORE = SamplingParams(temperature=0, num_tokens_to_generate=20)
LONG = SamplingParams(temperature=0, num_tokens_to_generate=60)
PROMPTS = [[1, 2, 3], [9], list(range(20))]


@pytest.fixture(params=[False, True], ids=["in turn", "ahead"])
def make_engine(request: pytest.FixtureRequest, make_engine: Make) -> Make:
    """Engines that read the results of a step at once, and while the next is computed."""
    return functools.partial(make_engine, run_ahead=request.param)


def weights(model: GPTModel) -> list[tuple[str, Tensor]]:
    return [(shard.name, shard.parameter.detach().clone()) for shard in named_shards(model)]


def same(model: GPTModel, wanted: list[tuple[str, Tensor]]) -> bool:
    return all(torch.equal(one, other) for (_, one), (_, other) in zip(weights(model), wanted, strict=True))


def begin(engine: DynamicInferenceEngine, params: SamplingParams, steps: int) -> list[int]:
    """Requests that have some tokens already."""
    numbers = [engine.add_request(prompt, params) for prompt in PROMPTS]
    for _ in range(steps):
        engine.step()
    return numbers


def end(engine: DynamicInferenceEngine) -> dict[int, Any]:
    records = {}
    while engine.has_unfinished_requests():
        records |= {record.request_id: record for record in engine.step()}
    assert engine.context.allocator.total_used == 0
    return records


# -- what is copied ----------------------------------------------------------------------------------------------------


def parts(name: str, tensor: Tensor, rng: random.Random) -> Iterator[tuple[str, WeightSlice]]:
    """Boxes that cover a tensor."""
    cuts = []
    for size in tensor.shape:
        places = sorted(rng.sample(range(1, size), min(size - 1, rng.randint(0, 2))))
        cuts.append(list(itertools.pairwise([0, *places, size])))
    for box in itertools.product(*cuts):
        yield name, WeightSlice(tensor=tensor[tuple(slice(*bounds) for bounds in box)], offsets=tuple(first for first, _ in box))


@pytest.mark.parametrize("seed", range(6))
def test_parts_in_any_order_and_bucket_are_the_whole(make_model: Make, seed: int) -> None:
    rng, model, wanted = random.Random(seed), make_model(seed=0), weights(make_model(seed=1))
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    chunks: list[Any] = [part for name, tensor in wanted for part in (parts(name, tensor, rng) if rng.random() < 0.8 else [(name, tensor)])]
    rng.shuffle(chunks)
    loader = ModelWeights(model, bucket_bytes=rng.choice([1, 5000, 2**30]))
    loader.load(iter(chunks))
    assert loader.are_complete and same(model, wanted)
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
    lost = rng.randrange(len(chunks))
    with pytest.raises(WeightLoadError, match=f"1 parameters did not come, among them .*{chunks[lost][0]}"):
        loader.load(chunks[:lost] + chunks[lost + 1 :])
    with pytest.raises(WeightLoadError, match=f"{chunks[lost][0]} came twice, or parts of it overlap"):
        loader.load([*chunks, chunks[lost]])


def test_a_buffer_is_copied_before_it_is_written_again_and_not_kept(make_model: Make) -> None:
    rng, model, wanted = random.Random(3), make_model(seed=0), weights(make_model(seed=1))
    slices = [(name, own) for name, tensor in wanted for _, own in parts(name, tensor, rng)]
    kept: list[bool] = []

    def chunks() -> Iterator[Any]:
        left = list(slices)
        while left:
            some = [left.pop() for _ in range(min(len(left), rng.randint(1, 4)))]
            buffers = [own.tensor.clone() for _, own in some]
            storages = [weakref.ref(buffer.untyped_storage()) for buffer in buffers]
            for number, (name, own) in enumerate(some, 1):
                yield name, WeightSlice(tensor=buffers[number - 1], offsets=own.offsets, ends_buffer=number == len(some))
            for buffer in buffers:
                buffer.fill_(9.0)
            # The last slice is still bound by the loop that took it.
            buffers[-1].set_()
            del buffer, buffers
            kept.extend(storage() is not None for storage in storages)

    ModelWeights(model).load(chunks())
    assert same(model, wanted) and len(kept) == len(slices) > 20 and not any(kept)


def test_a_parameter_row_by_row_costs_no_more_than_its_rows(make_model: Make) -> None:
    model = make_model(vocab_size=4_000, layers=1, dtype=torch.float32)
    wanted = weights(model)
    rows: list[Any] = [
        (name, WeightSlice(tensor=tensor[at : at + 1], offsets=(at, *(0,) * (tensor.dim() - 1))))
        for name, tensor in wanted
        for at in range(len(tensor))
    ]
    ModelWeights(model).load(rows)
    assert same(model, wanted) and len(rows) > 8_000


def test_floats_are_cast(make_model: Make) -> None:
    model, wanted = make_model(seed=0, dtype=torch.float32), weights(make_model(seed=1, dtype=torch.bfloat16))
    ModelWeights(model).load(wanted)
    assert same(model, [(name, tensor.float()) for name, tensor in wanted])


# -- what is refused ---------------------------------------------------------------------------------------------------


def part(tensor: Tensor, *offsets: int) -> WeightSlice:
    return WeightSlice(tensor=tensor, offsets=offsets)


BAD: list[tuple[str, Any, str]] = [
    ("output.wieght", torch.zeros(64, 32), "output.wieght is no parameter of the model; the nearest are .*output.weight"),
    ("output.weight", torch.zeros(64, 31), r"shape \(64, 31\); its global shape is \(64, 32\)"),
    ("output.weight", part(torch.zeros(4, 4), 61, 0), r"a part of output.weight has shape \(4, 4\) at \(61, 0\)"),
    ("output.weight", part(torch.zeros(4), 0), r"a part of output.weight has shape \(4,\)"),
    ("output.weight", torch.zeros(64, 32, dtype=torch.int64), "dtype torch.int64 and the model's is torch.float64"),
    ("output.weight", torch.zeros(64, 32).to(torch.float8_e4m3fn), "dtype torch.float8_e4m3fn"),
    ("output.weight", torch.zeros(64, 32, device="meta"), "tensor without memory"),
    ("output.weight", [0.0], "is a list; give a plain tensor"),
]


@pytest.mark.parametrize(("place", "in_flight"), [(0, "recompute"), (-1, "keep")], ids=["first", "last"])
def test_a_bad_chunk_is_refused_before_anything_is_written(make_model: Make, make_engine: Make, place: int, in_flight: Any) -> None:
    engine = make_engine(make_model(seed=0))
    numbers, before = begin(engine, MORE, 3), weights(engine.model)
    new = [(name, tensor) for name, tensor in weights(make_model(seed=1)) if name != "output.weight"]
    for name, tensor, words in BAD:
        with pytest.raises(WeightLoadError, match=words):
            engine.load_weights([(name, tensor), *new] if place == 0 else [*new, (name, tensor)], in_flight=in_flight)
    for chunks in (new, []):
        with pytest.raises(WeightLoadError, match=r"did not come, among them \[.*\]; give all, and each of them whole"):
            engine.load_weights(chunks, in_flight=in_flight)
    assert same(engine.model, before) and engine.weight_version == 0 and engine.num_preemptions == 0
    records = end(engine)
    assert [records[number].generated_tokens for number in numbers] == [naive_greedy(engine.model, prompt, 20) for prompt in PROMPTS]


def test_weights_with_scales_beside_adapters_take_no_others(make_model: Make, make_engine: Make) -> None:
    models = [make_model(seed=seed) for seed in (0, 1)]
    for model in models:
        add_lora(model, LoraConfig(rank=2, base_dtype="fp8"), model.groups)
        quantize_base(model)
    engine = make_engine(models[0])
    before = [tensor.float() for _, tensor in weights(models[0])]
    # Stored values of another model, and none at all.
    for chunks in (weights(models[1]), []):
        with pytest.raises(WeightLoadError, match=r"layers.0.attention.qkv.weight is in torch.float8_e4m3fn beside .*base_dtype=None"):
            engine.load_weights(chunks)
    assert all(torch.equal(one, other.float()) for one, (_, other) in zip(before, weights(models[0]), strict=True))
    assert engine.generate([PROMPTS[0]], GREEDY)[0].generated_tokens == naive_greedy(models[0], PROMPTS[0], 10)


def test_arguments_are_checked_first(make_model: Make, make_engine: Make) -> None:
    engine = make_engine()
    good: Any = weights(engine.model)
    for more, words in (
        ({"in_flight": "wait"}, "in_flight='wait' is unknown; choose recompute, keep or drain"),
        ({"version": -1}, "version=-1"),
    ):
        with pytest.raises(ValueError, match=words):
            engine.load_weights(good, **more)
    others: list[tuple[Any, str]] = [
        (engine.model.state_dict(), r"chunks is a OrderedDict, .* give its .items\(\)"),
        (None, "chunks is a NoneType; give pairs of a global name and a tensor"),
        ([torch.ones(2)], "chunks holds a Tensor; give pairs"),
        (["ab"], "chunks holds a str; give pairs"),
        ([good[0], ("x",)], "chunks holds a tuple; give pairs"),
    ]
    for chunks, words in others:
        with pytest.raises(WeightLoadError, match=words):
            engine.load_weights(chunks)
    engine.weights.check_complete()
    with pytest.raises(ValueError, match=r"offsets=\(0,\) must have one entry for each dim of shape \(2, 2\)"):
        WeightSlice(tensor=torch.zeros(2, 2), offsets=(0,))
    with pytest.raises(ValueError, match="offsets=-1"):
        WeightSlice(tensor=torch.zeros(2), offsets=(-1,))


def test_a_load_that_fails_half_way_stops_the_engine_until_one_succeeds(make_model: Make, make_engine: Make) -> None:
    engine, good = make_engine(make_model(seed=0)), weights(make_model(seed=1))
    engine.weights = ModelWeights(engine.model, bucket_bytes=1)
    numbers = begin(engine, MORE, 3)
    for bad, words in ((good[:-1], "did not come"), ([good[0], good[0]], "twice"), ([good[0], ("x", good[0][1])], "x is no parameter")):
        with pytest.raises(WeightLoadError, match=words):
            engine.load_weights(bad)
        assert not engine.can_step
        for call in (engine.step, functools.partial(engine.load_weights, good, in_flight="drain")):
            with pytest.raises(IncompleteWeightsError, match="repeat it with all parameters"):
                call()
    engine.load_weights(good)
    assert engine.weight_version == 1 and same(engine.model, good)
    records = end(engine)
    for number, prompt in zip(numbers, PROMPTS, strict=True):
        (_, old), (version, new) = records[number].weight_versions
        tokens = records[number].generated_tokens
        assert version == 1 and new == 20 - old and tokens[old:] == naive_greedy(engine.model, [*prompt, *tokens[:old]], new)


# -- requests in flight ------------------------------------------------------------------------------------------------


def test_recomputed_requests_go_on_as_in_a_fresh_engine_with_the_new_weights(make_model: Make, make_engine: Make) -> None:
    engine, fresh = make_engine(make_model(seed=0)), make_engine(make_model(seed=1))
    params = SamplingParams(temperature=0, num_tokens_to_generate=12, return_log_probs=True)
    numbers = begin(engine, params, 5)
    engine.load_weights(weights(fresh.model), 7)
    records = end(engine)
    assert engine.weight_version == 7 and engine.num_preemptions == 3
    for number, prompt in zip(numbers, PROMPTS, strict=True):
        record = records[number]
        (first, old), (second, new) = record.weight_versions
        assert (first, second, old + new) == (0, 7, 12) and old and new
        assert record.generated_tokens[:old] == naive_greedy(make_model(seed=0), prompt, old)
        wanted = fresh.generate(
            [[*prompt, *record.generated_tokens[:old]]], SamplingParams(temperature=0, num_tokens_to_generate=new, return_log_probs=True)
        )[0]
        assert record.generated_tokens[old:] == wanted.generated_tokens
        torch.testing.assert_close(record.generated_log_probs[old:], wanted.generated_log_probs)
    # The prefix cache knows nothing of the old weights.
    assert engine.generate([PROMPTS[2]], GREEDY)[0].generated_tokens == fresh.generate([PROMPTS[2]], GREEDY)[0].generated_tokens
    engine.load_weights(weights(make_model(seed=0)))
    assert engine.weight_version == 8


def test_kept_requests_go_on_over_their_old_keys_and_values(make_model: Make, make_engine: Make) -> None:
    # Keys and values of one layer follow from the tokens alone, so that new matrices behind them leave them as they are.
    old, other = make_model(seed=0, layers=1), make_model(seed=1, layers=1)
    late = ("attention.out", "mlp", "final_norm", "output")
    new = [
        (name, tensor if any(word in name for word in late) else first)
        for (name, first), (_, tensor) in zip(weights(old), weights(other), strict=True)
    ]
    engine = make_engine(old)
    numbers = begin(engine, GREEDY, 4)
    counts = [engine.get_request(number).num_generated for number in numbers]
    engine.load_weights(new, in_flight="keep")
    records = end(engine)
    assert engine.num_preemptions == 0
    reference = make_model(seed=0, layers=1)
    for number, prompt in zip(numbers, PROMPTS, strict=True):
        record = records[number]
        (_, count), (version, rest) = record.weight_versions
        assert (version, count + rest) == (1, 10) and count >= counts[number]
        begun = naive_greedy(reference, prompt, count)
        assert record.generated_tokens == begun + naive_greedy(engine.model, [*prompt, *begun], rest)
        assert record.merge().generated_tokens == record.generated_tokens


def test_kept_keys_and_values_are_not_computed_again_nor_shared(make_model: Make, make_engine: Make) -> None:
    engine, new = make_engine(make_model(seed=0)), make_model(seed=1)
    prompt = list(range(30))
    number = engine.add_request(prompt, GREEDY)
    for _ in range(4):
        engine.step()
    block = engine.context.block_table(number)[0]
    before = engine.context.cache.pages[:, :, block].clone()
    engine.load_weights(weights(new), in_flight="keep")
    # The same beginning, computed with the new weights.
    later = engine.add_request(prompt, GREEDY)
    engine.step()
    assert torch.equal(engine.context.cache.pages[:, :, block], before)
    records = end(engine)
    assert records[later].generated_tokens == naive_greedy(new, prompt, 10) and records[later].weight_versions == [(1, 10)]
    # Nor is anything of it found once its blocks are given back.
    assert engine.generate([prompt], GREEDY)[0].generated_tokens == naive_greedy(new, prompt, 10)


def test_kept_requests_survive_preemption_and_further_loads(make_model: Make, make_engine: Make) -> None:
    engine = make_engine(make_model(seed=0), num_blocks=8, block_size_tokens=8, max_sequence_length=56)
    same_weights = weights(engine.model)
    numbers = begin(engine, SamplingParams(temperature=0, num_tokens_to_generate=30), 3)
    for version in range(5, 25):
        engine.load_weights(same_weights, version, in_flight="keep" if version % 5 else "recompute")
        engine.step()
    records = end(engine)
    assert engine.num_preemptions > 0
    for number, prompt in zip(numbers, PROMPTS, strict=True):
        record = records[number]
        assert record.generated_tokens == naive_greedy(engine.model, prompt, 30)
        assert sum(count for _, count in record.weight_versions) == 30
        assert [version for version, _ in record.weight_versions] == sorted(version for version, _ in record.weight_versions)


def test_drained_requests_end_with_the_old_weights_and_the_queue_gets_the_new(make_model: Make, make_engine: Make) -> None:
    engine, old, new = make_engine(make_model(seed=0), max_requests=2), make_model(seed=0), make_model(seed=1)
    numbers = begin(engine, GREEDY, 3)
    assert engine.num_in_flight == 2 and engine.num_waiting == 1
    engine.load_weights(weights(new), in_flight="drain")
    assert engine.num_waiting == 1 and engine.num_in_flight == 0 and engine.context.allocator.total_used == 0
    records = end(engine)
    assert set(records) == set(numbers)
    for number, prompt, model in zip(numbers, PROMPTS, (old, old, new), strict=True):
        assert records[number].generated_tokens == naive_greedy(model, prompt, 10)
        assert records[number].weight_versions == [(int(model is new), 10)]


def test_a_suspended_engine_is_loaded_but_not_drained(make_model: Make, make_engine: Make) -> None:
    engine, new = make_engine(make_model(seed=0)), make_model(seed=1)
    numbers = begin(engine, GREEDY, 4)
    engine.suspend()
    with pytest.raises(RuntimeError, match=r"suspended; call resume\(\)"):
        engine.load_weights(weights(new), in_flight="drain")
    engine.load_weights(weights(new), in_flight="keep")
    engine.resume()
    tokens = end(engine)[numbers[0]].generated_tokens
    assert tokens[-5:] == naive_greedy(new, [*PROMPTS[0], *tokens[:-5]], 5)


# -- through the runner ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_flight", ["recompute", "keep", "drain"])
def test_a_runner_loads_while_requests_stream(make_model: Make, make_engine: Make, in_flight: Any) -> None:
    engine, new = make_engine(make_model(seed=0)), make_model(seed=1)

    async def main() -> None:
        with EngineRunner(engine) as runner:
            streams = [await runner.submit(prompt, LONG) for prompt in PROMPTS]
            async for _ in streams[0]:
                break
            loading = asyncio.ensure_future(runner.load_weights(weights(new), 3, in_flight=in_flight))
            await asyncio.sleep(0)
            late = await runner.submit([5], GREEDY)
            await loading
            assert engine.weight_version == 3
            records = [await stream.record() for stream in streams]
            for record in records:
                assert record.num_generated == 60 and record.weight_versions[-1][0] == (0 if in_flight == "drain" else 3)
            record = await late.record()
            assert record.weight_versions == [(3, 10)] and record.generated_tokens == naive_greedy(new, [5], 10)

    asyncio.run(main())


def test_a_runner_waits_for_whole_weights_and_refuses_to_drain_without_steps(make_model: Make, make_engine: Make) -> None:
    engine, new = make_engine(make_model(seed=0)), weights(make_model(seed=1))
    engine.weights = ModelWeights(engine.model, bucket_bytes=1)

    async def main() -> None:
        with EngineRunner(engine, max_failed_steps=1) as runner:
            stream = await runner.submit([1], LONG)
            async for _ in stream:
                break
            with pytest.raises(WeightLoadError, match="did not come"):
                await runner.load_weights(new[:-1], in_flight="keep")
            other = await runner.submit([2], GREEDY)
            for repair in (False, True):
                if repair:
                    await runner.pause()
                    await runner.load_weights(new)
                with pytest.raises(RuntimeError, match="needs steps, and none runs"):
                    await runner.load_weights(new, in_flight="drain")
            await runner.unpause()
            await runner.load_weights(new, in_flight="drain")
            assert (await stream.record()).num_generated == 60 and (await other.record()).num_generated == 10

    asyncio.run(main())
    assert engine.finished_counts["error"] == 0


def test_a_load_without_a_version_never_gets_one_that_was_given(make_model: Make, make_engine: Make) -> None:
    engine, first, second = make_engine(make_model(seed=0)), make_model(seed=1), make_model(seed=2)
    stamps: list[int] = []
    # The third load goes back to the weights of the first: the next one is no second.
    for model, version in ((first, None), (second, None), (first, 1), (make_model(seed=3), None)):
        engine.load_weights(weights(model), version)
        [record] = engine.generate([PROMPTS[0]], SamplingParams(num_tokens_to_generate=2))
        stamps += [stamp for stamp, _ in record.weight_versions]
    assert stamps == [1, 2, 1, 3] and engine.next_weight_version == 4
