# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Answers of each iteration, as texts to look at."""

import json
from collections.abc import Sequence
from pathlib import Path

from mcore_parallel.data import Tokenizer
from mcore_rl import TokenRollout

_MOST_CHARACTERS = 4000


def write_examples(path: Path, step: int, rollouts: Sequence[TokenRollout], tokenizer: Tokenizer) -> None:
    """Append a line of JSON for each: step, env_id, problem_id, reward, prompt and answer, of long ones the beginning and the end."""
    with path.open("a", encoding="utf-8") as file:
        for rollout in rollouts:
            first = rollout.generation_mask.index(True) if any(rollout.generation_mask) else len(rollout.trajectory)
            row = {
                "step": step,
                "env_id": rollout.env_id,
                "problem_id": rollout.problem_id,
                "reward": rollout.reward,
                "prompt": _short(tokenizer.detokenize(rollout.trajectory[:first], skip_special=False)),
                "answer": _short(tokenizer.detokenize(rollout.trajectory[first:], skip_special=False)),
            }
            file.write(json.dumps(row) + "\n")


def _short(text: str) -> str:
    half = _MOST_CHARACTERS // 2
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:half]} ... {text[-half:]}"
