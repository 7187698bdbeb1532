# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Conversations by a tokenizer's own chat template."""

from mcore_tools.chat._generation import end_tokens, read_generation
from mcore_tools.chat._spans import AssistantSpans, TemplateError, assistant_spans
from mcore_tools.chat._tokenizer import TEMPLATES, TemplateTokenizer, find_template

__all__ = [
    "TEMPLATES",
    "AssistantSpans",
    "TemplateError",
    "TemplateTokenizer",
    "assistant_spans",
    "end_tokens",
    "find_template",
    "read_generation",
]
