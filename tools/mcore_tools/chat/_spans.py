# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Which characters of a rendered conversation the assistant writes, where its template does not mark them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Messages = Sequence[Mapping[str, Any]]
Render = Callable[[Messages, bool], str]
"""Messages, and whether an open turn of the assistant ends the text."""


class TemplateError(ValueError):
    """A chat template that cannot be run, or does not say what the assistant writes."""


@dataclass(frozen=True, kw_only=True)
class AssistantSpans:
    """A conversation as text."""

    text: str
    spans: Sequence[tuple[int, int]]
    """Characters [begin, end) that the assistant writes, in order: the content, the end of the turn, and what its template puts before."""


def assistant_spans(messages: Messages, render: Render, special: Sequence[str] = ()) -> AssistantSpans:
    """Find the turns of the assistant by rendering prefixes of the conversation.

    A turn begins where the text of the messages before it ends, with an open turn of the assistant: what a server gives the model; one that
    begins the conversation, behind what opens any turn. It ends where the text of the messages up to it ends, or, where a template writes
    its last turn differently (Qwen3 drops the thoughts of earlier ones), behind its content (or the name of its last call) and whatever
    follows there. All are checked against the whole text.

    Args:
        messages: ``{"role", "content"}``, and ``tool_calls`` of some.
        render: the template.
        special: tokens of which one ends a turn; white space behind it belongs to nobody.

    Raises:
        TemplateError: the prefixes are not what the whole text begins with.
    """
    text = render(messages, False)
    spans: list[tuple[int, int]] = []
    for number, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        begin = _begin(text, messages[:number], render) if number else _first_begin(text, message, render)
        if begin is None or (spans and begin < spans[-1][1]):
            raise _unstable(number, "before")
        end = _end(text, begin, render(messages[: number + 1], False), _landmark(message), number)
        shorter = text[:end].rstrip()
        if shorter.endswith(tuple(special)):
            end = len(shorter)
        spans.append((begin, end))
    return AssistantSpans(text=text, spans=spans)


def _begin(text: str, before: Messages, render: Render) -> int | None:
    opened = render(before, True)
    return len(opened) if text.startswith(opened) else None


def _first_begin(text: str, message: Mapping[str, Any], render: Render) -> int | None:
    """Of a turn that nothing comes before but what the template writes itself, as tools: behind what opens a turn, or where its text is."""
    question = [{"role": "user", "content": "a"}]
    closed, opened = render(question, False), render(question, True)
    header = opened.removeprefix(closed) if opened.startswith(closed) else ""
    place = text.find(header) if header else -1
    if place >= 0:
        return place + len(header)
    landmark = _landmark(message)
    place = text.find(landmark) if landmark else -1
    return place if place >= 0 else None


def _landmark(message: Mapping[str, Any]) -> str:
    """Text of a turn that a template writes wherever the turn stands."""
    calls = message.get("tool_calls") or []
    return str(message.get("content", "")).strip() or (calls[-1]["function"]["name"] if calls else "")


def _end(text: str, begin: int, after: str, landmark: str, number: int) -> int:
    if text.startswith(after) and len(after) >= begin:
        return len(after)
    # Another last turn: the landmark, and what closes it.
    last = after.rfind(landmark)
    closed = after[last:]
    found = text.find(closed, begin)
    if not landmark or last < 0 or found < 0:
        raise _unstable(number, "after")
    return found + len(closed)


def _unstable(number: int, side: str) -> TemplateError:
    return TemplateError(
        f"the chat template is not prefix-stable: its text of the messages {side} messages[{number}] (assistant) is not what the whole "
        "text begins with, so nobody can say what the assistant writes; mark that with {% generation %} in a copy of the template, and "
        "name it with sft.template=FILE"
    )
