# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What the engine and the server need of a tokenizer."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from mcore_inference._stability import experimental_api

__all__ = [
    "BosTokenizer",
    "ChatTokenizer",
    "JsonTokenizer",
    "StopTokenizer",
    "Tokenizer",
    "ToolChatTokenizer",
    "TransformersTokenizer",
    "VocabularyTokenizer",
    "chat_tokens",
]


@experimental_api
@runtime_checkable
class Tokenizer(Protocol):
    """What the engine and the server need of a tokenizer; those of ``mcore_parallel.data`` conform.

    One of the transformers library is wrapped: ``TransformersTokenizer(tokenizer)``.
    """

    @property
    def vocab_size(self) -> int:
        """Ids lie in [0, vocab_size); larger ones are never drawn."""
        ...

    @property
    def eod(self) -> int | None:
        """Id that ends a text."""
        ...

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text, nothing added."""
        ...

    def detokenize(self, ids: list[int]) -> str:
        """Text of token ids without special tokens; an incomplete character at the end becomes U+FFFD.

        It depends on the ids alone: an engine remembers the texts of single tokens. Whoever reads a text calls it, in threads beside the
        engine's.
        """
        ...


@experimental_api
@runtime_checkable
class BosTokenizer(Protocol):
    """A tokenizer with an id that begins a text."""

    @property
    def bos(self) -> int | None: ...


@experimental_api
@runtime_checkable
class StopTokenizer(Protocol):
    """A tokenizer with more than one id that ends an output, such as the end of a turn."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]: ...


@experimental_api
@runtime_checkable
class VocabularyTokenizer(Protocol):
    """A tokenizer that knows the bytes of its tokens, as structured output needs them."""

    def token_bytes(self) -> list[bytes | None]:
        """Of ids 0, 1, ...; None for special tokens and for ids without token."""
        ...


@experimental_api
@runtime_checkable
class JsonTokenizer(Protocol):
    """A tokenizer of the ``tokenizers`` library, from whose file structured output reads the bytes of its tokens."""

    @property
    def vocab_size(self) -> int: ...

    def tokenizer_json(self) -> str:
        """What its tokenizer.json holds."""
        ...


@experimental_api
@runtime_checkable
class ChatTokenizer(Protocol):
    """A tokenizer with a way of its own to write a conversation."""

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = False) -> list[int]:
        """Ids of a conversation, with an open turn of the assistant at the end."""
        ...


@experimental_api
@runtime_checkable
class ToolChatTokenizer(Protocol):
    """A tokenizer whose chat template writes tools, and messages that call them."""

    def apply_tool_template(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], add_generation_prompt: bool = False
    ) -> list[int]:
        """Ids of a conversation with tools; none for messages that only hold calls."""
        ...


@experimental_api
class TransformersTokenizer:
    """A tokenizer of the transformers library as a ``Tokenizer``, ``ChatTokenizer`` and ``ToolChatTokenizer``.

    Args:
        inner: for instance ``AutoTokenizer.from_pretrained(folder)``.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    @property
    def vocab_size(self) -> int:
        # Its own vocab_size leaves added tokens out.
        return len(self.inner)

    @property
    def eod(self) -> int | None:
        return self.inner.eos_token_id

    @property
    def bos(self) -> int | None:
        return self.inner.bos_token_id

    def tokenize(self, text: str) -> list[int]:
        return self.inner.encode(text, add_special_tokens=False)

    def detokenize(self, ids: list[int]) -> str:
        # A stream cannot take a space back that a mark behind it would remove.
        return self.inner.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def tokenizer_json(self) -> str:
        """Of a fast tokenizer.

        Raises:
            ValueError: the tokenizer is written in Python and has no such file.
        """
        if getattr(self.inner, "backend_tokenizer", None) is None:
            raise ValueError(f"{type(self.inner).__name__} is no fast tokenizer and has no tokenizer.json; load it with use_fast=True")
        return self.inner.backend_tokenizer.to_str()

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = False) -> list[int]:
        """By the tokenizer's template; without one, as ``chat_tokens`` does by default."""
        if self.inner.chat_template is None:
            return self.tokenize(_plain_chat(messages, add_generation_prompt))
        text = self.inner.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=add_generation_prompt)
        return self.tokenize(text)

    def apply_tool_template(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], add_generation_prompt: bool = False
    ) -> list[int]:
        """By the tokenizer's template.

        Raises:
            ValueError: it has none.
        """
        if self.inner.chat_template is None:
            raise ValueError(f"{type(self.inner).__name__} has no chat template to write tools by; give it one")
        text = self.inner.apply_chat_template(
            list(messages), tools=list(tools) or None, tokenize=False, add_generation_prompt=add_generation_prompt
        )
        return self.tokenize(text)


@experimental_api
def chat_tokens(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] = (),
) -> list[int]:
    """Ids of a conversation.

    By the tokenizer's ``apply_chat_template`` when it has one; else each message is a line ``role: content``.

    Args:
        tokenizer: the model's.
        messages: ``role`` and ``content`` of each; ``tool_calls`` of one that called tools.
        add_generation_prompt: whether the assistant's turn is open at the end (``assistant:`` without a template).
        tools: that the model may call, in OpenAI's form.

    Raises:
        ValueError: there are tools or calls, and the tokenizer is no ``ToolChatTokenizer``.
    """
    if tools or any("tool_calls" in message for message in messages):
        if not isinstance(tokenizer, ToolChatTokenizer):
            raise ValueError(
                f"{type(tokenizer).__name__} has no chat template that writes tools; serve a tokenizer with apply_tool_template"
            )
        return list(tokenizer.apply_tool_template(messages, tools, add_generation_prompt=add_generation_prompt))
    if isinstance(tokenizer, ChatTokenizer):
        return list(tokenizer.apply_chat_template(messages, add_generation_prompt=add_generation_prompt))
    return list(tokenizer.tokenize(_plain_chat(messages, add_generation_prompt)))


def _plain_chat(messages: Sequence[Mapping[str, str]], add_generation_prompt: bool) -> str:
    return "".join(f"{message['role']}: {message['content']}\n" for message in messages) + "assistant:" * add_generation_prompt
