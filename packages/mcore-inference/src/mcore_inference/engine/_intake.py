# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Makes requests of prompts and settings, or says what is wrong with them."""

import time

from mcore_inference.cache import PrefixChain
from mcore_inference.context import DynamicInferenceContext
from mcore_inference.engine._active_request import ActiveRequest
from mcore_inference.engine._loras import EngineLoras
from mcore_inference.requests import (
    DynamicInferenceRequest,
    DynamicInferenceRequestRecord,
    Prompt,
    bad_word_tokens,
    encode_prompt,
    stop_tokens,
)
from mcore_inference.sampling import SamplingParams, request_seed
from mcore_inference.speculation import NgramDrafter, NgramSpeculation
from mcore_inference.structured import GrammarCompiler
from mcore_inference.text import TextStream, Tokenizer, TokenTexts


class Intake:
    """Everything that a request needs before it waits; no memory of the device is taken.

    Args:
        context: which requests fit.
        tokenizer: as of the engine.
        vocab_size: ids that exist.
        seed: of requests that bring none.
        ngrams: proposals from their own text; None for none of these.
        shares_prefixes: whether they share cache blocks.
        loras: adapters that requests may choose.
    """

    def __init__(
        self,
        context: DynamicInferenceContext,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        *,
        seed: int,
        ngrams: NgramSpeculation | None,
        shares_prefixes: bool,
        loras: EngineLoras,
    ) -> None:
        self._context, self._tokenizer, self._vocab_size, self._loras = context, tokenizer, vocab_size, loras
        self._seed, self._ngrams, self._shares_prefixes = seed, ngrams, shares_prefixes
        self._texts = None if tokenizer is None else TokenTexts(tokenizer)
        self._grammars = GrammarCompiler(tokenizer, vocab_size)

    def make(
        self, prompt: Prompt, params: SamplingParams, *, number: int, order: int, priority: int, lora: str | None = None
    ) -> ActiveRequest:
        """A request with the number and the place of its arrival.

        Raises:
            RequestError, ValueError: as ``DynamicInferenceEngine.add_request``.
        """
        adapter = self._loras.choose(lora, number)
        tokens = encode_prompt(prompt, params, self._tokenizer, self._vocab_size, number)
        stop_ids = stop_tokens(params, self._tokenizer, self._vocab_size)
        wanted = params.budget(len(tokens))
        budget = self._context.check_fits(len(tokens), wanted, number)
        bad_words = bad_word_tokens(params, stop_ids, self._tokenizer, self._vocab_size)
        request = DynamicInferenceRequest(
            request_id=number,
            prompt_tokens=tokens,
            sampling_params=params,
            num_tokens_to_generate=budget,
            budget_clamped=budget < wanted,
            prompt=prompt if isinstance(prompt, str) else None,
            priority=priority,
            lora=lora,
        )
        form, words, texts = params.structured_output, params.stop_words, self._texts
        # Last: other ranks compile the forms of what is accepted, and keep as many.
        grammar = None if form is None else self._grammars.matcher(form, number)
        text = None
        if texts is not None and words:
            text = TextStream(texts, words, keeps_stop_word=params.detokenize_stop_sequence, prompt=tokens)
        entry = ActiveRequest(
            chain=PrefixChain(self._context.block_size, adapter.root) if self._shares_prefixes else None,
            adapter=adapter.slot,
            record=DynamicInferenceRequestRecord.from_request(request),
            params=params,
            order=order,
            seed=request_seed(self._seed, number) if params.seed is None else params.seed,
            stop_ids=stop_ids,
            bad_words=bad_words,
            text=text,
            tokenizer=None if words else texts,
            started=time.monotonic(),
            grammar=grammar,
            drafter=None if self._ngrams is None or grammar is not None else NgramDrafter(self._ngrams, tokens),
        )
        entry.grow_keys()
        return entry
