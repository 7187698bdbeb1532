# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Conversations as token ids."""

from collections.abc import Callable, Mapping, Sequence

from mcore_parallel.data._errors import TokenizerError

TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"


def render_chat(
    messages: Sequence[Mapping[str, str]], *, encode: Callable[[str], list[int]], start: int, end: int, add_generation_prompt: bool
) -> list[int]:
    """Ids of ``<start>role newline content<end>newline`` for each message.

    Only the two sentinels are special; ``encode`` must treat text as plain, so a message cannot forge a turn.

    Args:
        messages: mappings with ``role`` and ``content``.
        encode: plain text to ids.
        start: sentinel ids.
        end: likewise, after the turn.
        add_generation_prompt: end with an open assistant turn.

    Raises:
        TokenizerError: a message lacks role or content.
    """
    ids: list[int] = []
    for number, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not isinstance(content, str):
            raise TokenizerError(f'messages[{number}] must have "role" and "content" as text, got keys {sorted(message)}')
        ids += [start, *encode(f"{role}\n{content}"), end, *encode("\n")]
    if add_generation_prompt:
        ids += [start, *encode("assistant\n")]
    return ids
