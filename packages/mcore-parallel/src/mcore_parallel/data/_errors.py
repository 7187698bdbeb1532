# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What goes wrong with corpora, tokenizers and the indices built over them."""


class DataError(ValueError):
    """Base of everything this folder raises about its inputs; the message names the file or field, what was found and the remedy."""


class IndexedDatasetError(DataError):
    """A .bin/.idx pair is missing, damaged, foreign, or the tokens given do not fit it."""


class DocumentError(DataError):
    """Text that should become documents is missing, unreadable or empty."""


class TokenizerError(DataError):
    """A tokenizer is unknown, cannot be loaded, or lacks what was asked of it."""
