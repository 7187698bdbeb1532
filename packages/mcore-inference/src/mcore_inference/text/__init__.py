# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Tokenizers, and the text of a growing list of tokens."""

from mcore_inference.text._pieces import TextPieces, prompt_end, text_until_failure, whole_text
from mcore_inference.text._stream import TextStream
from mcore_inference.text._token_bytes import TokenBytes
from mcore_inference.text._token_texts import TokenTexts
from mcore_inference.text._tokenizer import (
    BosTokenizer,
    ChatTokenizer,
    JsonTokenizer,
    StopTokenizer,
    Tokenizer,
    ToolChatTokenizer,
    TransformersTokenizer,
    VocabularyTokenizer,
    chat_tokens,
)

__all__ = [
    "BosTokenizer",
    "ChatTokenizer",
    "JsonTokenizer",
    "StopTokenizer",
    "TextPieces",
    "TextStream",
    "TokenBytes",
    "TokenTexts",
    "Tokenizer",
    "ToolChatTokenizer",
    "TransformersTokenizer",
    "VocabularyTokenizer",
    "chat_tokens",
    "prompt_end",
    "text_until_failure",
    "whole_text",
]
