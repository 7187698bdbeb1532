# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Texts of single tokens, which are asked for again and again."""

import functools

from mcore_inference._stability import internal_api
from mcore_inference.text._tokenizer import Tokenizer

__all__ = ["TokenTexts"]

_MAX_TEXTS = 2**16
"""That are remembered; most texts use few thousands."""


@internal_api
class TokenTexts:
    """A tokenizer that is asked for the text of a token by itself once.

    ``TextPieces`` decodes each token alone and with the next one, so that this saves nearly half of the calls.

    Args:
        tokenizer: whose texts depend on the ids alone.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

        @functools.lru_cache(maxsize=_MAX_TEXTS)
        def text_of(token: int) -> str:
            return tokenizer.detokenize([token])

        self._text_of = text_of

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.vocab_size

    @property
    def eod(self) -> int | None:
        return self._tokenizer.eod

    def tokenize(self, text: str) -> list[int]:
        return self._tokenizer.tokenize(text)

    def detokenize(self, ids: list[int]) -> str:
        """As of the tokenizer; what it raises is not remembered."""
        try:
            return self._text_of(ids[0]) if len(ids) == 1 else self._tokenizer.detokenize(ids)
        except (Exception, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            # Libraries in Rust panic by one that is no Exception, which would end more than this request.
            raise RuntimeError(f"the tokenizer panicked: {error}") from error
