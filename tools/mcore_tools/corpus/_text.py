# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Text on disk becomes a tokenizer and a corpus of tokens."""

import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from mcore_parallel.data import DocumentError, HuggingFaceTokenizer, PreprocessReport, preprocess, read_documents, train_bpe

# Folders of the standard library that are not its sources: installed packages, test data, caches.
_NOT_SOURCES = {"site-packages", "dist-packages", "test", "tests", "lib2to3", "__pycache__"}


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Where the tokens lie, and what was counted on the way."""

    prefix: str
    tokenizer: HuggingFaceTokenizer
    report: PreprocessReport


def default_text() -> list[Path]:
    """The sources of the running interpreter's standard library: real text that is always there."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return sorted(
        path
        for path in root.iterdir()
        if path.suffix == ".py" or (path.is_dir() and path.name not in _NOT_SOURCES and any(path.glob("*.py")))
    )


def check_text(text: Sequence[Path]) -> None:
    """Read all of the text before anything is written.

    Raises:
        DocumentError: the text is missing, unreadable or empty.
    """
    if not sum(1 for document in _documents(text) if document.strip()):
        raise DocumentError(f"{', '.join(map(str, text))}: no document with text; give a file, folder or JSONL that has some")


def _documents(text: Sequence[Path]) -> Iterator[str]:
    return chain.from_iterable(read_documents(path, encoding_errors="replace") for path in text)


def prepare(text: Sequence[Path], folder: Path, vocab_size: int, console: Console) -> Corpus:
    """Learn a byte-level BPE from the text, and write the text as tokens.

    Raises:
        DocumentError: the text is missing, unreadable or empty.
    """
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("learning a tokenizer")
        tokenizer = train_bpe(_documents(text), vocab_size, folder / "tokenizer")
        progress.update(task, description=f"tokenizer of {tokenizer.vocab_size:,} tokens", completed=1, total=1)
        task = progress.add_task("writing tokens", total=None)

        def show(documents: int, tokens: int, share: float) -> None:
            progress.update(task, description=f"writing tokens: {documents:,} documents, {tokens:,} tokens", total=1.0, completed=share)

        prefix = str(folder / "corpus")
        report = preprocess(text, prefix, tokenizer, append_eod=True, encoding_errors="replace", on_progress=show)
        progress.update(task, completed=1, total=1)
    return Corpus(prefix=prefix, tokenizer=tokenizer, report=report)
