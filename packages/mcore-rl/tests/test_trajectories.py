# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Trajectories become rows in which each token's numbers sit where it is predicted."""

import pytest
import torch

from mcore_rl import TokenRollout, rollout_batches


def rollout(prompt: int, written: int, start: int = 10) -> TokenRollout:
    return TokenRollout(
        trajectory=range(start, start + prompt + written),
        reward=1.0,
        generation_mask=[False] * prompt + [True] * written,
        logprobs=[-float(i) for i in range(1, written + 1)],
        env_id="env",
        problem_id="p",
    )


def test_numbers_sit_one_place_left_of_their_token() -> None:
    [batch] = rollout_batches([rollout(2, 3)], [0.5], seq_len=6, micro_batch_size=1)
    assert batch.tokens.tolist() == [[10, 11, 12, 13, 14, 0]]
    assert batch.labels.tolist() == [[11, 12, 13, 14, 0, 0]]
    assert batch.loss_mask.tolist() == [[0, 1, 1, 1, 0, 0]]
    assert batch.extras["advantages"].tolist() == [[0, 0.5, 0.5, 0.5, 0, 0]]
    assert batch.extras["inference_logprobs"].tolist() == [[0, -1, -2, -3, 0, 0]]
    assert batch.valid.tolist() == [[True, True, True, True, False, False]]


def test_a_trajectory_without_prompt_keeps_its_alignment() -> None:
    [batch] = rollout_batches([rollout(0, 3)], [1.0], seq_len=4, micro_batch_size=1)
    assert batch.extras["inference_logprobs"].tolist() == [[-2, -3, 0, 0]]


def test_a_trajectory_without_answer_counts_nothing() -> None:
    [batch] = rollout_batches([rollout(3, 0)], [1.0], seq_len=4, micro_batch_size=1)
    assert batch.loss_mask.sum() == 0


def test_rows_fill_up_with_empty_ones() -> None:
    batches = rollout_batches([rollout(1, 2)] * 3, [1.0, 2.0, 3.0], seq_len=4, micro_batch_size=2)
    assert len(batches) == 2
    assert batches[1].loss_mask[1].sum() == 0
    assert sum(batch.loss_mask.sum() for batch in batches) == torch.tensor(6.0)


def test_too_long_a_trajectory_is_named() -> None:
    with pytest.raises(ValueError, match="trajectory of p has 8 tokens, seq_len=6 admits 7"):
        rollout_batches([rollout(4, 4)], [1.0], seq_len=6, micro_batch_size=1)


def test_inconsistent_rollouts_are_refused() -> None:
    with pytest.raises(ValueError, match="generation_mask has 1 entries for 2 tokens"):
        TokenRollout(trajectory=[1, 2], reward=0, generation_mask=[True], logprobs=[0.0], env_id="e", problem_id="p")
    with pytest.raises(ValueError, match="logprobs has 1 entries for 2 generated tokens"):
        TokenRollout(trajectory=[1, 2], reward=0, generation_mask=[True, True], logprobs=[0.0], env_id="e", problem_id="p")
