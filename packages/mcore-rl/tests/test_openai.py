# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""An engine behind HTTP answers as one in the process, and a bad server costs a typed error."""

import asyncio
import contextlib
import dataclasses
import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mcore_inference import DynamicInferenceContext, DynamicInferenceEngine, InferenceConfig, PagedAttention
from mcore_inference.server import serve
from mcore_parallel import ProcessGroups
from mcore_parallel.data import ByteTokenizer
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_rl import GenericGenerationArgs, InferenceRequest, MegatronLocal
from mcore_rl.inference import (
    BalancedInference,
    LostError,
    OpenAIInference,
    PeerError,
    PeerReplyError,
    PeerTimeoutError,
    RequestSeeds,
    SGLangInference,
)
from mcore_rl.inference._peer import PeerRefusalError
from tests.support.sentence_pieces import SentencePieces
from tests.support.tcp_server import tcp_server

TOKENIZER = ByteTokenizer()
REQUEST = InferenceRequest(prompts=[[1, 2, 3]], generation_args=GenericGenerationArgs(max_tokens=2))
CHOICE: dict[str, Any] = {"text": "ab", "token_ids": [97, 98], "logprobs": {"token_logprobs": [-1.0, -2.0]}, "finish_reason": "length"}


def engine() -> DynamicInferenceEngine:
    torch.manual_seed(0)
    sizes = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2, vocab_size=TOKENIZER.vocab_size)
    model = GPTModel(sizes, ProcessGroups.single(), attention_core=PagedAttention()).eval()
    context = DynamicInferenceContext(sizes, InferenceConfig(max_sequence_length=64, max_requests=4, block_size_tokens=16))
    return DynamicInferenceEngine(model, context, TOKENIZER, vocab_size=TOKENIZER.vocab_size)


def peer(answer: Callable[[socket.socket], None]) -> contextlib.AbstractContextManager[str]:
    """A server that reads what comes, does ``answer`` and closes."""

    def read_and_answer(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        answer(connection)

    return tcp_server(read_and_answer)


def http(content: bytes, status: str = "200 OK", length: int | None = None) -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(content) if length is None else length}\r\n\r\n".encode() + content


def completion(**changes: Any) -> bytes:
    return http(json.dumps({"choices": [CHOICE | changes]}).encode())


def client(url: str, **settings: Any) -> OpenAIInference:
    return OpenAIInference(url, **{"model": "mcore", "tokenizer": TOKENIZER, "timeout_s": 30.0} | settings)


def ask(url: str, request: InferenceRequest = REQUEST, **settings: Any) -> Any:
    return asyncio.run(client(url, **settings).agenerate(request))


def test_event_loops_that_have_ended_are_not_kept() -> None:
    with peer(lambda connection: connection.sendall(completion())) as url:
        asked = client(url, max_concurrency=1)
        for _ in range(3):
            # More than one: what waits for a place knows its event loop.
            asyncio.run(asked.agenerate(dataclasses.replace(REQUEST, n=3)))
    assert len(asked._gates) == 1


def test_tokens_and_log_probs_are_those_of_the_engine_in_the_process() -> None:
    # Requests of one seed, one after the other.
    requests = [
        InferenceRequest(prompts=[list(TOKENIZER.tokenize(text))], generation_args=GenericGenerationArgs(max_tokens=12))
        for text in ("hello", "a", "of several tokens")
    ]
    interface = MegatronLocal(engine(), seed=3)
    local = [asyncio.run(interface.agenerate(request)) for request in requests]
    with serve(engine()) as server:
        asked = client(server.url, seeds=RequestSeeds(3))
        remote = [asyncio.run(asked.agenerate(request)) for request in requests]
    for [[mine]], [[theirs]] in zip(local, remote, strict=True):
        assert len(mine.logprobs) > 0
        assert (mine.token_ids, mine.prompt_length, mine.response) == (theirs.token_ids, theirs.prompt_length, theirs.response)
        assert (mine.finish_reason, list(mine.logprobs)) == (theirs.finish_reason, pytest.approx(theirs.logprobs, abs=1e-6))


@pytest.mark.journey
def test_draws_follow_the_seeds_of_their_own_interface_whatever_the_server_is_asked() -> None:
    prompts = [list(TOKENIZER.tokenize(text)) for text in ("hello", "a", "of several tokens")]
    args = GenericGenerationArgs(max_tokens=12)

    def tokens(interface: Any, prompt: list[int]) -> Any:
        [[one, other]] = asyncio.run(interface.agenerate(InferenceRequest(prompts=[prompt], n=2, generation_args=args)))
        return one.token_ids, other.token_ids

    local = MegatronLocal(engine(), seed=5)
    expected = [tokens(local, prompt) for prompt in prompts]
    assert all(one != other for one, other in expected)
    with serve(engine()) as first, serve(engine()) as second:
        alone = client(first.url, seeds=RequestSeeds(5))
        assert [tokens(alone, prompt) for prompt in prompts] == expected
        # By turns over two servers, each of which is asked for other answers between.
        seeds, others = RequestSeeds(5), RequestSeeds(6)
        training = [client(server.url, seeds=seeds) for server in (first, second)]
        beside = [client(first.url), client(second.url, seeds=others)]
        drawn = []
        for number, prompt in enumerate(prompts):
            assert tokens(beside[number % 2], prompt) not in expected
            drawn.append(tokens(training[number % 2], prompt))
    assert drawn == expected


@pytest.mark.journey
def test_a_request_with_a_name_is_drawn_alike_by_engines_and_servers() -> None:
    prompt, args = list(TOKENIZER.tokenize("hello")), GenericGenerationArgs(max_tokens=12)

    def tokens(interface: Any, draw: str | None) -> Any:
        [[answer]] = asyncio.run(interface.agenerate(InferenceRequest(prompts=[prompt], generation_args=args, draw=draw)))
        return answer.token_ids

    names = ["e 1 0 turn 0", "e 1 0 turn 1", "e 1 1 turn 0", "e 2 0 turn 0", "e evaluation 1 0 turn 0"]
    local = MegatronLocal(engine(), seed=5)
    expected, unnamed = [tokens(local, name) for name in names], tokens(MegatronLocal(engine(), seed=5), None)
    assert len({tuple(one) for one in expected}) == len(names) and tokens(local, names[2]) == expected[2]
    # Those with a name take no number from those without.
    assert tokens(local, None) == unnamed
    with serve(engine()) as first, serve(engine()) as second:
        seeds = RequestSeeds(5)
        balanced = BalancedInference([client(server.url, seeds=seeds) for server in (first, second)])
        assert [tokens(balanced, name) for name in reversed(names)] == expected[::-1]
        assert tokens(balanced, None) == unnamed


def test_seeds_of_names_are_positive_and_of_63_bits() -> None:
    seeds = [RequestSeeds(-7).of(f"e {number} 0 turn 0") for number in range(1000)]
    assert len(set(seeds)) == 1000 and all(0 <= seed < 1 << 63 for seed in seeds) and max(seeds) >= 1 << 62


def test_a_server_that_hangs_is_named_when_the_time_is_over() -> None:
    with peer(lambda connection: time.sleep(5)) as url:
        begin = time.perf_counter()
        with pytest.raises(PeerTimeoutError, match=f"{url} did not answer within timeout_s=0.2"):
            ask(url, timeout_s=0.2)
        assert time.perf_counter() - begin < 4


@pytest.mark.parametrize(
    ("raw", "error"),
    [
        (b"\x00garbage\r\n\r\n", PeerReplyError),
        (http(b"<html>"), PeerReplyError),
        (http(b"[]"), PeerReplyError),
        (http(b'{"choices": [{}]}'), PeerReplyError),
        (completion(token_ids=[97, TOKENIZER.vocab_size]), PeerReplyError),
        (completion(token_ids=[97, True]), PeerReplyError),
        (completion(token_ids=[97]), PeerReplyError),
        (completion(prompt_token_ids=[1, 2, 4]), PeerReplyError),
        (completion(logprobs={"token_logprobs": [-1.0, None]}), PeerReplyError),
        (completion(logprobs={"token_logprobs": [-1.0, float("nan")]}), PeerReplyError),
        (completion(finish_reason="abort"), PeerReplyError),
        (http(b"busy", "503 Busy"), PeerRefusalError),
        (http(b"no key", "401 Unauthorized"), PeerError),
        (b"", PeerError),
        (http(b'{"choices', length=1000), PeerError),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n40\r\nhalf", PeerError),
    ],
)
def test_garbage_and_a_server_that_dies_are_typed_errors_that_name_it(raw: bytes, error: type[PeerError]) -> None:
    with peer(lambda connection: connection.sendall(raw)) as url, pytest.raises(PeerError, match=url) as caught:
        ask(url)
    assert type(caught.value) is error


@pytest.mark.parametrize(("status", "is_transient"), [("400 Bad Request", False), ("429 Too Many Requests", True), ("503 Busy", True)])
def test_a_server_that_refuses_one_request_loses_one_answer(status: str, is_transient: bool) -> None:
    with peer(lambda connection: connection.sendall(http(b"too long", status))) as url, pytest.raises(LostError, match=url) as caught:
        ask(url)
    assert caught.value.is_transient is is_transient


def test_a_server_that_is_not_there_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(PeerError, match=f"{url} was lost"):
        ask(url)


def test_only_requests_under_way_have_bodies_and_seeds_follow_the_order_in_which_they_come() -> None:
    made, most, seeds = 0, 0, {}

    class Asked(OpenAIInference):
        def _body(self, prompt: list[int], args: GenericGenerationArgs) -> dict[str, Any]:
            nonlocal made, most
            made += 1
            most = max(most, made)
            return super()._body(prompt, args)

        async def _post(self, body: bytes) -> bytes:
            nonlocal made
            content = json.loads(body)
            [first] = content["prompt"]
            seeds[first] = content["seed"]
            # Later ones are answered sooner.
            await asyncio.sleep(0.05 / first)
            made -= 1
            return json.dumps({"choices": [CHOICE]}).encode()

    interface = Asked("http://127.0.0.1:1", model="m", tokenizer=TOKENIZER, max_concurrency=3, seeds=RequestSeeds(5))
    many = InferenceRequest(prompts=[[first] for first in range(1, 13)], generation_args=GenericGenerationArgs(max_tokens=2))
    asyncio.run(interface.agenerate(many))
    expected = RequestSeeds(5)
    assert most == 3 and [seeds[first] for first in range(1, 13)] == [expected.following() for _ in range(12)]


def test_no_more_requests_than_max_concurrency_are_under_way() -> None:
    lock, running, most = threading.Lock(), 0, 0

    def answer(connection: socket.socket) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.02)
        with lock:
            running -= 1
        connection.sendall(completion())

    with peer(answer) as url:
        interface = client(url, max_concurrency=3)
        many = InferenceRequest(prompts=[[1], [2]], n=6, generation_args=GenericGenerationArgs(max_tokens=2))
        for _ in range(2):  # the second time in another event loop
            groups = asyncio.run(interface.agenerate(many))
            assert [[one.token_ids[0] for one in group] for group in groups] == [[1] * 6, [2] * 6]
    assert most == 3


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"url": "host:80"}, "url"),
        ({"timeout_s": 0.0}, "timeout_s"),
        ({"max_concurrency": 0}, "max_concurrency"),
        ({"logprobs": "any"}, "logprobs"),
        ({"api_key": "a\r\nb"}, "api_key"),
        ({"generation_args": GenericGenerationArgs(temperature=0.7)}, "generation_args.temperature=0.7"),
        ({"generation_args": GenericGenerationArgs(top_k=5)}, "generation_args.top_k=5"),
        ({"generation_args": GenericGenerationArgs(top_p=0.9)}, "generation_args.top_p=0.9"),
    ],
)
def test_what_the_server_cannot_honour_is_refused_by_name(settings: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        client(**{"url": "http://127.0.0.1:1"} | settings)


def test_a_server_is_left_no_choice_of_its_own() -> None:
    sent = {}

    class Asked(OpenAIInference):
        def _body(self, prompt: list[int], args: GenericGenerationArgs) -> dict[str, Any]:
            sent.update(super()._body(prompt, args))
            return sent

    with peer(lambda connection: connection.sendall(http(json.dumps({"choices": [CHOICE]}).encode()))) as url:
        asyncio.run(Asked(url, model="m", tokenizer=TOKENIZER).agenerate(REQUEST))
    # A published model's generation_config.json names these, and servers take from it what a request leaves open.
    drawn = {name: sent[name] for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
    assert drawn == {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


def test_an_open_max_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="max_tokens=None"):
        ask("http://127.0.0.1:1", InferenceRequest(prompts=[[1]]))


@pytest.mark.parametrize("text", [" name", "name", "\nname", "", "\u00e9", " ", "  ada grace"])
def test_texts_behind_a_prompt_begin_with_no_blank_that_is_the_tokenizers(text: str) -> None:
    pieces = SentencePieces()
    prompt = pieces.tokenize("ada")
    request = dataclasses.replace(REQUEST, prompts=[prompt])
    with peer(lambda connection: connection.sendall(completion(text=text))) as url:
        [[answer]] = ask(url, request, tokenizer=pieces, logprobs="none")
    assert answer.response == text and list(answer.token_ids[: len(prompt)]) == prompt
    assert pieces.detokenize(answer.token_ids) == f"ada{text}"


def test_answers_of_a_server_that_gives_texts_alone_are_in_tokens_of_the_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[dict[str, Any]] = []

    def ask(reason: str) -> Any:
        async def post(_: OpenAIInference, body: bytes) -> bytes:
            sent.append(json.loads(body))
            return json.dumps({"choices": [{"text": "ab", "finish_reason": reason}]}).encode()

        monkeypatch.setattr(OpenAIInference, "_post", post)
        [[response]] = asyncio.run(
            OpenAIInference("http://127.0.0.1:1", model="m", tokenizer=TOKENIZER, logprobs="none").agenerate(REQUEST)
        )
        return response

    ended, cut = ask("stop"), ask("length")
    assert ended.token_ids == [1, 2, 3, *TOKENIZER.tokenize("ab"), TOKENIZER.eod] and cut.token_ids == [1, 2, 3, *TOKENIZER.tokenize("ab")]
    assert ended.logprobs is None and cut.finish_reason == "length"
    assert set(sent[0]) == {"model", "prompt", "max_tokens", "temperature", "top_p"}
    with pytest.raises(ValueError, match="logprobs='none' must be 'raw' or 'processed'"):
        SGLangInference("http://127.0.0.1:1", tokenizer=TOKENIZER, logprobs="none")  # type: ignore[arg-type]
    # A server that was to give log-probabilities is refused without.
    with pytest.raises(PeerReplyError, match="gave no completion with ids and log-probabilities"):
        asyncio.run(OpenAIInference("http://127.0.0.1:1", model="m", tokenizer=TOKENIZER).agenerate(REQUEST))
