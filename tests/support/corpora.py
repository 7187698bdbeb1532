# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A few words again and again, as a run reads them."""

from pathlib import Path

from mcore_parallel.data import HuggingFaceTokenizer, preprocess, train_bpe


def write_corpus(folder: Path, text: str, *, num_documents: int = 8, vocab_size: int = 300) -> HuggingFaceTokenizer:
    """Make ``folder/corpus`` of documents of 20 times the text, and ``folder/tokenizer``, which learnt from one of them and is returned."""
    document = text * 20
    for number in range(num_documents):
        (folder / f"{number}.txt").write_text(document, encoding="ascii")
    tokenizer = train_bpe([document], vocab_size, folder / "tokenizer")
    preprocess(sorted(folder.glob("*.txt")), str(folder / "corpus"), tokenizer, append_eod=True)
    return tokenizer
