# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""OpenAI's answer objects, from what the engine returns."""

from collections.abc import Sequence
from typing import Any

from mcore_inference.requests import DynamicInferenceRequestRecord
from mcore_inference.text import TokenBytes, Tokenizer


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


def completion_log_probs(
    tokenizer: Tokenizer, tokens: Sequence[int], values: Sequence[float | None], best: Sequence[dict[int, float] | None], offset: int
) -> dict[str, Any]:
    """``logprobs`` of ``/v1/completions``.

    Args:
        tokens: ids.
        values: log-probabilities; None for the first token of an echoed prompt.
        best: id -> log-probability at each position, or None.
        offset: characters of text before the first token.
    """
    texts = [tokenizer.detokenize([token]) for token in tokens]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    top = []
    for ranked in best:
        named: dict[str, float] = {}
        # Best first: of two ids with one text the better one is shown.
        for token, value in (ranked or {}).items():
            named.setdefault(tokenizer.detokenize([token]), value)
        top.append(None if ranked is None else named)
    return {"tokens": texts, "token_logprobs": list(values), "top_logprobs": top, "text_offset": offsets}


def chat_log_probs(
    tokenizer: Tokenizer, token_bytes: TokenBytes, tokens: Sequence[int], values: Sequence[float], best: Sequence[dict[int, float]]
) -> dict[str, Any]:
    """``logprobs`` of ``/v1/chat/completions``; ``best`` may be empty."""

    def entry(token: int, value: float) -> dict[str, Any]:
        # A token may be a part of a character, which its text does not tell.
        written = token_bytes.of(token)
        return {"token": tokenizer.detokenize([token]), "logprob": value, "bytes": None if written is None else list(written)}

    content = []
    for index, (token, value) in enumerate(zip(tokens, values, strict=True)):
        ranked = best[index] if best else {}
        content.append({**entry(token, value), "top_logprobs": [entry(*item) for item in ranked.items()]})
    return {"content": content, "refusal": None}
