# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What texts and conversations of clients become."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mcore_inference.server._errors import ApiError
from mcore_inference.text import BosTokenizer, Tokenizer, chat_tokens

_TOOL = {"type": "function", "function": {"name": "a", "description": "a", "parameters": {"type": "object", "properties": {}}}}


class PromptEncoder:
    """Text to tokens and back, with the faults of a client's text as answers.

    Tokenizing takes time with the length of a text, so one that cannot fit the context is refused by its length before.

    Args:
        tokenizer: the engine's own.
        max_sequence_length: gives the tokens of a prompt and its output together; 0 while no engine is there.
        max_characters_per_token: a text of more characters than this times ``max_sequence_length`` is refused.
    """

    def __init__(self, tokenizer: Tokenizer, max_sequence_length: Callable[[], int], max_characters_per_token: int) -> None:
        self.tokenizer = tokenizer
        self._max_sequence_length, self._max_characters_per_token = max_sequence_length, max_characters_per_token

    @property
    def bos(self) -> int | None:
        """Id that begins a text, where the tokenizer has one."""
        return self.tokenizer.bos if isinstance(self.tokenizer, BosTokenizer) else None

    def encode(self, text: str) -> list[int]:
        """Ids of a text, nothing added.

        Raises:
            ApiError: 400; the text is too long, or the tokenizer refuses it. 503; no engine is there.
        """
        self._check_length(len(text), "prompt")
        try:
            return list(self.tokenizer.tokenize(text))
        except Exception as error:
            raise ApiError(400, f"the tokenizer refused the prompt: {error}", param="prompt") from error

    def decode(self, tokens: list[int], param: str = "prompt") -> str:
        """Text of ids, without special tokens.

        Raises:
            ApiError: 400; an id outside the vocabulary, or the tokenizer refuses them.
        """
        largest = max(tokens, default=0)
        if largest >= self.tokenizer.vocab_size:
            raise ApiError(400, f"{param} holds {largest}; ids lie below {self.tokenizer.vocab_size}", param=param)
        try:
            return self.tokenizer.detokenize(tokens)
        except Exception as error:
            raise ApiError(400, f"the tokenizer refused the {param}: {error}", param=param) from error

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] = (), add_generation_prompt: bool = True
    ) -> list[int]:
        """Ids of a conversation, by the tokenizer's chat template where it has one.

        Args:
            messages: ``role`` and ``content`` of each, and ``name`` and ``tool_calls`` of some.
            tools: that the model may call.
            add_generation_prompt: whether the assistant's turn is opened at the end.

        Raises:
            ApiError: 400; the conversation is too long, the template refuses it, or writes no names where there are some.
        """
        calls = [message["tool_calls"] for message in messages if "tool_calls" in message]
        written = sum(len(json.dumps(part)) for part in (calls, tools) if part)
        texts = sum(len(message.get("content") or "") + len(message.get("name", "")) for message in messages)
        self._check_length(written + texts, "messages")

        try:
            tokens = chat_tokens(self.tokenizer, messages, add_generation_prompt, tools)
        except Exception as error:
            # Templates refuse conversations in their own ways (wrong order of roles); it is the client's conversation.
            raise ApiError(400, f"the chat template refused the messages: {error}", param="messages") from error
        for role in sorted({message["role"] for message in messages if "name" in message}):
            # Templates write names of some roles, or none; another name shows which, also where one is needed.
            other = [{**message, "name": f"{message['name']}_"} if _is_named(message, role) else message for message in messages]
            try:
                is_written = chat_tokens(self.tokenizer, other, add_generation_prompt, tools) != tokens
            except Exception:
                # The template reads names, and has no such one.
                is_written = True
            if not is_written:
                text = f"messages: the chat template writes no name of role {role!r}; leave name out, or put it into the content"
                raise ApiError(400, text, param="messages.name")
        # A template may write the begin-of-text token before an encoder that adds it.
        bos = self.bos
        return tokens[1:] if bos is not None and tokens[:2] == [bos, bos] else tokens

    def _check_length(self, num_characters: int, param: str) -> None:
        longest, each = self._max_sequence_length(), self._max_characters_per_token
        if not longest:
            raise ApiError(503, "no engine is there to serve; try again later", code="no_engine")
        if num_characters > longest * each:
            limit = f"max_sequence_length={longest} and max_characters_per_token={each}"
            message = f"the {param} has {num_characters} characters, beyond the {longest * each} of {limit}; shorten it"
            # OpenAI's own code, which clients look for.
            raise ApiError(400, message, code="context_length_exceeded", param=param)


def _is_named(message: Mapping[str, Any], role: str) -> bool:
    return message["role"] == role and "name" in message


def check_tool_template(tokenizer: Tokenizer) -> None:
    """See that tools reach the model.

    Raises:
        ValueError: the tokenizer has no chat template that writes them.
    """
    messages = [{"role": "user", "content": "a"}]
    remedy = "give it one that writes them, or tool_call_parser=None"
    try:
        with_tools = chat_tokens(tokenizer, messages, tools=[_TOOL])
    except ValueError as error:
        raise ValueError(f"{error} ({remedy})") from error
    if with_tools == chat_tokens(tokenizer, messages):
        raise ValueError(f"the chat template of {type(tokenizer).__name__} leaves tools out; {remedy}")
