# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Reading the bodies of requests."""

from collections.abc import Callable
from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from mcore_inference.server._errors import ApiError
from mcore_inference.server._models import ServedModels
from mcore_inference.server._schema import MAX_MODEL_NAME, DetokenizeBody
from mcore_inference.server._stream import read_body
from mcore_parallel.graphs import collection_paused

Body = TypeVar("Body", bound=BaseModel)
_MAX_BRACKETS = 2**18
"""Lists and objects cost most to read, by their bytes. Those in texts count: a text of so many has more tokens than any model takes."""
_MAX_NAMES = 2**16
"""Names cost most behind those, as each is a text to remember. A quote within a text has a backslash, so JSON in texts does not count."""


class BodyReader:
    """Bodies of bounded length, checked field by field.

    Args:
        models: that a body may name.
        max_body_bytes: longest body.
        max_sequence_length: gives the most tokens of a prompt; 0 while no engine is there.
    """

    def __init__(self, models: ServedModels, max_body_bytes: int, max_sequence_length: Callable[[], int]) -> None:
        self._models = models
        self._max_body_bytes, self._max_sequence_length = max_body_bytes, max_sequence_length

    async def read(self, request: Request, model: type[Body]) -> Body:
        """The body as a ``model``.

        Raises:
            ApiError: 413 for its length, 415 for its type, 400 for no JSON or too many tokens, 422 for its fields, 404 for another model.
            ClientGone: the client left before the body was whole.
        """
        if request.headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
            raise ApiError(415, "the body must be application/json", code="unsupported_media_type")
        raw = await read_body(request, self._max_body_bytes)
        if raw is None:
            raise ApiError(413, f"the body is longer than {self._max_body_bytes} bytes", code="body_too_large")
        body = _read(model, raw, self._max_sequence_length())
        if isinstance(body, ApiError):
            raise body
        await self._models.check(getattr(body, "model", ""))
        return body


def _read(model: type[Body], raw: bytes, longest: int) -> Body | ApiError:
    """The body, or why it is none; what was read of such a one is gone."""
    if (brackets := raw.count(b"[") + raw.count(b"{")) > _MAX_BRACKETS:
        return ApiError(422, f"the body has {brackets} brackets [ and {{; at most {_MAX_BRACKETS} are read", code="invalid_body")
    if (names := raw.count(b'":') - raw.count(b'\\":')) > _MAX_NAMES:
        return ApiError(422, f"the body has {names} names of fields; at most {_MAX_NAMES} are read", code="invalid_body")
    # The one text of these ids is the name of a model.
    if model is DetokenizeBody and longest and raw.count(b",") > longest + MAX_MODEL_NAME:
        message = f"tokens holds more than max_sequence_length={longest} tokens; send fewer"
        return ApiError(400, message, code="context_length_exceeded", param="tokens")
    # Each few hundred lists of a body begin one of Python's collections, which would cost ten times the reading of them all.
    with collection_paused(freeze=False):
        return _checked(model, raw, longest)


def _checked(model: type[Body], raw: bytes, longest: int) -> Body | ApiError:
    try:
        # Not at once by pydantic, which copies what is at fault into each error: a list of 100,000 twice.
        body = from_json(raw, cache_strings="keys")
        if not isinstance(body, dict):
            return ApiError(422, "the body must be a JSON object", code="invalid_body")
        return model.model_validate(body, context=longest)
    except ValidationError as error:
        return ApiError.of_validation(error)
    except ApiError as error:
        return error.with_traceback(None)
    except ValueError as error:
        return ApiError(400, f"Invalid JSON: {error}"[:2000], code="invalid_body")
