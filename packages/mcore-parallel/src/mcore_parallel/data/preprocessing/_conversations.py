# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Conversations into a tokenised corpus on disk that marks the tokens with a loss."""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from mcore_parallel.data._errors import DataError, DocumentError
from mcore_parallel.data.corpus import HAS_LOSS, IndexedDatasetBuilder, token_dtype
from mcore_parallel.data.preprocessing._documents import document_files, read_entries
from mcore_parallel.data.preprocessing._preprocess import PreprocessReport
from mcore_parallel.data.tokenizers import ChatTurn

SHAREGPT_KEY = "conversations"
"""Field of a ShareGPT line."""
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant"}


def as_message(message: Mapping[str, Any], place: str) -> dict[str, Any]:
    """``message`` with its role and its content as text; entries without a value are left out.

    Args:
        message: ``{"role", "content"}`` or ``{"from", "value"}``; content is text, or a list of text parts.
        place: for messages of errors.

    Raises:
        DocumentError: no role, content that is neither, or calls of tools.
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
    if not (isinstance(fields.get("role"), str) and isinstance(fields.get("content"), str)):
        raise DocumentError(f'{place} must have "role" and "content" as text, found {str(fields)[:80]}')
    return fields


def _part(part: Any, place: str) -> str:
    text = part if isinstance(part, str) else part.get("text") if isinstance(part, Mapping) else None
    if not isinstance(text, str):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        raise DocumentError(f"{place} has a part of type {kind!r} in its content; only text is learnt, remove the others")
    return text


_OPENAI_KEY = "messages"


@runtime_checkable
class ChatTokenizer(Protocol):
    """What it takes to tokenise conversations."""

    @property
    def vocab_size(self) -> int: ...
    def chat_turns(self, messages: Sequence[Mapping[str, str]]) -> list[ChatTurn]: ...


def read_conversations(path: str | os.PathLike[str], *, json_key: str = "messages") -> Iterator[list[Mapping[str, Any]]]:
    """Conversations of a JSON lines or Parquet file, or of all such files of a folder, gzipped ones too.

    Messages are ``{"role", "content"}``, as OpenAI writes them (content may be a list of text parts), or ``{"from", "value"}``, as
    ShareGPT does; both come out as the first. Where ``messages`` is not there, ``conversations`` is read.

    Args:
        path: file or folder, see `read_documents`.
        json_key: which field of a line, or column of a Parquet file, holds the list of messages.

    Raises:
        DocumentError: a file cannot be read, a line is no JSON object or lacks the list, or a message has another form.
    """
    for place, entry in read_entries(path):
        key = SHAREGPT_KEY if json_key == _OPENAI_KEY and json_key not in entry else json_key
        messages = entry.get(key)
        if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
            raise DocumentError(f"{place} has no list of messages in the field {json_key!r} (fields are {', '.join(sorted(entry)[:8])})")
        if entry.get("tools"):
            raise DocumentError(f"{place} has tools, which no conversation is rendered with; remove the field, or write them into the text")
        yield [as_message(message, f"{place}: {key}[{number}]") for number, message in enumerate(messages)]


def preprocess_conversations(
    inputs: Sequence[str | os.PathLike[str]],
    output_prefix: str | os.PathLike[str],
    tokenizer: ChatTokenizer,
    *,
    trained_roles: Sequence[str] = ("assistant",),
    json_key: str = "messages",
) -> PreprocessReport:
    """Write ``<output_prefix>.bin`` and ``.idx`` for `SFTDataset`: one document a conversation.

    Sequences alternate between prompt tokens and loss tokens, marked by their mode: the contents and turn ends of
    ``trained_roles`` have a loss. A conversation without such a turn is left out. If anything fails no dataset appears.

    Args:
        inputs: files and folders, see `read_conversations`.
        output_prefix: folder and stem of the output; the folder is made.
        tokenizer: gives the turns; ids lie in [0, vocab_size).
        trained_roles: whose turns have a loss.
        json_key: which field holds the messages.

    Raises:
        DocumentError: a conversation is missing, unreadable or none is left.
        TokenizerError: a message lacks role or content, or the tokenizer has no turns.
        IndexedDatasetError: the output cannot be written.
    """
    if not inputs or not trained_roles:
        raise DataError("inputs and trained_roles must not be empty; name files, and whose turns have a loss")
    for path in inputs:
        document_files(path)  # a wrong path shows before hours of work
    prefix, dtype = os.fspath(output_prefix), token_dtype(tokenizer.vocab_size)
    os.makedirs(os.path.dirname(prefix) or ".", exist_ok=True)
    started = time.perf_counter()
    num_documents = num_tokens = num_skipped = 0
    with IndexedDatasetBuilder(prefix + ".bin", dtype=dtype, multimodal=True) as builder:
        for messages in (messages for path in inputs for messages in read_conversations(path, json_key=json_key)):
            parts, modes = _parts(tokenizer.chat_turns(messages), trained_roles)
            if HAS_LOSS not in modes:
                num_skipped += 1
                continue
            ids = [token for part in parts for token in part]
            builder.add_document(np.array(ids, dtype=np.int64), [len(part) for part in parts], modes)
            num_documents += 1
            num_tokens += len(ids)
        if num_documents == 0:
            files = ", ".join(os.fspath(path) for path in inputs)
            raise DocumentError(
                f"{files}: no conversation with a turn of {', '.join(trained_roles)} ({num_skipped} without); "
                "check trained_roles, and the roles of the messages"
            )
        builder.finalize(prefix + ".idx")
    seconds = time.perf_counter() - started
    return PreprocessReport(num_documents=num_documents, num_tokens=num_tokens, num_skipped=num_skipped, dtype=dtype.name, seconds=seconds)


def _parts(turns: Sequence[ChatTurn], trained_roles: Sequence[str]) -> tuple[list[list[int]], list[int]]:
    """Stretches of ids and the mode of each, neighbours of one mode joined."""
    parts: list[list[int]] = []
    modes: list[int] = []
    for turn in turns:
        mode_of_body = HAS_LOSS if turn.role in trained_roles else 0
        for ids, mode in ((turn.header, 0), (turn.body, mode_of_body), (turn.tail, 0)):
            if modes and modes[-1] == mode:
                parts[-1] += ids
            elif ids:
                parts.append(list(ids))
                modes.append(mode)
    return parts, modes
