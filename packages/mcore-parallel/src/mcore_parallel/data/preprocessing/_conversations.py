# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Conversations into a tokenised corpus on disk that marks the tokens with a loss."""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from mcore_parallel.data._errors import DataError, DocumentError
from mcore_parallel.data.corpus import HAS_LOSS, IndexedDatasetBuilder, token_dtype
from mcore_parallel.data.preprocessing._documents import document_files, read_entries
from mcore_parallel.data.preprocessing._messages import as_message, as_tools
from mcore_parallel.data.preprocessing._preprocess import PreprocessReport
from mcore_parallel.data.tokenizers import ChatTurn

_SHAREGPT_KEY = "conversations"
_OPENAI_KEY = "messages"


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """A conversation as chat templates take it."""

    messages: Sequence[Mapping[str, Any]]
    """``role`` and ``content`` of each as text; an assistant's that calls tools has ``tool_calls``, their arguments as objects."""
    tools: Sequence[Mapping[str, Any]] = ()
    """That the assistant may call: ``{"type": "function", "function": {"name", ...}}``."""
    place: str = ""
    """File and line, for messages of errors."""


@runtime_checkable
class ChatTokenizer(Protocol):
    """What it takes to tokenise conversations."""

    @property
    def vocab_size(self) -> int: ...
    def chat_turns(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> list[ChatTurn]: ...


def read_conversations(path: str | os.PathLike[str], *, json_key: str = "messages") -> Iterator[Conversation]:
    """Conversations of a JSON lines or Parquet file, or of all such files of a folder, gzipped ones too.

    Messages are ``{"role", "content"}``, as OpenAI writes them (content may be a list of text parts), or ``{"from", "value"}``, as
    ShareGPT does; both come out as the first. Where ``messages`` is not there, ``conversations`` is read.

    Calls are an assistant's ``tool_calls``, with arguments as an object or its JSON, or a turn ``function_call`` of ShareGPT; results are
    messages of role ``tool`` (in ShareGPT ``observation`` or ``function_response``, too). ``tools`` beside the messages is a list of
    functions, or its JSON. In Parquet, whose columns have one type, entries without a value are those that are not there.

    Args:
        path: file or folder, see `read_documents`.
        json_key: which field of a line, or column of a Parquet file, holds the list of messages.

    Raises:
        DocumentError: a file cannot be read, a line is no JSON object or lacks the list, or a message has another form.
    """
    for place, entry in read_entries(path):
        key = _SHAREGPT_KEY if json_key == _OPENAI_KEY and json_key not in entry else json_key
        messages = entry.get(key)
        if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
            raise DocumentError(f"{place} has no list of messages in the field {json_key!r} (fields are {', '.join(sorted(entry)[:8])})")
        plain = [as_message(message, f"{place}: {key}[{number}]") for number, message in enumerate(messages)]
        yield Conversation(messages=plain, tools=as_tools(entry.get("tools"), place), place=place)


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
        DocumentError: a conversation is missing, unreadable, refused by the tokenizer (as one with tools is by those of this wheel), or
            none is left.
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
        for conversation in (one for path in inputs for one in read_conversations(path, json_key=json_key)):
            parts, modes = _parts(_turns(tokenizer, conversation), trained_roles)
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


def _turns(tokenizer: ChatTokenizer, conversation: Conversation) -> list[ChatTurn]:
    try:
        return tokenizer.chat_turns(conversation.messages, conversation.tools)
    except ValueError as error:
        raise DocumentError(f"{conversation.place}: {error}") from error


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
