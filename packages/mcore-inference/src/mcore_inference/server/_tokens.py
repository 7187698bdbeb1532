# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Bearer tokens: who may use a route."""

import hmac

from fastapi import Request

from mcore_inference.server._errors import ApiError


class BearerToken:
    """A dependency of routes.

    Args:
        token: that clients must bring; None for open access.
    """

    def __init__(self, token: str | None) -> None:
        self._token = None if token is None else token.encode()

    def admits(self, request: Request) -> bool:
        """Whether the request brings the token."""
        if self._token is None:
            return True
        scheme, _, brought = request.headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(brought.strip().encode(), self._token)

    async def __call__(self, request: Request) -> None:
        """Refuse a request without it: 401."""
        if not self.admits(request):
            raise ApiError(401, "the bearer token is missing or wrong", code="invalid_api_key")
