# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A student learns the same in every layout, from a teacher that runs or from its log-probabilities on disk."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mcore_parallel import ParallelPlan, ProcessGroups, named_shards
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.models import GPTModel, TransformerConfig, hybrid_config, place_layers
from mcore_parallel.nn import MambaConfig, RecomputeConfig
from mcore_parallel.optim import MegatronOptimizer, OptimizerConfig
from mcore_parallel.pipeline import ModelChunks, PipelineConfig
from mcore_parallel.training import Batch, evaluate, train_step
from mcore_parallel.training.distill import (
    DistillationConfig,
    DistillationObjective,
    HiddenCapture,
    HiddenPair,
    HiddenProjection,
    LogProbStore,
    LogProbStoreConfig,
    LogProbStoreError,
    LogProbStoreWriter,
    RatioBalancer,
    Teacher,
    record,
    writes,
)
from tests.support.layouts import Curve, check_curve

B, S, V = 2, 8, 16
STUDENT = TransformerConfig(num_layers=4, hidden_size=8, num_attention_heads=2, ffn_hidden_size=12, vocab_size=V, init_method_std=0.3)
HYBRID = "M*-M-*M-"
SIZES: dict[str, Any] = {"hidden_size": 12, "num_attention_heads": 2, "ffn_hidden_size": 16, "vocab_size": V, "init_method_std": 0.3}
MAMBA = MambaConfig(head_dim=4, num_groups=2, state_dim=3, chunk_size=4)
LOSSES = DistillationConfig(
    temperature=1.5,
    pairs=(HiddenPair(student="layers.3", teacher="layers.7"), HiddenPair(student="final_norm", teacher="layers.7", loss="mse")),
)


def batch(seed: int) -> Batch:
    tokens = torch.randint(0, V, (B, S + 1), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones(B, S, dtype=torch.float64)
    mask[0, 2 : 2 + seed] = 0.0
    return Batch(tokens=tokens[:, :-1], labels=tokens[:, 1:], loss_mask=mask)


def build_teacher(groups: ProcessGroups) -> ModelChunks:
    """States, attention and feed-forwards, as many segments as there are virtual stages."""
    length = len(HYBRID) // (groups.pp.size * groups.plan.vpp)
    pattern = "|".join(HYBRID[first : first + length] for first in range(0, len(HYBRID), length))
    return build(hybrid_config(pattern, mamba=MAMBA, **SIZES), groups, seed=1)


def build(config: TransformerConfig, groups: ProcessGroups, seed: int, **options: Any) -> ModelChunks:
    layout = place_layers(config, PipelineConfig(), num_stages=groups.pp.size, num_chunks=groups.plan.vpp)
    parts = layout.of_rank(groups.pp.rank)
    return ModelChunks([GPTModel(config, groups, layers=part, dtype=torch.float64, seed=seed, **options) for part in parts])


def curve(groups: ProcessGroups, store: Path | None = None, *, schedule: str = "auto", **options: Any) -> Curve:
    """Two steps of gradient descent; with a store, from its log-probabilities. Options go to the student."""
    losses = LOSSES if store is None else DistillationConfig(temperature=1.5)
    teacher = Teacher(build_teacher(groups), capture=LOSSES.teacher_modules)
    source = teacher if store is None else LogProbStore(store, temperature=1.5)
    model, projection = build(STUDENT, groups, seed=0, **options), None
    if store is None and groups.pp.is_last:
        projection = HiddenProjection(8, 12, groups, dtype=torch.float64)
        model.add_module("distill_projection", projection)
    shards = list(named_shards(model))
    initial = {shard.name: shard.parameter.detach().numpy().copy() for shard in shards}
    sync = DistributedDataParallel(DistributedDataParallelConfig(), model, groups)
    optimizer = MegatronOptimizer(OptimizerConfig(optimizer="sgd", lr=1.0, clip_grad=0.0, weight_decay=0.0), sync, groups)
    pipeline = PipelineConfig(schedule=schedule).build(groups.plan.vpp)
    mine, numbers = slice(groups.dp.rank, None, groups.dp.size), []
    with HiddenCapture(model, losses.student_modules) as capture:
        objective = DistillationObjective(
            config=losses,
            teacher=teacher if store is None else None,
            capture=capture,
            projection=projection,
            balancer=RatioBalancer(skip_lm_loss=False, kd_loss_scale=2.0),
        )
        for step in range(2):
            micro = source.label([batch(4 * step + i) for i in range(2)][mine])
            report = train_step(model, micro, objective, sync, optimizer, lr=0.2, groups=groups, pipeline=pipeline)
            numbers += [report.loss, report.grad_norm, *(value for _, value in sorted(report.metrics.items()))]
        numbers.append(evaluate(model, source.label([batch(i) for i in range(2)][mine]), objective, groups=groups).mean.item())
    assert not any(module._forward_hooks for module in model.modules())
    trained = {shard.name: shard.parameter.detach().numpy().copy() for shard in shards}
    assert all(parameter.grad is None for chunk in teacher.chunks for parameter in chunk.parameters())
    return Curve(numbers=numbers, initial=initial, trained=trained, slices={shard.name: shard.spec.slices(groups) for shard in shards})


@functools.cache
def serial() -> Curve:
    return curve(ProcessGroups.single())


def check(degrees: dict[str, Any], expected: Curve, store: Path, offline: Curve, written: Path) -> None:
    groups = ProcessGroups.build(ParallelPlan(**degrees))
    check_curve(curve(groups), expected)
    check_curve(curve(groups, store), offline)
    if groups.pp.size > groups.plan.vpp:
        check_curve(curve(groups, schedule="zero_bubble"), expected)
    if groups.cp.size == 1:
        assert fill(groups, written) == 8 // groups.dp.size


@pytest.mark.world(2)
@pytest.mark.parametrize(
    "degrees",
    [
        pytest.param({"tp": 2}, marks=pytest.mark.journey),
        pytest.param({"tp": 2, "sequence_parallel": False}, marks=pytest.mark.journey),
        {"cp": 2},
        {"dp": 2},
        {"pp": 2},
        {"pp": 2, "vpp": 2},
    ],
    ids=str,
)
def test_two_ranks_learn_and_write_as_one(world: Any, tmp_path: Path, degrees: dict[str, Any]) -> None:
    fill(ProcessGroups.single(), tmp_path / "one")
    offline = curve(ProcessGroups.single(), tmp_path / "one")
    world(check, degrees=degrees, expected=serial(), store=tmp_path / "one", offline=offline, written=tmp_path / "two")
    if "cp" in degrees:
        return
    for one, two in zip(values(tmp_path / "one"), values(tmp_path / "two"), strict=True):
        torch.testing.assert_close(one.extras["teacher_log_probs"], two.extras["teacher_log_probs"])
        assert torch.equal(one.extras["teacher_token_ids"], two.extras["teacher_token_ids"])


def test_layers_that_run_again_are_captured_all_the_same() -> None:
    recompute = RecomputeConfig(granularity="full", method="uniform", num_layers=1)
    check_curve(curve(ProcessGroups.single(), recompute=recompute), serial(), tolerance=1e-14)


def test_the_projection_is_trained_and_kept_and_the_teacher_is_not() -> None:
    found = serial()
    assert not np.array_equal(found.trained["distill_projection.weight"], found.initial["distill_projection.weight"])
    layers = {name.split(".")[1] for name in found.trained if name.startswith("layers.")}
    assert layers == {"0", "1", "2", "3"}


def settings(**changes: Any) -> LogProbStoreConfig:
    return LogProbStoreConfig(**{"teacher": "seed 1", "seq_len": S, "top_k": V, "temperature": 1.5, **changes})


def fill(groups: ProcessGroups, folder: Path) -> int:
    teacher = Teacher(build_teacher(groups))
    writer = LogProbStoreWriter(folder, settings(), name=str(groups.dp.rank), shard_samples=5) if writes(teacher) else None
    steps = [[batch(4 * step + i) for i in range(4)][groups.dp.rank :: groups.dp.size] for step in range(2)]
    count = record(teacher, steps, writer)
    if writer is not None:
        writer.close()
    return count


def values(folder: Path) -> list[Batch]:
    return LogProbStore(folder, temperature=1.5).label([batch(i) for i in reversed(range(8))])


def test_a_store_of_all_tokens_teaches_as_the_teacher_does(tmp_path: Path) -> None:
    groups = ProcessGroups.single()
    assert fill(groups, tmp_path) == 8
    assert len(LogProbStore(tmp_path, temperature=1.5)) == 16
    assert fill(groups, tmp_path) == 0, "what is there is not written again"
    teacher = Teacher(build_teacher(groups))
    model, found = build(STUDENT, groups, seed=0), []
    for source in (LogProbStore(tmp_path, temperature=1.5), teacher):
        objective = DistillationObjective(
            config=DistillationConfig(temperature=1.5), teacher=source if isinstance(source, Teacher) else None
        )
        report = evaluate(model, source.label([batch(i) for i in range(8)]), objective)
        found.append([report.sum, report.metrics["lm_loss"]])
    # The store holds float32.
    torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=1e-6)
    assert found[0][0] > 0


def test_stores_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LogProbStoreError, match="is no store: it has no store.json"):
        LogProbStore(tmp_path)
    fill(ProcessGroups.single(), tmp_path)
    with pytest.raises(LogProbStoreError, match=r"holds log-probabilities at temperature=1.5, not 1.0"):
        LogProbStore(tmp_path)
    with pytest.raises(LogProbStoreError, match="was made with .*seed 1.*, not with .*seed 2"):
        LogProbStoreWriter(tmp_path, settings(teacher="seed 2"))
    store = LogProbStore(tmp_path, temperature=1.5)
    with pytest.raises(LogProbStoreError, match=r"none of the rows \[0, 1\] of a batch among its 16 samples"):
        store.label([batch(99)])
    with pytest.raises(LogProbStoreError, match="samples of 4 tokens do not fit a store with seq_len=8"):
        store.label(
            [dataclasses.replace(batch(0), tokens=batch(0).tokens[:, :4], labels=batch(0).labels[:, :4], loss_mask=torch.ones(2, 4))]
        )
    labelled = store.label([batch(0)])[0]
    with pytest.raises(ValueError, match="reverse=True needs the teacher's probability of every token"):
        model = build(STUDENT, ProcessGroups.single(), seed=0)
        evaluate(model, [labelled], DistillationObjective(config=DistillationConfig(reverse=True)))
    shard = next(tmp_path.glob("shard-*"))
    (shard / "log_probs.npy").write_bytes((shard / "log_probs.npy").read_bytes()[:-40])
    with pytest.raises(LogProbStoreError, match="is damaged"):
        LogProbStore(tmp_path, temperature=1.5)


def test_a_shard_that_was_cut_short_is_none(tmp_path: Path) -> None:
    (tmp_path / ".shard-0-000000.partial").mkdir()
    with LogProbStoreWriter(tmp_path, settings(top_k=2), shard_samples=4) as writer:
        writer.add(batch(0), torch.zeros(B, S, 2), torch.zeros(B, S, 2, dtype=torch.int64))
        assert writer.holds(batch(0)) and not writer.holds(batch(1))
        assert len(LogProbStore(tmp_path, temperature=1.5)) == 0
    assert len(LogProbStore(tmp_path, temperature=1.5)) == 2
    with pytest.raises(LogProbStoreError, match=r"must both be \[B, seq_len, top_k\] = \(2, 8, 2\)"):
        writer.add(batch(1), torch.zeros(B, S, 3), torch.zeros(B, S, 3))
