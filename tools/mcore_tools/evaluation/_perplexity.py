# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""How well a model predicts text."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mcore_tools.evaluation._scorer import Scorer


@dataclass(frozen=True, kw_only=True)
class Perplexity:
    """Of some documents together."""

    num_documents: int
    num_tokens: int
    num_bytes: int
    """Of the UTF-8 text."""
    nats: float
    """Minus the sum of the log-probabilities."""

    @property
    def loss(self) -> float:
        """Nats a token."""
        return self.nats / self.num_tokens

    @property
    def perplexity(self) -> float:
        """A token; depends on the tokenizer."""
        return math.exp(self.loss)

    @property
    def bits_per_byte(self) -> float:
        """Does not depend on the tokenizer."""
        return self.nats / math.log(2) / self.num_bytes


def read_texts(paths: Sequence[Path]) -> list[str]:
    """Documents of files: each object of a .jsonl has one as ``text``, any other file is one.

    Raises:
        ValueError: bytes that are no UTF-8, or a line that is no such object; names file and place.
        OSError: a file cannot be read.
    """
    texts: list[str] = []
    for path in paths:
        try:
            # As it is, with the ends of its lines.
            whole = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8: byte 0x{error.object[error.start]:02x} at {error.start}; convert it") from None
        texts += _lines(path, whole) if path.suffix == ".jsonl" else [whole]
    if not any(texts):
        raise ValueError(f"{', '.join(map(str, paths))} holds no text; name a file that does")
    return [text for text in texts if text]


def _lines(path: Path, whole: str) -> Iterator[str]:
    # JSON may hold other characters that end lines, such as U+2028.
    for number, line in enumerate(whole.split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}:{number} is no JSON: {error}; correct the line") from None
        if not isinstance(value, dict) or not isinstance(value.get("text"), str):
            raise ValueError(f'{path}:{number} must be an object with a string "text"; correct the line, or name a file of plain text')
        yield value["text"]


def score_texts(scorer: Scorer, texts: Sequence[str], *, stride: int | None = None) -> Perplexity:
    """Predict every token of every text once.

    A text that is longer than the engine's length is cut into windows; each predicts ``stride`` tokens with all that fits before them as
    context.

    Args:
        scorer: of the model.
        texts: documents.
        stride: tokens that a window predicts; None for half of the engine's length.

    Raises:
        ValueError: a stride that leaves no context.
    """
    stride = max(1, scorer.max_length // 2) if stride is None else stride
    if not 1 <= stride < scorer.max_length:
        raise ValueError(f"stride={stride} must be at least 1 and below the length of {scorer.max_length} tokens")
    pairs = []
    for text in texts:
        tokens = [scorer.first, *scorer.tokenizer.tokenize(text)]
        # The first window has no context but the token before the text, and so predicts as many as fit.
        begin, step = 1, scorer.max_length - 1
        while begin < len(tokens):
            pairs.append((tokens[:begin], tokens[begin : begin + step]))
            begin, step = begin + step, stride
    scores = scorer.log_probs(pairs)
    return Perplexity(
        num_documents=len(texts),
        num_tokens=sum(map(len, scores)),
        num_bytes=sum(len(text.encode()) for text in texts),
        nats=-math.fsum(value for row in scores for value in row),
    )
