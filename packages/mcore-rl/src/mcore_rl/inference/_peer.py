# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What all engines behind HTTP have in common: limits of what is asked, and checks of what is answered."""

import asyncio
import json
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from mcore_rl._by_loop import of_this_loop
from mcore_rl._http import HttpPeer, PeerError, PeerReplyError
from mcore_rl._lost import LostError
from mcore_rl._stability import experimental_api
from mcore_rl._types import GenericGenerationArgs, InferenceRequest, InferenceResponse
from mcore_rl.inference._interface import InferenceInterface, answer_all

if TYPE_CHECKING:
    from mcore_parallel.data import Tokenizer

# At these values the distribution that tokens are drawn from is that of the raw logits.
_RAW = {"temperature": (None, 1), "top_k": (None, 0), "top_p": (None, 1)}
UNCHANGED: Mapping[str, float] = MappingProxyType({"min_p": 0.0, "repetition_penalty": 1.0})
"""Sent with each request: what is left open a server takes from the generation_config.json of its model, and draws from another
distribution than the policy's."""


# Of HTTP: what is wrong with one request, and what passes. Others, as of a wrong key or route, are the same for all requests.
_BEFORE = "\n"
"""A text that hardly any token begins with and goes on behind."""
_NUM_COMPARED = 8
"""Tokens at the beginning of an answer that say whether its text is that of all."""
_OWN_FAULTS, _TRANSIENT = (400, 413, 422), (408, 429, 500, 502, 503, 504)


class PeerRefusalError(PeerError, LostError):
    """A server refused one request."""


@dataclass(frozen=True, kw_only=True)
class PeerAnswer:
    """What a server says of one continuation, as it came."""

    text: Any
    tokens: Any
    """Generated ids; of a server that gives texts alone, those behind the text's."""
    scores: Any
    """Of each, its log-probability; None of a server that gives texts alone."""
    reason: Any
    prompt: Any = None
    """Ids that were continued, where the server repeats them."""
    versions: Any = None
    """Of each token, the weights that drew it, where the server says so."""


@experimental_api
class PeerInference(InferenceInterface):
    """Every continuation is one POST; a subclass writes its body and reads its answer. Arguments as of `OpenAIInference`."""

    path: str
    """Of the route."""
    kinds: tuple[str, ...] = ("raw", "processed")
    """Log-probabilities that there are."""

    def __init__(
        self,
        url: str,
        *,
        tokenizer: "Tokenizer",
        generation_args: GenericGenerationArgs | None = None,
        logprobs: Literal["raw", "processed", "none"] = "raw",
        timeout_s: float = 600.0,
        max_concurrency: int = 64,
        api_key: str | None = None,
    ) -> None:
        self._peer = HttpPeer(url, api_key=api_key, timeout_s=timeout_s)
        if logprobs not in self.kinds:
            raise ValueError(f"logprobs={logprobs!r} must be {' or '.join(map(repr, self.kinds))}")
        if max_concurrency < 1:
            raise ValueError(f"max_concurrency={max_concurrency} must be at least 1")
        self.url, self.tokenizer = url, tokenizer
        self.generation_args, self.logprobs = generation_args or GenericGenerationArgs(), logprobs
        self.timeout_s, self.max_concurrency = timeout_s, max_concurrency
        self._check(self.generation_args)
        self._gates: dict[asyncio.AbstractEventLoop, asyncio.Semaphore] = {}

    def encode(self, text: str) -> Sequence[int]:
        return self.tokenizer.tokenize(text)

    async def agenerate(self, request: InferenceRequest) -> list[list[InferenceResponse]]:
        """Continuations from the server.

        Raises:
            ValueError: ``max_tokens`` is open, or the server cannot honour an argument; nothing is sent.
            PeerTimeoutError: ``timeout_s`` went by.
            PeerReplyError: an answer that cannot be learnt from.
            PeerError: the server was not reached, died, or refused; a `LostError`, too, where it refused this request alone.
        """
        args = self.generation_args.add(request.generation_args)
        self._check(args)
        if args.max_tokens is None:
            raise ValueError("generation_args.max_tokens=None: servers then stop after 16 tokens; set it")
        gate = of_this_loop(self._gates, lambda: asyncio.Semaphore(self.max_concurrency))
        return await answer_all(request, lambda prompt: self._answer(gate, prompt, args, request.draw))

    @abstractmethod
    def _body(self, prompt: list[int], args: GenericGenerationArgs) -> dict[str, Any]:
        """Of the request."""

    def _next_seed(self, draw: str | None) -> int | None:
        """Of a request that comes, by its name where it has one; None to send none."""
        return None

    @abstractmethod
    def _read(self, content: Any) -> PeerAnswer:
        """The answer in a JSON value.

        Raises:
            ValueError, KeyError, TypeError, AttributeError, IndexError: it is none.
        """

    def _check(self, args: GenericGenerationArgs) -> None:
        for name, allowed in _RAW.items():
            value = getattr(args, name)
            if self.logprobs == "raw" and value not in allowed:
                raise ValueError(
                    f"generation_args.{name}={value}: log-probabilities of {self.url} are of the raw logits, not of the distribution "
                    "drawn from; leave it open, or start the server with processed ones and set logprobs='processed'"
                )

    async def _answer(
        self, gate: asyncio.Semaphore, prompt: Sequence[int], args: GenericGenerationArgs, draw: str | None
    ) -> InferenceResponse:
        # In the order of the requests; their bodies take no memory while they wait.
        seed = self._next_seed(draw)
        async with gate:
            prompt = list(prompt)
            body = self._body(prompt, args) | ({} if seed is None else {"seed": seed})
            content = await self._post(json.dumps(body).encode())
        try:
            answer = self._read(json.loads(content))
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
            raise PeerReplyError(
                f"{self.url}{self.path} gave no completion with ids and log-probabilities of its tokens ({error!r}): {content[:200]!r}"
            ) from error
        return self._response(prompt, args.max_tokens or 0, answer)

    async def _post(self, body: bytes) -> bytes:
        try:
            return await self._peer.post(self.path, body)
        except PeerError as error:
            if error.status not in (*_OWN_FAULTS, *_TRANSIENT):
                raise
            refusal = PeerRefusalError(str(error), is_transient=error.status in _TRANSIENT)
            refusal.status = error.status
            raise refusal from error

    def _response(self, prompt: list[int], max_tokens: int, answer: PeerAnswer) -> InferenceResponse:
        text, tokens, scores, reason, versions = answer.text, answer.tokens, answer.scores, answer.reason, answer.versions
        if not isinstance(text, str) or reason not in ("stop", "length"):
            raise PeerReplyError(f"{self.url} ended with text {text!r} and finish_reason={reason!r}; it must be 'stop' or 'length'")
        if self.logprobs == "none":
            ids = [*prompt, *_tokens_behind(self.tokenizer, prompt, text), *tokens]
            return InferenceResponse(response=text, token_ids=ids, prompt_length=len(prompt), logprobs=None, finish_reason=reason)
        if not isinstance(tokens, list) or not isinstance(scores, list) or not len(tokens) == len(scores) <= max_tokens:
            raise PeerReplyError(
                f"{self.url} must give up to {max_tokens} token_ids, each with a log-probability; got {str(tokens)[:200]} and "
                f"{str(scores)[:200]}"
            )
        size = self.tokenizer.vocab_size
        for token in tokens:
            if type(token) is not int or not 0 <= token < size:
                raise PeerReplyError(f"{self.url} drew token {token!r}, tokenizer has vocab_size={size}; serve a model of this vocabulary")
        if answer.prompt is not None and answer.prompt != prompt:
            raise PeerReplyError(f"{self.url} continued another prompt than it was sent; prompt_token_ids differ")
        for score in scores:
            if type(score) not in (int, float) or not math.isfinite(score):
                raise PeerReplyError(f"{self.url} gave log-probability {score!r}; it must be a finite number")
        if versions is not None and (
            not isinstance(versions, list) or len(versions) != len(tokens) or any(type(version) is not int for version in versions)
        ):
            raise PeerReplyError(f"{self.url} gave weight_versions {str(versions)[:200]}; it must be a number for each token")
        return InferenceResponse(
            response=text,
            token_ids=[*prompt, *tokens],
            prompt_length=len(prompt),
            logprobs=[float(score) for score in scores],
            finish_reason=reason,
            weight_versions=None if versions is None else tuple(versions),
        )


def _tokens_behind(tokenizer: "Tokenizer", prompt: Sequence[int], text: str) -> list[int]:
    """Of a text that follows a prompt. A tokenizer of SentencePiece puts a blank before each text, which is none of it here."""
    from mcore_inference import TextStream

    alone, before, both = (list(tokenizer.tokenize(whole)) for whole in (text, _BEFORE, _BEFORE + text))
    for tokens in (alone, both[len(before) :] if both[: len(before)] == before else alone):
        stream = TextStream(tokenizer, prompt=prompt)
        for token in tokens[:_NUM_COMPARED]:
            stream.push(token)
        if text.startswith(stream.text):
            return tokens
    return alone
