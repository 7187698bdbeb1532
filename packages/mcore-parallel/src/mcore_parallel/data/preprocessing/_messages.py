# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""One message of a conversation, in the forms that data sets have."""

from collections.abc import Mapping
from typing import Any

from mcore_parallel.data._errors import DocumentError

SHAREGPT_KEY = "conversations"
"""Field of a ShareGPT line."""
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant"}


def as_message(message: Mapping[str, Any], place: str) -> dict[str, Any]:
    """``message`` with its role and its content as text; entries without a value are left out.

    Args:
        message: ``{"role", "content"}`` or ``{"from", "value"}``; content is text, or a list of text parts.
        place: for messages of errors.

    Raises:
        DocumentError: content that is neither, or calls of tools.
    """
    fields = {name: value for name, value in message.items() if value is not None}
    if "role" not in fields and "from" in fields:
        role, content = fields.pop("from"), fields.pop("value", None)
        fields = {"role": _ROLES.get(role, role) if isinstance(role, str) else role, "content": content, **fields}
    for name in ("tool_calls", "function_call"):
        if fields.get(name):
            raise DocumentError(f"{place} has {name}, which no conversation is rendered with; write it into the content, or remove it")
    content = fields.get("content")
    if isinstance(content, list):
        fields["content"] = "".join(_part(part, place) for part in content)
    return fields


def _part(part: Any, place: str) -> str:
    text = part if isinstance(part, str) else part.get("text") if isinstance(part, Mapping) else None
    if not isinstance(text, str):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        raise DocumentError(f"{place} has a part of type {kind!r} in its content; only text is learnt, remove the others")
    return text
