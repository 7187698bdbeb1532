# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Answers as they are generated, by an OpenAI-compatible server."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException, HTTPResponse
from typing import Any

from mcore_tools.terminal._answers import AnswerError, AnswerSettings, Messages

_DATA, _DONE = b"data:", b"[DONE]"


class ServerAnswers:
    """Answers of a server; conforms to ``Answers``.

    Args:
        url: of the server, with or without ``/v1``.
        settings: how they are drawn.
        model: its name there; empty for the first one.
        token: secret that the server wants; empty for none.
        timeout_s: between two pieces of an answer.

    Raises:
        AnswerError: nobody serves there, or no such model.
    """

    def __init__(self, url: str, settings: AnswerSettings, *, model: str = "", token: str = "", timeout_s: float = 600.0) -> None:
        self._url = url.rstrip("/").removesuffix("/v1") + "/v1"
        self._settings, self._token, self._timeout_s = settings, token, timeout_s
        with self._open("models") as response:
            served = [str(entry.get("id")) for entry in _object(response.read()).get("data", [])]
        if not served or (model and model not in served):
            raise AnswerError(f"{self._url} serves {', '.join(served) or 'no model'}; name one of them with --model")
        self.model = model or served[0]
        """The name of the model."""
        self._is_cut = False

    @property
    def is_cut(self) -> bool:
        return self._is_cut

    def stream(self, messages: Messages) -> Iterator[str]:
        self._is_cut = False
        body = {
            "model": self.model,
            "messages": [dict(message) for message in messages],
            "max_tokens": self._settings.max_tokens,
            "temperature": self._settings.temperature,
            "stream": True,
        }
        # Closed early, it tells the server to give the answer up.
        with self._open("chat/completions", body) as response:
            try:
                for line in response:
                    if not line.startswith(_DATA):
                        continue
                    data = line.removeprefix(_DATA).strip()
                    if data == _DONE:
                        return
                    event = _object(data)
                    yield from _pieces(event)
                    self._is_cut |= any(choice.get("finish_reason") == "length" for choice in event.get("choices", []))
            except (OSError, HTTPException) as error:
                raise AnswerError(f"{self._url} broke off: {error}; ask again, or look at the server's log") from None

    def _open(self, path: str, body: dict[str, Any] | None = None) -> HTTPResponse:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self._token}"} if self._token else {})
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(f"{self._url}/{path}", data, headers)
            return urllib.request.urlopen(request, timeout=self._timeout_s)
        except urllib.error.HTTPError as error:
            with error:
                raise AnswerError(f"{self._url}: {_reason(error)}") from None
        except (OSError, HTTPException, ValueError) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            raise AnswerError(f"{self._url} does not answer: {reason}; is `mcore serve` up?") from None


def _pieces(event: dict[str, Any]) -> Iterator[str]:
    if "error" in event:
        raise AnswerError(_message(event) or "the server gave the answer up")
    for choice in event.get("choices", []):
        if text := (choice.get("delta") or {}).get("content"):
            yield text


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        return _message(_object(error.read())) or f"{error.code} {error.reason}"
    except AnswerError:
        return f"{error.code} {error.reason}"


def _message(event: dict[str, Any]) -> str:
    error = event.get("error")
    return str(error.get("message", "")) if isinstance(error, dict) else str(error or "")


def _object(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise AnswerError(f"the server sent {data[:80]!r}, which is no JSON object; is it OpenAI-compatible?")
    return value
