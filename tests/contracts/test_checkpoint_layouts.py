# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A run that was saved in one layout goes on in another as if nothing had happened."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_ckpt import CheckpointingException, CheckpointManager, read_tensor
from mcore_ckpt.hf import export_checkpoint_hf, import_hf
from mcore_moe import MoEConfig
from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.optim import OptimizerConfig
from mcore_parallel.training import Batch, CrossEntropyObjective, model_state, train_step
from mcore_tools.assembly import Parts, assemble
from mcore_tools.recipes import RunConfig, TrainConfig

# Three layers of this width: the border between two slices of the experts falls inside an expert, so a slice is several boxes.
CONFIG = RunConfig(
    model=TransformerConfig(
        num_layers=3, hidden_size=16, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=24, vocab_size=32, init_method_std=0.1
    ),
    moe=MoEConfig(num_moe_experts=4, moe_router_topk=2, moe_aux_loss_coeff=0.01),
    train=TrainConfig(seq_len=8, dtype="float64"),
    optimizer=OptimizerConfig(lr=1e-2, weight_decay=0.1, clip_grad=1.0),
)
TIED = dataclasses.replace(CONFIG, model=dataclasses.replace(CONFIG.model, share_embeddings_and_output_weights=True), moe=None)
SAVED = ParallelPlan(tp=2, dp=2, ep=2)


def start(plan: ParallelPlan, sliced: bool, seed: int, config: RunConfig = CONFIG) -> Parts:
    optimizer = dataclasses.replace(config.optimizer, use_distributed_optimizer=sliced)
    train = dataclasses.replace(config.train, seed=seed)
    return assemble(dataclasses.replace(config, plan=plan, optimizer=optimizer, train=train), "cpu")


def advance(parts: Parts, steps: range) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step; the same four micro-batches a step in every layout."""
    rows = []
    for step in steps:
        tokens = torch.randint(32, (4, 2, 9), generator=torch.Generator().manual_seed(step))
        mine = tokens[parts.groups.dp.rank :: parts.groups.dp.size]
        batches = [Batch(tokens=part[:, :-1], labels=part[:, 1:], loss_mask=torch.ones(2, 8, dtype=torch.float64)) for part in mine]
        report = train_step(parts.model, batches, CrossEntropyObjective(), parts.sync, parts.optimizer, lr=1e-2)
        rows.append((report.loss + report.aux, report.grad_norm))
    return rows


def check_goes_on(folder: str, targets: list[tuple[ParallelPlan, bool]], config: RunConfig = CONFIG) -> int:
    """Save after one step with the optimizer in slices; every target layout continues with the same numbers."""
    first = start(SAVED, True, seed=1, config=config)
    advance(first, range(1))
    state = first.state()
    CheckpointManager(folder).save(1, state, {"optimizer_step": first.optimizer.step_count})
    expected = advance(first, range(1, 3))
    for plan, sliced in targets:
        other = start(plan, sliced, seed=2, config=config)
        step, extra = CheckpointManager(folder).load(other.state())
        assert step == 1
        other.optimizer.load_step_count(extra["optimizer_step"])
        for ours, wanted in zip(advance(other, range(1, 3)), expected, strict=True):
            assert ours == pytest.approx(wanted, rel=1e-8), (plan, sliced)
    return sum(len(value) > 1 for value in state.values() if isinstance(value, list))


@pytest.mark.world(4)
def test_experts_with_biases_and_without_a_gate_go_on_in_every_layout(world, tmp_path: Path) -> None:
    model = dataclasses.replace(CONFIG.model, activation="gelu", add_bias_linear=True)
    targets = [
        (ParallelPlan(dp=4, ep=2, etp=2), True),
        (ParallelPlan(tp=2, dp=2, ep=1, etp=2, sequence_parallel=False), True),
        (ParallelPlan(tp=2, dp=2, ep=2, etp=1, sequence_parallel=False), False),
    ]
    world(check_goes_on, folder=str(tmp_path), targets=targets, config=dataclasses.replace(CONFIG, model=model))


@pytest.mark.journey
@pytest.mark.world(4)
def test_a_sliced_optimizer_state_goes_on_in_every_layout(world, tmp_path: Path) -> None:
    targets = [
        (SAVED, False),
        (ParallelPlan(pp=2, dp=2), True),
        (ParallelPlan(tp=2, pp=2, ep=2), True),
        (ParallelPlan(dp=4, ep=2, etp=2), True),
    ]
    parts = world(check_goes_on, folder=str(tmp_path), targets=targets)
    assert any(parts), "no rank held a tensor in several parts: the test would not show that they load"


@pytest.mark.journey
@pytest.mark.world(4)
def test_biases_of_experts_and_shared_experts_go_on_in_every_layout(world, tmp_path: Path) -> None:
    mixture = MoEConfig(
        num_moe_experts=4,
        moe_layer_freq=(0, 1, 1),
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_bias_update_rate=0.05,
        moe_shared_expert_intermediate_size=8,
        moe_shared_expert_gate=True,
    )
    balanced = dataclasses.replace(CONFIG, moe=mixture)
    targets = [
        (ParallelPlan(pp=2, dp=2), True),
        (ParallelPlan(dp=4, ep=2, etp=2), True),
        (ParallelPlan(tp=2, dp=2, ep=2, etp=1, sequence_parallel=False), False),
    ]
    world(check_goes_on, folder=str(tmp_path / "ddp"), targets=targets, config=balanced)
    # A fully sharded model holds buffers whole, and parameters in boxes.
    sharded = dataclasses.replace(balanced, data_parallel="fsdp")
    world(check_goes_on, folder=str(tmp_path / "fsdp"), targets=[(ParallelPlan(pp=2, dp=2), True), (SAVED, True)], config=sharded)
    for folder in ("ddp", "fsdp"):
        saved = read_tensor(CheckpointManager(tmp_path / folder).path(1), "layers.1.mlp.router.expert_bias")
        assert saved.dtype == torch.float32 and saved.abs().max() >= 0.05


def counted(state: dict[str, Any]) -> int:
    """Elements of the embedding and its moments that a checkpoint takes from this rank."""
    found = [part for name, value in state.items() if "embedding" in name for part in (value if isinstance(value, list) else [value])]
    return sum(part.data.numel() for part in found if part.replica == 0)


def check_tied_goes_on(folder: str) -> int:
    """A table at both ends is one table of the checkpoint, whichever layout saves and whichever goes on."""
    pipeline, wide, whole = ParallelPlan(pp=2, dp=2), ParallelPlan(tp=2, pp=2), ParallelPlan(dp=4)
    runs = [(pipeline, True, whole, False), (whole, True, pipeline, True), (wide, False, pipeline, False), (pipeline, False, wide, True)]
    elements = 0
    for number, (plan, sliced, other_plan, other_sliced) in enumerate(runs):
        first = start(plan, sliced, 1, TIED)
        advance(first, range(1))
        manager = CheckpointManager(f"{folder}/{number}")
        manager.save(1, first.state(), {"optimizer_step": first.optimizer.step_count})
        elements += counted(first.state())
        expected = advance(first, range(1, 3))
        other = start(other_plan, other_sliced, 2, TIED)
        _, extra = manager.load(other.state())
        other.optimizer.load_step_count(extra["optimizer_step"])
        for ours, wanted in zip(advance(other, range(1, 3)), expected, strict=True):
            assert ours == pytest.approx(wanted, rel=1e-8), (plan, other_plan)
    return elements


@pytest.mark.journey
@pytest.mark.world(4)
def test_a_tied_model_goes_on_in_other_stages_and_is_exported(world, tmp_path: Path) -> None:
    table = TIED.model.vocab_size * TIED.model.hidden_size
    assert sum(world(check_tied_goes_on, folder=str(tmp_path))) == 4 * 3 * table, "four checkpoints of a table and two moments"
    export_checkpoint_hf(CheckpointManager(tmp_path / "0").path(1), tmp_path / "hf", family="llama", config=dataclasses.asdict(TIED.model))
    found: dict[str, Tensor] = dict(import_hf(tmp_path / "hf").tensors)
    model = GPTModel(TIED.model, ProcessGroups.single(), dtype=torch.float64)
    CheckpointManager(tmp_path / "0").load(model_state(model, model.groups), strict=False)
    expected = model.state_dict()
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def check_fully_sharded_stages(folder: str) -> int:
    """Stages of one chunk and of two, with a table at both ends, in each other's checkpoints."""
    wide = dataclasses.replace(TIED, model=dataclasses.replace(TIED.model, num_layers=4), data_parallel="fsdp")
    elements, expected = 0, None
    for number, plan in enumerate((ParallelPlan(dp=4), ParallelPlan(pp=2, dp=2), ParallelPlan(pp=2, vpp=2, dp=2))):
        parts = start(plan, True, 1, wide)
        assert len(parts.model.chunks) == plan.vpp
        rows = advance(parts, range(1))
        CheckpointManager(f"{folder}/{number}").save(1, parts.state(), {"optimizer_step": parts.optimizer.step_count})
        elements += counted(parts.state())
        rows += advance(parts, range(1, 3))
        if expected is None:
            expected = rows
        other = start(plan, True, 2, wide)
        _, extra = CheckpointManager(f"{folder}/{max(0, number - 1)}").load(other.state())
        other.optimizer.load_step_count(extra["optimizer_step"])
        for ours, again, wanted in zip(rows[1:], advance(other, range(1, 3)), expected[1:], strict=True):
            assert ours == pytest.approx(wanted, rel=1e-8) and again == pytest.approx(wanted, rel=1e-8), plan
    return elements


@pytest.mark.journey
@pytest.mark.world(4)
def test_fully_sharded_stages_share_a_table_and_take_turns_by_chunks(world, tmp_path: Path) -> None:
    table = TIED.model.vocab_size * TIED.model.hidden_size
    assert sum(world(check_fully_sharded_stages, folder=str(tmp_path))) == 3 * 3 * table, "three checkpoints of a table and two moments"


def test_another_number_of_experts_is_refused_by_name(tmp_path: Path) -> None:
    first = start(ParallelPlan(), False, seed=1)
    CheckpointManager(str(tmp_path)).save(1, first.state(), {})
    other = dataclasses.replace(CONFIG, moe=dataclasses.replace(CONFIG.moe, num_moe_experts=8))
    with pytest.raises(CheckpointingException, match=r"mlp\.(experts|router)\."):
        CheckpointManager(str(tmp_path)).load(start(ParallelPlan(), False, seed=2, config=other).state())
