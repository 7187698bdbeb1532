# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""RL whose layers run from CUDA graphs learns what it learns without, while trainer and engine take turns and a reference is swapped in."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mcore_parallel.graphs import CudaGraphConfig, GraphedModel, graph_modules
from mcore_rl import Learner, MemorySwitch
from mcore_tools import reinforce
from tests.support.countdown import PACE, QUIET, SIZES, countdown_words, rows
from tests.support.graphed_updates import SIZES as MODEL
from tests.support.graphed_updates import Learnt, iterate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # Of torch's compiler, about itself.
    pytest.mark.filterwarnings("default"),
]
ITERATIONS, WARMUP_STEPS = 4, 3
TURNS = MemorySwitch(offload_optimizer=True, suspend_engine=True)


def graphs(forward_only: bool) -> Callable[[nn.Module], GraphedModel]:
    config = CudaGraphConfig(warmup_steps=WARMUP_STEPS, capture_forward_only=forward_only)

    def build(model: nn.Module) -> GraphedModel:
        return graph_modules(model, ["layers.*"], config)

    return build


def on_gpu(**options: Any) -> Learnt:
    return iterate(ITERATIONS, device="cuda", dtype=torch.bfloat16, **options)


@pytest.fixture(scope="module")
def eager() -> tuple[Learnt, bool]:
    """Without graphs, and whether it gives the same bits again."""
    first, second = on_gpu(), on_gpu()
    same = first.losses == second.losses and all(torch.equal(a, b) for a, b in zip(first.weights, second.weights, strict=True))
    return first, same


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten().double() for tensor in tensors])


def check(graphed: Learnt, eager: tuple[Learnt, bool]) -> None:
    """The bits of an eager run where that has them each time; else as near as roundings of bfloat16 leave it."""
    wanted, repeats = eager
    if repeats:
        assert graphed.losses == wanted.losses
        assert torch.equal(flat(graphed.logprobs), flat(wanted.logprobs)) and torch.equal(flat(graphed.weights), flat(wanted.weights))
        return
    assert graphed.losses == pytest.approx(wanted.losses, rel=0.05, abs=0.02)
    assert (flat(graphed.logprobs) - flat(wanted.logprobs)).abs().max() < 0.05
    # An update moves a weight by 1e-3 at most, and each of them is updated 16 times.
    assert ((flat(graphed.weights) - flat(wanted.weights)).abs() > 4e-3).double().mean() < 0.01


@pytest.mark.parametrize("forward_only", [False, True])
def test_updates_and_scores_from_graphs_are_those_without(eager: tuple[Learnt, bool], forward_only: bool) -> None:
    graphed = on_gpu(memory=TURNS, graphs=graphs(forward_only))
    check(graphed, eager)
    kinds = 2 if forward_only else 1
    for report, calls in zip(graphed.reports, graphed.calls, strict=True):
        # Of each layer one for all bins, kept over the iterations.
        assert report.graphs == kinds * MODEL.num_layers and report.memory_bytes > 0
        assert report.eager["warm-up"] == kinds * WARMUP_STEPS * MODEL.num_layers
        assert set(report.eager) == ({"warm-up"} if forward_only else {"warm-up", "no gradient is wanted"})
        assert report.replays == calls - report.eager.total() > 0


def test_gradients_that_come_back_elsewhere_are_added_to_where_they_are(eager: tuple[Learnt, bool]) -> None:
    decoys: list[Tensor] = []
    places: list[list[int]] = []

    def meanwhile(learner: Learner) -> None:
        """Somebody takes the memory of the gradients and keeps it."""
        assert learner.critic is not None
        buffers = [buffer.data for sync in (learner.sync, learner.critic.sync) for buffer in sync.grad_buffers]  # type: ignore[attr-defined]
        decoys.extend(torch.full((len(buffer),), float("nan"), dtype=buffer.dtype, device="cuda") for buffer in buffers for _ in range(2))
        places.append([decoy.data_ptr() for decoy in decoys])

    graphed = on_gpu(memory=MemorySwitch(offload_optimizer=True, release_gradients=True), graphs=graphs(True), meanwhile=meanwhile)
    check(graphed, eager)
    assert all(decoy.isnan().all() for decoy in decoys) and len(places) == ITERATIONS
    assert [report.graphs for report in graphed.reports] == [2 * MODEL.num_layers] * 2


def test_a_run_of_mcore_rl_replays_policy_critic_and_reference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = (
        *(*SIZES, *PACE, *QUIET, "model.attention_backend=reference", "train.steps=4", "rl.imitation_steps=3", "train.eval_interval=4"),
        *("rl.packing.bin_size=48", "rl.packing.max_sequences_per_bin=8", "rl.packing.device_bounds=true", "rl.kl_beta=0.05"),
        *("rl.gae.lam=0.95", "rl.critic.lr=1e-3", "rl.ref_model_sync_steps=2", "rl.generation_args.max_tokens=6", "rl.cache_gb=0.1"),
        *("rl.memory.offload_optimizer=true", "rl.memory.suspend_engine=true", "rl.num_epochs=2"),
        *("cuda_graphs=[layers.*]", "cuda_graph.capture_forward_only=true", "cuda_graph.warmup_steps=1", f"output={tmp_path / 'run'}"),
    )
    assert reinforce.main(countdown_words(*changes)) == 0
    remarks = re.findall(r"cuda graphs: (\d+) captured, (\d+) replays, \d+ MiB; eager calls: (.*)", capsys.readouterr().out)
    # Bins of updates and bins of scores are held; rows of imitation were warmed up, too, and the critic imitates nothing.
    assert [(int(captured), eager) for captured, _, eager in remarks] == [(2, "3 warm-up"), (2, "2 warm-up")]
    assert all(int(replays) > 20 for _, replays, _ in remarks)
    # The engine has the weights of each iteration by a refit: graphs that read older ones would be far from it.
    for row in rows(tmp_path / "run"):
        assert row["logprob_mismatch"] < 1e-2 and row["kl"] >= -1e-6 and row["packing_efficiency"] > 0
