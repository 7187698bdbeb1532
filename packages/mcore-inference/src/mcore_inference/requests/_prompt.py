# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Prompts, stop tokens and bad words as token ids, checked against the vocabulary."""

from collections.abc import Collection, Sequence
from numbers import Integral
from typing import Any

import numpy as np
from torch import Tensor

from mcore_inference._stability import experimental_api
from mcore_inference.requests._errors import InvalidTokenError
from mcore_inference.sampling import SamplingParams, ScoreAdjuster
from mcore_inference.text import BosTokenizer, StopTokenizer, Tokenizer

Prompt = str | Sequence[int] | Tensor


@experimental_api
def encode_prompt(prompt: Prompt, params: SamplingParams, tokenizer: Tokenizer | None, vocab_size: int, request_id: int) -> list[int]:
    """Token ids of a prompt.

    Raises:
        InvalidTokenError: empty, no text and no sequence of integers, a text that the tokenizer refuses, or an id outside the vocabulary.
        ValueError: text without tokenizer, or a begin-of-text id that the tokenizer does not have.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError("a text prompt needs a tokenizer; give the engine one, or pass token ids")
        try:
            tokens = list(tokenizer.tokenize(prompt))
        except Exception as error:
            # Tokenizers refuse what is no text, such as half a surrogate pair, in their own ways.
            raise InvalidTokenError(request_id, f"the tokenizer refused the prompt: {error}") from error
        if params.add_BOS:
            bos = tokenizer.bos if isinstance(tokenizer, BosTokenizer) else None
            if bos is None:
                raise ValueError("add_BOS=True needs a tokenizer with a bos id; leave it off")
            tokens = tokens if tokens[:1] == [bos] else [bos, *tokens]
    else:
        tokens = _sequence(prompt, request_id)
    if not tokens:
        raise InvalidTokenError(request_id, "the prompt is empty; give at least one token")
    # Plain integers, which nearly all prompts are, are looked at by C code only: 20 ns a token instead of 500.
    if set(map(type, tokens)) == {int} and min(tokens) >= 0 and max(tokens) < vocab_size:
        return list(tokens)
    for token in tokens:
        if not _is_integer(token) or not 0 <= token < vocab_size:
            raise InvalidTokenError(request_id, f"the prompt holds {repr(token)[:80]}; token ids are integers from 0 to {vocab_size - 1}")
    return [int(token) for token in tokens]


@experimental_api
def stop_tokens(params: SamplingParams, tokenizer: Tokenizer | None, vocab_size: int) -> frozenset[int]:
    """Ids that end a request's output.

    Raises:
        ValueError: stop words, or a text that keeps them, without tokenizer, an id of the settings outside the vocabulary, or
            ``min_tokens`` where all allowed ids end the output.
    """
    if params.stop_words and tokenizer is None:
        raise ValueError("stop_words need a tokenizer; give the engine one, or use stop_token_ids")
    if params.detokenize_stop_sequence and tokenizer is None:
        raise ValueError("detokenize_stop_sequence=True needs a tokenizer, which makes the text; give the engine one, or leave it off")
    named = {"stop_token_ids": params.stop_token_ids, "logit_bias": params.logit_bias or ()}
    named["allowed_token_ids"] = params.allowed_token_ids or ()
    named["termination_id"] = () if params.termination_id in (None, -1) else (params.termination_id,)
    for name, ids in named.items():
        if bad := [token for token in ids if not 0 <= token < vocab_size]:
            raise ValueError(f"{name} holds {bad[:5]}; token ids are from 0 to {vocab_size - 1}")
    ending = params.termination_id
    if ending is None and tokenizer is not None:
        ending = tokenizer.eod
    ids = set(params.stop_token_ids)
    if tokenizer is not None and params.termination_id is None and not params.ignore_eos and isinstance(tokenizer, StopTokenizer):
        ids |= set(tokenizer.stop_token_ids)
    if ending is not None and ending >= 0 and not params.ignore_eos:
        ids.add(ending)
    if params.min_tokens and params.allowed_token_ids and ids.issuperset(params.allowed_token_ids):
        raise ValueError(
            f"min_tokens={params.min_tokens} leaves nothing to draw: all allowed_token_ids end the output; allow others, or leave it at 0"
        )
    # A tokenizer may know more ids than are drawn.
    return frozenset(token for token in ids if token < vocab_size)


@experimental_api
def bad_word_tokens(
    params: SamplingParams, stop_ids: Collection[int], tokenizer: Tokenizer | None, vocab_size: int
) -> tuple[tuple[int, ...], ...]:
    """Token ids that must not follow each other in a request's output: those of each bad word, and of the word behind a space.

    Spaces that a word begins with do not count. vLLM leaves out the word behind a space where it has more or fewer tokens than the word.

    Args:
        params: of the request.
        stop_ids: that end its output.
        tokenizer: of the model.
        vocab_size: ids that exist.

    Raises:
        ValueError: bad words without tokenizer, one of no tokens, of too many, or with an id outside the vocabulary, or nothing is left
            to draw.
    """
    if not params.bad_words:
        return ()
    if tokenizer is None:
        raise ValueError("bad_words need a tokenizer; give the engine one, or use logit_bias")
    longest, words = ScoreAdjuster.max_word_tokens, dict[tuple[int, ...], None]()
    for word in params.bad_words:
        bare = word.lstrip() or word
        for text in (bare, " " + bare):
            try:
                tokens = tuple(tokenizer.tokenize(text))
            except Exception as error:
                raise ValueError(f"bad_words holds {word[:80]!r}, which the tokenizer refused: {error}") from error
            if not 0 < len(tokens) <= longest:
                raise ValueError(f"bad_words holds {word[:80]!r}, which is {len(tokens)} tokens; a word has 1 to {longest}, so shorten it")
            if max(tokens) >= vocab_size:
                raise ValueError(f"bad_words holds {word[:80]!r}, whose token {max(tokens)} is never drawn; leave the word out")
            words[tokens] = None
    banned = {*(word[0] for word in words if len(word) == 1), *(stop_ids if params.min_tokens else ())}
    if params.allowed_token_ids and banned.issuperset(params.allowed_token_ids):
        raise ValueError("bad_words leave nothing to draw: they are all of allowed_token_ids; allow others")
    return tuple(words)


@experimental_api
def integers_of(prompt: object) -> list[int]:
    """Ids of a prompt that was refused, for its record; empty for text and for what is no sequence of integers."""
    try:
        tokens = [] if isinstance(prompt, str) else _sequence(prompt, -1)
    except InvalidTokenError:
        return []
    return [int(token) for token in tokens] if all(_is_integer(token) for token in tokens) else []


def _is_integer(token: object) -> bool:
    return isinstance(token, Integral) and not isinstance(token, bool)


def _sequence(prompt: object, request_id: int) -> list[Any]:
    if isinstance(prompt, Tensor | np.ndarray):
        if prompt.ndim != 1:
            raise InvalidTokenError(
                request_id, f"the prompt has shape {tuple(prompt.shape)}; token ids come in one dimension, a prompt a request"
            )
        return prompt.tolist()
    if isinstance(prompt, bytes | bytearray | memoryview) or not isinstance(prompt, Sequence):
        raise InvalidTokenError(request_id, f"the prompt is a {type(prompt).__name__}; give text, or a sequence of token ids")
    return list(prompt)
