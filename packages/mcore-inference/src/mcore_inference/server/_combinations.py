# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Fields of a body that need or exclude each other: one that would change nothing is refused."""

from mcore_inference.server._errors import ApiError
from mcore_inference.server._schema import ChatBody, CompletionBody


def check_completion(body: CompletionBody) -> None:
    """Raise for a completion that asks for what it cannot have.

    Raises:
        ApiError: 400, with the field.
    """
    _check_stream(body)
    if body.echo and body.stream:
        raise ApiError(400, "echo with stream is not available; call without stream", param="echo")
    if body.logprobs_mode is not None and body.logprobs is None:
        raise _lacking(body.logprobs_mode, "logprobs_mode", "logprobs")


def check_chat(body: ChatBody) -> None:
    """Raise for a chat that asks for what it cannot have.

    Raises:
        ApiError: 400, with the field.
    """
    _check_stream(body)
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs=true", param="top_logprobs")
    if body.tools is None and body.parallel_tool_calls is not None:
        raise _lacking(body.parallel_tool_calls, "parallel_tool_calls", "tools")
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        both = f"max_tokens={body.max_tokens} and max_completion_tokens={body.max_completion_tokens}"
        raise ApiError(400, f"{both} are one limit by two names; leave max_tokens out", param="max_tokens")


def check_budget(body: CompletionBody | ChatBody, budget: int) -> None:
    """Raise where an output must be longer than it may be.

    Args:
        body: of the call.
        budget: tokens that an output gets at most.

    Raises:
        ApiError: 400, with the field.
    """
    if body.min_tokens is not None and body.min_tokens > budget:
        message = f"min_tokens={body.min_tokens} is more than the {budget} tokens that an output may have; lower it, or raise max_tokens"
        raise ApiError(400, message, param="min_tokens")


def _check_stream(body: CompletionBody | ChatBody) -> None:
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream=true; leave it out, or set stream", param="stream_options")


def _lacking(value: object, field: str, other: str) -> ApiError:
    return ApiError(400, f"{field}={value!r} needs {other}; leave it out, or give {other}", param=field)
