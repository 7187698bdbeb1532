# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Samples cut from corpora, blends of them, and the order in which ranks read."""

from mcore_parallel.data.datasets._blend import BlendedDataset, BlendedMegatronDatasetConfig, Split, parse_blend, parse_split
from mcore_parallel.data.datasets._blend_builder import BlendedMegatronDatasetBuilder
from mcore_parallel.data.datasets._fim import GPTFIMDataset, GPTFIMDatasetConfig
from mcore_parallel.data.datasets._gpt import GPTDataset, GPTDatasetConfig
from mcore_parallel.data.datasets._masked import MaskedTokensConfig, MaskedTokensDataset, word_starts
from mcore_parallel.data.datasets._pairs import SentencePairConfig, SentencePairDataset
from mcore_parallel.data.datasets._sampler import PretrainingSampler, batches
from mcore_parallel.data.datasets._sft import SFTDataset, SFTDatasetConfig
from mcore_parallel.data.datasets._span_corruption import SpanCorruptionConfig, SpanCorruptionDataset

__all__ = [
    "BlendedDataset",
    "BlendedMegatronDatasetBuilder",
    "BlendedMegatronDatasetConfig",
    "GPTDataset",
    "GPTDatasetConfig",
    "GPTFIMDataset",
    "GPTFIMDatasetConfig",
    "MaskedTokensConfig",
    "MaskedTokensDataset",
    "PretrainingSampler",
    "SFTDataset",
    "SFTDatasetConfig",
    "SentencePairConfig",
    "SentencePairDataset",
    "SpanCorruptionConfig",
    "SpanCorruptionDataset",
    "Split",
    "batches",
    "parse_blend",
    "parse_split",
    "word_starts",
]
