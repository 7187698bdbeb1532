# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Pieces of text by decoders that look at several tokens: bytes in a row, special tokens between words."""

import random
import time
from collections.abc import Sequence

import pytest

from mcore_inference.text import TextPieces, TokenTexts, whole_text
from mcore_parallel.data import ByteTokenizer

tokenizers = pytest.importorskip("tokenizers")

HELLO, WORLD, TOOL = 257, 258, 259
LETTERS = {letter: 260 + number for number, letter in enumerate("\u2581helo")}


class ByteFallback:
    """Words, letters, bytes of all other characters, and a special token, decoded as of Llama 2 and Mistral."""

    vocab_size, eod = 265, None

    def __init__(self) -> None:
        vocabulary = {
            "<unk>": 0,
            **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)},
            "\u2581hello": HELLO,
            "\u2581world": WORLD,
            "<tool>": TOOL,
        }
        model = tokenizers.models.BPE({**vocabulary, **LETTERS}, [], unk_token="<unk>", byte_fallback=True)
        self._tokenizer = tokenizers.Tokenizer(model)
        decoders = tokenizers.decoders
        self._tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        self._tokenizer.add_special_tokens(["<tool>"])

    def tokenize(self, text: str) -> list[int]:
        tokens: list[int] = []
        for letter in text.replace(" ", "\u2581"):
            tokens += [LETTERS[letter]] if letter in LETTERS else [byte + 1 for byte in letter.encode()]
        return tokens

    def detokenize(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)


FALLBACK = ByteFallback()


def joined(tokens: Sequence[int], tokenizer: ByteFallback | ByteTokenizer = FALLBACK) -> str:
    pieces = TextPieces(tokenizer)
    return "".join(map(pieces.push, tokens)) + pieces.rest()


@pytest.mark.parametrize("seed", range(30))
def test_characters_of_bytes_come_whole_among_letters(seed: int) -> None:
    rng = random.Random(seed)
    text = "".join(rng.choice("he\u0e2a\u0e27\u00e9\U0001f600 lo") for _ in range(20))
    tokens = [HELLO, *FALLBACK.tokenize(text)]
    assert joined(tokens) == whole_text(FALLBACK, tokens) == FALLBACK.detokenize(tokens) == f"hello{text}"


@pytest.mark.parametrize("missing", [1, 2, 3])
def test_a_text_that_ends_within_a_character_keeps_those_before_it(missing: int) -> None:
    tokens = FALLBACK.tokenize("\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35\U0001f600")[:-missing]
    # The decoder breaks all of them.
    assert set(FALLBACK.detokenize(tokens)) == {"\ufffd"}
    assert joined(tokens) == whole_text(FALLBACK, tokens)
    assert joined(tokens).startswith("\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35\ufffd") and set(
        joined(tokens)[len("\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35") :]
    ) == {"\ufffd"}


def test_a_special_token_between_words_leaves_the_space_of_the_next() -> None:
    for tokens in ([HELLO, TOOL, WORLD, HELLO], [TOOL, TOOL, HELLO, TOOL, TOOL, WORLD], [HELLO, TOOL]):
        assert joined(tokens) == FALLBACK.detokenize(tokens)


@pytest.mark.parametrize(("tokenizer", "broken"), [(ByteTokenizer(), 0xFF), (FALLBACK, 0x100)], ids=["bytes", "fallback"])
def test_bytes_of_no_character_are_not_decoded_again_with_each_token(tokenizer: ByteFallback | ByteTokenizer, broken: int) -> None:
    def seconds(count: int) -> float:
        begun = time.process_time()
        assert set(joined([broken] * count, tokenizer)) == {"\ufffd"}
        return time.process_time() - begun

    # Twice as many took four times as long, 1.2 and 4 s of 8,000.
    assert seconds(8000) < 1.0


def test_a_library_that_panics_fails_as_others_do() -> None:
    class Panic(BaseException):
        pass

    class Panics(ByteTokenizer):
        def detokenize(self, ids: Sequence[int], skip_special: bool = True) -> str:
            raise Panic("index out of bounds")

    with pytest.raises(RuntimeError, match="the tokenizer panicked: index out of bounds"):
        TokenTexts(Panics()).detokenize([1, 2])
