# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Which part of a student learns: its output, its heads that predict further tokens, or both; and quantised students."""

import dataclasses
import functools
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_parallel import ParallelPlan, ProcessGroups, named_shards
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.optim import MegatronOptimizer, OptimizerConfig
from mcore_parallel.training import Batch, evaluate, train_step
from mcore_parallel.training.distill import (
    DistillationConfig,
    DistillationObjective,
    LogProbStore,
    LogProbStoreConfig,
    LogProbStoreWriter,
    ModeloptMissingError,
    Teacher,
    quantize_student,
    record,
)
from tests.support.layouts import Curve, check_curve

B, S, V = 2, 6, 16
ONE = ProcessGroups.single()
SIZES: dict[str, Any] = {"hidden_size": 8, "num_attention_heads": 2, "ffn_hidden_size": 12, "vocab_size": V, "init_method_std": 0.3}
STUDENT = TransformerConfig(num_layers=2, mtp_num_layers=2, **SIZES)
PLACE: dict[str, Any] = {"dtype": torch.float64}


def batch(seed: int) -> Batch:
    tokens = torch.randint(0, V, (B, S + 1), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones(B, S, dtype=torch.float64)
    mask[1, 2] = 0.0
    return Batch(tokens=tokens[:, :-1], labels=tokens[:, 1:], loss_mask=mask)


def teach(groups: ProcessGroups) -> Teacher:
    return Teacher(GPTModel(TransformerConfig(num_layers=2, **SIZES), groups, seed=1, **PLACE))


def divergence(theirs: Tensor, mine: Tensor) -> Tensor:
    p, q = F.log_softmax(theirs, -1), F.log_softmax(mine, -1)
    return (p.exp() * (p - q)).sum(-1)


def test_heads_learn_what_the_teacher_says_further_on() -> None:
    teacher, student = teach(ONE), GPTModel(STUDENT, ONE, **PLACE)
    (given,) = teacher.label([batch(0)])
    output, _ = student(given.tokens.flatten(), given.step())
    found = {}
    for targets in ("base", "mtp", "both"):
        config = DistillationConfig(targets=targets, mtp_loss_scaling_factor=0.5)
        found[targets] = DistillationObjective(config=config, teacher=teacher)(output, given)
    theirs = teacher.output(given).logits().view(B, S, V)
    base = (divergence(theirs, output.logits().view(B, S, V)) * given.loss_mask).sum()
    heads = [
        (divergence(theirs[:, k:], depth.logits().view(B, S, V)[:, : S - k]) * given.loss_mask[:, k:]).sum()
        for k, depth in enumerate(output.depths, 1)
    ]
    torch.testing.assert_close(found["base"].sum, base)
    torch.testing.assert_close(found["mtp"].sum, 0.25 * (heads[0] + heads[1]))
    torch.testing.assert_close(found["both"].sum, base + 0.25 * (heads[0] + heads[1]))
    for k, value in enumerate(heads, 1):
        torch.testing.assert_close(found["both"].metrics[f"mtp_{k}_distillation_loss"], value.detach())
        assert found["both"].counts[f"mtp_{k}_distillation_loss"] == given.loss_mask[:, k:].sum()
    assert set(found["base"].metrics) == {"lm_loss", "logits_distillation_loss"}
    # Detached heads leave the trunk alone.
    detached = GPTModel(dataclasses.replace(STUDENT, mtp_detach=True), ONE, **PLACE)
    output, _ = detached(given.tokens.flatten(), given.step())
    DistillationObjective(config=DistillationConfig(targets="mtp"), teacher=teacher)(output, given).sum.backward()
    moved = {name.split(".")[0] for name, x in detached.named_parameters() if x.grad is not None and x.grad.abs().max() > 0}
    assert moved == {"mtp"}


def curve(groups: ProcessGroups, store: Path | None = None) -> Curve:
    teacher, student = teach(groups), GPTModel(STUDENT, groups, **PLACE)
    objective = DistillationObjective(config=DistillationConfig(targets="both"), teacher=teacher if store is None else None)
    source = teacher if store is None else LogProbStore(store)
    shards = list(named_shards(student))
    initial = {shard.name: shard.parameter.detach().numpy().copy() for shard in shards}
    sync = DistributedDataParallel(DistributedDataParallelConfig(), student, groups)
    optimizer = MegatronOptimizer(OptimizerConfig(optimizer="sgd", lr=1.0, clip_grad=0.0, weight_decay=0.0), sync, groups)
    mine = slice(groups.dp.rank, None, groups.dp.size)
    report = train_step(student, source.label([batch(0), batch(1)][mine]), objective, sync, optimizer, lr=0.2, groups=groups)
    numbers = [report.loss, report.grad_norm, *(value for _, value in sorted(report.metrics.items()))]
    numbers.append(evaluate(student, source.label([batch(2)]), objective, groups=groups).mean.item())
    trained = {shard.name: shard.parameter.detach().numpy().copy() for shard in shards}
    return Curve(numbers=numbers, initial=initial, trained=trained, slices={shard.name: shard.spec.slices(groups) for shard in shards})


@functools.cache
def serial() -> Curve:
    return curve(ONE)


def check(degrees: dict[str, Any], expected: Curve) -> None:
    check_curve(curve(ProcessGroups.build(ParallelPlan(**degrees))), expected)


@pytest.mark.world(2)
@pytest.mark.parametrize("degrees", [{"tp": 2}, {"pp": 2}, {"dp": 2}], ids=str)
def test_two_ranks_learn_as_one(world: Any, degrees: dict[str, Any]) -> None:
    world(check, degrees=degrees, expected=serial())


def test_a_store_teaches_heads_too(tmp_path: Path) -> None:
    with LogProbStoreWriter(tmp_path, LogProbStoreConfig(teacher="seed 1", seq_len=S, top_k=V)) as writer:
        record(teach(ONE), [[batch(0), batch(1), batch(2)]], writer)
    # The store holds float32.
    check_curve(curve(ONE, tmp_path), serial(), tolerance=1e-5)


def test_a_student_of_which_a_part_learns_nothing_is_trained() -> None:
    teacher, student = teach(ONE), GPTModel(STUDENT, ONE, **PLACE)
    sync = DistributedDataParallel(DistributedDataParallelConfig(), student, ONE)
    optimizer = MegatronOptimizer(OptimizerConfig(lr=1e-2, weight_decay=0.0), sync, ONE)
    before = {name: x.detach().clone() for name, x in student.named_parameters()}
    train_step(student, teacher.label([batch(0)]), DistillationObjective(teacher=teacher), sync, optimizer, lr=1e-2)
    same = {name.split(".")[0] for name, x in student.named_parameters() if torch.equal(x, before[name])}
    assert same == {"mtp"}


def test_targets_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="targets='heads' must be one of base, mtp, both"):
        DistillationConfig(targets="heads")
    with pytest.raises(ValueError, match="mtp_loss_scaling_factor=-1 must be at least 0"):
        DistillationConfig(mtp_loss_scaling_factor=-1)
    teacher, student = teach(ONE), GPTModel(dataclasses.replace(STUDENT, mtp_num_layers=0), ONE, **PLACE)
    (given,) = teacher.label([batch(0)])
    objective = DistillationObjective(config=DistillationConfig(targets="mtp"), teacher=teacher)
    with pytest.raises(ValueError, match="targets='mtp' needs heads that predict further tokens"):
        objective(student(given.tokens.flatten(), given.step())[0], given)


HAS_MODELOPT = importlib.util.find_spec("modelopt") is not None


@pytest.mark.skipif(HAS_MODELOPT, reason="nvidia-modelopt is installed")
def test_without_the_extra_its_name_is_said() -> None:
    with pytest.raises(ModeloptMissingError, match=r"pip install 'mcore-parallel\[modelopt\]'"):
        quantize_student(GPTModel(STUDENT, ONE), "FP8_DEFAULT_CFG", [batch(0)])


def quantised(groups: ProcessGroups, preset: str) -> list[float]:
    """Losses of a student with its teacher's weights, which differ by what rounding does."""
    teacher, student = (
        GPTModel(TransformerConfig(num_layers=2, **SIZES), groups, seed=1, unpadded_vocab_size=V, **PLACE) for _ in range(2)
    )
    mine = slice(groups.dp.rank, None, groups.dp.size)
    names = [shard.name for shard in named_shards(student)]
    quantize_student(student, preset, [batch(8), batch(9)][mine], groups=groups)
    assert [shard.name for shard in named_shards(student)] == names
    with pytest.raises(ValueError, match="the model is quantised already"):
        quantize_student(student, preset, [batch(8)], groups=groups)
    sync = DistributedDataParallel(DistributedDataParallelConfig(), student, groups)
    optimizer = MegatronOptimizer(OptimizerConfig(lr=1e-3, weight_decay=0.0), sync, groups)
    source, losses = Teacher(teacher), []
    objective = DistillationObjective(teacher=source)
    for _ in range(4):
        micro = source.label([batch(0), batch(1)][mine])
        losses.append(train_step(student, micro, objective, sync, optimizer, lr=1e-3, groups=groups).loss)
    return losses


def check_quantised(degrees: dict[str, Any], preset: str, expected: list[float]) -> None:
    torch.testing.assert_close(quantised(ProcessGroups.build(ParallelPlan(**degrees)), preset), expected, rtol=1e-8, atol=1e-10)


@pytest.mark.skipif(not HAS_MODELOPT, reason="needs nvidia-modelopt")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.world(2)
@pytest.mark.parametrize("preset", ["FP8_DEFAULT_CFG", "INT8_DEFAULT_CFG"])
def test_a_quantised_student_learns_the_same_in_every_layout(world: Any, preset: str) -> None:
    expected = quantised(ONE, preset)
    assert expected[0] > 0
    for degrees in ({"tp": 2}, {"tp": 2, "sequence_parallel": False}, {"dp": 2}, {"pp": 2}):
        # The library takes its time to be imported.
        world(check_quantised, timeout_s=140.0, degrees=degrees, preset=preset, expected=expected)
    with pytest.raises(ValueError, match="config='FP9' is no preset of nvidia-modelopt; choose one of "):
        quantize_student(GPTModel(STUDENT, ONE, **PLACE), "FP9", [batch(0)])
