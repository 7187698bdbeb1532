# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What every rank knows of every rollout: enough to plan who trains on it, without its tokens."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from mcore_rl._types import TokenRollout, as_array, as_tensor


@dataclass(frozen=True, kw_only=True)
class RolloutHeader:
    """Scalars of a `TokenRollout`; its numbers a token follow as bytes to the ranks that train on it.

    Example:
        >>> header = RolloutHeader.of(rollout)
        >>> header.rollout(header.encode(rollout)) == rollout
        True
    """

    num_tokens: int
    """Of the trajectory."""
    num_generated: int
    """Of these, those that the policy wrote."""
    num_counted: int
    """Of those, the ones with a token before them, which predicts them."""
    num_turns: int
    """Runs of generated tokens."""
    reward: float
    env_id: str
    problem_id: str
    finish_reason: str
    num_prompt: int
    """Tokens before the first that the policy wrote; all, where it wrote none."""
    prompt: str
    """Digest of those; equal for answers that may share a prompt, and empty for one that shares none."""
    has_logprobs: bool
    """Whether the engine gave those of its tokens."""
    has_versions: bool
    """Whether the weights that drew each token are known."""
    routing: tuple[int, int] | None
    """Layers and experts a token of the recorded routing."""

    @classmethod
    def of(cls, rollout: TokenRollout) -> Self:
        mask = as_array(rollout.generation_mask, "b").tobytes()
        num_generated, first = mask.count(1), mask.find(1)
        num_prompt = len(mask) if first < 0 else first
        shares = 2 <= num_prompt < len(mask)
        digest = hashlib.blake2b(as_array(rollout.trajectory[:num_prompt], "q").tobytes(), digest_size=16).hexdigest() if shares else ""
        routed = rollout.routed_experts
        return cls(
            num_tokens=len(mask),
            num_generated=num_generated,
            num_counted=num_generated - int(first == 0),
            num_turns=mask.count(b"\x00\x01") + int(first == 0),
            reward=float(rollout.reward),
            env_id=rollout.env_id,
            problem_id=rollout.problem_id,
            finish_reason=rollout.finish_reason,
            num_prompt=num_prompt,
            prompt=digest,
            has_logprobs=rollout.logprobs is not None,
            has_versions=rollout.weight_versions is not None,
            routing=None if routed is None else (routed.shape[1], routed.shape[2]),
        )

    def to_json(self) -> list[Any]:
        """What JSON can hold, in the order of the fields."""
        return [getattr(self, name) for name in self.__dataclass_fields__]

    @classmethod
    def from_json(cls, values: Sequence[Any]) -> Self:
        """Of what ``to_json`` made."""
        fields: Mapping[str, Any] = dict(zip(cls.__dataclass_fields__, values, strict=True))
        routing = fields["routing"]
        return cls(**{**fields, "routing": None if routing is None else tuple(routing)})

    def num_bytes(self, *, routed: bool = True) -> int:
        """Of ``encode``."""
        size = 9 * self.num_tokens + 8 * (self.has_logprobs + self.has_versions) * self.num_generated
        return size + (2 * self._num_routed if routed else 0)

    def encode(self, rollout: TokenRollout, *, routed: bool = True) -> bytes:
        """The numbers of this rollout's tokens; its routing on demand."""
        parts = [as_array(rollout.trajectory, "q").tobytes()]
        if rollout.logprobs is not None:
            parts.append(as_array(rollout.logprobs, "d").tobytes())
        if rollout.weight_versions is not None:
            parts.append(as_array(rollout.weight_versions, "q").tobytes())
        parts.append(as_array(rollout.generation_mask, "b").tobytes())
        if routed and rollout.routed_experts is not None:
            parts.append(rollout.routed_experts.to("cpu", torch.int16).contiguous().numpy().tobytes())
        return b"".join(parts)

    def rollout(self, data: bytes | memoryview, *, routed: bool = True) -> TokenRollout:
        """The rollout, from what ``encode`` made of it."""
        rest = memoryview(data)

        def take(count: int, kind: str, size: int) -> Any:
            nonlocal rest
            numbers = as_array((), kind)
            numbers.frombytes(rest[: count * size])
            rest = rest[count * size :]
            return numbers

        trajectory = take(self.num_tokens, "q", 8).tolist()
        logprobs = take(self.num_generated, "d", 8).tolist() if self.has_logprobs else None
        versions = take(self.num_generated, "q", 8).tolist() if self.has_versions else None
        # Numbers are no booleans.
        mask: Any = memoryview(take(self.num_tokens, "b", 1).tobytes()).cast("?").tolist()
        experts = None
        if routed and self.routing is not None:
            experts = as_tensor(take(self._num_routed, "h", 2), "h").view(max(0, self.num_tokens - 1), *self.routing)
        return TokenRollout(
            trajectory=trajectory,
            reward=self.reward,
            generation_mask=mask,
            logprobs=logprobs,
            env_id=self.env_id,
            problem_id=self.problem_id,
            finish_reason=self.finish_reason,
            routed_experts=experts,
            weight_versions=versions,
        )

    @property
    def _num_routed(self) -> int:
        return 0 if self.routing is None else max(0, self.num_tokens - 1) * self.routing[0] * self.routing[1]
