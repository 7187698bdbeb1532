# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Rollouts from an engine behind an OpenAI-compatible HTTP server."""

import asyncio
import io
import json
import math
import socket
import ssl
import weakref
from collections.abc import Sequence
from http.client import HTTPException, HTTPResponse
from typing import TYPE_CHECKING, Any, Literal, cast
from urllib.parse import urlsplit

from mcore_rl._stability import experimental_api
from mcore_rl._types import GenericGenerationArgs, InferenceRequest, InferenceResponse
from mcore_rl.inference._interface import InferenceInterface, answer_all

if TYPE_CHECKING:
    from mcore_parallel.data import Tokenizer

_MAX_REPLY = 64 << 20
# At these values the distribution that tokens are drawn from is that of the raw logits.
_RAW = {"temperature": (None, 1), "top_k": (None, 0, -1), "top_p": (None, 0, 1)}


@experimental_api
class PeerError(RuntimeError):
    """A server gave no answer: not reached, it died, or it refused. The message names the server."""


@experimental_api
class PeerTimeoutError(PeerError, TimeoutError):
    """A server did not answer in time."""


@experimental_api
class PeerReplyError(PeerError):
    """A server's answer cannot be learnt from: not of the protocol, without token ids or log-probabilities, or of another vocabulary."""


@experimental_api
class OpenAIInference(InferenceInterface):
    """Asks ``/v1/completions`` of a server: token ids in, token ids and log-probabilities out.

    The server must know ``return_token_ids``. Every continuation is one HTTP request on a connection of its own; a caller that gives up
    closes its connections. Weights are not sent to the server.

    Args:
        url: of the server without path, as ``http://127.0.0.1:8000``.
        model: name that the server gives the model.
        tokenizer: that of the served model; token ids of another vocabulary are refused.
        generation_args: choices for requests that leave them open.
        logprobs: what the server reports: ``raw`` is of the logits as they are, ``processed`` of the distribution that was drawn from. A
            raw one is good only for temperature 1 without ``top_k`` and ``top_p``; others are refused.
        timeout_s: seconds for one continuation, from the connection to the last byte.
        max_concurrency: requests that the server has at a time, from one event loop.
        api_key: sent as a bearer token.

    Raises:
        ValueError: a setting that is out of range, or that the server cannot honour; names it.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str,
        tokenizer: "Tokenizer",
        generation_args: GenericGenerationArgs | None = None,
        logprobs: Literal["raw", "processed"] = "raw",
        timeout_s: float = 600.0,
        max_concurrency: int = 64,
        api_key: str | None = None,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/") or parts.query:
            raise ValueError(f"url={url!r} must be http(s)://host:port without a path")
        if logprobs not in ("raw", "processed"):
            raise ValueError(f"logprobs={logprobs!r} must be 'raw' or 'processed'")
        if not 0 < timeout_s < math.inf:
            raise ValueError(f"timeout_s={timeout_s} must be positive and finite")
        if max_concurrency < 1:
            raise ValueError(f"max_concurrency={max_concurrency} must be at least 1")
        if any(not " " < character <= "~" for character in api_key or ""):
            raise ValueError("api_key must be visible ASCII characters; take spaces and line ends off")
        self.url, self.model, self.tokenizer = url, model, tokenizer
        self.generation_args, self.logprobs = generation_args or GenericGenerationArgs(), logprobs
        self.timeout_s, self.max_concurrency = timeout_s, max_concurrency
        self._check(self.generation_args)
        self._host, self._netloc = parts.hostname, parts.netloc.rpartition("@")[2]
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._authorization = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._gates: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = weakref.WeakKeyDictionary()

    def encode(self, text: str) -> Sequence[int]:
        return self.tokenizer.tokenize(text)

    async def agenerate(self, request: InferenceRequest) -> list[list[InferenceResponse]]:
        """Continuations from the server.

        Raises:
            ValueError: ``max_tokens`` is open, or the server cannot honour an argument; nothing is sent.
            PeerTimeoutError: ``timeout_s`` went by.
            PeerReplyError: an answer that cannot be learnt from.
            PeerError: the server was not reached, died, or refused.
        """
        args = self.generation_args.add(request.generation_args)
        self._check(args)
        if args.max_tokens is None:
            raise ValueError("generation_args.max_tokens=None: servers then stop after 16 tokens; set it")
        gate = self._gates.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self.max_concurrency))
        return await answer_all(request, lambda prompt: self._answer(gate, list(prompt), args))

    def _check(self, args: GenericGenerationArgs) -> None:
        for name, allowed in _RAW.items():
            value = getattr(args, name)
            if self.logprobs == "raw" and value not in allowed:
                raise ValueError(
                    f"generation_args.{name}={value}: log-probabilities of {self.url} are of the raw logits, not of the distribution "
                    "drawn from; leave it open, or start the server with processed ones and set logprobs='processed'"
                )

    async def _answer(self, gate: asyncio.Semaphore, prompt: list[int], args: GenericGenerationArgs) -> InferenceResponse:
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": args.max_tokens,
            "temperature": 1.0 if args.temperature is None else args.temperature,
            "top_p": args.top_p or 1.0,
            "logprobs": 0,
            "return_token_ids": True,
        }
        if args.top_k is not None and args.top_k > 0:
            body["top_k"] = args.top_k
        async with gate:
            try:
                async with asyncio.timeout(self.timeout_s):
                    raw = await self._post(json.dumps(body).encode())
            except TimeoutError as error:
                raise PeerTimeoutError(f"{self.url} did not answer within timeout_s={self.timeout_s}") from error
            except OSError as error:
                raise PeerError(f"{self.url} was lost: {error}") from error
        return self._response(prompt, args.max_tokens or 0, self._content(raw))

    async def _post(self, body: bytes) -> bytes:
        """All bytes of the answer; the server ends it by closing."""
        reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._ssl)
        try:
            head = (
                f"POST /v1/completions HTTP/1.1\r\nHost: {self._netloc}\r\nContent-Type: application/json\r\n{self._authorization}"
                f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            )
            writer.write(head.encode() + body)
            await writer.drain()
            raw = bytearray()
            while part := await reader.read(1 << 16):
                raw += part
                if len(raw) > _MAX_REPLY:
                    raise PeerReplyError(f"{self.url} answered more than {_MAX_REPLY >> 20} MiB")
            return bytes(raw)
        finally:
            writer.transport.abort()

    def _content(self, raw: bytes) -> bytes:
        if not raw:
            raise PeerError(f"{self.url} closed the connection without an answer")
        reply = HTTPResponse(cast("socket.socket", _Received(raw)))
        try:
            reply.begin()
            content = reply.read()
        except HTTPException as error:
            # Cut off is a server that died; anything else is no HTTP.
            kind = PeerError if raw.startswith(b"HTTP/") else PeerReplyError
            raise kind(f"{self.url} gave no whole HTTP answer: {error!r}") from error
        except ValueError as error:
            raise PeerReplyError(f"{self.url} gave no HTTP answer: {error}") from error
        if reply.status != 200:
            raise PeerError(f"{self.url} refused with status {reply.status}: {content[:500]!r}")
        return content

    def _response(self, prompt: list[int], max_tokens: int, content: bytes) -> InferenceResponse:
        try:
            [choice] = json.loads(content)["choices"]
            tokens, scores = choice["token_ids"], choice["logprobs"]["token_logprobs"]
            text, reason, sent = choice["text"], choice["finish_reason"], choice.get("prompt_token_ids")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise PeerReplyError(
                f"{self.url} gave no completion with token_ids and logprobs ({error!r}): {content[:200]!r}; it must know return_token_ids"
            ) from error
        if not isinstance(text, str) or reason not in ("stop", "length"):
            raise PeerReplyError(f"{self.url} ended with text {text!r} and finish_reason={reason!r}; it must be 'stop' or 'length'")
        if not isinstance(tokens, list) or not isinstance(scores, list) or not len(tokens) == len(scores) <= max_tokens:
            raise PeerReplyError(f"{self.url} must give up to {max_tokens} token_ids, each with a log-probability; got {content[:200]!r}")
        size = self.tokenizer.vocab_size
        for token in tokens:
            if type(token) is not int or not 0 <= token < size:
                raise PeerReplyError(f"{self.url} drew token {token!r}, tokenizer has vocab_size={size}; serve a model of this vocabulary")
        if sent is not None and sent != prompt:
            raise PeerReplyError(f"{self.url} continued another prompt than it was sent; prompt_token_ids differ")
        for score in scores:
            if type(score) not in (int, float) or not math.isfinite(score):
                raise PeerReplyError(f"{self.url} gave log-probability {score!r}; it must be a finite number")
        return InferenceResponse(
            response=text, token_ids=[*prompt, *tokens], prompt_length=len(prompt), logprobs=[float(score) for score in scores],
            finish_reason=reason,
        )  # fmt: skip


class _Received:
    """Bytes where the standard library's parser expects a socket."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw

    def makefile(self, mode: str) -> io.BytesIO:
        return io.BytesIO(self.raw)
