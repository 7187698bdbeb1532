# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What agents, engines and the trainer say to each other."""

import base64
import math
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from numbers import Real
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from mcore_rl._fields import check_finite, check_integers
from mcore_rl._pass_at import pass_at_k
from mcore_rl._stability import experimental_api


@experimental_api
@dataclass(frozen=True, kw_only=True)
class GenericGenerationArgs:
    """How to sample; None leaves a choice to the generator, 0 of ``top_k`` and 1 of ``top_p`` say that all tokens may be drawn.

    Raises:
        ValueError: a number out of its range.

    Example:
        >>> GenericGenerationArgs(temperature=0.0).add(GenericGenerationArgs(max_tokens=8))
        GenericGenerationArgs(temperature=0.0, top_k=None, top_p=None, max_tokens=8)
        >>> GenericGenerationArgs(top_k=3).add(GenericGenerationArgs(top_k=None)).top_k is None
        True
    """

    temperature: float | None = None
    """0 is greedy."""
    top_k: int | None = None
    """Draw among so many most likely tokens; 0 for all."""
    top_p: float | None = None
    """Draw among the most likely tokens that together have this probability; 1 for all."""
    max_tokens: int | None = None
    """Tokens of an answer at most; None for what the engine allows."""
    _opened: ClassVar[frozenset[str]] = frozenset()
    """Names of fields to which None was passed; of an object, not of the class. No field, so that two that sample alike are equal."""

    def __new__(cls, **values: Any) -> "GenericGenerationArgs":
        made = super().__new__(cls)
        none = frozenset(name for name, value in values.items() if value is None)
        object.__setattr__(made, "_opened", none if len(values) < len(fields(cls)) else frozenset())
        return made

    def __post_init__(self) -> None:
        if self.temperature is not None:
            check_finite(self, 0, "temperature")
        for name, least in (("top_k", 0), ("max_tokens", 1)):
            if getattr(self, name) is not None:
                check_integers(self, least, name)
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must lie above 0 and up to 1; 1 for all tokens")

    @property
    def truncated_by(self) -> str | None:
        """The field that keeps tokens from being drawn; None where all may be."""
        return "top_k" if self.top_k else "top_p" if self.top_p not in (None, 1) else None

    def _choices(self) -> dict[str, float | int | None]:
        """By field: every value, and each None that opens a choice."""
        return {name: value for name, value in asdict(self).items() if value is not None or name in self._opened}

    def add(self, other: "GenericGenerationArgs") -> "GenericGenerationArgs":
        """These choices, overridden by those that ``other`` makes. A None that it was given opens a choice again; where it was given all
        fields, as ``dataclasses.replace`` and files do, a None says nothing."""
        both = {**self._choices(), **other._choices()}
        added = GenericGenerationArgs(**both)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        object.__setattr__(added, "_opened", frozenset(name for name, value in both.items() if value is None))
        return added


@experimental_api
@dataclass(frozen=True, kw_only=True)
class InferenceRequest:
    """Prompts to continue, each ``n`` times.

    Raises:
        ValueError: a ``draw`` of several continuations.
    """

    prompts: Sequence[Sequence[int]]
    """Token ids."""
    n: int = 1
    generation_args: GenericGenerationArgs = GenericGenerationArgs()
    draw: str | None = None
    """Names the one continuation, as by conversation and turn: an interface with seeds (`RequestSeeds`) draws it by this name, whenever it
    is asked; None for the order of its requests."""

    def __post_init__(self) -> None:
        if self.draw is not None and (self.n != 1 or len(self.prompts) != 1):
            raise ValueError(
                f"draw={self.draw!r} names one continuation, and {len(self.prompts)} prompts have n={self.n} each; ask for each alone"
            )


@experimental_api
@dataclass(frozen=True, kw_only=True)
class InferenceResponse:
    """One continuation."""

    response: str
    """Text of the generated part."""
    token_ids: Sequence[int]
    """Prompt and generated tokens."""
    prompt_length: int
    logprobs: Sequence[float] | None
    """Log-probability of each generated token under the distribution that it was drawn from; None where the engine says nothing of them."""
    finish_reason: str = "stop"
    """stop, or length when the token limit ended it."""
    routed_experts: Tensor | None = field(default=None, compare=False, repr=False)
    """[tokens - 1, layers, experts a token] int16, experts of all tokens but the last, as the engine recorded them; -1 where it did not."""
    weight_versions: Sequence[int] | None = None
    """Of each generated token, the version of the weights that it was drawn from, as the engine counts them; None where it says nothing."""

    def __post_init__(self) -> None:
        generated = len(self.token_ids) - self.prompt_length
        for name in ("logprobs", "weight_versions"):
            values = getattr(self, name)
            if values is not None and len(values) != generated:
                raise ValueError(f"{name} has {len(values)} entries for {generated} generated tokens")


def check_reward(reward: float, *, env_id: str, problem_id: str) -> None:
    """Whether a reward can be learnt from.

    Raises:
        ValueError: it is no finite number; names environment and problem.
    """
    if not isinstance(reward, Real) or not math.isfinite(reward):
        raise ValueError(f"reward={reward!r} of problem {problem_id!r} in environment {env_id!r} must be a finite number; repair its judge")


@experimental_api
@dataclass(frozen=True, kw_only=True)
class TokenRollout:
    """A judged trajectory in tokens.

    Raises:
        ValueError: lists of different lengths, a reward or a log-probability that is no finite number.
    """

    trajectory: Sequence[int]
    reward: float
    generation_mask: Sequence[bool]
    """Which tokens the policy wrote."""
    logprobs: Sequence[float] | None
    """Of the tokens the policy wrote, in order; None where the engine says nothing of them: these are learnt from without a correction."""
    env_id: str
    problem_id: str
    finish_reason: str = "stop"
    routed_experts: Tensor | None = field(default=None, compare=False, repr=False)
    """[tokens - 1, layers, experts a token] int16, as of ``InferenceResponse``; the trainer replays them. None for fresh routing."""
    weight_versions: Sequence[int] | None = None
    """Of each token the policy wrote, the weights that it was drawn from, as of ``InferenceResponse``; ``logprobs`` are theirs."""

    def __post_init__(self) -> None:
        if len(self.generation_mask) != len(self.trajectory):
            raise ValueError(
                f"generation_mask has {len(self.generation_mask)} entries for {len(self.trajectory)} tokens of {self.problem_id}"
            )
        num_written = sum(self.generation_mask)
        for name in ("logprobs", "weight_versions"):
            values = getattr(self, name)
            if values is not None and len(values) != num_written:
                raise ValueError(f"{name} has {len(values)} entries for {num_written} generated tokens of {self.problem_id}")
        # A number that is none makes the sum none, in a fraction of the time that looking at each takes.
        logprobs = self.logprobs or ()
        if not math.isfinite(sum(logprobs)) and not all(map(math.isfinite, logprobs)):
            place = next(place for place, value in enumerate(logprobs) if not math.isfinite(value))
            raise ValueError(
                f"logprobs[{place}]={logprobs[place]} of {self.problem_id} must be a finite number; whatever drew the token is broken"
            )
        check_reward(self.reward, env_id=self.env_id, problem_id=self.problem_id)
        experts = self.routed_experts
        if experts is not None and (experts.dim() != 3 or len(experts) != len(self.trajectory) - 1):
            raise ValueError(
                f"routed_experts of shape {list(experts.shape)} must be [{len(self.trajectory) - 1}, layers, experts a token]: a row for "
                f"each token of {self.problem_id} but the last"
            )

    def to_json(self) -> dict[str, Any]:
        """What JSON can hold: numbers of tokens are the base64 of little-endian bytes, which cost a tenth of the time of digits."""
        values: dict[str, Any] = {item.name: getattr(self, item.name) for item in fields(self)}
        values["reward"] = float(self.reward)
        for name, kind in _PACKED.items():
            if values[name] is not None:
                values[name] = _text_of(as_array(values[name], kind))
        if self.routed_experts is not None:
            rows = self.routed_experts.to("cpu", torch.int16).contiguous()
            values["routed_experts"] = {"shape": list(rows.shape), "int16": _text_of(array("h", rows.numpy().tobytes()))}
        return values

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Of what ``to_json`` made; numbers of tokens may also be lists."""
        values, experts = dict(value), value.get("routed_experts")
        for name, kind in _PACKED.items():
            if isinstance(numbers := values.get(name), str):
                values[name] = _array_of(numbers, kind).tolist()
        # Numbers are no booleans.
        values["generation_mask"] = memoryview(bytes(values["generation_mask"])).cast("?").tolist()
        if experts is not None:
            values["routed_experts"] = as_tensor(_array_of(experts["int16"], "h"), "h").view(experts["shape"])
        return cls(**values)


_PACKED = {"trajectory": "q", "generation_mask": "b", "logprobs": "d", "weight_versions": "q"}
"""Fields of a `TokenRollout` with a number a token, and the type code of an ``array`` of them."""
_DTYPES = {"b": torch.int8, "h": torch.int16, "q": torch.int64, "d": torch.float64}


def as_array(values: Iterable[Any], kind: str) -> "array[Any]":
    """Numbers one behind the other in memory, several times as fast as a tensor is made of them."""
    # Of truth values, bytes are made three times as fast; a tuple, because what is a buffer already would be taken as it lies there.
    return array(kind, bytes(tuple(values)) if kind == "b" else values)


def as_tensor(values: Iterable[Any], kind: str) -> Tensor:
    """The same as a tensor, of int8 for "b", int16 for "h", int64 for "q" and float64 for "d"."""
    numbers = as_array(values, kind)
    # An empty buffer is refused.
    return torch.frombuffer(numbers, dtype=_DTYPES[kind]) if numbers else torch.empty(0, dtype=_DTYPES[kind])


def _text_of(numbers: "array[Any]") -> str:
    return base64.b64encode(_little_endian(numbers)).decode()


def _array_of(text: str, kind: str) -> "array[Any]":
    numbers = array(kind)
    numbers.frombytes(base64.b64decode(text))
    return _little_endian(numbers)


def _little_endian(numbers: "array[Any]") -> "array[Any]":
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


@experimental_api
@dataclass(frozen=True, kw_only=True)
class Rollout:
    """A judged trajectory as text.

    Raises:
        ValueError: a prompt longer than the trajectory, or a reward that is no finite number.
    """

    trajectory: str
    """Prompt and answer."""
    prompt_length: int
    """Characters of the prompt."""
    reward: float
    env_id: str
    problem_id: str

    def __post_init__(self) -> None:
        if not 0 <= self.prompt_length <= len(self.trajectory):
            raise ValueError(
                f"prompt_length={self.prompt_length} must lie in 0..{len(self.trajectory)}, the trajectory of {self.problem_id}"
            )
        check_reward(self.reward, env_id=self.env_id, problem_id=self.problem_id)


@experimental_api
@dataclass(frozen=True, kw_only=True)
class RewardEvaluationResult:
    """One judged answer of an evaluation."""

    prompt: str
    response: str
    reward: float
    problem_id: str
    env_id: str = ""
    """The environment that posed it; empty where nobody says."""


@experimental_api
@dataclass(frozen=True, kw_only=True)
class EvaluationResponse:
    """All answers of one environment, or of several that are one (`WeightedMultiTask`)."""

    env_id: str
    results: Sequence[RewardEvaluationResult] = field(default_factory=tuple)
    num_dropped: int = 0
    """Answers that never came, or whose judge failed."""

    def of(self, env_id: str) -> "EvaluationResponse":
        """The answers of one of several environments; nobody knows of whom the dropped ones were."""
        return EvaluationResponse(env_id=env_id, results=[result for result in self.results if result.env_id == env_id])

    def metrics(self) -> dict[str, list[float]]:
        return {"reward": [result.reward for result in self.results]}

    def pass_at(self, k: int, *, right: float = 1.0) -> list[float]:
        """The chance that one of k answers is right, for each problem that has so many.

        Args:
            k: answers.
            right: least reward of a right one.
        """
        rewards: dict[str, list[float]] = {}
        for result in self.results:
            rewards.setdefault(result.problem_id, []).append(result.reward)
        return [pass_at_k(len(some), sum(reward >= right for reward in some), k) for some in rewards.values() if len(some) >= k]
