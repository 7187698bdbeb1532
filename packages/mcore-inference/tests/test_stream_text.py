# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Text of streams, made by whoever reads them."""

import asyncio
import itertools
import random
import threading
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
from mcore_inference.engine._stream_text import StreamText
from mcore_parallel.data import ByteTokenizer

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


def finished(tokens: list[int], text: str, status: Status = Status.COMPLETED) -> DynamicInferenceRequestRecord:
    request = DynamicInferenceRequest(request_id=0, prompt_tokens=[1], sampling_params=SamplingParams(), status=status)
    request.generated_tokens = tokens
    return DynamicInferenceRequestRecord(requests=[request], generated_text=text)


@pytest.mark.parametrize("seed", range(20))
def test_pieces_of_random_bytes_join_to_the_text_of_all_whole_characters_first(seed: int) -> None:
    rng, tokenizer = random.Random(seed), ByteTokenizer()
    tokens = list("a\u00e9\U0001f600".encode() * 5 + rng.randbytes(100)) if seed else list("\U0001f600".encode()[:2])
    errors: list[Exception] = []
    text, shown, at = StreamText(tokenizer, {tokenizer.eod}, errors.append), "", 0
    while at < len(tokens) - 1:
        count = rng.randint(1, 3)
        shown += text.push(tokens[at : at + count])
        at += count
        assert tokenizer.detokenize(tokens[: len(tokens)]).startswith(shown)
    record = finished(tokens, "")
    # The last one ends the request, and is no text.
    shown += text.end([*tokens[at:], tokenizer.eod], record)
    assert shown == record.generated_text == tokenizer.detokenize(tokens) and not errors


@pytest.mark.parametrize("decodes_all", [False, True])
def test_what_a_tokenizer_raises_is_told_once_and_text_before_it_stays(decodes_all: bool) -> None:
    errors: list[Exception] = []
    text = StreamText(Touchy(ord("c")), (), errors.append)
    assert [text.push(part) for part in (b"a", b"bc", b"d")] == ["a", "b", ""]
    assert [type(error) for error in errors] == [KeyError]
    # The engine, which decodes all tokens at once, met the same, or did not.
    record = finished(list(b"abcde"), "abcde" if decodes_all else "", Status.COMPLETED if decodes_all else Status.FAILED)
    assert text.end(b"e", record) == ("cde" if decodes_all else "")
    assert record.generated_text == ("abcde" if decodes_all else "ab") and len(errors) == 1


def test_steps_decode_for_stop_words_alone(make_model: Make, make_engine: Make) -> None:
    """The text of other streams is made in the thread that reads them, and once more by the engine at their ends, at once."""
    tokenizer = Touchy()
    engine = make_engine(make_model(vocab_size=272, layers=1), tokenizer, max_requests=4)
    params = SamplingParams(temperature=0, num_tokens_to_generate=6, logit_bias={ord("z"): 1000.0})
    stops = SamplingParams(temperature=0, num_tokens_to_generate=6, logit_bias={ord("z"): 1000.0}, stop_words=["zzzzz"])

    async def main() -> list[list[Increment]]:
        with EngineRunner(engine) as runner:
            streams = [await runner.submit([1, 2], params, stream=stream) for stream in (True, False)]
            parts = [[part async for part in stream] for stream in streams]
            assert {call: count for call, count in tokenizer.calls.items() if call[0] == "mcore-engine"} == {("mcore-engine", 6): 2}
            assert sum(count for (name, _), count in tokenizer.calls.items() if name == "MainThread") > 5
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
