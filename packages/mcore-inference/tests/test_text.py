# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Text that grows token by token."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from mcore_inference import BosTokenizer, ChatTokenizer, TextStream, ToolChatTokenizer, TransformersTokenizer, chat_tokens
from mcore_inference.text import TokenBytes, TokenTexts
from mcore_parallel.data import ByteTokenizer
from mcore_parallel.data.tokenizers import train_bpe

BYTES = ByteTokenizer()


def feed(tokens: list[int], stops: tuple[str, ...] = (), *, keeps: bool = False) -> tuple[str, int]:
    """Final text and the number of tokens taken; checks that the text only grows."""
    stream = TextStream(BYTES, stops, keeps_stop_word=keeps)
    before = ""
    for count, token in enumerate(tokens, 1):
        stopped = stream.push(token)
        assert stream.text.startswith(before)
        assert "\ufffd" not in stream.text or "\ufffd" in BYTES.detokenize(tokens[:count])
        before = stream.text
        if stopped:
            assert stream.finish() == before
            return stream.text, count
    return stream.finish(), len(tokens)


@pytest.mark.parametrize("text", ["plain", "h\u00e9llo \u4f60\u597d \U0001f600!", "", "\ufffd real \ufffd"])
def test_pieces_join_to_the_text_of_all_tokens(text: str) -> None:
    tokens = BYTES.tokenize(text)
    assert feed(tokens) == (text, len(tokens))


@pytest.mark.parametrize("seed", range(20))
def test_random_bytes_join_to_the_text_of_all_tokens(seed: int) -> None:
    tokens = list(random.Random(seed).randbytes(200))
    assert feed(tokens)[0] == BYTES.detokenize(tokens)


def test_no_half_character_is_shown() -> None:
    stream = TextStream(BYTES)
    shown = []
    for token in BYTES.tokenize("a\U0001f600b"):
        stream.push(token)
        shown.append(stream.text)
    assert shown == ["a", "a", "a", "a", "a\U0001f600", "a\U0001f600b"]


@pytest.mark.parametrize(
    ("text", "stops", "expected", "taken"),
    [
        ("one STOP two", ("STOP",), "one ", 8),
        ("STOP", ("STOP",), "", 4),
        ("aab aaab", ("aaab",), "aab ", 8),
        ("xSTO", ("STOP",), "xSTO", 4),
        ("ab", ("b", "ab"), "", 2),
        ("caf\u00e9 ok", ("\u00e9",), "caf", 5),
        ("abcabd", ("abd", "q"), "abc", 6),
    ],
)
def test_text_is_cut_at_a_stop_word_across_tokens(text: str, stops: tuple[str, ...], expected: str, taken: int) -> None:
    assert feed(BYTES.tokenize(text), stops) == (expected, taken)
    whole = text.encode()[:taken].decode()
    assert feed(BYTES.tokenize(text), stops, keeps=True) == (whole, taken)


@pytest.mark.parametrize("seed", range(200))
def test_a_stop_word_cuts_at_its_first_place_in_random_texts(seed: int) -> None:
    rng = random.Random(seed)
    text = "".join(rng.choices("ab", k=30))
    stop = "".join(rng.choices("ab", k=rng.randint(1, 5)))
    at = text.find(stop)
    expected = (text, len(text)) if at < 0 else (text[:at], at + len(stop))
    assert feed(BYTES.tokenize(text), (stop,)) == expected
    assert feed(BYTES.tokenize(text), (stop,), keeps=True) == (text[: expected[1]], expected[1])


@pytest.mark.parametrize("seed", range(200))
def test_words_that_were_complete_before_any_could_stop_are_text(seed: int) -> None:
    rng = random.Random(seed)
    text = "".join(rng.choices("abx", k=16)) if seed else "xaXYZ"
    stops = tuple("".join(rng.choices("abx", k=rng.randint(1, 4))) for _ in range(3)) if seed else ("a", "ab")
    first = rng.randint(1, 10) if seed else 3
    ends = [end for end in range(first, len(text) + 1) if text[:end].endswith(stops)]
    end = ends[0] if ends else len(text)
    cut = end - max((len(word) for word in stops if text[:end].endswith(word)), default=0) if ends else end
    for keeps in (False, True):
        stream = TextStream(BYTES, stops, keeps_stop_word=keeps)
        taken = next((n for n, token in enumerate(BYTES.tokenize(text), 1) if stream.push(token, may_stop=n >= first)), len(text))
        assert (stream.finish(), taken, stream.stopped) == (text[: end if keeps else cut], end, bool(ends))


def test_the_text_of_a_token_alone_is_asked_for_once_and_texts_stay_what_they_were() -> None:
    class Counting(ByteTokenizer):
        num_calls = 0

        def detokenize(self, ids: list[int], skip_special: bool = True) -> str:
            self.num_calls += 1
            if 7 in ids:
                raise KeyError("no text for 7")
            return super().detokenize(ids, skip_special)

    rng, tokenizer, length = random.Random(3), Counting(), 400
    texts = TokenTexts(tokenizer)
    assert (texts.vocab_size, texts.eod, texts.tokenize("ab")) == (tokenizer.vocab_size, tokenizer.eod, [97, 98])
    for stops, keeps in (((), False), (("ab", "b c"), False), (("ca",), True)):
        tokens = BYTES.tokenize("".join(rng.choices("abc \u00e9\U0001f600", k=length)))[:length]
        plain, remembering = (TextStream(source, stops, keeps_stop_word=keeps) for source in (BYTES, texts))
        tokenizer.num_calls = 0
        for token in tokens:
            # Some match where the text must not end yet.
            may_stop = rng.random() < 0.5
            assert plain.push(token, may_stop=may_stop) == remembering.push(token, may_stop=may_stop)
            assert plain.text == remembering.text
            if plain.stopped:
                break
        assert plain.finish() == remembering.finish()
        if not stops:
            # Parts of a character are decoded together until it is whole.
            assert length < tokenizer.num_calls < 1.5 * length
    for _ in range(2):
        with pytest.raises(KeyError, match="no text for 7"):
            texts.detokenize([7])


def test_a_chat_without_template_is_written_line_by_line() -> None:
    class Letters:
        vocab_size, eod = 256, None

        def tokenize(self, text: str) -> list[int]:
            return list(text.encode())

        def detokenize(self, ids: list[int]) -> str:
            return bytes(ids).decode()

    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    assert bytes(chat_tokens(Letters(), messages)).decode() == "system: be kind\nuser: hi\nassistant:"
    assert chat_tokens(BYTES, messages) == BYTES.apply_chat_template(messages, add_generation_prompt=True)


class TransformersLike:
    """The part of a transformers tokenizer that is used."""

    chat_template: str | None = None
    eos_token_id, bos_token_id = 3, 4

    def __len__(self) -> int:
        return 300

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [4] * add_special_tokens + list(text.encode())

    def decode(self, ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        assert not clean_up_tokenization_spaces
        return bytes(i for i in ids if i > 4 or not skip_special_tokens).decode(errors="replace")

    def apply_chat_template(
        self, messages: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool, tools: list[dict[str, str]] | None = None
    ) -> str:
        assert not tokenize and add_generation_prompt
        written = "".join(f"[{message['role']}]{message['content']}{message.get('tool_calls', '')}" for message in messages)
        return written if tools is None else f"{tools}{written}"


def test_a_transformers_tokenizer_is_wrapped() -> None:
    tokenizer = TransformersTokenizer(TransformersLike())
    assert isinstance(tokenizer, ChatTokenizer)
    assert isinstance(tokenizer, BosTokenizer)
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.bos) == (300, 3, 4)
    assert tokenizer.tokenize("hi") == [104, 105] and tokenizer.detokenize([4, 104, 3]) == "h"
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.detokenize(chat_tokens(tokenizer, messages)) == "user: hi\nassistant:"
    with pytest.raises(ValueError, match="TransformersLike has no chat template"):
        chat_tokens(tokenizer, messages, tools=[{"type": "function"}])
    tokenizer.inner.chat_template = "given"
    assert tokenizer.detokenize(chat_tokens(tokenizer, messages)) == "[user]hi"
    assert isinstance(tokenizer, ToolChatTokenizer)
    assert tokenizer.detokenize(chat_tokens(tokenizer, messages, tools=[{"type": "function"}])) == "[{'type': 'function'}][user]hi"
    called = [*messages, {"role": "assistant", "content": "", "tool_calls": "!"}]
    assert tokenizer.detokenize(chat_tokens(tokenizer, called)) == "[user]hi[assistant]!"


def test_tools_and_calls_need_a_template_that_writes_them() -> None:
    messages = [{"role": "user", "content": "hi"}]
    for more, tools in (([], [{"type": "function"}]), ([{"role": "assistant", "content": "", "tool_calls": []}], [])):
        with pytest.raises(ValueError, match="ByteTokenizer has no chat template that writes tools; serve"):
            chat_tokens(BYTES, [*messages, *more], tools=tools)


def test_bytes_of_tokens_join_to_those_of_the_text(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    text = "h\u00e9llo \u4f60\u597d \U0001f600 \ufffd!"
    trained = train_bpe(["hello hello", " \u4f60"] * 3, 270, tmp_path)
    theirs = TransformersTokenizer(PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), eos_token="<|endoftext|>"))
    for tokenizer in (BYTES, trained, theirs):
        token_bytes, tokens = TokenBytes(tokenizer), tokenizer.tokenize(text)
        assert any("\ufffd" in tokenizer.detokenize([token]) for token in tokens)
        assert b"".join(token_bytes.of(token) or b"" for token in tokens) == text.encode()
        assert tokenizer.eod is not None and token_bytes.of(tokenizer.eod) == b""


def test_bytes_that_a_vocabulary_writes_as_numbers_are_known() -> None:
    class Fallback:
        vocab_size, eod, texts = 4, None, ("\ufffd", "a", "\ufffd", "\ufffd")

        def __init__(self, pieces: object) -> None:
            self.pieces = pieces

        def tokenize(self, text: str) -> list[int]:
            return [self.texts.index(letter) for letter in text]

        def detokenize(self, ids: list[int]) -> str:
            return "".join(self.texts[number] for number in ids)

        def tokenizer_json(self) -> str:
            return json.dumps({"model": {"vocab": self.pieces}})

    class Slow(Fallback):
        def tokenizer_json(self) -> str:
            raise ValueError("is no fast tokenizer")

    assert [TokenBytes(Slow(None)).of(token) for token in range(2)] == [None, b"a"]
    names = ["<0xC3>", "a", "\ufffd", "\u2581"]
    for pieces in ({name: number for number, name in enumerate(names)}, [[name, -1.0] for name in names]):
        token_bytes = TokenBytes(Fallback(pieces))
        assert [token_bytes.of(token) for token in range(4)] == [b"\xc3", b"a", b"\xef\xbf\xbd", None]


class Begins(ByteTokenizer):
    """Loses the blank that a text begins with, and the first call."""

    num_calls = 0

    def tokenize(self, text: str) -> list[int]:
        self.num_calls += 1
        if self.num_calls == 1:
            raise OSError("not now")
        return super().tokenize(text)

    def detokenize(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return super().detokenize(ids, skip_special).removeprefix(" ")


def test_a_call_that_fails_costs_later_tokens_no_blank() -> None:
    tokenizer = Begins()
    token_bytes = TokenBytes(tokenizer)
    assert [token_bytes.text(ord(" ")) for _ in range(3)] == ["", " ", " "]
    # What it told is known.
    assert tokenizer.num_calls == 2
