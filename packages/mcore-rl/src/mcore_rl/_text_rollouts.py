# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Rollouts of text in tokens."""

from mcore_rl._types import Rollout, TokenRollout
from mcore_rl.inference import InferenceInterface


def in_tokens(rollout: TokenRollout | Rollout, interface: InferenceInterface | None) -> TokenRollout:
    """A text in tokens of the policy, prompt and answer each by itself, as an engine has them; nobody knows their log-probabilities.

    Raises:
        TypeError: it is neither in text nor in tokens, or a text beside no interface.
    """
    if isinstance(rollout, TokenRollout):
        return rollout
    if not isinstance(rollout, Rollout) or interface is None:
        raise TypeError(f"the agent made a {type(rollout).__name__}; let it make TokenRollouts, or Rollouts beside an interface")
    text, length = rollout.trajectory, rollout.prompt_length
    prompt, answer = (list(interface.encode(part)) for part in (text[:length], text[length:]))
    return TokenRollout(
        trajectory=(*prompt, *answer),
        reward=rollout.reward,
        generation_mask=(False,) * len(prompt) + (True,) * len(answer),
        logprobs=None,
        env_id=rollout.env_id,
        problem_id=rollout.problem_id,
    )
