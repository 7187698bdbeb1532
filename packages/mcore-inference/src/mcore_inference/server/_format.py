# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""OpenAI's answer objects, from what the engine returns."""

from collections.abc import Sequence
from typing import Any

from mcore_inference.requests import DynamicInferenceRequestRecord
from mcore_inference.text import TextPieces, TokenBytes, Tokenizer

_BROKEN = "\ufffd"


def usage(records: Sequence[DynamicInferenceRequestRecord], num_choices: int) -> dict[str, Any]:
    """Token counts; a prompt counts once for all its choices, and its cached tokens are those of the first."""
    prompt = sum(len(record.prompt_tokens) for record in records[::num_choices])
    completion = sum(record.num_generated for record in records)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(record.cached_prompt_tokens for record in records[::num_choices])},
    }


class TextOffsets:
    """Where the tokens of one text begin in it.

    Args:
        tokenizer: decodes.
        begin: characters before the first token.
        prompt: tokens behind which the text stands.
    """

    def __init__(self, tokenizer: Tokenizer, begin: int = 0, prompt: Sequence[int] = ()) -> None:
        self._pieces, self._end = TextPieces(tokenizer, prompt), begin

    def push(self, token: int, text: str) -> int:
        """The characters before the next token, whose own text this is; one that completes a character begins where that does."""
        begin = self._end
        self._end += len(self._pieces.push(token))
        return begin if _BROKEN in text else max(begin, self._end - len(text))


def completion_log_probs(
    token_bytes: TokenBytes,
    tokens: Sequence[int],
    values: Sequence[float | None],
    best: Sequence[dict[int, float] | None],
    offsets: TextOffsets,
) -> dict[str, Any]:
    """``logprobs`` of ``/v1/completions``.

    Args:
        token_bytes: tells texts of tokens.
        tokens: ids.
        values: log-probabilities; None for the first token of an echoed prompt.
        best: id -> log-probability at each position, or None.
        offsets: told of the tokens before these.
    """
    top = []
    for ranked in best:
        named: dict[str, float] = {}
        # Best first: of two ids with one text the better one is shown.
        for token, value in (ranked or {}).items():
            named.setdefault(token_bytes.text(token), value)
        top.append(None if ranked is None else named)
    texts = [token_bytes.text(token) for token in tokens]
    places = list(map(offsets.push, tokens, texts))
    return {"tokens": texts, "token_logprobs": list(values), "top_logprobs": top, "text_offset": places}


def chat_log_probs(
    token_bytes: TokenBytes, tokens: Sequence[int], values: Sequence[float], best: Sequence[dict[int, float]]
) -> dict[str, Any]:
    """``logprobs`` of ``/v1/chat/completions``; ``best`` may be empty."""

    def entry(token: int, value: float) -> dict[str, Any]:
        # A token may be a part of a character, which its text does not tell.
        written = token_bytes.of(token)
        return {"token": token_bytes.text(token), "logprob": value, "bytes": None if written is None else list(written)}

    content = []
    for index, (token, value) in enumerate(zip(tokens, values, strict=True)):
        ranked = best[index] if best else {}
        content.append({**entry(token, value), "top_logprobs": [entry(*item) for item in ranked.items()]})
    return {"content": content, "refusal": None}
