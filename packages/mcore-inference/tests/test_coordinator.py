# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A coordinator over real sockets, with engines of a tiny model."""

import asyncio
import json
import re
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch

pytest.importorskip("zmq")

from mcore_inference import CoordinatorError, EngineRunner, FinishReason, InvalidTokenError, MaxSequenceLengthOverflowError, SamplingParams
from mcore_inference.coordinator import (
    CoordinatedRunner,
    CoordinatorConfig,
    CoordinatorSecurity,
    DataParallelInferenceCoordinator,
    EngineWorker,
    InferenceClient,
)
from mcore_inference.coordinator._messages import Message, Partials, encode
from mcore_inference.coordinator._peer import Silence
from mcore_parallel.data import ByteTokenizer
from tests.support.coordinated_engines import QUICK, serve

Make = Callable[..., Any]
TEN = SamplingParams(num_tokens_to_generate=10, seed=1, return_log_probs=True, top_n_logprobs=2)
LONG = SamplingParams(num_tokens_to_generate=400, ignore_eos=True, seed=1)


def test_answers_are_those_of_one_engine(runners: list[EngineRunner], make_model: Make, make_engine: Make) -> None:
    prompts = [f"prompt {index}" for index in range(8)]
    alone = make_engine(make_model(vocab_size=272, dtype=torch.float32, layers=1), ByteTokenizer(), max_sequence_length=512)
    wanted = alone.generate(prompts, TEN)

    async def ask(address: str) -> None:
        async with InferenceClient(address) as client:
            assert client.max_sequence_length == 512
            records = await asyncio.gather(*(client.add_request(prompt, TEN) for prompt in prompts))
            for record, reference in zip(records, wanted, strict=True):
                assert record.generated_tokens == reference.generated_tokens
                assert record.generated_text == reference.generated_text
                assert record.generated_log_probs == pytest.approx(reference.generated_log_probs, abs=1e-5)
                assert record.latency is not None and record.latency > 0
            assert (await client.add_request(prompts[1], TEN, priority=3)).merge().priority == 3
            with pytest.raises(ValueError, match="priority="):
                await client.submit(prompts[0], TEN, priority=0.5)  # type: ignore[arg-type]
            stream = await client.submit(prompts[0], TEN, priority=-1)
            tokens, text, best = [], "", []
            async for increment in stream:
                tokens, text, best = tokens + increment.tokens, text + increment.text, best + increment.top_n_logprobs
            assert (tokens, text) == (wanted[0].generated_tokens, wanted[0].generated_text)
            [whole] = [increment async for increment in await client.submit(prompts[0], TEN, stream=False)]
            assert (whole.tokens, whole.text) == (wanted[0].generated_tokens, wanted[0].generated_text)
            assert [set(each) for each in best] == [set(each) for each in wanted[0].generated_top_n_logprobs]
            status = await client.status()
            assert {engine.name for engine in status.engines} == {"dp-0", "dp-1"}
            assert [engine.finished_requests for engine in status.engines] == [pytest.approx(5.5, abs=1.6)] * 2

    with ExitStack() as stack:
        coordinator = serve(stack, runners)
        asyncio.run(ask(coordinator.address))
        assert coordinator.num_open_requests == 0


def test_what_a_full_engine_refuses_is_answered_by_another(make_model: Make, make_engine: Make) -> None:
    engines = [make_engine(make_model(vocab_size=272, dtype=torch.float32, layers=1), ByteTokenizer()) for _ in range(2)]

    async def ask(address: str, full: EngineRunner) -> None:
        await full.pause()
        async with InferenceClient(address) as client:
            answers = [client.add_request("alike " * 8, TEN) for _ in range(12)]
            deadline = time.monotonic() + 30.0
            while sum(answer.done() for answer in answers) < 10 and time.monotonic() < deadline:
                await asyncio.sleep(0.01)
            assert [answer.done() and len(answer.result().generated_tokens) for answer in answers].count(10) == 10
            await full.unpause()
            assert all([len((await answer).generated_tokens) == 10 for answer in answers])

    with ExitStack() as stack:
        full = stack.enter_context(EngineRunner(engines[0], max_waiting_requests=2, stall_timeout_s=100.0))
        coordinator = serve(stack, [full, stack.enter_context(EngineRunner(engines[1]))])
        asyncio.run(ask(coordinator.address, full))


def test_a_message_has_the_tokens_of_a_step_of_all_streams(runners: list[EngineRunner], monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def counted(message: Message) -> bytes:
        if isinstance(message, Partials):
            sizes.append(len(message.items))
        return encode(message)

    async def ask(runner: CoordinatedRunner) -> None:
        async def one(prompt: str) -> None:
            stream = await runner.submit(prompt, SamplingParams(num_tokens_to_generate=40, ignore_eos=True))
            tokens, text = [], ""
            async for increment in stream:
                tokens, text = tokens + increment.tokens, text + increment.text
            assert increment.record is not None
            assert len(tokens) == 40 and (tokens, text) == (increment.record.generated_tokens, increment.record.generated_text)

        await asyncio.gather(*(one(f"prompt {number}") for number in range(8)))
        assert runner.health().unfinished_requests == 0

    monkeypatch.setattr("mcore_inference.coordinator._worker.encode", counted)
    with ExitStack() as stack:
        coordinator = serve(stack, runners[:1])
        asyncio.run(ask(stack.enter_context(CoordinatedRunner(coordinator.address))))
    # The last token of a stream comes with its record.
    assert sum(sizes) <= 8 * 39 and len(sizes) < sum(sizes) / 2, sizes


def test_refusals_of_engines_reach_the_client_and_end_one_request(runners: list[EngineRunner]) -> None:
    async def ask(address: str) -> None:
        async with InferenceClient(address) as client:
            with pytest.raises(MaxSequenceLengthOverflowError, match="max_sequence_length=512"):
                await client.add_request([1] * 600, TEN)
            with pytest.raises(InvalidTokenError):
                await client.add_request([], TEN)
            assert len((await client.add_request("x", TEN)).generated_tokens) == 10

    with ExitStack() as stack:
        asyncio.run(ask(serve(stack, runners).address))


def test_a_text_that_a_tokenizer_fails_at_ends_its_request_alone(make_model: Make, make_engine: Make) -> None:
    class Touchy(ByteTokenizer):
        def detokenize(self, ids: Any, skip_special: bool = True) -> str:
            if ord("!") in ids:
                raise KeyError("no text for it")
            return super().detokenize(ids, skip_special)

    async def ask(address: str) -> None:
        async with InferenceClient(address) as client:
            bad, good = (SamplingParams(temperature=0, num_tokens_to_generate=3, logit_bias={ord(letter): 1000.0}) for letter in "!a")
            whole = [client.add_request([1, 2], params) for params in (bad, good)]
            streams = [await client.submit([1, 2], params) for params in (bad, good)]
            records = [*await asyncio.gather(*whole), *[await stream.record() for stream in streams]]
            assert [record.finish_reason for record in records] == [FinishReason.ERROR, FinishReason.LENGTH] * 2
            assert [record.generated_text for record in records] == ["", "aaa"] * 2
            assert all("no text for it" in str(record.error) for record in records[::2])

    with ExitStack() as stack:
        runner = stack.enter_context(EngineRunner(make_engine(make_model(vocab_size=272, layers=1), Touchy())))
        asyncio.run(ask(serve(stack, [runner]).address))
        counts = runner.engine.finished_counts
        # Of a stream it is met before or behind the last token.
        assert counts["error"] + runner.engine.stats()["failed_texts"] == 2 and counts["error"] + counts["length"] == 4


def test_a_cancelled_request_is_aborted_and_others_go_on(runners: list[EngineRunner]) -> None:
    async def ask(address: str) -> None:
        async with InferenceClient(address) as client:
            await client.pause_engines()
            requests = [client.add_request("x", TEN) for _ in range(4)]
            await asyncio.sleep(0.1)
            requests[1].cancel()
            await client.unpause_engines()
            records = await asyncio.gather(*requests, return_exceptions=True)
            assert [isinstance(record, asyncio.CancelledError) for record in records] == [False, True, False, False]
            status = await client.status()
            assert sum(engine.open_requests for engine in status.engines) == 0

    with ExitStack() as stack:
        asyncio.run(ask(serve(stack, runners).address))
        deadline = time.monotonic() + 30
        while any(runner.engine.has_unfinished_requests() for runner in runners):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_an_engine_without_an_answer_says_so_and_no_more_once_it_has_one(
    runners: list[EngineRunner], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def until(is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30
        while not is_so():
            assert time.monotonic() < deadline, caplog.text
            time.sleep(0.01)

    monkeypatch.setattr("mcore_inference.coordinator._peer._SILENT_S", 0.1)
    with ExitStack() as stack, socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        # One that takes the connection and says nothing, as a coordinator of another key does.
        with EngineWorker(runners[0], f"tcp://127.0.0.1:{port}", name="dp-0", heartbeat_s=0.05) as worker:
            until(lambda: caplog.text.count("dp-0 has no answer") >= 2)
            assert re.search(rf"from tcp://127.0.0.1:{port} for \d+ s; is the server up, is the job file its newest\?", caplog.text)
            listener.close()
            stack.enter_context(DataParallelInferenceCoordinator(CoordinatorConfig(port=port, **QUICK))).wait_for_engines(1, 30)
            until(lambda: worker._silence._since is None)


def test_warnings_of_a_silence_come_ever_later_and_begin_anew_with_another_one() -> None:
    silence = Silence()
    dues = [now for now in range(300) if silence.sent(float(now)) is not None]
    assert dues == [5, 10, 20, 40, 80, 140, 200, 260]
    silence.heard()
    assert [now for now in range(300, 312) if silence.sent(float(now)) is not None] == [305, 310]


@pytest.mark.journey
def test_the_http_server_speaks_to_a_coordinator_as_to_one_engine(runners: list[EngineRunner]) -> None:
    httpx = pytest.importorskip("httpx")
    from mcore_inference.server import serve_runner

    with ExitStack() as stack:
        coordinator = serve(stack, runners)
        server = stack.enter_context(serve_runner(lambda: CoordinatedRunner(coordinator.address), ByteTokenizer()))
        client = stack.enter_context(httpx.Client(base_url=server.url, timeout=20))
        body = {"prompt": "x", "max_tokens": 10, "temperature": 0.0}
        answer = client.post("/v1/completions", json=body).json()
        assert answer["usage"]["completion_tokens"] == 10
        with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            lines = [line for line in response.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        assert "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines[:-1]) == answer["choices"][0]["text"]
        long = client.post("/v1/completions", json={"prompt": [1] * 600, "max_tokens": 4})
        assert long.status_code == 400 and long.json()["error"]["code"] == "context_length_exceeded"
        assert client.get("/health").status_code == 200
        assert client.get("/v1/models").json()["data"][0]["max_model_len"] == 512
        assert "mcore_inference_engines 2.0" in client.get("/metrics").text
        coordinator.close()
        deadline = time.monotonic() + 10
        while client.get("/health").status_code == 200:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_a_server_that_was_there_before_its_engines_serves_once_they_are(runners: list[EngineRunner]) -> None:
    httpx = pytest.importorskip("httpx")
    from mcore_inference.server import serve_runner

    body = {"prompt": "x", "max_tokens": 4, "ignore_eos": True}
    with ExitStack() as stack:
        coordinator = stack.enter_context(DataParallelInferenceCoordinator(CoordinatorConfig(**QUICK)))
        server = stack.enter_context(serve_runner(lambda: CoordinatedRunner(coordinator.address), ByteTokenizer()))
        client = stack.enter_context(httpx.Client(base_url=server.url, timeout=20))
        early = client.post("/v1/completions", json=body)
        assert early.status_code == 503 and early.json()["error"]["code"] == "no_engine"
        stack.enter_context(EngineWorker(runners[0], coordinator.address, name="late", heartbeat_s=0.05))
        coordinator.wait_for_engines(1)
        end = time.monotonic() + 20
        while (answer := client.post("/v1/completions", json=body)).status_code == 503:
            assert time.monotonic() < end, "the server does not see the engine"
            time.sleep(0.1)
        assert answer.json()["usage"]["completion_tokens"] == 4


def test_a_client_outlives_a_coordinator_that_is_restarted(runners: list[EngineRunner]) -> None:
    async def ask(stack: ExitStack, first: DataParallelInferenceCoordinator) -> None:
        port = int(first.address.rsplit(":", 1)[1])
        async with InferenceClient(first.address, timeout_s=5, heartbeat_s=0.05) as client:
            with EngineWorker(runners[0], first.address, heartbeat_s=0.05):
                await asyncio.to_thread(first.wait_for_engines, 1)
                first.close()
                second = stack.enter_context(DataParallelInferenceCoordinator(CoordinatorConfig(port=port, **QUICK)))
                await asyncio.to_thread(second.wait_for_engines, 1)
                for _ in range(100):
                    try:
                        record = await client.add_request("x", TEN)
                        break
                    except CoordinatorError:
                        await asyncio.sleep(0.05)
                assert len(record.generated_tokens) == 10

    with ExitStack() as stack:
        asyncio.run(ask(stack, stack.enter_context(DataParallelInferenceCoordinator(CoordinatorConfig(**QUICK)))))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"host": "192.0.2.1"}, "host='192.0.2.1' is reachable from other machines"),
        ({"host": "192.0.2.1", "security": CoordinatorSecurity(secret="s")}, "both keys"),
        *(
            ({"host": host}, "stands for all addresses of this machine, and others .*; give the one")
            for host in ("0.0.0.0", "::", "*", "0", "0.0", "::ffff:0.0.0.0")
        ),
        ({"port": 70000}, "port=70000 must be an integer from 0 to 65535"),
        ({"engine_timeout_s": 1.0}, "engine_timeout_s=1.0 must be at least twice heartbeat_s=1.0"),
        ({"max_retries": -1}, "max_retries=-1"),
    ],
)
def test_bad_settings_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CoordinatorConfig(**fields)
