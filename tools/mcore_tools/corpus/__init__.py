# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Text becomes a tokenizer and an indexed corpus."""

from mcore_tools.corpus._text import Corpus, check_text, default_text, prepare

__all__ = [
    "Corpus",
    "check_text",
    "default_text",
    "prepare",
]
