# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Rollouts from an engine behind an OpenAI-compatible HTTP server."""

from typing import TYPE_CHECKING, Any, Literal

from mcore_rl._stability import experimental_api
from mcore_rl._types import GenericGenerationArgs
from mcore_rl.inference._peer import UNCHANGED, PeerAnswer, PeerInference
from mcore_rl.inference._request_seeds import RequestSeeds

if TYPE_CHECKING:
    from mcore_parallel.data import Tokenizer


@experimental_api
class OpenAIInference(PeerInference):
    """Asks ``/v1/completions`` of a server: token ids in, token ids and log-probabilities out.

    The server must know ``return_token_ids``, as that of this project and recent vLLM do. Every continuation is one HTTP request on a
    connection of its own; a caller that gives up closes its connections. `ServedWeights` gives the server new weights; one that says which
    weights drew each token (``weight_versions``) has it in the responses.

    Args:
        url: of the server without path, as ``http://127.0.0.1:8000``.
        model: name that the server gives the model.
        tokenizer: that of the served model; token ids of another vocabulary are refused.
        generation_args: choices for requests that leave them open.
        logprobs: what the server reports: ``raw`` is of the logits as they are, ``processed`` of the distribution that was drawn from. A
            raw one is good only for temperature 1 without ``top_k`` and ``top_p``; others are refused. A server of this project reports
            either, vLLM processed ones with ``--logprobs-mode processed_logprobs``. ``none`` is of a server that gives texts alone: tokens
            are the tokenizer's, its end behind an answer that stopped, and are learnt from without an importance correction.
        timeout_s: seconds for one continuation, from the connection to the last byte.
        max_concurrency: requests that the server has at a time, from one event loop.
        api_key: sent as a bearer token.
        seeds: sent with the requests, by their names or in the order in which they come here (`RequestSeeds`); interfaces of several
            servers share one object. None leaves draws to the server's own state, which everybody's requests advance.

    Raises:
        ValueError: a setting that is out of range, or that the server cannot honour; names it.
    """

    path = "/v1/completions"
    kinds = ("raw", "processed", "none")

    def __init__(
        self,
        url: str,
        *,
        model: str,
        tokenizer: "Tokenizer",
        generation_args: GenericGenerationArgs | None = None,
        logprobs: Literal["raw", "processed", "none"] = "raw",
        timeout_s: float = 600.0,
        max_concurrency: int = 64,
        api_key: str | None = None,
        seeds: RequestSeeds | None = None,
    ) -> None:
        self.model, self._seeds = model, seeds
        shared: dict[str, Any] = {"generation_args": generation_args, "logprobs": logprobs, "timeout_s": timeout_s}
        super().__init__(url, tokenizer=tokenizer, max_concurrency=max_concurrency, api_key=api_key, **shared)

    def _body(self, prompt: list[int], args: GenericGenerationArgs) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": args.max_tokens,
            "temperature": 1.0 if args.temperature is None else args.temperature,
            "top_p": args.top_p or 1.0,
            "top_k": args.top_k or 0,
        }
        if self.logprobs == "none":
            # Other servers refuse fields that they do not know.
            return {name: value for name, value in body.items() if name != "top_k" or value}
        body |= {**UNCHANGED, "logprobs": 0, "return_token_ids": True}
        if self.logprobs == "processed":
            # A server of this project is told with each request, vLLM when it starts.
            body["logprobs_mode"] = "processed_logprobs"
        return body

    def _next_seed(self, draw: str | None) -> int | None:
        return None if self._seeds is None else self._seeds.of(draw)

    def _read(self, content: Any) -> PeerAnswer:
        [choice] = content["choices"]
        if self.logprobs == "none":
            text, reason = choice["text"], choice["finish_reason"]
            end = [self.tokenizer.eod] if reason == "stop" and self.tokenizer.eod is not None else []
            return PeerAnswer(text=text, tokens=end, scores=None, reason=reason)
        return PeerAnswer(
            text=choice["text"],
            tokens=choice["token_ids"],
            scores=choice["logprobs"]["token_logprobs"],
            reason=choice["finish_reason"],
            prompt=choice.get("prompt_token_ids"),
            versions=choice.get("weight_versions"),
        )
