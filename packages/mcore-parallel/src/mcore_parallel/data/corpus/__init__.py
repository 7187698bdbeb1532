# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Tokenised corpora on disk: a .bin of token ids beside a .idx of lengths."""

from mcore_parallel.data.corpus._builder import IndexedDatasetBuilder, merge_indexed
from mcore_parallel.data.corpus._index_file import HAS_LOSS, token_dtype
from mcore_parallel.data.corpus._indexed import IndexedDataset

__all__ = [
    "HAS_LOSS",
    "IndexedDataset",
    "IndexedDatasetBuilder",
    "merge_indexed",
    "token_dtype",
]
