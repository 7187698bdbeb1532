# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Pieces of text by decoders that look at several tokens: bytes in a row, special tokens between words."""

import random
import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_inference.server._format import TextOffsets
from mcore_inference.text import TextPieces, TokenBytes, Tokenizer, TokenTexts, TransformersTokenizer, whole_text
from mcore_inference.text._token_bytes import _BYTES
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


def joined(tokens: Sequence[int], tokenizer: Tokenizer = FALLBACK, prompt: Sequence[int] = ()) -> str:
    pieces = TextPieces(tokenizer, prompt)
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


class Named:
    """Tokens by the names that a vocabulary has for them, and special ones, behind one of the decoders of the library."""

    eod = None

    def __init__(self, names: Sequence[str], decoder: Any, special: Sequence[str]) -> None:
        self._tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({name: number for number, name in enumerate(names)}, names[0]))
        self._tokenizer.decoder = decoder
        self._tokenizer.add_special_tokens([*special])
        self.vocab_size = self._tokenizer.get_vocab_size()

    def tokenize(self, text: str) -> list[int]:
        raise NotImplementedError

    def detokenize(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode([*ids], skip_special_tokens=True)


def named() -> dict[str, Named]:
    decoders, special = tokenizers.decoders, ["<tool>", "</s>"]
    # Whole characters, and ones that are cut before, within and behind a token.
    parts = ["\u00e9", "\u4f60\u597d", "\U0001f600", "a", " hello", "  ", "\n"]
    cut = [b"\xe4", b"\xbd\xa0", b"x\xf0\x9f", b"\x98\x80", b"\x98", b"\x80", b"\xc3\xa9\xe4", b"\xef\xbf", b"\xbd", b"\xff"]
    letters = {byte: letter for letter, byte in _BYTES.items()}
    byte_level = ["".join(letters[byte] for byte in token) for token in [*(part.encode() for part in parts), *cut]]
    words = ["\u2581", "\u2581\u2581", "\u2581hello", "he", "\u00e9", "\u2581.", "'", "\ufffd"]
    fallback = [f"<0x{byte:02X}>" for byte in (0x20, 0x0A, 0x41, 0xC3, 0xA9, 0xE4, 0xBD, 0xA0, 0xF0, 0x9F, 0x98, 0x80, 0xFF)] + words
    pieces = [
        "hello",
        "##ing",
        "##s",
        "##",
        "##.",
        ".",
        ",",
        "!",
        "'",
        "n't",
        "'m",
        "##n't",
        "do",
        "not",
        "do not",
        "##\u00e9",
        "\u4f60",
        "\ufffd",
    ]
    llama = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    return {
        "byte level": Named(byte_level, decoders.ByteLevel(), special),
        "byte fallback": Named(fallback, decoders.Sequence(llama), special),
        "byte fallback without the first space": Named(fallback, decoders.Sequence([*llama, decoders.Strip(" ", 1, 0)]), special),
        "metaspace": Named(words, decoders.Metaspace(), special),
        "word pieces": Named(pieces, decoders.WordPiece(cleanup=False), special),
        "cleaned word pieces": Named(pieces, decoders.WordPiece(cleanup=True), special),
        "suffixes": Named(["he", "llo</w>", "</w>", ".</w>", "\u00e9", "\u4f60</w>"], decoders.BPEDecoder(suffix="</w>"), special),
    }


NAMED = named()


@pytest.mark.parametrize("name", NAMED)
@given(data=st.data())
def test_pieces_of_any_tokens_join_to_the_text_of_all(name: str, data: st.DataObject) -> None:
    """Which a request without a stream has; no piece changes what is shown before."""
    tokenizer = NAMED[name]
    tokens = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=24))
    text = joined(tokens, TokenTexts(tokenizer))
    assert text == whole_text(tokenizer, tokens)
    decoded = tokenizer.detokenize(tokens)
    # Where a decoder falls back to bytes, one that is broken breaks its neighbours, too.
    assert text == decoded or ("fallback" in name and "\ufffd" in decoded)


@pytest.mark.parametrize("name", NAMED)
@given(data=st.data())
def test_pieces_behind_a_prompt_join_to_what_all_tokens_add_to_it(name: str, data: st.DataObject) -> None:
    tokenizer = NAMED[name]
    token = st.integers(0, tokenizer.vocab_size - 1)
    # As many as are looked at, at least.
    prompt, tokens = data.draw(st.lists(token, max_size=6)), data.draw(st.lists(token, max_size=12))
    text = joined(tokens, TokenTexts(tokenizer), prompt)
    assert text == whole_text(tokenizer, tokens, prompt)
    begin, decoded = tokenizer.detokenize(prompt), tokenizer.detokenize([*prompt, *tokens])
    if "\ufffd" not in decoded and "\ufffd" not in begin:
        assert begin + text == decoded
    longer = data.draw(st.lists(token, max_size=20)) + prompt
    assert joined(tokens, tokenizer, longer) == whole_text(tokenizer, tokens, longer)


def test_a_blank_is_stripped_where_no_text_stands_before_it() -> None:
    assert FALLBACK.detokenize([WORLD]) == joined([WORLD]) == joined([WORLD], prompt=[TOOL, TOOL]) == "world"
    for prompt in (
        [HELLO],
        [HELLO, TOOL],
        [TOOL, HELLO] * 20,
        [*FALLBACK.tokenize("\ufffd"), LETTERS["h"]],
        FALLBACK.tokenize("\u0e2a" * 20),
    ):
        for tokens in ([WORLD], [TOOL, WORLD], [WORLD, TOOL, HELLO]):
            text = joined(tokens, prompt=prompt)
            assert text == whole_text(FALLBACK, tokens, prompt) == " " + FALLBACK.detokenize(tokens)


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), FALLBACK], ids=["bytes", "fallback"])
def test_a_character_that_a_prompt_begins_is_its_outputs_whole(tokenizer: ByteFallback | ByteTokenizer) -> None:
    text = "h\u00e9 \u20ac\U0001f600\u0e2a\u0e27\u00e9\u00e9lo"
    tokens = tokenizer.tokenize(text)
    for cut in range(1, len(tokens)):
        prompt, output = tokens[:cut], tokens[cut:]
        new = joined(output, tokenizer, prompt)
        assert new == whole_text(tokenizer, output, prompt)
        assert joined(prompt, tokenizer).rstrip("\ufffd") + new == text
        # What stays broken is not there twice.
        letter = tokenizer.tokenize("l")
        assert joined(letter, tokenizer, prompt) == whole_text(tokenizer, letter, prompt) == "l"
        # A prompt of broken bytes alone.
        assert joined(letter, tokenizer, tokens[1:2] * 20) == whole_text(tokenizer, letter, tokens[1:2] * 20) == "l"


def test_a_character_behind_ones_that_stay_broken_is_not_lost() -> None:
    for text in ("h\ufffd\u20ac", "\ufffd\u20ac\u20acl"):
        tokens = FALLBACK.tokenize(text)
        shown = joined(tokens)
        assert shown == whole_text(FALLBACK, tokens) and shown.replace("\ufffd", "") == text.replace("\ufffd", "")


def test_a_byte_that_a_decoder_strips_leaves_the_character_behind_it_whole() -> None:
    tokenizer = NAMED["byte fallback without the first space"]
    spaced = [0, *range(8, 12)]
    assert tokenizer.detokenize(spaced) == joined(spaced, tokenizer) == "\U0001f600"
    assert joined([2, *spaced], tokenizer) == "A \U0001f600"


def test_spaces_of_a_transformers_tokenizer_stay_as_its_tokens_have_them() -> None:
    transformers = pytest.importorskip("transformers")
    names = ["a", "'", "b", "do", "not", "."]
    model = tokenizers.models.WordLevel({name: number for number, name in enumerate(names)}, "a")
    inner = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(model), clean_up_tokenization_spaces=True)
    tokenizer, tokens = TransformersTokenizer(inner), [0, 1, 2, 3, 4, 5]
    assert inner.decode(tokens) != "a ' b do not ."
    assert tokenizer.detokenize(tokens) == joined(tokens, tokenizer) == "a ' b do not ."


def test_texts_and_bytes_of_single_tokens_have_the_blank_that_they_begin_with_behind_others() -> None:
    tokens = [HELLO, WORLD, LETTERS["\u2581"], TOOL, LETTERS["h"], *(byte + 1 for byte in "\u20ac".encode())]
    assert FALLBACK.detokenize([WORLD]) == "world"
    token_bytes = TokenBytes(FALLBACK)
    assert [token_bytes.text(token) for token in tokens] == [" hello", " world", " ", "", "h", *"\ufffd\ufffd\ufffd"]
    assert [token_bytes.of(token) for token in tokens] == [b" hello", b" world", b" ", b"", b"h", None, None, None]
    # The text does not begin with it, but behind a prompt.
    offsets = TextOffsets(FALLBACK)
    assert [offsets.push(token, token_bytes.text(token)) for token in tokens] == [0, 5, 11, 12, 12, 13, 13, 13]
    offsets = TextOffsets(FALLBACK, 5, [HELLO])
    assert [offsets.push(token, token_bytes.text(token)) for token in tokens] == [5, 11, 17, 18, 18, 19, 19, 19]
