# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Log-probabilities of given tokens, by an engine."""

from collections.abc import Sequence
from typing import cast

from mcore_inference import DynamicInferenceEngine, SamplingParams
from mcore_parallel.data import Tokenizer

REMEDY = "check that the tokenizer is that of the model, or raise --cache-gb"
"""Where an engine refuses tokens that fit its length."""
_BATCH = 256


class Scorer:
    """Scores continuations of contexts.

    Args:
        engine: idle; its tokenizer reads the texts.
        lora: adapter of the engine that is measured; None for the model alone.
    """

    def __init__(self, engine: DynamicInferenceEngine, lora: str | None = None) -> None:
        tokenizer = engine.tokenizer
        if tokenizer is None:
            raise ValueError("the engine has no tokenizer; open it with mcore_tools.serving.open_engine")
        self.engine, self.tokenizer = engine, cast(Tokenizer, tokenizer)
        self.max_length: int = engine.context.max_sequence_length
        self._lora = lora

    @property
    def first(self) -> int:
        """Token before the first one of a text.

        Raises:
            ValueError: the tokenizer has neither a begin nor an end of text.
        """
        token = self.tokenizer.bos if self.tokenizer.bos is not None else self.tokenizer.eod
        if token is None:
            raise ValueError("the tokenizer has no begin and no end of text, one of which stands before the first token; add one to it")
        return token

    def log_probs(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[float]]:
        """Of every token of each continuation, in nats.

        Args:
            pairs: (context, continuation), token ids, each at least one; of a context that is too long the beginning is left out.

        Raises:
            ValueError: an empty context or continuation, a continuation that fills the engine's length, or a text that the engine refuses.
        """
        params = SamplingParams(temperature=0.0, num_tokens_to_generate=0, return_log_probs=True, skip_prompt_log_probs=False)
        scores: list[list[float]] = []
        for begin in range(0, len(pairs), _BATCH):
            batch = pairs[begin : begin + _BATCH]
            records = self.engine.generate([self._fit(context, text) for context, text in batch], params, lora=self._lora)
            for record, (_, text) in zip(records, batch, strict=True):
                if record.error is not None:
                    raise ValueError(f"the engine refused a text: {record.error}; {REMEDY}")
                values = record.prompt_log_probs
                assert values is not None, "they were asked for"
                scores.append([float(value) for value in values[len(values) - len(text) :]])
        return scores

    def continuations(self, contexts: Sequence[Sequence[int]], lengths: Sequence[int]) -> list[list[int]]:
        """The likeliest token after each context, again and again, so many times; fewer where the text ended."""
        params = [SamplingParams(temperature=0.0, num_tokens_to_generate=length, ignore_eos=True) for length in lengths]
        prompts = [list(context)[-(self.max_length - length) :] for context, length in zip(contexts, lengths, strict=True)]
        return [list(record.generated_tokens) for record in self.engine.generate(prompts, params, lora=self._lora)]

    def _fit(self, context: Sequence[int], text: Sequence[int]) -> list[int]:
        if not context or not text:
            raise ValueError(f"a context of {len(context)} and a continuation of {len(text)} tokens must each have one at least")
        if len(text) >= self.max_length:
            raise ValueError(
                f"a continuation of {len(text)} tokens leaves no room for its context within {self.max_length}; raise --max-length"
            )
        return [*list(context)[-(self.max_length - len(text)) :], *text]
