# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What goes wrong with corpora, tokenizers and the indices built over them."""


def reason_of(error: OSError) -> str:
    """Why the system refused; some libraries raise the error without its reason, but with words."""
    return error.strerror or str(error) or type(error).__name__


class DataError(ValueError):
    """Base of everything this folder raises about its inputs; the message names the file or field, what was found and the remedy."""


class IndexedDatasetError(DataError):
    """A .bin/.idx pair is missing, damaged, foreign, or the tokens given do not fit it."""


class DocumentError(DataError):
    """Text that should become documents is missing, unreadable or empty."""


class TokenizerError(DataError):
    """A tokenizer is unknown, cannot be loaded, or lacks what was asked of it."""
