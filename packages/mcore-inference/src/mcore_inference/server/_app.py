# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The routes."""

import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client.exposition import choose_encoder
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from mcore_inference.engine import Increment, RequestStream
from mcore_inference.requests import DynamicInferenceRequestRecord, FinishReason, Status, StructuredOutputError
from mcore_inference.sampling import SamplingParams, request_seed
from mcore_inference.server._bodies import BodyReader
from mcore_inference.server._combinations import check_budget, check_chat, check_completion
from mcore_inference.server._errors import ApiError
from mcore_inference.server._format import TextOffsets, chat_log_probs, completion_log_probs, usage
from mcore_inference.server._group import ServerCounts
from mcore_inference.server._hosts import AllowedHosts
from mcore_inference.server._loras import LoraRoutes
from mcore_inference.server._metrics import ServerMetrics
from mcore_inference.server._models import ServedModels
from mcore_inference.server._openapi import openapi_document
from mcore_inference.server._playground import Playground
from mcore_inference.server._prompts import PromptEncoder
from mcore_inference.server._request_ids import CLIENT_LEFT, RequestIds, current_request_id
from mcore_inference.server._runner import Runner
from mcore_inference.server._schema import MAX_CHOICES, ChatBody, CompletionBody
from mcore_inference.server._stream import ClientGone, EventStream, merged, unless_gone
from mcore_inference.server._tokenize import TokenizeRoutes
from mcore_inference.server._tokens import BearerToken
from mcore_inference.server._tools import ToolUse
from mcore_inference.server._weights import WeightRoute
from mcore_inference.text import TokenBytes
from mcore_inference.tool_calls import ToolCallParser, ToolFormat

_DEFAULT_COMPLETION_TOKENS = 16
_LOG = logging.getLogger("mcore_inference.server")


@dataclass(frozen=True, kw_only=True)
class _GenerationCall:
    """One call: its requests, and how its answer looks."""

    prompts: list[list[int]]
    params: list[SamplingParams]
    """One for each choice, prompt by prompt."""
    body: CompletionBody | ChatBody
    id: str
    kind: str
    choice: Callable[["_GenerationCall", int, DynamicInferenceRequestRecord], dict[str, Any]]
    """A finished choice."""
    delta: Callable[["_GenerationCall", int, Increment], dict[str, Any]]
    """A piece of a choice."""
    chunk_kind: str
    prompt_texts: list[str]
    tools: ToolUse | None = None
    parsers: list[ToolCallParser] = field(default_factory=list)
    """One for each choice, where there are tools."""
    offsets: list[TextOffsets] = field(default_factory=list)
    """One for each choice, where log-probabilities of a completion are streamed."""

    def envelope(self, kind: str, model: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": int(time.time()), "model": model}


class Routes:
    """Handlers of one server.

    Args:
        runner: what generates.
        reader: reads bodies.
        models: that are served.
        encoder: text to tokens and back.
        token: clients must bring it as bearer token; None for open access.
        metrics: what ``/metrics`` answers.
        counts: told of each answer.
        created: when the model was, in seconds since the epoch: the same for all servers of an address.
        seed: choice n of all without a seed is drawn with one of this and n.
        tool_format: how the model writes calls of tools; None to refuse tools.
        weights: takes new weights from folders; None for no such route.
        loras: takes adapters from folders; None for no such routes.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        reader: BodyReader,
        models: ServedModels,
        encoder: PromptEncoder,
        token: str | None,
        metrics: ServerMetrics,
        counts: ServerCounts,
        created: int,
        seed: int,
        tool_format: ToolFormat | None = None,
        weights: WeightRoute | None = None,
        loras: LoraRoutes | None = None,
    ) -> None:
        self._runner, self._models = runner, models
        self._weights, self._loras = weights, loras
        self._reader = reader
        self._encoder = encoder
        self._tokenizer, self._token_bytes = encoder.tokenizer, TokenBytes(encoder.tokenizer)
        self._token = BearerToken(token)
        self._needs_token = token is not None
        self._metrics = metrics
        self._tool_format = tool_format
        self._counts, self._created = counts, created
        self._seed, self._num_seeded = seed, 0

    def app(self, allowed_hosts: Sequence[str] | None) -> ASGIApp:
        """The ASGI application; ``allowed_hosts`` are the names in the Host header that it answers to, None for all."""
        app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
        if allowed_hosts is not None:
            app.add_middleware(AllowedHosts, hosts=allowed_hosts)
        app.add_exception_handler(ApiError, self._api_error)
        app.add_exception_handler(HTTPException, self._http_error)
        app.add_exception_handler(ClientGone, self._client_gone)
        app.add_exception_handler(Exception, self._our_error)
        guard = [Depends(self._token)]
        app.add_api_route("/", Playground().page, methods=["GET"])
        app.add_api_route("/openapi.json", self.openapi, methods=["GET"], dependencies=guard)
        app.add_api_route("/health", self.health, methods=["GET"])
        app.add_api_route("/metrics", self.metrics, methods=["GET"], dependencies=guard)
        app.add_api_route("/v1/models", self.models, methods=["GET"], dependencies=guard)
        app.add_api_route("/v1/models/{name:path}", self.model, methods=["GET"], dependencies=guard)
        # Without the framework's dependencies, which cost more than a few tokens.
        app.add_route("/v1/completions", self._guarded(self.completions), methods=["POST"])
        app.add_route("/v1/chat/completions", self._guarded(self.chat_completions), methods=["POST"])
        texts = TokenizeRoutes(self._reader, self._encoder, self._runner)
        app.add_api_route("/tokenize", texts.tokenize, methods=["POST"], dependencies=guard)
        app.add_api_route("/detokenize", texts.detokenize, methods=["POST"], dependencies=guard)
        if self._weights is not None:
            own_guard = self._weights.guard or guard
            app.add_api_route("/update_weights_from_disk", self._weights.update, methods=["POST"], dependencies=own_guard)
        if self._loras is not None:
            own_guard = self._loras.guard or guard
            app.add_api_route("/v1/load_lora_adapter", self._loras.load, methods=["POST"], dependencies=own_guard)
            app.add_api_route("/v1/unload_lora_adapter", self._loras.unload, methods=["POST"], dependencies=own_guard)
        return RequestIds(app, self._counts.count_response)

    def _guarded(self, handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def guarded(request: Request) -> Response:
            await self._token(request)
            return await handler(request)

        return guarded

    # -- small routes ------------------------------------------------------------------------------------------------

    async def health(self, request: Request) -> JSONResponse:
        """For probes without a token too, which learn no more than the status."""
        health = self._runner.health()
        body: dict[str, Any] = {"status": "ok" if health.alive else "dead"}
        if self._token.admits(request):
            body |= {"last_step_age_s": health.last_step_age_s, "unfinished_requests": health.unfinished_requests}
        return JSONResponse(body, 200 if health.alive else 503)

    async def openapi(self) -> JSONResponse:
        document = openapi_document(
            [self._models.base, *self._models.loras],
            needs_token=self._needs_token,
            takes_weights=self._weights is not None,
            takes_loras=self._loras is not None,
        )
        return JSONResponse(document)

    async def metrics(self, request: Request) -> Response:
        write, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(write(self._metrics.registry), media_type=content_type)

    async def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [self._model(name) for name in (self._models.base, *self._models.loras)]}

    async def model(self, name: str) -> dict[str, Any]:
        await self._models.check(name)
        return self._model(name)

    def _model(self, name: str) -> dict[str, Any]:
        """The model, or an adapter, whose parent it is."""
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "mcore",
            "max_model_len": self._runner.max_sequence_length,
            "parent": None if name == self._models.base else self._models.base,
        }

    # -- generation --------------------------------------------------------------------------------------------------

    async def completions(self, request: Request) -> Response:
        body = await self._reader.read(request, CompletionBody)
        check_completion(body)
        texts, prompts, params = [], [], []
        if len(body.prompts) * body.num_choices > MAX_CHOICES:
            raise ApiError(
                422, f"{len(body.prompts)} prompts with n={body.num_choices} exceed {MAX_CHOICES} choices; send fewer", param="n"
            )
        budget = _DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        check_budget(body, budget)
        for prompt in body.prompts:
            tokens = self._encoder.encode(prompt) if isinstance(prompt, str) else prompt
            prompts.append(tokens)
            texts.append("" if not body.echo else prompt if isinstance(prompt, str) else self._encoder.decode(prompt))
            for choice in range(body.num_choices):
                more = {"return_log_probs": body.logprobs is not None, "top_n_logprobs": body.logprobs or 0}
                more["processed_log_probs"] = body.logprobs_mode == "processed_logprobs"
                if body.echo and body.logprobs is not None:
                    more["skip_prompt_log_probs"] = False
                params.append(self._params(body, budget, choice, more))
        call = _GenerationCall(
            prompts=prompts, params=params, body=body, id=f"cmpl-{uuid.uuid4().hex}", kind="text_completion", chunk_kind="text_completion",
            choice=self._completion_choice, delta=self._completion_delta, prompt_texts=texts,
            offsets=[TextOffsets(self._tokenizer, prompt=prompts[index // body.num_choices]) for index in range(len(params))]
            if body.stream and body.logprobs is not None else [],
        )  # fmt: skip
        return await self._answer(request, call)

    async def chat_completions(self, request: Request) -> Response:
        body = await self._reader.read(request, ChatBody)
        check_chat(body)
        tools = ToolUse.of(body, self._tool_format)
        tokens = self._encoder.encode_chat([message.plain() for message in body.messages], tools=() if tools is None else tools.tools)
        budget = body.max_completion_tokens or body.max_tokens or max(1, self._runner.room(len(tokens)))
        check_budget(body, budget)
        more: dict[str, Any] = {"return_log_probs": bool(body.logprobs), "top_n_logprobs": body.top_logprobs or 0}
        if tools is not None and tools.structured_output is not None:
            more["structured_output"] = tools.structured_output
        call = _GenerationCall(
            prompts=[tokens], params=[self._params(body, budget, choice, more) for choice in range(body.num_choices)], body=body,
            id=f"chatcmpl-{uuid.uuid4().hex}", kind="chat.completion", chunk_kind="chat.completion.chunk",
            choice=self._chat_choice, delta=self._chat_delta, prompt_texts=[""],
            tools=tools, parsers=[] if tools is None else [tools.parser() for _ in range(body.num_choices)],
        )  # fmt: skip
        return await self._answer(request, call)

    async def _answer(self, request: Request, call: _GenerationCall) -> Response:
        streams = await self._submit(call)
        if call.body.stream:
            return EventStream(self._events(call, streams))
        records: list[DynamicInferenceRequestRecord] = []

        async def collect() -> None:
            for stream in streams:
                records.append(await stream.record())

        try:
            await unless_gone(request.receive, collect())
        except ClientGone:
            return Response(status_code=CLIENT_LEFT)
        except Exception as error:
            raise _named(call, ApiError.of(error)) from error
        finally:
            _abort(streams)
        for record in records:
            if record.status is Status.FAILED:
                raise _named(call, ApiError.of_failure(record.error))
        choices = [call.choice(call, index, record) for index, record in enumerate(records)]
        answer = call.envelope(call.kind, call.body.model or self._models.base)
        return JSONResponse({**answer, "choices": choices, "usage": usage(records, call.body.num_choices)})

    async def _submit(self, call: _GenerationCall) -> list[RequestStream]:
        streams: list[RequestStream] = []
        lora = self._models.lora_of(call.body.model)
        try:
            for index, params in enumerate(call.params):
                prompt, priority = call.prompts[index // call.body.num_choices], call.body.priority or 0
                streamed = bool(call.body.stream)
                streams.append(await self._runner.submit(prompt, params, priority=priority, stream=streamed, lora=lora))
        except BaseException as error:
            _abort(streams)
            if isinstance(error, Exception):
                raise _named(call, ApiError.of(error)) from error
            raise
        return streams

    async def _events(self, call: _GenerationCall, streams: list[RequestStream]) -> AsyncIterator[str]:
        """Chunks, the usage when asked for, and the end mark.

        Raises:
            ApiError: nothing was generated; a later error is an error object, which ends the stream.
        """
        records: dict[int, DynamicInferenceRequestRecord] = {}

        with_usage = call.body.stream_options is not None and call.body.stream_options.include_usage
        # All but the choices is the same in each. While usage is asked for, OpenAI sends it as null with every chunk but the last.
        begin = json.dumps(call.envelope(call.chunk_kind, call.body.model or self._models.base))[:-1] + ', "choices": ['
        end = '], "usage": null}' if with_usage else "]}"

        def chunk(choice: dict[str, Any]) -> str:
            return begin + json.dumps(choice) + end

        has_begun = False
        try:
            async for index, increment in merged(streams):
                if increment.record is not None:
                    records[index] = increment.record
                    if increment.record.status is Status.FAILED:
                        raise _named(call, ApiError.of_failure(increment.record.error))
                if not has_begun and isinstance(call.body, ChatBody):
                    for choice in range(len(streams)):
                        first = {"index": choice, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
                        yield chunk(first)
                has_begun = True
                yield chunk(call.delta(call, index, increment))
            if with_usage:
                ordered = [records[index] for index in range(len(streams))]
                yield f'{begin}], "usage": {json.dumps(usage(ordered, call.body.num_choices))}}}'
            yield "[DONE]"
        except Exception as error:
            if not has_begun:
                raise _named(call, ApiError.of(error)) from error
            yield json.dumps(_named(call, ApiError.of(error)).body(current_request_id()))
        finally:
            _abort(streams)

    # -- answers -----------------------------------------------------------------------------------------------------

    def _completion_choice(self, call: _GenerationCall, index: int, record: DynamicInferenceRequestRecord) -> dict[str, Any]:
        assert isinstance(call.body, CompletionBody)
        prompt_text = call.prompt_texts[index // call.body.num_choices]
        values = None
        if call.body.logprobs is not None:
            offsets = TextOffsets(self._tokenizer, len(prompt_text), record.prompt_tokens)
            tokens, scores, best = record.generated_tokens, record.generated_log_probs, record.generated_top_n_logprobs
            values = completion_log_probs(self._token_bytes, tokens, scores, best or [None] * len(tokens), offsets)
            if call.body.echo:
                values = {name: echoed + values[name] for name, echoed in self._prompt_log_probs(record).items()}
        text = prompt_text + record.generated_text
        choice = {"index": index, "text": text, "logprobs": values, "finish_reason": record.finish_reason}
        return choice | self._ids(call, record.generated_tokens, record, with_prompt=True)

    def _prompt_log_probs(self, record: DynamicInferenceRequestRecord) -> dict[str, Any]:
        """Of an echoed prompt; of its first token nothing is known."""
        tokens = record.prompt_tokens
        scores, best = record.prompt_log_probs or [], record.prompt_top_n_logprobs or [None] * (len(tokens) - 1)
        return completion_log_probs(self._token_bytes, tokens, [None, *scores], [None, *best], TextOffsets(self._tokenizer))

    def _completion_delta(self, call: _GenerationCall, index: int, increment: Increment) -> dict[str, Any]:
        assert isinstance(call.body, CompletionBody)
        values = None
        if call.body.logprobs is not None and increment.tokens:
            best = increment.top_n_logprobs or [None] * len(increment.tokens)
            values = completion_log_probs(self._token_bytes, increment.tokens, increment.log_probs, best, call.offsets[index])
        reason = None if increment.record is None else increment.record.finish_reason
        choice = {"index": index, "text": increment.text, "logprobs": values, "finish_reason": reason}
        return choice | self._ids(call, increment.tokens, increment.record)

    def _chat_choice(self, call: _GenerationCall, index: int, record: DynamicInferenceRequestRecord) -> dict[str, Any]:
        values = None
        if isinstance(call.body, ChatBody) and call.body.logprobs:
            best = record.generated_top_n_logprobs
            values = chat_log_probs(self._token_bytes, record.generated_tokens, record.generated_log_probs, best)
        message: dict[str, Any] = {"role": "assistant", "content": record.generated_text, "refusal": None}
        reason = record.finish_reason
        if call.tools is not None:
            parser = call.parsers[index]
            content, calls = call.tools.split([*parser.push(record.generated_text), *parser.finish()], 0)
            message["content"] = content or (None if calls else "")
            if calls:
                message["tool_calls"] = [{name: value for name, value in one.items() if name != "index"} for one in calls]
            reason = _reason(reason, parser)
        choice = {"index": index, "message": message, "logprobs": values, "finish_reason": reason}
        return choice | self._ids(call, record.generated_tokens, record, with_prompt=True)

    def _chat_delta(self, call: _GenerationCall, index: int, increment: Increment) -> dict[str, Any]:
        values = None
        if isinstance(call.body, ChatBody) and call.body.logprobs and increment.tokens:
            best = increment.top_n_logprobs
            values = chat_log_probs(self._token_bytes, increment.tokens, increment.log_probs, best)
        reason = None if increment.record is None else increment.record.finish_reason
        content, calls = increment.text, []
        if call.tools is not None:
            parser = call.parsers[index]
            first = parser.num_calls
            parts = parser.push(increment.text) + ([] if increment.record is None else parser.finish())
            content, calls = call.tools.split(parts, first)
            reason = _reason(reason, parser)
        delta: dict[str, Any] = {"content": content} if content else {}
        if calls:
            delta["tool_calls"] = calls
        choice = {"index": index, "delta": delta, "logprobs": values, "finish_reason": reason}
        return choice | self._ids(call, increment.tokens, increment.record)

    def _ids(
        self, call: _GenerationCall, tokens: list[int], record: DynamicInferenceRequestRecord | None, *, with_prompt: bool = False
    ) -> dict[str, Any]:
        """Ids of tokens; with the record, which a stream has at its end, the version of the weights of each token of the answer."""
        if not call.body.return_token_ids:
            return {}
        ids: dict[str, Any] = {"token_ids": tokens}
        if record is not None:
            ids["weight_versions"] = [version for version, count in record.weight_versions for _ in range(count)]
            if with_prompt:
                ids["prompt_token_ids"] = record.prompt_tokens
        return ids

    # -- requests ----------------------------------------------------------------------------------------------------

    def _params(self, body: CompletionBody | ChatBody, budget: int, choice: int, more: dict[str, Any]) -> SamplingParams:
        seed = {} if body.seed is not None else {"seed": self._following_seed()}
        try:
            return body.sampling_params(budget=budget, choice=choice, **seed, **more)
        except ValueError as error:
            raise ApiError.of(error) from error

    def _following_seed(self) -> int:
        """Engines, which each count their own requests, would draw the same answers."""
        self._num_seeded += 1
        return request_seed(self._seed, self._num_seeded - 1)

    async def _api_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return JSONResponse(error.body(current_request_id()), error.status, headers=error.headers)

    async def _http_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        body = ApiError(error.status_code, str(error.detail)).body(current_request_id())
        return JSONResponse(body, error.status_code, headers=error.headers)

    async def _client_gone(self, request: Request, error: Exception) -> Response:
        """For nobody to read; the log gets the status."""
        return Response(status_code=CLIENT_LEFT)

    async def _our_error(self, request: Request, error: Exception) -> Response:
        """A bug of ours: the client learns its type only; the log gets the id here and the traceback from uvicorn."""
        number = current_request_id()
        _LOG.error("request_id=%s failed with %s", number, type(error).__name__)
        return JSONResponse(ApiError(500, f"internal error: {type(error).__name__}").body(number), 500)


def _named(call: _GenerationCall, answer: ApiError) -> ApiError:
    """The answer to an error of the engine; a form that it speaks of is that of the field which asked for one."""
    if answer.code == StructuredOutputError.__name__ and call.tools is not None:
        answer.param = "tools"
    elif answer.code == StructuredOutputError.__name__ and call.body.structured_outputs is not None:
        answer.param = "structured_outputs"
    return answer


def _reason(reason: FinishReason | None, parser: ToolCallParser) -> str | None:
    """Of a choice that may hold calls."""
    return "tool_calls" if reason is FinishReason.STOP and parser.num_calls else reason


def _abort(streams: Sequence[RequestStream]) -> None:
    """End what has not ended; ended requests are left alone."""
    for stream in streams:
        stream.abort()
