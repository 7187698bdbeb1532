# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Files of text and conversations into tokenised corpora."""

from mcore_parallel.data.preprocessing._conversations import ChatTokenizer, Conversation, preprocess_conversations, read_conversations
from mcore_parallel.data.preprocessing._documents import read_documents
from mcore_parallel.data.preprocessing._preprocess import PreprocessReport, preprocess

__all__ = [
    "ChatTokenizer",
    "Conversation",
    "PreprocessReport",
    "preprocess",
    "preprocess_conversations",
    "read_conversations",
    "read_documents",
]
