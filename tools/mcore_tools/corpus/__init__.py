# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Text becomes a tokenizer and an indexed corpus, conversations a corpus that marks what is learnt."""

from mcore_tools.corpus._conversations import ChatCorpus, prepare_chat
from mcore_tools.corpus._text import Corpus, check_text, default_text, prepare

__all__ = [
    "ChatCorpus",
    "Corpus",
    "check_text",
    "default_text",
    "prepare",
    "prepare_chat",
]
