# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A tokenizer as of Llama 2 and Mistral."""

import string
from collections.abc import Sequence

import tokenizers


def sentence_pieces() -> tokenizers.Tokenizer:
    """Bytes of what is no letter, a blank before every text and behind every special token, and few words."""
    letters = [*string.ascii_letters, *string.digits, *'\u2581{}[]":,._-!']
    words = ["\u2581ada", "\u2581name", "gra", "ce", '":']
    # Words come of merges, letter by letter.
    merges = [(word[:end], word[end]) for word in words for end in range(1, len(word))]
    pieces = dict.fromkeys([*(f"<0x{byte:02X}>" for byte in range(256)), *letters, *(a + b for a, b in merges)])
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {piece: number for number, piece in enumerate(pieces, start=3)}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    normalizers, decoders = tokenizers.normalizers, tokenizers.decoders
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.add_special_tokens(["<unk>", "<s>", "</s>"])
    return inner


class SentencePieces:
    """Its texts, for an engine: the first blank is stripped."""

    eod = None

    def __init__(self) -> None:
        self._tokenizer = sentence_pieces()
        self.vocab_size = self._tokenizer.get_vocab_size()

    def tokenize(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def detokenize(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids))
