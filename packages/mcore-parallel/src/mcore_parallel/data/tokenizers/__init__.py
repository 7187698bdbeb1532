# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Tokenizers of several libraries behind one protocol, and their files."""

from mcore_parallel.data.tokenizers._chat import ChatTurn, RoleTokenizer, check_ids
from mcore_parallel.data.tokenizers._files import build_tokenizer, save_tokenizer
from mcore_parallel.data.tokenizers._huggingface import HuggingFaceTokenizer, train_bpe
from mcore_parallel.data.tokenizers._sentencepiece import SentencePieceTokenizer
from mcore_parallel.data.tokenizers._tiktoken import TiktokenTokenizer
from mcore_parallel.data.tokenizers._tokenizer import ByteTokenizer, NullTokenizer, Tokenizer

__all__ = [
    "ByteTokenizer",
    "ChatTurn",
    "HuggingFaceTokenizer",
    "NullTokenizer",
    "RoleTokenizer",
    "SentencePieceTokenizer",
    "TiktokenTokenizer",
    "Tokenizer",
    "build_tokenizer",
    "check_ids",
    "save_tokenizer",
    "train_bpe",
]
