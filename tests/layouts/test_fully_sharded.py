# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A fully sharded run evaluates, divides its memory, and shares its checkpoints with every other layout."""

import dataclasses
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from mcore_ckpt import CheckpointManager
from mcore_parallel import ParallelPlan
from mcore_parallel.training import CrossEntropyObjective, evaluate
from mcore_tools.assembly import Parts, assemble
from mcore_tools.recipes import FSDPConfig, RecipeError, override
from tests.layouts.test_one_curve import CONFIG, serial, step_batches, trained
from tests.support.world import run

LAYOUTS = {
    "one": (ParallelPlan(), "ddp"),
    "dp2": (ParallelPlan(dp=2), "ddp"),
    "ep2": (ParallelPlan(dp=2, ep=2), "ddp"),
    "fsdp2": (ParallelPlan(dp=2), "fsdp"),
    "fsdp4": (ParallelPlan(dp=4), "fsdp"),
    "tp2-fsdp2": (ParallelPlan(tp=2, etp=2, dp=2), "fsdp"),
    "pp2-fsdp2": (ParallelPlan(pp=2, dp=2), "fsdp"),
    "ep2-fsdp4": (ParallelPlan(dp=4, ep=2), "fsdp"),
}


def parts_of(layout: str, **train: Any) -> Parts:
    plan, data_parallel = LAYOUTS[layout]
    return assemble(
        dataclasses.replace(CONFIG, plan=plan, data_parallel=data_parallel, train=dataclasses.replace(CONFIG.train, **train)), "cpu"
    )


def validation(parts: Parts) -> float:
    [batches] = islice(step_batches(parts.groups), 1)
    return evaluate(parts.model, batches, CrossEntropyObjective(), groups=parts.groups).mean.item()


def evaluated_steps(layout: str) -> list[tuple[float, ...]]:
    """Loss and norm of each step, and the validation loss after it."""
    parts = parts_of(layout)
    return [(*trained(parts, batches), validation(parts)) for batches in islice(step_batches(parts.groups), 4)]


@pytest.mark.journey
@pytest.mark.parametrize("layout", ["fsdp2", "pp2-fsdp2"])
def test_evaluation_between_steps_gives_the_losses_of_one_rank(layout: str) -> None:
    [expected] = run(evaluated_steps, 1, layout="one")
    assert [row[:2] for row in expected] == serial()[:4]
    for rows in run(evaluated_steps, LAYOUTS[layout][0].world_size, layout=layout):
        for ours, theirs in zip(rows, expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-8)


def test_experts_are_sharded_in_a_process_without_a_world_too() -> None:
    assert CONFIG.moe is not None and not dist.is_initialized()
    alike = dataclasses.replace(CONFIG, plan=ParallelPlan())
    rows = []
    for data_parallel in ("ddp", "fsdp"):
        parts = assemble(dataclasses.replace(alike, data_parallel=data_parallel), "cpu")
        rows.append([trained(parts, batches) for batches in islice(step_batches(parts.groups), 2)])
    for ours, theirs in zip(*rows, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-8)


def buffered_steps() -> list[tuple[float, float]]:
    """Losses and norms where every second layer has experts, gathered into two buffers."""
    assert CONFIG.moe is not None
    moe, buffered = dataclasses.replace(CONFIG.moe, moe_layer_freq=2), FSDPConfig(fsdp_double_buffer=True)
    plan, data_parallel = LAYOUTS["fsdp2" if dist.get_world_size() == 2 else "one"]
    config = dataclasses.replace(CONFIG, moe=moe, plan=plan, data_parallel=data_parallel)
    parts = assemble(config if plan.dp == 1 else dataclasses.replace(config, fsdp=buffered), "cpu")
    return [trained(parts, batches) for batches in islice(step_batches(parts.groups), 4)]


def test_two_buffers_hold_layers_that_differ() -> None:
    [expected] = run(buffered_steps, 1)
    for rows in run(buffered_steps, 2):
        for ours, theirs in zip(rows, expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-8)


def saved(layout: str, folder: str, dtype: str = "float64") -> list[tuple[float, float]]:
    """Saves after two of four steps; the numbers of the other two."""
    parts, rows = parts_of(layout, dtype=dtype), []
    for step, batches in enumerate(islice(step_batches(parts.groups), 4)):
        if step == 2:
            CheckpointManager(folder).save(2, parts.state(), {"steps": parts.optimizer.step_count})
        rows.append(trained(parts, batches))
    return rows[2:]


def resumed(layout: str, folder: str, dtype: str = "float64") -> list[tuple[float, float]]:
    parts = parts_of(layout, dtype=dtype, seed=CONFIG.train.seed + 1)
    _, extra = CheckpointManager(folder).load(parts.state())
    parts.optimizer.load_step_count(extra["steps"])
    return [trained(parts, batches) for batches in islice(step_batches(parts.groups), 2, 4)]


@pytest.mark.journey
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("fsdp2", "one"),
        ("one", "fsdp2"),
        ("fsdp2", "fsdp4"),
        ("tp2-fsdp2", "ep2"),
        ("ep2", "tp2-fsdp2"),
        ("pp2-fsdp2", "fsdp2"),
        ("ep2-fsdp4", "fsdp2"),
    ],
)
def test_a_checkpoint_continues_in_another_layout(before: str, after: str, tmp_path: Path) -> None:
    run(saved, LAYOUTS[before][0].world_size, layout=before, folder=str(tmp_path))
    for rows in run(resumed, LAYOUTS[after][0].world_size, layout=after, folder=str(tmp_path)):
        for ours, theirs in zip(rows, serial()[2:4], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-8)


@pytest.mark.journey
@pytest.mark.parametrize(("before", "after"), [("fsdp2", "dp2"), ("dp2", "fsdp2")])
def test_a_checkpoint_in_bfloat16_continues_with_its_masters(before: str, after: str, tmp_path: Path) -> None:
    expected = run(saved, 2, layout=before, folder=str(tmp_path), dtype="bfloat16")
    for rows, wanted in zip(run(resumed, 2, layout=after, folder=str(tmp_path), dtype="bfloat16"), expected, strict=True):
        for ours, theirs in zip(rows, wanted, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-6)


def held(layout: str) -> tuple[int, int]:
    """Elements of parameters and optimizer state on this rank between two steps, and how many of them a checkpoint takes from it."""
    parts = parts_of(layout)
    [batches] = islice(step_batches(parts.groups), 1)
    trained(parts, batches)
    boxes = [box for value in parts.state().values() for box in (value if isinstance(value, list) else [value])]
    return sum(box.data.numel() for box in boxes), sum(box.data.numel() for box in boxes if box.replica == 0)


@pytest.mark.parametrize("layout", ["fsdp2", pytest.param("ep2-fsdp4", marks=pytest.mark.journey), "tp2-fsdp2", "pp2-fsdp2"])
def test_ranks_hold_shares_of_parameters_and_state(layout: str) -> None:
    [(whole, _)] = run(held, 1, layout="one")
    ranks = LAYOUTS[layout][0].world_size
    shares = run(held, ranks, layout=layout)
    assert sum(counted for _, counted in shares) == whole
    # Stages differ in size, and every tp rank has the norms and routers.
    assert max(elements for elements, _ in shares) < 1.25 * whole / ranks


@pytest.mark.parametrize(
    ("assignments", "message"),
    [
        (["data_parallel=zero"], "data_parallel='zero' must be one of ddp, fsdp"),
        (["pipeline.schedule=zero_bubble", "data_parallel=fsdp"], "pipeline.schedule='zero_bubble'"),
        (["optimizer.optimizer=muon", "data_parallel=fsdp"], "cannot step with optimizer='muon'"),
    ],
)
def test_combinations_that_do_not_work_are_refused_by_name(assignments: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        override(CONFIG, assignments)
