# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A request that the engine is busy with: its record grows by one sampled token at a time."""

import functools
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mcore_inference.cache import BlockKey, PrefixChain
from mcore_inference.context import PENDING
from mcore_inference.engine._stream_text import StreamText, text_of
from mcore_inference.requests import (
    DynamicInferenceRequest,
    DynamicInferenceRequestRecord,
    FinishReason,
    NonFiniteLogitsError,
    Status,
    StructuredOutputError,
    TextMaker,
)
from mcore_inference.sampling import SamplingParams
from mcore_inference.speculation import NgramDrafter
from mcore_inference.structured import GrammarMatcher
from mcore_inference.text import TextStream, Tokenizer, prompt_end


@dataclass(kw_only=True, eq=False)
class ActiveRequest:
    """The record of a request, and what the engine keeps beside it."""

    record: DynamicInferenceRequestRecord
    params: SamplingParams
    order: int
    """Number of arrival; a preempted request keeps it."""
    seed: int
    stop_ids: frozenset[int]
    bad_words: Sequence[Sequence[int]]
    """Token ids that do not follow each other in the output."""
    text: TextStream | None
    """Of one with stop words, which needs it in each step."""
    tokenizer: Tokenizer | None
    """By which the text of another one is made, by whoever reads it."""
    started: float
    """Monotonic seconds of arrival."""
    grammar: GrammarMatcher | None = None
    """Where the output stands in the form asked for."""
    chain: PrefixChain | None = None
    """Identities of its full blocks; None where requests share none."""
    adapter: int = -1
    """Slot of its adapter; -1 for the base."""
    snapshot_ends: Sequence[int] = ()
    """Tokens of its prompt behind which its states are kept for others."""
    drafter: NgramDrafter | None = None
    """What proposes its next tokens."""
    drafts: list[int] = field(default_factory=list)
    """Tokens proposed for the next step."""
    routing: list[tuple[int, Tensor]] = field(default_factory=list)
    """Position of a first token, and experts [tokens, L, K] from there on; later ones hold where two speak of a token."""
    num_pending: int = 0
    """Tokens that were drawn and have not reached the host: 0 or 1."""
    ended: bool = False
    was_admitted: bool = False
    """Whether it ran once."""
    is_watched: bool = False
    """Whether somebody asks after each step what it gained."""
    last_tokens_at: float | None = None
    """Monotonic seconds at which a step brought tokens of it last."""

    def __post_init__(self) -> None:
        p = self.params
        self.counts_output = p.has_penalties or any(len(word) > 1 for word in self.bad_words)
        """Whether the scores of a draw depend on the output before it by more than the model."""
        self.always_adjusts = self.counts_output or bool(self.bad_words) or bool(p.logit_bias) or p.allowed_token_ids is not None
        """Whether every draw is from other scores than the model's."""
        self.is_bare = self.text is None and self.grammar is None and not p.return_log_probs and not p.top_n_logprobs
        """Whether a drawn token is all that is kept of a step."""
        self._early_text: StreamText | None = None
        """Where somebody asked for text before the end."""
        self._num_early = 0
        """Tokens of it."""
        self.reset_prompt_scores()

    def reset_prompt_scores(self) -> None:
        """Of the prompt's log-probabilities none is there; where they are asked for, those of one token are an empty list."""
        scores = self.wants_prompt_log_probs
        self.segment.prompt_log_probs = [] if scores else None
        self.segment.prompt_top_n_logprobs = [] if scores and self.params.top_n_logprobs else None

    @property
    def rank(self) -> tuple[int, int]:
        """Place among all requests: by priority, then by arrival."""
        return self.segment.priority, self.order

    @property
    def segment(self) -> DynamicInferenceRequest:
        """The part of the record since the last preemption."""
        return self.record.requests[-1]

    @property
    def wants_prompt_log_probs(self) -> bool:
        return self.params.return_log_probs and not self.params.skip_prompt_log_probs and len(self.record.requests) == 1

    @property
    def keys(self) -> Sequence[BlockKey]:
        """Of the full blocks of its tokens, as far as ``grow_keys`` knew them."""
        return () if self.chain is None else self.chain.keys

    @property
    def has_begun(self) -> bool:
        """Whether tokens were drawn for it."""
        return bool(self.record.num_generated or self.num_pending)

    @property
    def shares_prefix(self) -> bool:
        """Whether tokens in the cache need no computation: they do where log-probabilities of the prompt are asked for."""
        return self.chain is not None and not self.wants_prompt_log_probs

    def grow_keys(self) -> None:
        """Bring ``keys`` up to all tokens that the host knows."""
        if self.chain is not None:
            self.chain.grow(self.segment.prompt_tokens + self.segment.generated_tokens)

    @property
    def num_tokens(self) -> int:
        """Of the prompt and the output, the pending one included."""
        segment = self.segment
        return len(segment.prompt_tokens) + len(segment.generated_tokens) + self.num_pending

    @property
    def num_left(self) -> int:
        """Tokens that are still to be drawn."""
        segment = self.segment
        return segment.num_tokens_to_generate - len(segment.generated_tokens) - self.num_pending

    @property
    def position(self) -> int:
        """Tokens drawn so far."""
        return self.record.num_generated + self.num_pending

    @property
    def num_without_end(self) -> int:
        """Tokens that are still to be drawn before one that ends the request may be."""
        min_tokens = self.params.min_tokens
        return max(0, min_tokens - self.position) if min_tokens and self.stop_ids else 0

    @property
    def adjusts(self) -> bool:
        """Whether the next draw is from other scores than the model's, by penalties, biases or bans."""
        return self.always_adjusts or self.num_without_end > 0

    def tokens(self, start: int, count: int) -> list[int]:
        """Tokens from ``start`` on: of the prompt, or of the output once the prompt is computed."""
        prompt, output = self.segment.prompt_tokens, self.segment.generated_tokens
        if start < len(prompt):
            return prompt[start : start + count]
        return output[start - len(prompt) : start - len(prompt) + count] or [PENDING]

    def known_tokens(self, start: int, end: int) -> list[int]:
        """Tokens [start, end) of the prompt and the output that the host knows."""
        prompt, output = self.segment.prompt_tokens, self.segment.generated_tokens
        return prompt[start:end] + output[max(0, start - len(prompt)) : max(0, end - len(prompt))]

    def append(self, token: int, log_prob: float, ranked: dict[int, float]) -> tuple[FinishReason, Exception | None] | None:
        """Append a sampled token; the reason and the error with which it ends the request, or None."""
        segment, record = self.segment, self.record
        if self.is_bare and token >= 0 and segment.generated_tokens:
            # The usual token costs little.
            segment.generated_tokens.append(token)
            return self._reason(stopped=token in self.stop_ids)
        if token < 0:
            scores = f"the scores of token {record.num_generated} hold NaN, or none is finite"
            message = f"{scores}; check the weights, the logit_bias and the bad_words"
            return FinishReason.ERROR, NonFiniteLogitsError(record.request_id, message)
        segment.status = Status.ACTIVE_AND_GENERATING_TOKENS
        segment.generated_tokens.append(token)
        if self.params.return_log_probs:
            segment.generated_log_probs.append(log_prob)
        if self.params.top_n_logprobs:
            segment.generated_top_n_logprobs.append(dict(itertools.islice(ranked.items(), self.params.top_n_logprobs)))
        if record.time_to_first_token is None:
            record.time_to_first_token = time.monotonic() - self.started
        stopped = token in self.stop_ids
        if self.text is not None and (not stopped or self.params.detokenize_stop_sequence):
            may_stop = bool(self.params.stop_words) and not stopped and record.num_generated >= self.params.min_tokens
            try:
                stopped = self.text.push(token, may_stop=may_stop) or stopped
            except Exception as error:
                # The tokenizer is foreign code; its failure is this request's alone.
                record.generated_text, self.text = self.text.text, None
                return FinishReason.ERROR, error
            record.generated_text = self.text.text
        if self.grammar is not None and not stopped:
            try:
                self.grammar.accept(token)
            except StructuredOutputError as error:
                return FinishReason.ERROR, error
            stopped = self.grammar.is_complete
        return self._reason(stopped=stopped)

    def _reason(self, *, stopped: bool) -> tuple[FinishReason, Exception | None] | None:
        if stopped:
            return FinishReason.STOP, None
        segment = self.segment
        return (FinishReason.LENGTH, None) if len(segment.generated_tokens) >= segment.num_tokens_to_generate else None

    def _routed_experts(self) -> Tensor:
        """[tokens - 1, L, K], -1 for tokens that came from the cache; the last token was drawn and never computed."""
        L, K = self.routing[0][1].shape[1:]
        length = len(self.record.prompt_tokens) + self.record.num_generated - 1
        experts = torch.full((length, L, K), -1, dtype=torch.int16)
        for first, rows in self.routing:
            # Proposals that were not accepted, and steps in vain, reach beyond the end.
            experts[first : first + len(rows)] = rows[: max(0, length - first)]
        return experts

    @property
    def silent_ids(self) -> frozenset[int]:
        """Tokens that are no text: those that end the request, unless their text is asked for."""
        return frozenset() if self.params.detokenize_stop_sequence else self.stop_ids

    def grow_text(self) -> None:
        """Bring the text up to the tokens, by whole characters. One that the tokenizer fails at ends the request when all are decoded."""
        record = self.record
        if self.tokenizer is not None and (tokens := record.generated_tokens[self._num_early :]):
            if self._early_text is None:
                self._early_text = StreamText(self.tokenizer, record.prompt_tokens, self.silent_ids, lambda _: None)
            self._num_early += len(tokens)
            record.generated_text += self._early_text.push(tokens)

    def text_maker(self) -> TextMaker | None:
        """How its text is made when it has ended; None where it is there, or there is none. It keeps nothing else of the request."""
        if self.tokenizer is None or not self.record.num_generated:
            return None
        if self._early_text is None:
            return functools.partial(text_of, self.tokenizer, prompt_end(self.record.prompt_tokens), self.silent_ids)
        # What was shown stays.
        return functools.partial(_end_of, self._early_text, self._num_early)

    def finish(self, reason: FinishReason, error: Exception | None) -> FinishReason:
        """Close the record; the reason is another one when the tokenizer fails at the last characters."""
        record, segment = self.record, self.segment
        self.ended = True
        if self.text is not None:
            try:
                record.generated_text = self.text.finish()
            except Exception as failure:
                record.generated_text = self.text.text
                if reason in (FinishReason.STOP, FinishReason.LENGTH):
                    reason, error = FinishReason.ERROR, failure
        record.latency = time.monotonic() - self.started
        if self.routing:
            record.routed_experts = self._routed_experts()
        segment.finish_reason, segment.error = reason, error
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            segment.status = Status.COMPLETED
            segment.add_event_finish()
        else:
            segment.status = Status.FAILED
            if error is not None:
                segment.add_event_error(error)
            segment.add_event_fail()
        return reason


def _end_of(text: StreamText, num_pushed: int, tokens: list[int]) -> tuple[str, Exception | None]:
    """Of a text that has the first of these tokens."""
    text.end(tokens[num_pushed:])
    return text.emitted, text.failure
