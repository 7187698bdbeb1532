# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Updates, scores and a swapped reference whose layers are replayed, recorded here by a tape in place of a GPU."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mcore_parallel.graphs import CudaGraphConfig, GraphedModel, graph_modules
from mcore_rl import Learner, MemorySwitch, PackingConfig, PackingContext, TokenRollout
from tests.support.graphed_updates import SIZES, Learnt, iterate
from tests.support.tape_capture import TapeCapture

ITERATIONS, WARMUP_STEPS = 3, 2


def taped(capture: TapeCapture, *, forward_only: bool) -> Any:
    config = CudaGraphConfig(warmup_steps=WARMUP_STEPS, capture_forward_only=forward_only)

    def graphs(model: nn.Module) -> GraphedModel:
        return graph_modules(model, ["layers.*"], config, capture=capture)

    return graphs


@pytest.fixture(scope="module")
def eager() -> Learnt:
    return iterate(ITERATIONS)


def same(graphed: Learnt, wanted: Learnt) -> None:
    assert graphed.losses == wanted.losses
    for ours, eager in ((graphed.logprobs, wanted.logprobs), (graphed.weights, wanted.weights)):
        assert all(torch.equal(one, other) for one, other in zip(ours, eager, strict=True))


@pytest.mark.parametrize("forward_only", [False, True])
def test_replayed_updates_and_scores_have_the_bits_of_eager_ones(eager: Learnt, forward_only: bool) -> None:
    capture = TapeCapture()
    switch = MemorySwitch(offload_optimizer=True, suspend_engine=True)
    graphed = iterate(ITERATIONS, memory=switch, graphs=taped(capture, forward_only=forward_only))
    same(graphed, eager)
    kinds = 2 if forward_only else 1
    for report, calls in zip(graphed.reports, graphed.calls, strict=True):
        # One graph of each layer for bins of all packings; the reference's weights come where the policy's were recorded.
        assert report.graphs == kinds * SIZES.num_layers and report.replays + report.eager.total() == calls
        assert report.eager.pop("warm-up") == kinds * WARMUP_STEPS * SIZES.num_layers
        assert set(report.eager) == (set() if forward_only else {"no gradient is wanted"})
    # A forward and a backward for updates, a forward for scores; of two models.
    assert capture.recorded == 2 * (3 if forward_only else 2) * SIZES.num_layers


def test_rows_are_of_one_kind_too() -> None:
    capture = TapeCapture()
    graphed = iterate(2, packing=None, graphs=taped(capture, forward_only=False))
    same(graphed, iterate(2, packing=None))
    for report in graphed.reports:
        # Rows that all end with the last place say nothing of padding; here none do.
        assert report.graphs == SIZES.num_layers and report.eager.pop("warm-up") == WARMUP_STEPS * SIZES.num_layers
        assert set(report.eager) == {"no gradient is wanted"} and report.replays > 0


def test_layers_whose_gradients_come_back_elsewhere_are_captured_anew(eager: Learnt) -> None:
    capture, decoys = TapeCapture(), []

    def meanwhile(learner: Learner) -> None:
        """Somebody takes the memory of the gradients and keeps it."""
        assert learner.critic is not None
        buffers: list[Any] = [buffer for sync in (learner.sync, learner.critic.sync) for buffer in sync.grad_buffers]  # type: ignore[attr-defined]
        assert all(buffer.data.untyped_storage().nbytes() == 0 for buffer in buffers)
        decoys.extend(torch.full((buffer.data.numel(),), float("nan"), dtype=buffer.data.dtype) for buffer in buffers for _ in range(3))

    graphed = iterate(
        ITERATIONS, memory=MemorySwitch(release_gradients=True), graphs=taped(capture, forward_only=True), meanwhile=meanwhile
    )
    same(graphed, eager)
    assert all(decoy.isnan().all() for decoy in decoys), "what was recorded adds to gradients that are there"
    assert [report.graphs for report in graphed.reports] == [2 * SIZES.num_layers] * 2
    assert capture.recorded > 2 * 3 * SIZES.num_layers


def test_bins_that_are_full_are_of_the_kind_of_others() -> None:
    def rollout(length: int) -> TokenRollout:
        return TokenRollout(
            trajectory=[1] * length,
            reward=0.0,
            generation_mask=[False] + [True] * (length - 1),
            logprobs=[-1.0] * (length - 1),
            env_id="env",
            problem_id="problem",
        )

    packing = PackingConfig(bin_size=8, device_bounds=True)
    valid: list[Tensor | None] = [PackingContext.pack([rollout(length)], packing).batches[0].valid for length in (5, 9)]
    assert [None if part is None else int(part.sum()) for part in valid] == [4, 8]
    on_host = PackingContext.pack([rollout(9)], PackingConfig(bin_size=8)).batches[0]
    assert on_host.valid is None
