# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Judged trajectories in micro-batches, and where each of them is."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import torch
from torch import Tensor

from mcore_parallel.training import Batch, real_tokens
from mcore_rl._aggregation import Aggregation
from mcore_rl._stability import experimental_api
from mcore_rl._types import TokenRollout, as_array


@experimental_api
@dataclass(frozen=True, kw_only=True)
class BatchStyle:
    """What is written into micro-batches beside the tokens, and where they are."""

    pad_id: int = 0
    """Token of empty places."""
    aggregation: Aggregation = field(default_factory=Aggregation)
    """How much each token counts."""
    mask_truncated: bool = False
    """Answers that the token limit ended count nothing."""
    device: torch.device | str = "cpu"
    dtype: torch.dtype = torch.float32
    """Of masks, advantages and log-probabilities."""

    def num_counted(self, rollout: TokenRollout) -> int:
        """Tokens of a rollout that count."""
        return 0 if self.mask_truncated and rollout.finish_reason == "length" else sum(rollout.generation_mask[1:])


@dataclass(frozen=True)
class Place:
    """Where a trajectory is: position t predicts its token t + 1."""

    batch: int
    start: int
    """In the B * S places of the batch."""
    num_labels: int
    """One less than it has tokens, without those of places that it shares."""
    room: int
    """Places that no other trajectory has."""
    shared_start: int = 0
    """Where the places are that it shares with others, in the same batch."""
    num_shared: int = 0
    """Its first labels, which lie there; ``num_labels`` are those behind them."""


@experimental_api
@dataclass(frozen=True, kw_only=True)
class TrajectoryBatches:
    """Micro-batches, and the place of each trajectory in them.

    Masks, advantages and log-probabilities sit one place to the left of the tokens they belong to. Only tokens the policy wrote count.
    Recorded routing sits at its tokens, and the forward replays it.
    """

    batches: list[Batch]
    places: list[Place]
    """One a rollout, in their order; of a `PackingContext` in the order of its ``rollouts``."""

    def with_advantages(self, advantages: Sequence[float]) -> Self:
        """With one advantage a rollout, at each of its tokens that counts.

        Args:
            advantages: in the order of ``places``, which packing changes: of a `PackingContext` those of its ``rollouts``.

        Raises:
            ValueError: lists of different lengths.
        """
        if len(advantages) != len(self.places):
            raise ValueError(f"{len(self.places)} rollouts come with {len(advantages)} advantages")
        weights = [torch.zeros_like(batch.loss_mask) for batch in self.batches]
        for place, advantage in zip(self.places, advantages, strict=True):
            weights[place.batch].view(-1)[place.start : place.start + place.num_labels] = advantage
        counted = [weight * (batch.loss_mask != 0) for weight, batch in zip(weights, self.batches, strict=True)]
        return self.with_extra("advantages", counted)

    def with_extra(self, name: str, values: Sequence[Tensor]) -> Self:
        """With a tensor [B, S] a micro-batch in the extras."""
        batches = [
            dataclasses.replace(batch, extras={**batch.extras, name: value}) for batch, value in zip(self.batches, values, strict=True)
        ]
        return dataclasses.replace(self, batches=batches)

    def on(self, device: torch.device | str) -> Self:
        """With all tensors on a device."""
        return dataclasses.replace(self, batches=on_device(self.batches, device))

    def of_rollouts(self, values: Sequence[Tensor]) -> list[Tensor]:
        """From a tensor [B, S] a micro-batch, the values of each rollout's tokens but the first."""
        return [_of_place(values[place.batch].flatten(), place) for place in self.places]


def _of_place(values: Tensor, place: Place) -> Tensor:
    own = values[place.start : place.start + place.num_labels]
    return torch.cat((values[place.shared_start : place.shared_start + place.num_shared], own)) if place.num_shared else own


def write_batches(
    rollouts: Sequence[TokenRollout],
    places: Sequence[Place],
    shape: tuple[int, int, int],
    style: BatchStyle,
    packed: Sequence[tuple[Tensor, Tensor | None]] | None = None,
) -> list[Batch]:
    """Micro-batches with rollouts at their places; advantages are zero.

    Args:
        rollouts: judged trajectories.
        places: one each.
        shape: number of micro-batches, B and S of each.
        style: masks and devices.
        packed: ``cu_seqlens`` and ``prefixes`` of each micro-batch; None for rows.
    """
    count, B, S = shape
    # Arrays of the host, because a slice of a tensor takes several times as long; numbers are rounded to their dtype at the end.
    tokens, labels = (np.full((count, B * S), style.pad_id, dtype=np.int64) for _ in range(2))
    weights, factors, drawn = (np.zeros((count, B * S)) for _ in range(3))
    filled = np.zeros((count, B * S), dtype=np.bool_)
    for rollout, place in zip(rollouts, places, strict=True):
        trajectory = np.asarray(as_array(rollout.trajectory, "q"))
        written = np.asarray(as_array(rollout.generation_mask, "b"))[1:] != 0
        batch, own = place.batch, slice(place.start, place.start + place.num_labels)
        if shared := place.num_shared:
            span = slice(place.shared_start, place.shared_start + shared)
            tokens[batch, span], labels[batch, span] = trajectory[:shared], trajectory[1 : shared + 1]
            filled[batch, span] = True
            trajectory, written = trajectory[shared:], written[shared:]
        row = trajectory[: place.room]
        tokens[batch, place.start : place.start + len(row)] = row
        labels[batch, own] = trajectory[1:]
        filled[batch, own] = True
        logprobs = (math.nan,) * sum(rollout.generation_mask) if rollout.logprobs is None else rollout.logprobs
        drawn[batch, own][written] = np.asarray(as_array(logprobs, "d"))[int(rollout.generation_mask[0]) :]
        if num_counted := style.num_counted(rollout):
            weights[batch, own], factors[batch, own] = (written * value for value in style.aggregation.weights(num_counted))
    tokens, labels, real = (torch.from_numpy(values) for values in (tokens, labels, filled))
    mask, factors, logprobs = (torch.from_numpy(values).to(style.dtype) for values in (weights, factors, drawn))
    # What stands behind the last token that counts reaches no loss, and takes no expert's time.
    valid = real_tokens(mask.view(-1, S)) if packed is None else None if bool(real.all()) else real
    valid = None if valid is None else valid.view(count, B * S)
    extras = {"advantages": torch.zeros_like(mask), "inference_logprobs": logprobs, "loss_factors": factors}
    if (routed := _routed_experts(rollouts, places, (count, B * S))) is not None:
        extras["routed_experts"] = routed

    def parts(values: Tensor) -> list[Tensor]:
        # One copy of all micro-batches: many small ones would each wait for what else is on its way to the device.
        return list(values.to(style.device).view(count, B, S, *values.shape[2:]).unbind(0))

    token_parts, label_parts, mask_parts = parts(tokens), parts(labels), parts(mask)
    parted = {name: parts(values) for name, values in extras.items()}
    valid_parts = None if valid is None else parts(valid)
    return [
        Batch(
            tokens=token_parts[i],
            labels=label_parts[i],
            loss_mask=mask_parts[i],
            cu_seqlens=None if packed is None else packed[i][0],
            prefixes=None if packed is None else packed[i][1],
            valid=None if valid_parts is None else valid_parts[i],
            extras={name: values[i] for name, values in parted.items()},
        )
        for i in range(count)
    ]


def on_device(batches: Sequence[Batch], device: torch.device | str) -> list[Batch]:
    """Micro-batches of ``write_batches`` with their tensors on a device, in one copy a field; bounds of sequences stay on the host, but for
    those of ``Batch.with_device_bounds``."""
    if not batches:
        return []

    def parts(values: Sequence[Tensor]) -> list[Tensor]:
        return list(torch.stack(list(values)).to(device).unbind(0))

    first, names = batches[0], ["tokens", "labels", "loss_mask", "positions", "valid"]
    names += [] if first.max_seqlen is None else ["cu_seqlens"]
    fields = {name: parts([getattr(batch, name) for batch in batches]) for name in names if getattr(first, name) is not None}
    extras = {name: parts([batch.extras[name] for batch in batches]) for name in first.extras}
    return [
        dataclasses.replace(
            batch, **{name: values[i] for name, values in fields.items()}, extras={name: values[i] for name, values in extras.items()}
        )
        for i, batch in enumerate(batches)
    ]


def _routed_experts(rollouts: Sequence[TokenRollout], places: Sequence[Place], shape: tuple[int, int]) -> Tensor | None:
    """[batches, B * S, L, K], -1 for tokens that are routed afresh; None where nothing was recorded.

    A token of a shared prompt goes where the first of its answers that recorded it went.

    Raises:
        ValueError: recorded by models of several shapes.
    """
    sizes = {tuple(rollout.routed_experts.shape[1:]) for rollout in rollouts if rollout.routed_experts is not None}
    if not sizes:
        return None
    if len(sizes) > 1:
        raise ValueError(f"routed_experts of the rollouts have [layers, experts a token] of {sorted(sizes)}; record them with one model")
    routed = torch.full((*shape, *sizes.pop()), -1, dtype=torch.int16)
    for rollout, place in zip(rollouts, places, strict=True):
        if rollout.routed_experts is not None:
            routed[place.batch, place.start : place.start + place.num_labels] = rollout.routed_experts[place.num_shared :]
            shared = routed[place.batch, place.shared_start : place.shared_start + place.num_shared]
            missing = (shared < 0).flatten(1).any(1)
            shared[missing] = rollout.routed_experts[: place.num_shared][missing].to(routed.dtype)
    return routed


def routed_afresh(batches: Sequence[Batch]) -> list[Batch]:
    """The batches for a model other than the policy, which has a routing of its own."""
    return [
        dataclasses.replace(batch, extras={name: value for name, value in batch.extras.items() if name != "routed_experts"})
        for batch in batches
    ]


def place_rows(
    rollouts: Sequence[TokenRollout], seq_len: int, micro_batch_size: int, num_rows: int = 0
) -> tuple[list[Place], tuple[int, int, int]]:
    """One row a rollout; the last micro-batch is filled with empty rows.

    Args:
        rollouts: trajectories.
        seq_len: S, positions of a row; trajectories may hold up to S + 1 tokens.
        micro_batch_size: rows of a batch.
        num_rows: at least so many rows, so that all data ranks have as many batches.

    Returns:
        places, and the shape of the micro-batches.

    Raises:
        ValueError: a trajectory that is too long.
    """
    for rollout in rollouts:
        if (length := len(rollout.trajectory)) > seq_len + 1:
            raise ValueError(
                f"trajectory of {rollout.problem_id} has {length} tokens, seq_len={seq_len} admits {seq_len + 1}; raise seq_len"
            )
    places = [
        Place(row // micro_batch_size, row % micro_batch_size * seq_len, max(0, len(rollout.trajectory) - 1), seq_len)
        for row, rollout in enumerate(rollouts)
    ]
    return places, (-(-max(len(rollouts), num_rows) // micro_batch_size), micro_batch_size, seq_len)


@experimental_api
def rollout_batches(
    rollouts: Sequence[TokenRollout],
    advantages: Sequence[float],
    *,
    seq_len: int,
    micro_batch_size: int,
    num_rows: int = 0,
    style: BatchStyle | None = None,
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
        style: how tokens count, the token of empty places, the device; None for the defaults.

    Raises:
        ValueError: a trajectory that is too long, or lists of different lengths.
    """
    places, shape = place_rows(rollouts, seq_len, micro_batch_size, num_rows)
    written = TrajectoryBatches(batches=write_batches(rollouts, places, shape, style or BatchStyle()), places=places)
    return written.with_advantages(advantages).batches
