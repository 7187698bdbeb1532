# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Texts of requests, made by whoever reads them."""

import asyncio
import copy
import dataclasses
import functools
import gc
import itertools
import pickle
import random
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from mcore_inference import (
    DynamicInferenceRequest,
    DynamicInferenceRequestRecord,
    EngineRunner,
    FinishReason,
    Increment,
    RequestStream,
    SamplingParams,
    Status,
)
from mcore_inference.engine._stream import EndTurns, deliver
from mcore_inference.engine._stream_text import StreamText
from mcore_inference.requests import TextMaker
from mcore_parallel.data import ByteTokenizer
from tests.support.sentence_pieces import SentencePieces

Make = Callable[..., Any]


class Touchy(ByteTokenizer):
    """Has no text for one id, and says in which threads it decoded how many tokens."""

    def __init__(self, bad: int = -1) -> None:
        super().__init__()
        self.bad = bad
        self.calls = Counter[tuple[str, int]]()

    def detokenize(self, ids: Any, skip_special: bool = True) -> str:
        self.calls[threading.current_thread().name, len(ids)] += 1
        if self.bad in ids:
            raise KeyError(f"no text for {self.bad}")
        return super().detokenize(ids, skip_special)


class Turns(torch.nn.Module):
    """An output layer by which the next of these tokens is certain."""

    def __init__(self, tokens: Iterator[int]) -> None:
        super().__init__()
        self.tokens = tokens

    def forward(self, hidden: torch.Tensor, weight: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor:
        logits = hidden.new_full((len(rows), 272), -30.0)
        logits[:, next(self.tokens)] = 30.0
        return logits


def completed(make: TextMaker, fail: Callable[[], None] = lambda: None, number: int = 0) -> DynamicInferenceRequestRecord:
    """A record of "abc" that ended with the budget, whose text is not made."""
    request = DynamicInferenceRequest(request_id=number, prompt_tokens=[1], sampling_params=SamplingParams())
    request.generated_tokens, request.status, request.finish_reason = list(b"abc"), Status.COMPLETED, FinishReason.LENGTH
    request.add_event_finish()
    record = DynamicInferenceRequestRecord.from_request(request)
    record.defer_text(make, fail)
    return record


@pytest.mark.parametrize("seed", range(20))
def test_pieces_of_random_bytes_join_to_the_text_of_all_whole_characters_first(seed: int) -> None:
    rng, tokenizer = random.Random(seed), ByteTokenizer()
    tokens = list("a\u00e9\U0001f600".encode() * 5 + rng.randbytes(100)) if seed else list("\U0001f600".encode()[:2])
    errors: list[Exception] = []
    text, shown, at = StreamText(tokenizer, (), {tokenizer.eod}, errors.append), "", 0
    while at < len(tokens) - 1:
        count = rng.randint(1, 3)
        shown += text.push(tokens[at : at + count])
        at += count
        assert tokenizer.detokenize(tokens[: len(tokens)]).startswith(shown)
    # The last one ends the request, and is no text.
    shown += text.end([*tokens[at:], tokenizer.eod])
    assert shown == text.emitted == tokenizer.detokenize(tokens) and not errors


def test_what_a_tokenizer_raises_is_told_once_and_text_before_it_stays() -> None:
    errors: list[Exception] = []
    text = StreamText(Touchy(ord("c")), (), (), errors.append)
    assert [text.push(part) for part in (b"a", b"bc", b"d")] == ["a", "b", ""]
    assert text.end(b"e") == "" and text.emitted == "ab"
    assert [type(error) for error in errors] == [KeyError] and errors == [text.failure]
    # At the end nobody is left to be told.
    text = StreamText(Touchy(ord("c")), (), (), errors.append)
    assert (text.push(b"ab"), text.end(b"c"), text.emitted) == ("ab", "", "ab")
    assert isinstance(text.failure, KeyError) and len(errors) == 1


def test_steps_decode_for_stop_words_alone(make_model: Make, make_engine: Make) -> None:
    """The text of other requests is made in the thread that reads it, of a stream once."""
    tokenizer = Touchy()
    engine = make_engine(make_model(vocab_size=272, layers=1), tokenizer, max_requests=4)
    params = SamplingParams(temperature=0, num_tokens_to_generate=6, logit_bias={ord("z"): 1000.0})
    stops = SamplingParams(temperature=0, num_tokens_to_generate=6, logit_bias={ord("z"): 1000.0}, stop_words=["zzzzz"])

    async def main() -> list[list[Increment]]:
        with EngineRunner(engine) as runner:
            streams = [await runner.submit([1, 2], params, stream=stream) for stream in (True, False)]
            parts = [[part async for part in stream] for stream in streams]
            assert {name for name, _ in tokenizer.calls} == {"MainThread"}
            # The prompts, and the first token behind one; each by itself once, and with the one before; the other request's all at once.
            assert {length: count for (_, length), count in tokenizer.calls.items()} == {1: 1, 2: 2 + 5, 3: 1, 8: 1}
            tokenizer.calls.clear()
            stream = await runner.submit([1, 2], stops)
            parts.append([part async for part in stream])
            assert {name for name, _ in tokenizer.calls} == {"mcore-engine"}
            return parts

    for parts, text in zip(asyncio.run(main()), ("zzzzzz", "zzzzzz", ""), strict=True):
        record = parts[-1].record
        assert record is not None and "".join(part.text for part in parts) == record.generated_text == text
        assert [token for part in parts for token in part.tokens] == record.generated_tokens


@pytest.mark.parametrize("bad", [-1, 0xA9])
def test_a_record_that_is_asked_for_has_the_text_of_its_tokens(bad: int, make_model: Make, make_engine: Make) -> None:
    """Without a runner; by whole characters, and up to where the tokenizer fails."""
    engine = make_engine(make_model(vocab_size=272, layers=1), Touchy(bad))
    # The bytes of an e with an accent, in turn: the output layer looks at nothing else than the number of the step.
    drawn = itertools.cycle("a\u00e9".encode())
    engine.model.output = Turns(drawn)
    number = engine.add_request([1, 2], SamplingParams(temperature=0, num_tokens_to_generate=6))
    asked_late = engine.get_request(number)
    texts, ended = [], []
    while not ended:
        ended = engine.step()
        if not ended:
            texts.append(engine.get_request(number).generated_text)
            assert engine.get_request(number) is asked_late
    (record,) = ended
    if bad < 0:
        assert texts == ["a", "a", "a\u00e9", "a\u00e9a", "a\u00e9a"] and record.generated_text == "a\u00e9a\u00e9"
        assert record.finish_reason is FinishReason.LENGTH
    else:
        assert texts == ["a"] * 5 and record.generated_text == "a"
        assert record.finish_reason is FinishReason.ERROR and isinstance(record.error, KeyError)


def test_texts_go_on_from_their_prompts_whoever_makes_them(make_model: Make, make_engine: Make) -> None:
    """A blank that a tokenizer strips at the beginning of a text is there behind a prompt."""
    tokenizer = SentencePieces()
    ada = tokenizer.tokenize("ada")
    assert len(ada) == 1 and tokenizer.detokenize(ada) == "ada"

    def params(**more: Any) -> SamplingParams:
        return SamplingParams(temperature=0, ignore_eos=True, **{"num_tokens_to_generate": 16, "allowed_token_ids": ada} | more)

    # There is no room for all to the end.
    engine = make_engine(make_model(vocab_size=tokenizer.vocab_size, layers=1), tokenizer, num_blocks=5)
    records = engine.generate(["name", "name", [1]], [params(), params(n=2), params()])
    assert any(record.num_preemptions for record in records)
    for record in records[:-1]:
        assert record.generated_text == record.merge().generated_text == " ada" * 16
        assert "name" + record.generated_text == tokenizer.detokenize(record.prompt_tokens + record.generated_tokens)
    # Where a prompt has no text, the output's is the beginning.
    assert records[-1].generated_text == "ada" + " ada" * 15
    for keeps in (False, True):
        (stopped,) = engine.generate(["name"], params(stop_words=[" ada"], detokenize_stop_sequence=keeps))
        assert stopped.num_generated == 1 and stopped.generated_text == " ada" * keeps
    number = engine.add_request("name", params(num_tokens_to_generate=3))
    engine.step()
    assert engine.get_request(number).generated_text == " ada"
    ended: list[DynamicInferenceRequestRecord] = []
    while not ended:
        ended = engine.step()
    assert ended[0].generated_text == " ada" * 3

    async def main() -> None:
        with EngineRunner(engine) as runner:
            streams = [await runner.submit("name", params(stop_words=words)) for words in ([], ["name"])]
            for stream in streams:
                parts = [part async for part in stream]
                record = parts[-1].record
                assert record is not None and "".join(part.text for part in parts) == record.generated_text == " ada" * 16

    asyncio.run(main())


def test_a_prompt_that_the_tokenizer_refuses_leaves_the_text_of_its_output(make_model: Make, make_engine: Make) -> None:
    engine = make_engine(make_model(vocab_size=272, layers=1), Touchy(bad=1))
    settings = SamplingParams(temperature=0, num_tokens_to_generate=2, allowed_token_ids=[ord("z")])
    for words in ([], ["a"]):
        (record,) = engine.generate([[1, 2]], dataclasses.replace(settings, stop_words=words))
        assert record.finish_reason is FinishReason.LENGTH and record.generated_text == "zz"


def test_a_tokenizer_that_fails_in_a_stream_ends_its_request_alone(make_model: Make, make_engine: Make) -> None:
    """At once, and not when all its tokens are drawn."""
    engine = make_engine(make_model(vocab_size=272, layers=1), Touchy(33), max_sequence_length=512)
    may_step = threading.Semaphore(0)
    step = engine.step
    engine.step = lambda: (may_step.acquire(timeout=30), step())[1]

    def params(token: int) -> SamplingParams:
        return SamplingParams(temperature=0, num_tokens_to_generate=20, logit_bias={token: 1000.0}, return_log_probs=True)

    async def read(stream: RequestStream) -> list[Increment]:
        parts: list[Increment] = []
        async for part in stream:
            parts.append(part)
            may_step.release()
        return parts

    async def main() -> list[list[Increment]]:
        with EngineRunner(engine) as runner:
            await runner.pause()
            streams = [await runner.submit([1, 2], params(token)) for token in (33, 34)]
            await runner.unpause()
            may_step.release()
            bad = await read(streams[0])
            may_step.release(40)
            return [bad, await read(streams[1])]

    bad, good = asyncio.run(main())
    for parts in (bad, good):
        record = parts[-1].record
        assert record is not None and "".join(part.text for part in parts) == record.generated_text
        assert [token for part in parts for token in part.tokens] == record.generated_tokens
        assert len([value for part in parts for value in part.log_probs]) == record.num_generated
    record = bad[-1].record
    assert record is not None and record.finish_reason is FinishReason.ERROR and isinstance(record.error, KeyError)
    # Steps wait for the reader of its increments: the failure is known before the third.
    assert record.num_generated <= 3 and record.generated_text == ""
    assert good[-1].record is not None and good[-1].record.generated_text == '"' * 20
    assert engine.finished_counts["error"] == 1 and engine.finished_counts["length"] == 1


@pytest.mark.parametrize("is_shown", [False, True], ids=["unread", "shown before"])
def test_text_is_made_by_who_reads_it_first_or_how_its_request_ended(is_shown: bool, make_model: Make, make_engine: Make) -> None:
    tokenizer = Touchy()
    engine = make_engine(make_model(vocab_size=272, layers=1), tokenizer)
    params = SamplingParams(temperature=0, num_tokens_to_generate=4, logit_bias={ord("z"): 1000.0})
    for read in (
        lambda record: record.generated_text,
        lambda record: record.status,
        lambda record: record.finish_reason,
        lambda record: record.error,
        lambda record: record.merge(),
        lambda record: record.serialize(),
        copy.copy,
        pickle.dumps,
        repr,
        dataclasses.replace,
    ):
        number = engine.add_request([1, 2], params)
        engine.step()
        if is_shown:
            assert engine.get_request(number).generated_text == "z"
        tokenizer.calls.clear()
        ended: list[DynamicInferenceRequestRecord] = []
        while not ended:
            ended = engine.step()
        (record,) = ended
        assert record.generated_tokens == [ord("z")] * 4 and record.num_generated == 4 and not tokenizer.calls
        read(record)
        assert tokenizer.calls
        tokenizer.calls.clear()
        assert record.generated_text == record.merge().generated_text == "zzzz" and record.finish_reason is FinishReason.LENGTH
        assert pickle.loads(pickle.dumps(record)) == record == DynamicInferenceRequestRecord.deserialize(record.serialize())
        assert not tokenizer.calls
    assert engine.finished_counts == {"length": 10}


@pytest.mark.parametrize("is_shown", [False, True], ids=["unread", "shown before"])
def test_a_tokenizer_that_fails_at_a_text_ends_its_request_by_an_error(is_shown: bool, make_model: Make, make_engine: Make) -> None:
    engine = make_engine(make_model(vocab_size=272, layers=1), Touchy(ord("b")))
    engine.model.output = Turns(iter(b"aab"))
    number = engine.add_request([1, 2], SamplingParams(temperature=0, num_tokens_to_generate=3))
    engine.step()
    assert not is_shown or engine.get_request(number).generated_text == "a"
    engine.step()
    (record,) = engine.step()
    assert engine.finished_counts == {"length": 1}
    assert record.status is Status.FAILED and record.finish_reason is FinishReason.ERROR and isinstance(record.error, KeyError)
    assert record.generated_text == "aa" and record.generated_tokens == list(b"aab")
    assert [event.type.name for event in record.requests[0].events] == ["ADD", "ERROR_NONTRANSIENT", "FAIL"]
    # It stays counted as it ended, since counters do not fall.
    assert engine.finished_counts == {"length": 1} and engine.stats()["failed_texts"] == 1
    # Others have their texts, and the failure of one that was given up is that.
    engine.model.output = Turns(iter(b"cb"))
    (good,) = engine.generate([[1, 2]], SamplingParams(temperature=0, num_tokens_to_generate=1))
    number = engine.add_request([1, 2], SamplingParams(temperature=0, num_tokens_to_generate=3))
    engine.step()
    aborted = engine.abort(number)
    assert aborted is not None and aborted.finish_reason is FinishReason.ABORT and aborted.error is None
    assert (good.generated_text, aborted.generated_text) == ("c", "") and aborted.status is Status.FAILED
    stats = engine.stats()
    assert (stats["finished_error"], stats["failed_texts"], stats["finished_length"], stats["finished_abort"]) == (0, 1, 2, 1)


@pytest.mark.parametrize("stream", [False, True])
def test_what_a_tokenizer_raises_at_the_last_token_reaches_its_own_reader(stream: bool, make_model: Make, make_engine: Make) -> None:
    engine = make_engine(make_model(vocab_size=272, layers=1), Touchy(33))

    async def main() -> list[DynamicInferenceRequestRecord]:
        with EngineRunner(engine) as runner:
            await runner.pause()
            params = [SamplingParams(temperature=0, num_tokens_to_generate=1, logit_bias={token: 1000.0}) for token in (33, 34)]
            streams = [await runner.submit([1, 2], each, stream=stream) for each in params]
            await runner.unpause()
            return [await stream.record() for stream in streams]

    bad, good = asyncio.run(main())
    assert bad.finish_reason is FinishReason.ERROR and isinstance(bad.error, KeyError) and bad.generated_text == ""
    assert good.finish_reason is FinishReason.LENGTH and good.generated_text == '"'
    assert engine.finished_counts == {"length": 2} and engine.stats()["failed_texts"] == 1


def fails_at_the_last(tokens: list[int]) -> tuple[str, Exception | None]:
    return "ab", KeyError("c")


def test_a_record_as_a_dict_has_its_segments_as_the_text_leaves_them() -> None:
    record = completed(fails_at_the_last)
    data = dataclasses.asdict(record)
    assert data["generated_text"] == "ab" and data["requests"][0]["status"] is record.status is Status.FAILED


def test_what_a_reader_was_shown_stays_when_a_stream_has_another_text() -> None:
    failed: list[int] = []
    record = completed(lambda tokens: ("abc", None), lambda: failed.append(1))
    assert (record.status, record.generated_text) == (Status.COMPLETED, "abc")
    record.settle_text("ab", KeyError("c"))
    assert (record.status, record.generated_text, failed) == (Status.COMPLETED, "abc", [])
    # One that nobody read has that of its stream.
    record = completed(lambda tokens: ("abc", None), lambda: failed.append(1))
    record.settle_text("ab", KeyError("c"))
    assert (record.status, record.generated_text, failed) == (Status.FAILED, "ab", [1])


def test_a_text_that_is_assigned_to_an_unread_record_is_not_made() -> None:
    record = completed(fails_at_the_last)
    record.generated_text = "mine"
    assert (record.status, record.generated_text) == (Status.COMPLETED, "mine")
    assert pickle.loads(pickle.dumps(record)) == dataclasses.replace(record) == copy.deepcopy(record) == record


@pytest.mark.parametrize("is_early", [False, True], ids=["while it is written", "before it is"])
def test_a_record_whose_request_ends_while_another_thread_pickles_it_is_written_whole(
    is_early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = DynamicInferenceRequest(request_id=0, prompt_tokens=[1], sampling_params=SamplingParams())
    record = DynamicInferenceRequestRecord.from_request(request)
    make_text = record._make_text

    def end() -> None:
        if record._late_text is None:
            record.defer_text(lambda tokens: ("whole", None), lambda: None)

    class Ends:
        def __reduce__(self) -> Any:
            end()
            return int, (0,)

    def made() -> str:
        text = make_text()
        monkeypatch.undo()
        end()
        return text

    if is_early:
        monkeypatch.setattr(record, "_make_text", made)
    else:
        record.latency = Ends()  # type: ignore[assignment]
    assert pickle.loads(pickle.dumps(record)).generated_text == ("whole" if is_early else "")
    assert record.generated_text == "whole"


def test_readers_in_several_threads_make_a_text_once() -> None:
    calls: list[list[int]] = []
    failed: list[int] = []
    together = threading.Barrier(4)

    def make(tokens: list[int]) -> tuple[str, Exception | None]:
        calls.append(tokens)
        return "ab", KeyError("c")

    record = completed(make, lambda: failed.append(1))
    read: list[tuple[Status, str]] = []

    def reader() -> None:
        together.wait(timeout=30)
        read.append((record.status, record.generated_text))

    threads = [threading.Thread(target=reader) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert read == [(Status.FAILED, "ab")] * 4 and calls == [list(b"abc")] and failed == [1]


def test_texts_of_many_answers_that_end_together_leave_others_their_turns() -> None:
    """Each takes longer than a turn of the event loop may be."""
    turns: list[int] = []

    def make(tokens: list[int]) -> tuple[str, Exception | None]:
        time.sleep(2e-3)
        return bytes(tokens).decode(), None

    async def main() -> list[tuple[int, str]]:
        loop = asyncio.get_running_loop()

        def turn() -> None:
            turns.append(len(ended))
            loop.call_soon(turn)

        ended: list[tuple[int, str]] = []
        done = asyncio.Event()

        def take(item: Increment | Exception) -> None:
            assert isinstance(item, Increment) and item.record is not None
            ended.append((item.record.request_id, item.text))
            if len(ended) == 8:
                done.set()

        streams = [RequestStream(lambda number: None, loop, whole=True) for _ in range(8)]
        for stream in streams:
            stream.forward(take)
        turn()
        deliver([(stream, completed(make, number=number)) for number, stream in enumerate(streams)])
        await asyncio.wait_for(done.wait(), timeout=30)
        return ended

    assert asyncio.run(main()) == [(number, "abc") for number in range(8)]
    # Somebody else had a turn behind each of them.
    assert set(range(8)) <= {*turns}


def test_ends_of_many_steps_have_one_turn_of_a_pass_together() -> None:
    """Each text takes longer than a turn may; one that fails in its reader keeps no other from its own."""
    passes: list[int] = []

    def make(tokens: list[int]) -> tuple[str, Exception | None]:
        time.sleep(2e-3)
        passes.append(num_passes)
        return bytes(tokens).decode(), None

    async def main() -> list[int]:
        nonlocal num_passes
        loop, turns, ended = asyncio.get_running_loop(), EndTurns(), list[int]()
        loop.set_exception_handler(lambda loop, context: failed.append(context["exception"]))
        for number in range(6):
            stream = RequestStream(lambda number: None, loop, whole=True)
            stream.forward(functools.partial(take, ended, number))
            deliver([(stream, completed(make, number=number))], turns=turns)
        deadline = loop.time() + 30
        while len(ended) < 6 and loop.time() < deadline:
            num_passes += 1
            await asyncio.sleep(0)
        assert turns._waiting
        await asyncio.sleep(0)
        assert not turns._waiting
        return ended

    def take(ended: list[int], number: int, item: Increment | Exception) -> None:
        ended.append(number)
        if number == 2:
            raise KeyError("of a reader")

    num_passes, failed = 0, list[Any]()
    assert asyncio.run(main()) == [0, 1, 2, 3, 4, 5]
    assert len(passes) == len(set(passes)) == 6 and [type(error) for error in failed] == [KeyError]


def test_a_loop_that_was_closed_keeps_no_ends_waiting() -> None:
    turns = EndTurns()

    def make(tokens: list[int]) -> tuple[str, Exception | None]:
        time.sleep(2e-3)
        return "", None

    async def leave() -> None:
        loop = asyncio.get_running_loop()
        deliver([(RequestStream(lambda number: None, loop, whole=True), completed(make)) for _ in range(50)], turns=turns)
        await asyncio.sleep(0)

    asyncio.run(leave())
    assert turns._waiting
    deliver([], turns=turns)
    assert not turns._waiting


@pytest.mark.parametrize("whole", [True, False])
def test_no_text_is_made_for_a_reader_that_aborted(whole: bool, make_model: Make, make_engine: Make) -> None:
    tokenizer = Touchy()
    engine = make_engine(make_model(vocab_size=272, layers=1), tokenizer)
    params = SamplingParams(temperature=0, num_tokens_to_generate=50, logit_bias={ord("z"): 1000.0})

    async def main() -> None:
        with EngineRunner(engine) as runner:
            await runner.pause()
            streams = [await runner.submit([1, 2], params, stream=not whole) for _ in range(3)]
            await runner.call(lambda: [engine.step() for _ in range(3)])
            for stream in streams:
                stream.abort()
            last = [[increment async for increment in stream][-1] for stream in streams]
            assert [(increment.text, len(increment.tokens)) for increment in last] == [("", 3)] * 3
            assert not tokenizer.calls
            # It is there for whoever asks.
            records = [increment.record for increment in last if increment.record is not None]
            assert [(record.finish_reason, record.generated_text) for record in records] == [(FinishReason.ABORT, "zzz")] * 3

    asyncio.run(main())


def test_increments_that_are_made_come_in_order_however_long_their_readers_take() -> None:
    """A coordinator's, in one delivery each."""

    async def main() -> list[tuple[int, str]]:
        loop = asyncio.get_running_loop()
        taken: list[tuple[int, str]] = []
        done = asyncio.Event()

        def take(number: int, item: Increment | Exception) -> None:
            assert isinstance(item, Increment)
            time.sleep(2e-3)
            taken.append((number, item.text))
            if len(taken) == 6:
                done.set()

        streams = [RequestStream(lambda number: None, loop) for _ in range(3)]
        for number, stream in enumerate(streams):
            stream.forward(functools.partial(take, number))
        for text in "ab":
            deliver([(stream, Increment(text=text)) for stream in streams])
        await asyncio.wait_for(done.wait(), timeout=30)
        return taken

    assert asyncio.run(main()) == [(number, text) for text in "ab" for number in range(3)]


def test_a_record_that_nobody_reads_keeps_no_engine(make_model: Make, make_engine: Make) -> None:
    engine = make_engine(make_model(vocab_size=272, layers=1), ByteTokenizer())
    context = weakref.ref(engine.context)
    (record,) = engine.generate([[1, 2]], SamplingParams(temperature=0, num_tokens_to_generate=3, logit_bias={ord("z"): 1000.0}))
    del engine
    gc.collect()
    assert context() is None and record.generated_text == "zzz"
