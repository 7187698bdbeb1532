# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Forms of an output by way of the llguidance library (extra ``structured``)."""

import json
from collections import OrderedDict
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import numpy as np

from mcore_inference._stability import experimental_api
from mcore_inference.requests import StructuredOutputError
from mcore_inference.sampling import StructuredOutput
from mcore_inference.structured._bounds import check_form, on_deep_stack
from mcore_inference.text import JsonTokenizer, Tokenizer, VocabularyTokenizer

_MAX_COMPILED = 64
_MAX_MESSAGE = 300
_MAX_ITEMS = 500
"""Places in a form that a text may stand at: a token costs up to the square of them where a grammar is ambiguous."""
_MAX_SYMBOLS = 20_000
"""Of the rules of a form: an object takes the square of its optional properties to compile."""
_MAX_FUEL = 100_000
"""Of the work that the library counts, to compile a form and for the mask of a token each: some 10 ms, and 0.1 s, while all requests of the
engine wait. The largest usual forms take half of it. No clock decides, so that ranks of one engine end an output at the same token."""
# A weak model would write blanks without end where a grammar allows them.
_JSON_OPTIONS = {"whitespace_pattern": " ?"}
_MARKER = "\x02"
"""Stands before a text that is no beginning; no token joins it with what follows."""


@experimental_api
class GrammarMatcher:
    """The place of one output in its form.

    Args:
        matcher: of llguidance, at the beginning.
        vocab_size: ids that can be drawn.
        request_id: for errors.
        forget: called when the library met a limit, in what the matcher shares with others of its form: they fail from then on.

    Raises:
        StructuredOutputError: no token can begin the form.
    """

    def __init__(self, matcher: Any, vocab_size: int, request_id: int, forget: Callable[[], None] = lambda: None) -> None:
        self._matcher, self._vocab_size, self._request_id, self._forget = matcher, vocab_size, request_id, forget
        self._num_words = -(-vocab_size // 32)
        self._look()

    def accept(self, token: int) -> None:
        """Go on by a token.

        Raises:
            StructuredOutputError: the form does not allow it, no token can follow although the form is not complete, or the library met a
                limit. Ranks that follow one output meet it at the same token.
        """
        self._matcher.consume_token(token)
        self._look()

    def allowed(self, ending: Iterable[int]) -> np.ndarray:
        """[W] int32: bit ``i % 32`` of word ``i // 32`` says whether token i may come next; ``ending`` may where the form is complete."""
        words = self._words.copy()
        if self.may_end:
            for token in ending:
                words[token // 32] |= np.uint32(1 << token % 32)
        return words.view(np.int32)

    def _look(self) -> None:
        """Where the form stands now."""
        matcher = self._matcher
        # A limit of the library can be met here too, so errors are looked for after it.
        data = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        if matcher.is_error():
            self._forget()
            raise StructuredOutputError(self._request_id, f"structured_output cannot go on: {_short(matcher.get_error())}")
        # Bits above the vocabulary belong to the library's end of a text and to padding.
        self._words = data[: self._num_words * 4].copy().view(np.uint32)
        self._words[-1] &= np.uint32(0xFFFFFFFF >> -self._vocab_size % 32)
        is_stuck = not self._words.any()
        self.may_end: bool = matcher.is_accepting()
        """Whether the output so far has the form."""
        self.is_complete: bool = self.may_end and is_stuck
        """Whether, besides, nothing can follow."""
        if is_stuck and not self.may_end:
            raise StructuredOutputError(self._request_id, "structured_output needs text that no token of the vocabulary writes")


@experimental_api
class GrammarCompiler:
    """Compiles forms for one tokenizer; the last 64 are kept.

    The first request of a form takes the time to compile it, the very first also that of indexing the vocabulary.

    Args:
        tokenizer: of the engine, None where there is none.
        vocab_size: ids that can be drawn.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._index: Any = None
        self._compiled: OrderedDict[tuple[str, str], Any] = OrderedDict()

    def matcher(self, wanted: StructuredOutput, request_id: int) -> GrammarMatcher:
        """A matcher at the beginning of the form.

        Raises:
            StructuredOutputError: the library is not installed, the tokenizer does not say the bytes of its tokens, or the form is wrong or
                has a part that the library does not know, is deeper than can be compiled, or takes more work than the limits allow.
        """
        library = _library(request_id)
        if self._index is None:
            self._index = _index(library, self._tokenizer, self._vocab_size, request_id)
        form = wanted.form
        compiled = self._compiled.get(form)
        if compiled is None:
            compiled = self._compile(library, *form, request_id)

        def forget() -> None:
            if self._compiled.get(form) is compiled:
                del self._compiled[form]

        matcher = GrammarMatcher(compiled.deep_copy(), self._vocab_size, request_id, forget)
        # Not before: copies share what they have worked out, so all ranks of an engine keep the forms of requests that were accepted.
        self._compiled[form] = compiled
        self._compiled.move_to_end(form)
        if len(self._compiled) > _MAX_COMPILED:
            self._compiled.popitem(last=False)
        return matcher

    def _compile(self, library: ModuleType, name: str, text: str, request_id: int) -> Any:
        def make() -> Any:
            # Errors that tell the state of the parser take the square of its size to write.
            limits = library.LLParserLimits(
                max_items_in_row=_MAX_ITEMS,
                max_grammar_size=_MAX_SYMBOLS,
                initial_lexer_fuel=_MAX_FUEL,
                step_lexer_fuel=_MAX_FUEL,
                verbose_errors=False,
            )
            return library.LLMatcher(self._index, _grammar(library, name, text), log_level=0, limits=limits)

        try:
            check_form(name, text)
            compiled = on_deep_stack(make)
        except MemoryError as error:
            raise StructuredOutputError(
                request_id, f"structured_output: {name} could not be compiled: {error}", is_transient=True
            ) from error
        except ValueError as error:
            raise StructuredOutputError(request_id, f"structured_output: {name} is refused: {_short(str(error))}") from error
        if compiled.is_error():
            raise StructuredOutputError(request_id, f"structured_output: {name} is refused: {_short(compiled.get_error())}")
        return compiled


def _grammar(library: ModuleType, name: str, text: str) -> str:
    make = library.LLMatcher
    if name in ("json_schema", "json_object"):
        return make.grammar_from_json_schema(text, overrides=_JSON_OPTIONS)
    if name == "choices":
        return library.grammar_from("choice", text)
    return make.grammar_from_regex(text) if name == "regex" else make.grammar_from_lark(text)


def _library(request_id: int) -> ModuleType:
    try:
        import llguidance
    except ImportError as error:
        raise StructuredOutputError(
            request_id, "structured_output needs llguidance, which is not installed; pip install 'mcore-inference[structured]'"
        ) from error
    return llguidance


class _Vocabulary:
    """Bytes of every token as llguidance takes them, and one id more that ends a text: the model's own are the request's matter."""

    def __init__(self, tokens: list[bytes | None], tokenizer: Tokenizer) -> None:
        self._tokenizer, self._bytes = tokenizer, tokens
        self.tokens = [*(token or b"<special %d>" % number for number, token in enumerate(tokens)), b"<end>"]
        self.special_token_ids = [number for number, token in enumerate(tokens) if not token] + [len(tokens)]
        self.eos_token_id, self.bos_token_id = len(tokens), None
        self._numbers = {token: number for number, token in enumerate(tokens) if token}
        self._longest = max(map(len, self._numbers), default=0)

    def __call__(self, text: str) -> list[int]:
        """Tokens that write a text which a form forces, and no byte more; bytes are refused, which the library takes into account.

        Tokenizers may take it for the beginning of a text, before which SentencePiece puts a blank.
        """
        wanted = text.encode()
        for before in ("", _MARKER):
            tokens = self._ending(list(self._tokenizer.tokenize(before + text)), wanted)
            if tokens is not None:
                return tokens
        return self._longest_first(wanted)

    def _ending(self, tokens: list[int], wanted: bytes) -> list[int] | None:
        """The last of the tokens that write these bytes; None where they do not."""
        end = len(wanted)
        for place in range(len(tokens), 0, -1):
            if not end:
                return tokens[place:]
            written = self._bytes[tokens[place - 1]] if tokens[place - 1] < len(self._bytes) else None
            if not written or not wanted.endswith(written, 0, end):
                return None
            end -= len(written)
        return None if end else tokens

    def _longest_first(self, wanted: bytes) -> list[int]:
        """Tokens of as many of the bytes as the vocabulary can write."""
        tokens, at = list[int](), 0
        while at < len(wanted):
            lengths = range(min(self._longest, len(wanted) - at), 0, -1)
            token = next((wanted[at : at + length] for length in lengths if wanted[at : at + length] in self._numbers), None)
            if token is None:
                break
            tokens.append(self._numbers[token])
            at += len(token)
        return tokens


def _index(library: ModuleType, tokenizer: Tokenizer | None, vocab_size: int, request_id: int) -> Any:
    """The vocabulary as the library searches it."""
    if isinstance(tokenizer, VocabularyTokenizer):
        tokens = list(tokenizer.token_bytes())
    elif isinstance(tokenizer, JsonTokenizer):
        text = tokenizer.tokenizer_json()
        inner = library.LLTokenizer(text)
        numbers = range(min(inner.vocab_size, tokenizer.vocab_size))
        # The library's own idea of special includes every added token between angle brackets, such as <tool_call>, which is text.
        special = {added["id"] for added in json.loads(text).get("added_tokens") or () if added.get("special")}
        tokens = [None if number in special else inner.decode_bytes([number]) for number in numbers]
        # The library's name for an id without token.
        tokens = [None if token == b"<[%d]>" % number else token for number, token in enumerate(tokens)]
    else:
        kind = "no tokenizer" if tokenizer is None else f"a {type(tokenizer).__name__}"
        raise StructuredOutputError(
            request_id, f"structured_output needs a tokenizer with token_bytes() or tokenizer_json(), and the engine has {kind}"
        )
    tokens += [None] * (vocab_size - len(tokens))
    return library.LLTokenizer(library.TokenizerWrapper(_Vocabulary(tokens, tokenizer)))


def _short(message: str) -> str:
    """What a message of the library says first; it goes on with the state of the parser."""
    text = message.split("<state>")[0].split("<non-verbose/>")[0].strip()
    return text if len(text) <= _MAX_MESSAGE else f"{text[:_MAX_MESSAGE]}..."
