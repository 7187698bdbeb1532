# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Corpora on disk, the datasets cut from them, tokenizers, and the order in which ranks read."""

from mcore_parallel.data._blend import BlendedDataset
from mcore_parallel.data._blend_builder import BlendedMegatronDatasetBuilder
from mcore_parallel.data._blend_config import BlendedMegatronDatasetConfig, Split, parse_blend, parse_split
from mcore_parallel.data._builder import IndexedDatasetBuilder, merge_indexed
from mcore_parallel.data._chat import ChatTurn
from mcore_parallel.data._conversations import ChatTokenizer, preprocess_conversations, read_conversations
from mcore_parallel.data._documents import read_documents
from mcore_parallel.data._errors import DataError, DocumentError, IndexedDatasetError, TokenizerError
from mcore_parallel.data._fim import GPTFIMDataset, GPTFIMDatasetConfig
from mcore_parallel.data._gpt import GPTDataset, GPTDatasetConfig
from mcore_parallel.data._hf_tokenizer import HuggingFaceTokenizer, train_bpe
from mcore_parallel.data._index_file import token_dtype
from mcore_parallel.data._indexed import IndexedDataset
from mcore_parallel.data._masked import MaskedTokensConfig, MaskedTokensDataset
from mcore_parallel.data._pairs import SentencePairConfig, SentencePairDataset
from mcore_parallel.data._preprocess import PreprocessReport, preprocess
from mcore_parallel.data._sampler import PretrainingSampler, batches
from mcore_parallel.data._sentencepiece_tokenizer import SentencePieceTokenizer
from mcore_parallel.data._sft import SFTDataset, SFTDatasetConfig
from mcore_parallel.data._tiktoken_tokenizer import TiktokenTokenizer
from mcore_parallel.data._tokenizer import ByteTokenizer, NullTokenizer, Tokenizer
from mcore_parallel.data._tokenizer_files import build_tokenizer, save_tokenizer
from mcore_parallel.data._word_masking import word_starts

__all__ = [
    "BlendedDataset",
    "BlendedMegatronDatasetBuilder",
    "BlendedMegatronDatasetConfig",
    "ByteTokenizer",
    "ChatTokenizer",
    "ChatTurn",
    "DataError",
    "DocumentError",
    "GPTDataset",
    "GPTDatasetConfig",
    "GPTFIMDataset",
    "GPTFIMDatasetConfig",
    "HuggingFaceTokenizer",
    "IndexedDataset",
    "IndexedDatasetBuilder",
    "IndexedDatasetError",
    "MaskedTokensConfig",
    "MaskedTokensDataset",
    "NullTokenizer",
    "PreprocessReport",
    "PretrainingSampler",
    "SFTDataset",
    "SFTDatasetConfig",
    "SentencePairConfig",
    "SentencePairDataset",
    "SentencePieceTokenizer",
    "Split",
    "TiktokenTokenizer",
    "Tokenizer",
    "TokenizerError",
    "batches",
    "build_tokenizer",
    "merge_indexed",
    "parse_blend",
    "parse_split",
    "preprocess",
    "preprocess_conversations",
    "read_conversations",
    "read_documents",
    "save_tokenizer",
    "token_dtype",
    "train_bpe",
    "word_starts",
]
