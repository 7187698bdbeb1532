# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Judged trajectories as training batches."""

from collections.abc import Sequence

import torch

from mcore_parallel.training import Batch, real_tokens
from mcore_rl._types import TokenRollout


def rollout_batches(
    rollouts: Sequence[TokenRollout],
    advantages: Sequence[float],
    *,
    seq_len: int,
    micro_batch_size: int,
    num_rows: int = 0,
    pad_id: int = 0,
    device: torch.device | str = "cpu",
) -> list[Batch]:
    """Right-padded micro-batches of ``micro_batch_size`` trajectories; the last is filled with empty rows.

    Position s of a row predicts token s + 1, so masks, advantages and log-probabilities sit one place to the left of
    the tokens they belong to. Only tokens the policy wrote count.

    Args:
        rollouts: judged trajectories.
        advantages: one a rollout.
        seq_len: S, positions of a row; trajectories may hold up to S + 1 tokens.
        micro_batch_size: rows of a batch.
        num_rows: at least so many rows, so that all data ranks have as many batches.
        pad_id: token of empty places.
        device: of the batches.

    Raises:
        ValueError: a trajectory that is too long, or lists of different lengths.
    """
    if len(rollouts) != len(advantages):
        raise ValueError(f"{len(rollouts)} rollouts come with {len(advantages)} advantages")
    rows = -(-max(len(rollouts), num_rows) // micro_batch_size) * micro_batch_size
    tokens = torch.full((rows, seq_len + 1), pad_id, dtype=torch.int64)
    mask, weight, logprobs = (torch.zeros(rows, seq_len) for _ in range(3))
    for row, (rollout, advantage) in enumerate(zip(rollouts, advantages, strict=True)):
        length = len(rollout.trajectory)
        if length > seq_len + 1:
            raise ValueError(
                f"trajectory of {rollout.problem_id} has {length} tokens, seq_len={seq_len} admits {seq_len + 1}; raise seq_len"
            )
        tokens[row, :length] = torch.tensor(rollout.trajectory)
        written = torch.tensor(rollout.generation_mask)[1:]
        mask[row, : length - 1] = written.float()
        weight[row, : length - 1] = written * advantage
        logprobs[row, : length - 1][written] = torch.tensor(rollout.logprobs[int(rollout.generation_mask[0]) :])
    extras = {"advantages": weight, "inference_logprobs": logprobs}
    # What stands behind the last token that counts reaches no loss, and takes no expert's time.
    valid = real_tokens(mask)
    return [
        Batch(
            tokens=tokens[i : i + micro_batch_size, :-1].to(device),
            labels=tokens[i : i + micro_batch_size, 1:].to(device),
            loss_mask=mask[i : i + micro_batch_size].to(device),
            valid=None if valid is None else valid[i : i + micro_batch_size].to(device),
            extras={name: value[i : i + micro_batch_size].to(device) for name, value in extras.items()},
        )
        for i in range(0, rows, micro_batch_size)
    ]
