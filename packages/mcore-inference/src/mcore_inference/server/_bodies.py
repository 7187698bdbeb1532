# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Reading the bodies of requests."""

import gc
from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from mcore_inference.server._errors import ApiError
from mcore_inference.server._stream import read_body

Body = TypeVar("Body", bound=BaseModel)


class BodyReader:
    """Bodies of bounded length, checked field by field.

    Args:
        model_name: the one model of the server.
        max_body_bytes: longest body.
    """

    def __init__(self, model_name: str, max_body_bytes: int) -> None:
        self.model_name = model_name
        self._max_body_bytes = max_body_bytes

    async def read(self, request: Request, model: type[Body]) -> Body:
        """The body as a ``model``.

        Raises:
            ApiError: 413 for its length, 415 for its type, 400 for no JSON, 422 for its fields, 404 for another model.
            ClientGone: the client left before the body was whole.
        """
        if request.headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
            raise ApiError(415, "the body must be application/json", code="unsupported_media_type")
        raw = await read_body(request, self._max_body_bytes)
        if raw is None:
            raise ApiError(413, f"the body is longer than {self._max_body_bytes} bytes", code="body_too_large")
        body = _read(model, raw)
        if isinstance(body, ApiError):
            raise body
        self.check_model(getattr(body, "model", ""))
        return body

    def check_model(self, name: str) -> None:
        """Refuse a model that is not served here.

        Raises:
            ApiError: 404.
        """
        if name not in ("", self.model_name):
            raise ApiError(
                404, f"model={name!r} is not served here; the model is {self.model_name!r}", code="model_not_found", param="model"
            )


def _read(model: type[Body], raw: bytes) -> Body | ApiError:
    """The body, or why it is none; what was read of such a one is gone."""
    # Each few hundred lists of a body begin one of Python's collections, which would cost ten times the reading of them all.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        return ApiError.of_validation(error)
    finally:
        if was_enabled:
            gc.enable()
