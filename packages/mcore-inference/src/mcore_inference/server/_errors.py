# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Errors in the shape OpenAI's clients read."""

from typing import Any

from pydantic import ValidationError

from mcore_inference.engine import LoraInUseError
from mcore_inference.requests import (
    ContextOverflowError,
    CoordinatorError,
    EngineDeadError,
    EngineLostError,
    MaxSequenceLengthOverflowError,
    QueueFullError,
    RequestError,
    StructuredOutputError,
    UnknownLoraError,
)

_MAX_FAULTS = 100


class ApiError(Exception):
    """An answer that is not a success.

    Args:
        status: HTTP status.
        message: for a person.
        code: for a program.
        param: field at fault.
    """

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param

    def body(self, request_id: str | None = None) -> dict[str, Any]:
        """In OpenAI's shape, and ``request_id`` to find it in the log by."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        if self.status in (401, 429):
            kind = {401: "authentication_error", 429: "rate_limit_error"}[self.status]
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code, "request_id": request_id}}

    @property
    def headers(self) -> dict[str, str]:
        return {429: {"Retry-After": "1"}, 503: {"Retry-After": "1"}, 401: {"WWW-Authenticate": "Bearer"}}.get(self.status, {})

    @classmethod
    def of(cls, error: Exception) -> "ApiError":
        """The answer to an error of the engine."""
        if isinstance(error, ApiError):
            return error
        # The engine's number of a request says nothing to a client, who has one of his own.
        text = error.message if isinstance(error, RequestError) else str(error)
        if isinstance(error, QueueFullError):
            return cls(429, text, code=type(error).__name__)
        if isinstance(error, MaxSequenceLengthOverflowError):
            # OpenAI's own code, which clients look for.
            return cls(400, text, code="context_length_exceeded", param="prompt")
        if isinstance(error, ContextOverflowError) and error.is_transient:
            return cls(429, text, code=type(error).__name__)
        if isinstance(error, RequestError) and error.is_transient:
            return cls(503, text, code=type(error).__name__)
        if isinstance(error, UnknownLoraError):
            # OpenAI's own code.
            return cls(404, text, code="model_not_found", param="model")
        if isinstance(error, LoraInUseError):
            return cls(409, text, code=type(error).__name__)
        if isinstance(error, StructuredOutputError):
            return cls(400, text, code=type(error).__name__, param="response_format")
        if isinstance(error, RequestError | ValueError):
            return cls(400, text, code=type(error).__name__)
        if isinstance(error, EngineDeadError | EngineLostError | CoordinatorError):
            return cls(503, text, code=type(error).__name__)
        return cls(500, f"{type(error).__name__}: {error}", code=type(error).__name__)

    @classmethod
    def of_failure(cls, error: Exception | None) -> "ApiError":
        """The answer for a request that failed after it had begun; 503 where it may succeed when it is sent again.

        An output that cannot go on in the form that was asked for is the fault of the form, as one that cannot begin in it is.
        """
        if isinstance(error, StructuredOutputError):
            return cls.of(error)
        text = error.message if isinstance(error, RequestError) else str(error or "the request was aborted")
        return cls(503 if isinstance(error, RequestError) and error.is_transient else 500, text, code=type(error).__name__)

    @classmethod
    def of_validation(cls, error: ValidationError) -> "ApiError":
        """The first few faults of a body, with their fields; of very many only their number, since to describe one takes microseconds."""
        if error.error_count() > _MAX_FAULTS:
            return cls(422, f"the body has {error.error_count()} faults, such as unknown fields; send fewer fields", code="invalid_body")
        faults = error.errors(include_url=False, include_context=False, include_input=False)
        where = [".".join(str(part) for part in fault["loc"]) for fault in faults]
        text = "; ".join(f"{field}: {fault['msg']}" if field else fault["msg"] for field, fault in zip(where, faults, strict=True))
        return cls(422, text[:2000], code="invalid_body", param=where[0] or None)
