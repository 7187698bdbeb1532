# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A page to try a served model in a browser; it is one file and asks nobody but this server."""

import base64
import hashlib
import re
from importlib.resources import files

from fastapi import Response

_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


class Playground:
    """The page at ``/``. It holds no secret, so it is open; its calls bring the token that the user types."""

    def __init__(self) -> None:
        text = files("mcore_inference.server").joinpath("playground.html").read_text(encoding="utf-8")
        hashes = {kind: _digest(body) for kind, body in _INLINE.findall(text)}
        # Only what stands in the page runs, and it reaches this server only.
        policy = (
            f"default-src 'none'; script-src {hashes['script']}; style-src {hashes['style']}; connect-src 'self'; img-src data:; "
            "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        self._body = text.encode()
        self._headers = {
            "Content-Security-Policy": policy,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-cache",
        }

    async def page(self) -> Response:
        return Response(self._body, media_type="text/html", headers=self._headers)


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
