# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The engine against the same model run over whole sequences."""

import functools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_inference import (
    BlockOverflowError,
    DynamicInferenceContext,
    DynamicInferenceEngine,
    DynamicInferenceRequestRecord,
    EventType,
    FinishReason,
    InferenceConfig,
    InvalidTokenError,
    MaxSequenceLengthOverflowError,
    NonFiniteLogitsError,
    PagedAttention,
    SamplingParams,
    Status,
)
from mcore_parallel import ProcessGroups
from mcore_parallel.data import ByteTokenizer
from mcore_parallel.models import GPTModel, TransformerConfig
from tests.support.engine_checks import check_idle, random_prompts
from tests.support.generation import full_log_probs, naive_greedy

Make = Callable[..., Any]
GREEDY = SamplingParams(temperature=0, num_tokens_to_generate=10)


@pytest.fixture(params=[False, True], ids=["in turn", "ahead"])
def make_engine(request: pytest.FixtureRequest, make_engine: Make) -> Make:
    """Engines that read the results of a step at once, and while the next is computed."""
    return functools.partial(make_engine, run_ahead=request.param)


@pytest.mark.parametrize(
    ("seed", "dtype"),
    [
        pytest.param(seed, dtype, marks=() if dtype == torch.float64 or seed == 0 else pytest.mark.slow)
        for seed in range(6)
        for dtype in (torch.float64, torch.float32)
    ],
)
def test_greedy_serving_in_any_order_equals_recomputing_every_token(
    make_model: Make, make_engine: Make, seed: int, dtype: torch.dtype
) -> None:
    rng = random.Random(seed)
    model = make_model(dtype=dtype)
    size = rng.choice([1, 3, 4, 8, 16])
    tight = -(-40 // size) + 2
    engine = make_engine(
        model,
        block_size_tokens=size,
        num_blocks=rng.choice([tight, 3 * tight]),
        max_tokens=rng.choice([6, 17, 64]),
        max_requests=rng.choice([2, 6]),
        max_sequence_length=40,
    )
    prompts = random_prompts(rng, 8)
    budgets = [rng.choice([1, size, size + 1, 12]) for _ in prompts]
    arrivals = list(range(8))
    rng.shuffle(arrivals)
    finished: dict[int, DynamicInferenceRequestRecord] = {}
    while arrivals or engine.has_unfinished_requests():
        while arrivals and rng.random() < 0.4:
            number = arrivals.pop()
            engine.add_request(prompts[number], replace(GREEDY, num_tokens_to_generate=budgets[number]), request_id=number)
        finished |= {record.request_id: record for record in engine.step()}
    for number, prompt in enumerate(prompts):
        assert finished[number].generated_tokens == naive_greedy(model, prompt, budgets[number])
        assert finished[number].finish_reason is FinishReason.LENGTH
    check_idle(engine)


def test_preemption_by_recompute_changes_nothing_but_the_events(make_model: Make, make_engine: Make) -> None:
    model = make_model()
    rng = random.Random(1)
    prompts = random_prompts(rng, 6, 8)
    params = [
        SamplingParams(
            temperature=i % 2, seed=i, num_tokens_to_generate=20, return_log_probs=True, skip_prompt_log_probs=False, top_n_logprobs=2
        )
        for i in range(6)
    ]
    free = make_engine(model).generate(prompts, params)
    engine = make_engine(model, num_blocks=9, block_size_tokens=4)
    tight = engine.generate(prompts, params)
    assert engine.num_preemptions > 3
    assert sum(record.num_preemptions for record in tight) == engine.num_preemptions
    for one, other in zip(free, tight, strict=True):
        assert one.generated_tokens == other.generated_tokens
        assert other.merge().generated_tokens == one.generated_tokens
        torch.testing.assert_close(one.generated_log_probs, other.generated_log_probs, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(one.prompt_log_probs, other.prompt_log_probs, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(one.prompt_top_n_logprobs, other.prompt_top_n_logprobs, rtol=1e-10, atol=1e-10)
        assert [list(best) for best in one.generated_top_n_logprobs] == [list(best) for best in other.generated_top_n_logprobs]
        kinds = [event.type for event in other.merge().events]
        assert kinds == [EventType.ADD, EventType.EVICT] * other.num_preemptions + [EventType.ADD, EventType.FINISH]
    check_idle(engine)


def test_a_cache_that_is_asked_for_four_times_over_serves_every_request(make_model: Make, make_engine: Make) -> None:
    """All at once, more than half of them preempted, each with the tokens that it has where there is room for all; no block is lost."""
    model, rng = make_model(), random.Random(2)
    prompts = random_prompts(rng, 16, 8)
    params = [
        SamplingParams(temperature=number % 3 / 2, seed=number, ignore_eos=True, num_tokens_to_generate=rng.randrange(24, 40))
        for number in range(16)
    ]
    block, wanted = 4, [len(prompt) + settings.budget(0) for prompt, settings in zip(prompts, params, strict=True)]
    num_blocks = sum(-(-count // block) for count in wanted) // 4
    engine = make_engine(model, num_blocks=num_blocks, block_size_tokens=block, max_requests=16)
    free = make_engine(model, max_requests=16, num_blocks=256).generate(prompts, params)
    tight = engine.generate(prompts, params)
    assert sum(record.num_preemptions > 0 for record in tight) > 8
    for one, other in zip(free, tight, strict=True):
        assert other.generated_tokens == one.generated_tokens and other.finish_reason is FinishReason.LENGTH
    check_idle(engine)


def test_pauses_are_events_where_they_are_asked_for(make_model: Make, make_engine: Make) -> None:
    prompts, params = random_prompts(random.Random(1), 6, 8), replace(GREEDY, num_tokens_to_generate=20)
    engine = make_engine(make_model(), num_blocks=9, block_size_tokens=4, track_paused_request_events=True)
    add, pause, evict = EventType.ADD, EventType.PAUSE, EventType.EVICT
    records = engine.generate(prompts, params)
    assert engine.num_preemptions > 3
    for record in records:
        kinds = [event.type for event in record.merge().events]
        assert kinds == [add, pause, evict] * record.num_preemptions + [add, EventType.FINISH]
    number = engine.add_request(prompts[0], params)
    engine.step()
    record = engine.get_request(number)
    engine.suspend()
    engine.suspend()
    assert [event.type for event in record.merge().events] == [add, pause, evict]
    engine.resume()
    while engine.has_unfinished_requests():
        engine.step()
    copy = type(record).deserialize(record.serialize())
    assert [event.type for event in copy.merge().events] == [add, pause, evict, add, EventType.FINISH]
    with pytest.raises(ValueError, match="track_paused_request_events"):
        InferenceConfig(track_paused_request_events=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("max_tokens", [2, pytest.param(5, marks=pytest.mark.slow), 7, 8, 9, 64])
def test_a_prompt_in_parts_gives_the_tokens_and_log_probs_of_a_whole_one(make_model: Make, make_engine: Make, max_tokens: int) -> None:
    model = make_model()
    prompts = [random_prompts(random.Random(2), 1, 1)[0], list(range(30)), list(range(40, 51))]
    params = replace(GREEDY, return_log_probs=True, skip_prompt_log_probs=False)
    records = make_engine(model, max_tokens=max_tokens, max_requests=2).generate(prompts, params)
    for prompt, record in zip(prompts, records, strict=True):
        tokens = prompt + record.generated_tokens
        assert record.generated_tokens == naive_greedy(model, prompt, 10)
        wanted = full_log_probs(model, tokens)[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor((record.prompt_log_probs or []) + record.generated_log_probs), wanted.float())


def test_a_prompt_of_one_token_is_a_prompt_in_every_company(make_model: Make, make_engine: Make) -> None:
    """Its step has one token, as a decode step does; its log-probabilities are those of what follows all the same."""
    model = make_model()
    params = SamplingParams(temperature=0.0, num_tokens_to_generate=4, return_log_probs=True, skip_prompt_log_probs=False)
    engine = make_engine(model)
    longer = engine.add_request([3, 1, 4, 1, 5], params)
    engine.step()
    short = engine.add_request([9], params)
    ended = {record.request_id: record for _ in range(8) for record in engine.step()}
    for number in (longer, short):
        record = ended[number]
        prompt, tokens = record.prompt_tokens, record.generated_tokens
        wanted = full_log_probs(model, [*prompt, *tokens])
        values = [wanted[place - 1][token].item() for place, token in enumerate([*prompt, *tokens]) if place]
        assert len(record.prompt_log_probs or []) == len(prompt) - 1
        assert [*(record.prompt_log_probs or []), *record.generated_log_probs] == pytest.approx(values, abs=1e-9)


def test_a_seeded_request_draws_the_same_alone_and_in_any_crowd(make_model: Make, make_engine: Make) -> None:
    model = make_model()
    mine = SamplingParams(temperature=1.3, top_p=0.95, seed=1234, num_tokens_to_generate=15)
    alone = make_engine(model).generate([[5, 6, 7]], mine)[0].generated_tokens
    assert len(set(alone)) > 3
    for crowd in range(4):
        rng = random.Random(crowd)
        engine = make_engine(model, seed=crowd, max_tokens=rng.choice([8, 64]), num_blocks=rng.choice([12, 64]))
        prompts = random_prompts(rng, 6)
        place = rng.randrange(7)
        prompts.insert(place, [5, 6, 7])
        params = [SamplingParams(temperature=rng.choice([0, 1]), num_tokens_to_generate=12)] * 7
        params[place] = mine
        assert engine.generate(prompts, params)[place].generated_tokens == alone


def test_requests_without_seed_differ_and_the_engine_seed_repeats_them(make_model: Make, make_engine: Make) -> None:
    model = make_model()
    params = SamplingParams(num_tokens_to_generate=12)
    runs = [make_engine(model, seed=seed).generate([[1]] * 3, params) for seed in (0, 0, 1)]
    texts = [[record.generated_tokens for record in run] for run in runs]
    assert texts[0] == texts[1] != texts[2]
    assert len({tuple(tokens) for tokens in texts[0]}) == 3


def test_stop_tokens_and_the_termination_id_end_a_request(make_model: Make, make_engine: Make) -> None:
    model = make_model()
    wanted = naive_greedy(model, [1, 2], 12)
    stop = wanted[5]
    first = wanted.index(stop)
    engine = make_engine(model)
    ended = engine.generate([[1, 2]] * 3, [
        replace(GREEDY, stop_token_ids=[stop]), replace(GREEDY, termination_id=stop), replace(GREEDY, termination_id=stop, ignore_eos=True),
    ])  # fmt: skip
    assert [record.generated_tokens for record in ended] == [wanted[: first + 1], wanted[: first + 1], wanted[:10]]
    assert [record.finish_reason for record in ended] == [FinishReason.STOP, FinishReason.STOP, FinishReason.LENGTH]
    later = engine.generate([[1, 2]], replace(GREEDY, stop_token_ids=[stop], min_tokens=8))[0]
    assert stop not in later.generated_tokens[:8]


class LargerTokenizer(ByteTokenizer):
    """Knows more ids than a model, and ends texts with one of these."""

    vocab_size, eod = 300, 299
    stop_token_ids = (298, 5)


def test_ids_that_a_model_cannot_draw_end_nothing_and_are_no_obstacle(make_model: Make, make_engine: Make) -> None:
    engine = make_engine(make_model(vocab_size=272), LargerTokenizer())
    params = SamplingParams(seed=5, temperature=9, num_tokens_to_generate=12, min_tokens=12)
    (record,) = engine.generate(["x"], params)
    assert record.finish_reason is FinishReason.LENGTH and len(record.generated_tokens) == 12 and 5 not in record.generated_tokens[:-1]


def test_text_goes_in_and_out_and_a_stop_word_cuts_it(make_model: Make, make_engine: Make) -> None:
    tokenizer = ByteTokenizer()
    engine = make_engine(make_model(vocab_size=272), tokenizer)
    # Only letters can be drawn.
    letters = dict.fromkeys(tokenizer.tokenize("abcdefgh"), 100.0)
    params = SamplingParams(seed=5, num_tokens_to_generate=30, logit_bias=letters)
    whole = engine.generate(["hello"], params)[0]
    assert whole.prompt_tokens == tokenizer.tokenize("hello")
    assert whole.generated_text == tokenizer.detokenize(whole.generated_tokens)
    assert set(whole.generated_text) <= set("abcdefgh")
    word = whole.generated_text[12:15]
    cut = engine.generate(["hello"], replace(params, stop_words=[word]))[0]
    at = whole.generated_text.index(word)
    assert cut.generated_text == whole.generated_text[:at]
    assert cut.generated_tokens == whole.generated_tokens[: at + 3]
    assert cut.finish_reason is FinishReason.STOP
    last = engine.generate(["hello"], replace(params, stop_words=[word], num_tokens_to_generate=at + 3))[0]
    assert last.finish_reason is FinishReason.STOP and last.generated_text == cut.generated_text
    with_word = engine.generate(["hello"], replace(params, stop_words=[word], detokenize_stop_sequence=True))[0]
    assert with_word.generated_text == cut.generated_text + word and with_word.generated_tokens == cut.generated_tokens
    # A token that ends the output has text too, a special one has none.
    by_token = replace(params, stop_token_ids=(whole.generated_tokens[0],))
    with_token = replace(by_token, detokenize_stop_sequence=True)
    by_end = replace(with_token, stop_token_ids=(), logit_bias={tokenizer.eod: 100.0})
    ended = engine.generate(["hello"] * 3, [by_token, with_token, by_end])
    assert [record.generated_text for record in ended] == ["", whole.generated_text[0], ""]
    assert all(record.finish_reason is FinishReason.STOP and record.num_generated == 1 for record in ended)


def test_rows_of_the_embedding_beyond_the_vocabulary_are_never_drawn(make_model: Make, make_engine: Make) -> None:
    engine = make_engine(make_model(vocab_size=512), ByteTokenizer())
    records = engine.generate(["x"] * 8, SamplingParams(temperature=50, num_tokens_to_generate=40, ignore_eos=True))
    assert max(max(record.generated_tokens) for record in records) < ByteTokenizer.vocab_size
    ranked = engine.generate(["x"], SamplingParams(top_n_logprobs=64, num_tokens_to_generate=4))[0].generated_top_n_logprobs
    assert [len(best) for best in ranked] == [64] * 4 and max(map(max, ranked)) < ByteTokenizer.vocab_size
    with pytest.raises(InvalidTokenError, match="300"):
        engine.add_request([300])


def test_a_prompt_that_cannot_be_served_fails_alone(make_model: Make, make_engine: Make) -> None:
    model = make_model()
    engine = make_engine(model, max_sequence_length=40, num_blocks=4)
    records = engine.generate([[1], list(range(40)), [1, 64], [], [2], [3] * 25], replace(GREEDY, num_tokens_to_generate=12))
    kinds = [None, MaxSequenceLengthOverflowError, InvalidTokenError, InvalidTokenError, None, BlockOverflowError]
    assert [type(record.error) if record.error else None for record in records] == kinds
    assert [record.status is Status.COMPLETED for record in records] == [kind is None for kind in kinds]
    assert records[0].generated_tokens == naive_greedy(model, [1], 12)
    assert sum(engine.finished_counts.values()) == 6
    check_idle(engine)


class OneToken(torch.nn.Module):
    """An output layer by which one token is certain."""

    def __init__(self, token: int, vocab_size: int) -> None:
        super().__init__()
        self.token, self.vocab_size = token, vocab_size

    def forward(self, hidden: Tensor, weight: Tensor | None, rows: Tensor) -> Tensor:
        logits = hidden.new_full((len(rows), self.vocab_size), -30.0)
        logits[:, self.token] = 30.0
        return logits


@pytest.mark.slow
def test_ids_that_no_float32_holds_are_drawn_and_end_requests() -> None:
    last = 2**24 + 1
    config = TransformerConfig(num_layers=1, hidden_size=2, num_attention_heads=1, vocab_size=last + 2)
    model = GPTModel(config, ProcessGroups.single(), attention_core=PagedAttention(), dtype=torch.bfloat16).eval()
    sizes = InferenceConfig(num_blocks=2, block_size_tokens=8, max_sequence_length=8)
    engine = DynamicInferenceEngine(model, DynamicInferenceContext.for_model(model, sizes))
    common = {"num_tokens_to_generate": 2, "return_log_probs": True, "top_n_logprobs": 1}
    # Rounded to float32 the id would be that of its neighbour.
    for drawn in (last, last - 1):
        model.output = OneToken(drawn, last + 2)
        for temperature in (0.0, 1.0):
            params = SamplingParams(temperature=temperature, termination_id=last, seed=1, **common)
            (record,) = engine.generate([[last, last - 1]], params)
            wanted = ([last], FinishReason.STOP) if drawn == last else ([drawn] * 2, FinishReason.LENGTH)
            assert (record.generated_tokens, record.finish_reason) == wanted
            assert [list(best) for best in record.generated_top_n_logprobs] == [[token] for token in record.generated_tokens]
            assert record.generated_log_probs == pytest.approx([0.0] * len(record.generated_tokens), abs=1e-6)
    biased = SamplingParams(temperature=1.0, logit_bias={last: 100.0}, stop_token_ids=(last,), seed=1, **common)
    assert engine.generate([[last]], biased)[0].generated_tokens == [last]


class PoisonedLogits(torch.nn.Module):
    """An output layer that gives NaN for one sequence's token."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.row: int | None = None

    def forward(self, hidden: Tensor, weight: Tensor | None, rows: Tensor) -> Tensor:
        logits = self.inner(hidden, weight, rows)
        if self.row is not None:
            logits[self.row] = torch.nan
        return logits


def test_nan_scores_end_one_request_and_spare_the_others(make_model: Make, make_engine: Make) -> None:
    model = make_model()
    wanted = [naive_greedy(model, prompt, 10) for prompt in ([1], [2], [3])]
    model.output = PoisonedLogits(model.output)
    engine = make_engine(model)
    for prompt in ([1], [2], [3]):
        engine.add_request(prompt, GREEDY)
    engine.step()
    model.output.row = 1
    (failed,) = engine.step() or engine.step()
    assert failed.request_id == 1 and isinstance(failed.error, NonFiniteLogitsError) and failed.status is Status.FAILED
    model.output.row = None
    rest = []
    while engine.has_unfinished_requests():
        rest += engine.step()
    assert {record.request_id: record.generated_tokens for record in rest} == {0: wanted[0], 2: wanted[2]}
    check_idle(engine)


def test_a_tokenizer_that_fails_ends_one_request(make_model: Make, make_engine: Make) -> None:
    class Touchy(ByteTokenizer):
        def detokenize(self, ids: Any, skip_special: bool = True) -> str:
            if 33 in ids:
                raise KeyError("no text for 33")
            return super().detokenize(ids, skip_special)

    engine = make_engine(make_model(vocab_size=272), Touchy())
    bad = SamplingParams(temperature=0, num_tokens_to_generate=3, logit_bias={33: 1000.0})
    good = SamplingParams(temperature=0, num_tokens_to_generate=3, logit_bias={34: 1000.0})
    one, two = engine.generate(["a", "a"], [bad, good])
    assert isinstance(one.error, KeyError) and one.finish_reason is FinishReason.ERROR
    assert two.generated_text == '"""'
    check_idle(engine)


@pytest.mark.parametrize("steps", range(8))
def test_abort_in_every_state_frees_everything(make_engine: Make, steps: int) -> None:
    engine = make_engine(max_tokens=6, max_requests=2, num_blocks=6)
    numbers = [engine.add_request([1] * 16, GREEDY), engine.add_request([2] * 5, GREEDY), engine.add_request([3] * 9, GREEDY)]
    for _ in range(steps):
        engine.step()
    for number in numbers[::2]:
        record = engine.abort(number)
        assert record is not None and record.finish_reason is FinishReason.ABORT and record.status is Status.FAILED
        assert engine.abort(number) is None
    left = []
    while engine.has_unfinished_requests():
        left += engine.step()
    assert [record.request_id for record in left] == [numbers[1]]
    check_idle(engine)


def test_budgets_at_the_border(make_model: Make, make_engine: Make) -> None:
    model = make_model()
    engine = make_engine(model, max_sequence_length=12)
    nothing, clamped, total, scored = engine.generate(
        [[1, 2], [1] * 8, [1, 2], [1, 2, 3]],
        [
            replace(GREEDY, num_tokens_to_generate=0),
            replace(GREEDY, num_tokens_to_generate=100),
            SamplingParams(temperature=0, num_tokens_total=5),
            replace(GREEDY, num_tokens_to_generate=0, return_log_probs=True, skip_prompt_log_probs=False),
        ],
    )
    assert nothing.generated_tokens == [] and nothing.status is Status.COMPLETED
    assert len(clamped.generated_tokens) == 4 and clamped.merge().budget_clamped
    assert len(total.generated_tokens) == 3
    assert scored.generated_tokens == [] and len(scored.prompt_log_probs or []) == 2
    check_idle(engine)


def test_requests_are_served_by_priority_then_by_arrival(make_model: Make, make_engine: Make) -> None:
    model = make_model()
    engine = make_engine(model, max_requests=1)
    numbers = [engine.add_request([1, number], GREEDY, priority=priority) for number, priority in enumerate([0, 7, -1, 0, -1])]
    ended: list[DynamicInferenceRequestRecord] = []
    while engine.has_unfinished_requests():
        ended += engine.step()
    assert [record.request_id for record in ended] == [numbers[place] for place in (2, 4, 0, 3, 1)]
    assert [record.merge().priority for record in ended] == [-1, -1, 0, 0, 7]
    assert ended[-1].generated_tokens == naive_greedy(model, [1, 1], 10)
    for bad in (1.0, True, "1", 2**31, None):
        with pytest.raises(ValueError, match="priority="):
            engine.add_request([1], priority=bad)


def test_the_least_urgent_request_gives_way_and_keeps_its_priority(make_model: Make, make_engine: Make) -> None:
    model = make_model()
    engine = make_engine(model, num_blocks=7, block_size_tokens=4, max_requests=3)
    numbers = [engine.add_request([1, number], GREEDY, priority=priority) for number, priority in enumerate([2, 0, 1])]
    ended: dict[int, DynamicInferenceRequestRecord] = {}
    while engine.has_unfinished_requests():
        ended |= {record.request_id: record for record in engine.step()}
    assert [ended[number].num_preemptions > 0 for number in numbers] == [True, False, False]
    assert all(segment.priority == 2 for segment in ended[numbers[0]].requests) and len(ended[numbers[0]].requests) == 2
    assert all(ended[number].generated_tokens == naive_greedy(model, [1, number], 10) for number in numbers)


@pytest.mark.parametrize("seed", range(3))
def test_a_storm_of_requests_and_aborts_leaks_nothing(make_model: Make, make_engine: Make, seed: int) -> None:
    rng = random.Random(seed)
    engine = make_engine(make_model(layers=1), num_blocks=14, block_size_tokens=4, max_tokens=12, max_requests=5, max_sequence_length=48)
    added, ended = set(), []
    for _ in range(90):
        if rng.random() < 0.4:
            params = SamplingParams(temperature=rng.choice([0, 1]), num_tokens_to_generate=rng.randint(0, 12), return_log_probs=True)
            added.add(engine.add_request(random_prompts(rng, 1)[0], params))
        if rng.random() < 0.1 and added:
            record = engine.abort(rng.choice(sorted(added)))
            ended += [record] if record else []
        ended += engine.step()
        allocator, running = engine.context.allocator, engine._admission.running
        held = Counter(block for entry in running for block in engine.context.block_table(entry.record.request_id))
        assert len(held) == allocator.total_used and all(allocator.num_holders(block) == count for block, count in held.items())
    while engine.has_unfinished_requests():
        ended += engine.step()
    assert sorted(record.request_id for record in ended) == sorted(added)
    assert all(len(record.generated_log_probs) == record.num_generated for record in ended)
    assert sum(engine.finished_counts.values()) == len(added)
    check_idle(engine)


def test_suspending_between_any_two_steps_changes_no_token(make_engine: Make) -> None:
    prompts, params = [[1, 2, 3], [4] * 20, [5, 6]], SamplingParams(num_tokens_to_generate=12, seed=3, return_log_probs=True)
    wanted = make_engine().generate(prompts, params)
    for stop in range(12):
        engine = make_engine()
        numbers = [engine.add_request(prompt, params) for prompt in prompts]
        records = {}
        for step in range(100):
            if step == stop:
                engine.suspend()
                engine.suspend()
                assert engine.is_suspended and engine.context.cache.pages.untyped_storage().size() == 0
                with pytest.raises(RuntimeError, match="suspended"):
                    engine.step()
                engine.resume()
                engine.resume()
            records |= {record.request_id: record for record in engine.step()}
            if not engine.has_unfinished_requests():
                break
        for number, reference in zip(numbers, wanted, strict=True):
            assert records[number].generated_tokens == reference.generated_tokens
            torch.testing.assert_close(records[number].generated_log_probs, reference.generated_log_probs, rtol=1e-9, atol=1e-9)


def test_a_request_that_waits_in_vain_shifts_no_random_number(make_model: Make, make_engine: Make) -> None:
    mine = SamplingParams(temperature=1.2, seed=4, num_tokens_to_generate=24)
    wanted = make_engine(make_model()).generate([[1, 2, 3]], mine)[0].generated_tokens
    engine = make_engine(make_model(), num_blocks=5, block_size_tokens=8)
    engine.add_request([1, 2, 3], mine)
    done: list[DynamicInferenceRequestRecord] = []
    for step in range(60):
        if step == 4:
            late = engine.add_request([5] * 33, replace(mine, num_tokens_to_generate=1))
        if step == 9:
            engine.abort(late)
        done += engine.step()
    assert done[0].generated_tokens == wanted
