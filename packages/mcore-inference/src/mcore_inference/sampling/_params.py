# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What a request asks of the sampler."""

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from mcore_inference._fields import as_flag, as_integer, as_number
from mcore_inference.sampling._structured import StructuredOutput, known_fields

_MAX_STOPS = 64
_MAX_TOKEN = 2**31 - 1
_MAX_BIAS = 1e4
_MAX_WORD_LENGTH = 1024
_DEFAULT_BUDGET = 30
_NUMBERS = {
    "temperature": (0, 1e4),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repetition_penalty": (1e-3, 1e3),
    "presence_penalty": (-1e3, 1e3),
    "frequency_penalty": (-1e3, 1e3),
}
_INTEGERS = {
    "top_k": (-1, 2**31),
    "top_n_logprobs": (0, 64),
    "min_tokens": (0, 2**31),
    "n": (1, 2**16),
    "num_tokens_to_generate": (0, 2**63 - 1),
    "num_tokens_total": (1, 2**63 - 1),
    "seed": (-(2**63), 2**63 - 1),
    "termination_id": (-1, _MAX_TOKEN),
}
_REQUIRED = ("top_k", "top_n_logprobs", "min_tokens", "n")
"""Integers that are not optional."""
_FLAGS = ("ignore_eos", "return_log_probs", "processed_log_probs", "skip_prompt_log_probs", "add_BOS", "detokenize_stop_sequence")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling settings of one request, checked when they are made.

    Scores are treated in this order: repetition, presence and frequency penalties, logit bias, bad words, structured output, temperature,
    min-p, top-k, top-p. Two requests with equal prompt, settings and seed give equal tokens, whatever they are batched with, as far as
    the logits are equal: in float64, or with a batch-invariant backend. In fewer bits the last ones change with the size of a step, and now
    and then a token.

    Example:
        >>> SamplingParams(temperature=0.0, num_tokens_to_generate=4).is_greedy
        True

    Raises:
        ValueError: a field is of another type or out of its range, or two exclude each other; names the field, the value and the range.
            Booleans are no numbers,
            floats no integers, numpy's numbers are both.
    """

    temperature: float = 1.0
    """0 for greedy decoding."""
    top_k: int = 0
    """Keep the k best tokens (ties: lowest ids); 0 or -1 for all."""
    top_p: float = 0.0
    """Keep the smallest set of best tokens with at least this probability; 0 or 1 for all."""
    min_p: float = 0.0
    """Keep tokens with at least this share of the best token's probability; 0 for all."""
    repetition_penalty: float = 1.0
    """Scores of tokens seen in prompt or output are divided by it when positive, multiplied when negative; 1 for none."""
    presence_penalty: float = 0.0
    """Subtracted once from the score of each token generated before."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's score for each time it was generated."""
    logit_bias: Mapping[int, float] | None = None
    """Token id -> number added to its score, from -10000 to 10000."""
    allowed_token_ids: tuple[int, ...] | None = None
    """Nothing else is drawn, the ids that end the output neither unless they are among them; None for all. Not with
    ``structured_output``."""
    seed: int | None = None
    """None for one derived from the engine's seed and the request's number; over a coordinator of a number drawn at its start."""
    n: int = 1
    """Completions of one prompt, each a request of its own (``choices``) with a seed of its own; they share the prompt's cache blocks."""
    num_tokens_to_generate: int | None = None
    """Budget of new tokens; None for 30, or for what ``num_tokens_total`` leaves."""
    num_tokens_total: int | None = None
    """Budget of prompt and new tokens together; not with ``num_tokens_to_generate``."""
    min_tokens: int = 0
    """Neither the termination id nor a stop token is drawn before this many tokens, and no stop word ends the request."""
    termination_id: int | None = None
    """Token that ends the output; None for the tokenizer's end-of-text id, -1 for none."""
    ignore_eos: bool = False
    """Go on past the termination id (stop tokens and stop words still end the request)."""
    stop_token_ids: tuple[int, ...] = ()
    """Further tokens that end the output."""
    stop_words: tuple[str, ...] | None = None
    """Strings that end the output, found across token borders; the text is cut before them. Needs a tokenizer."""
    detokenize_stop_sequence: bool = False
    """Keep what ended the output in its text: the stop word, or what the tokenizer writes for the stop token (nothing for special ones).
    Needs a tokenizer."""
    bad_words: tuple[str, ...] | None = None
    """Strings that the output does not hold, neither as they are nor behind a space: as the tokens that the tokenizer makes of each, of
    which the last is not drawn behind the others. Another spelling of a word, by other tokens, is not found. Needs a tokenizer."""
    structured_output: StructuredOutput | None = None
    """The form that the output must have, such as a JSON schema; the output ends when nothing can follow. Needs a tokenizer; not with
    ``min_tokens``."""
    return_log_probs: bool = False
    """Return the model's own log-probability of every generated token: float32 log-softmax of the raw logits, before
    penalties, temperature and filters."""
    processed_log_probs: bool = False
    """With ``return_log_probs``: those of generated tokens are of the distribution that they were drawn from, after penalties, bias, bans,
    temperature and filters; 0 for a greedy one. So are those of ``top_n_logprobs``, without tokens that could not be drawn.
    Those of a prompt, which nobody drew, stay the model's own. Reinforcement learning needs these."""
    skip_prompt_log_probs: bool = True
    """With ``return_log_probs``: False for those of prompt tokens 1.. too."""
    top_n_logprobs: int = 0
    """Return the n best tokens, fewer where fewer can be drawn, and their log-probabilities at every generated position, and at those of
    the prompt whose log-probabilities are asked for."""
    add_BOS: bool = False
    """Put the tokenizer's begin-of-text id before a text prompt."""

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {name: as_number(name, getattr(self, name), *bounds) for name, bounds in _NUMBERS.items()}
        checked |= {name: as_flag(name, getattr(self, name)) for name in _FLAGS}
        for name, bounds in _INTEGERS.items():
            if getattr(self, name) is not None or name in _REQUIRED:
                checked[name] = as_integer(name, getattr(self, name), *bounds)
        checked["stop_token_ids"] = tuple(as_integer("stop_token_ids", token, 0, _MAX_TOKEN) for token in self._stops("stop_token_ids"))
        for name in ("stop_words", "bad_words"):
            if getattr(self, name) is not None:
                checked[name] = tuple(_word(name, word) for word in self._stops(name))
        if self.logit_bias is not None:
            checked["logit_bias"] = _bias(self.logit_bias)
        if self.allowed_token_ids is not None:
            checked["allowed_token_ids"] = _allowed(self.allowed_token_ids)
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if self.num_tokens_to_generate is not None and self.num_tokens_total is not None:
            raise ValueError(
                f"num_tokens_to_generate={self.num_tokens_to_generate} "
                f"and num_tokens_total={self.num_tokens_total} exclude each other; set one"
            )
        if not self.return_log_probs and (self.processed_log_probs or not self.skip_prompt_log_probs):
            name = "processed_log_probs=True" if self.processed_log_probs else "skip_prompt_log_probs=False"
            raise ValueError(f"{name} says which log-probabilities are returned, and return_log_probs=False returns none; set it to True")
        if self.structured_output is not None:
            if not isinstance(self.structured_output, StructuredOutput):
                raise ValueError(f"structured_output is a {type(self.structured_output).__name__}; give StructuredOutput(...)")
            if self.min_tokens:
                raise ValueError(
                    f"min_tokens={self.min_tokens} and structured_output exclude each other: the form says when the output ends; set one"
                )
            if self.allowed_token_ids is not None:
                raise ValueError("allowed_token_ids and structured_output exclude each other: the form says what is drawn; set one")

    def _stops(self, name: str) -> Collection[Any]:
        value = _collection(name, getattr(self, name))
        if len(value) > _MAX_STOPS:
            raise ValueError(f"{name} holds {len(value)} entries; at most {_MAX_STOPS} are allowed")
        return value

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0 or self.top_k == 1

    @property
    def has_penalties(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    def choices(self) -> "list[SamplingParams]":
        """Settings of each of the ``n`` completions; with a seed, completion i is drawn with seed + i.

        Example:
            >>> [params.seed for params in SamplingParams(n=3, seed=7).choices()]
            [7, 8, 9]
        """
        if self.n == 1:
            return [self]
        # Wrapped into 64 signed bits, so that none leaves the range.
        seeds = [None if self.seed is None else (self.seed + choice + 2**63) % 2**64 - 2**63 for choice in range(self.n)]
        return [dataclasses.replace(self, n=1, seed=seed) for seed in seeds]

    def budget(self, num_prompt_tokens: int) -> int:
        """New tokens a prompt of this length may get; 0 when the total is used up."""
        if self.num_tokens_total is not None:
            return max(0, self.num_tokens_total - num_prompt_tokens)
        return _DEFAULT_BUDGET if self.num_tokens_to_generate is None else self.num_tokens_to_generate

    def add_attributes(self, attributes: Mapping[str, Any]) -> NoReturn:
        """Refused: in Megatron-LM it sets the fields in place, and these settings are frozen. ``with_attributes`` returns a copy with them.

        Raises:
            dataclasses.FrozenInstanceError: always, so that no change is lost in silence.
        """
        names = ", ".join(map(str, attributes))
        raise dataclasses.FrozenInstanceError(
            f"add_attributes would set {names or 'fields'} in place, and SamplingParams is frozen; use params = params.with_attributes(...)"
        )

    def with_attributes(self, attributes: Mapping[str, Any]) -> "SamplingParams":
        """A copy with these fields set.

        Example:
            >>> SamplingParams().with_attributes({"top_k": 3}).top_k
            3

        Raises:
            ValueError: an unknown field or a bad value.
        """
        known = {field.name for field in dataclasses.fields(self)}
        if unknown := sorted(set(attributes) - known):
            raise ValueError(f"unknown fields {unknown}; SamplingParams has {sorted(known)}")
        return dataclasses.replace(self, **attributes)

    def serialize(self) -> dict[str, Any]:
        """All fields as JSON-ready data."""
        data = dict(vars(self))
        data["stop_token_ids"] = list(self.stop_token_ids)
        data["allowed_token_ids"] = None if self.allowed_token_ids is None else list(self.allowed_token_ids)
        data["stop_words"] = None if self.stop_words is None else list(self.stop_words)
        data["bad_words"] = None if self.bad_words is None else list(self.bad_words)
        # JSON and msgpack maps want string keys or lists of pairs; pairs keep ids as integers.
        data["structured_output"] = None if self.structured_output is None else self.structured_output.serialize()
        data["logit_bias"] = None if self.logit_bias is None else [[token, bias] for token, bias in self.logit_bias.items()]
        return data

    @classmethod
    def deserialize(cls, data: Mapping[str, Any]) -> "SamplingParams":
        """Settings from data; fields this version does not know are dropped with a warning.

        Raises:
            ValueError: a field is of another type or out of its range, as when they are made.
        """
        fields = known_fields("SamplingParams", data, cls.__dataclass_fields__)
        if fields.get("logit_bias") is not None:
            fields["logit_bias"] = _bias_of_pairs(fields["logit_bias"])
        if fields.get("structured_output") is not None:
            fields["structured_output"] = StructuredOutput.deserialize(fields["structured_output"])
        return cls(**fields)


def _collection(name: str, value: Any) -> Collection[Any]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Collection):
        raise ValueError(f"{name}={value!r} must be a sequence, not one {type(value).__name__}; wrap it in a list")
    return value


def _allowed(value: Any) -> tuple[int, ...]:
    tokens = tuple(as_integer("allowed_token_ids", token, 0, _MAX_TOKEN) for token in _collection("allowed_token_ids", value))
    if not tokens:
        raise ValueError("allowed_token_ids holds nothing that could be drawn; leave it at None for all ids")
    return tokens


def _word(name: str, word: object) -> str:
    if not isinstance(word, str) or not 0 < len(word) <= _MAX_WORD_LENGTH:
        raise ValueError(f"{name}={str(word)[:80]!r} must hold strings of 1 to {_MAX_WORD_LENGTH} characters")
    return word


def _bias_of_pairs(pairs: object) -> dict[Any, Any]:
    """What ``serialize`` makes of a bias, as a mapping again; one that is a mapping stays it."""
    try:
        return dict(pairs)  # type: ignore[call-overload]
    except (TypeError, ValueError) as error:
        raise ValueError(f"logit_bias={str(pairs)[:80]!r} must be pairs of token ids and numbers") from error


def _bias(bias: object) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise ValueError(f"logit_bias must map token ids to numbers and is a {type(bias).__name__}")
    return {
        as_integer("logit_bias: token id", token, 0, _MAX_TOKEN): as_number(f"logit_bias of token {token}", value, -_MAX_BIAS, _MAX_BIAS)
        for token, value in bias.items()
    }
