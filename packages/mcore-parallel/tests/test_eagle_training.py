# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A draft head learns the same from a target that runs and from its features on disk, in every layout, and drafts better than chance."""

import dataclasses
import functools
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_parallel import ParallelPlan, ProcessGroups, named_shards
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.models import GPTModel, TransformerConfig, hybrid_config
from mcore_parallel.models.eagle import DraftVocabulary, EagleConfig, EagleHead, load_published, published_weights
from mcore_parallel.nn import MambaConfig
from mcore_parallel.optim import MegatronOptimizer, OptimizerConfig
from mcore_parallel.training import Batch, CrossEntropyObjective, evaluate, train_step
from mcore_parallel.training.distill import Teacher, writes
from mcore_parallel.training.eagle import (
    EagleObjective,
    FeatureStore,
    FeatureStoreConfig,
    FeatureStoreError,
    FeatureStoreWriter,
    TargetEnds,
    record_features,
    vocab_parallel_argmax,
)
from tests.support.commands import run_script
from tests.support.journeys import TWO_RANKS
from tests.support.layouts import Curve, check_curve

B, S, V, D = 2, 8, 24, 8
ONE = ProcessGroups.single()
SIZES: dict[str, Any] = {"hidden_size": D, "num_attention_heads": 2, "ffn_hidden_size": 12, "vocab_size": V, "init_method_std": 0.3}
DENSE = TransformerConfig(num_layers=4, **SIZES)
HYBRID = hybrid_config("M*-M-*M-", mamba=MambaConfig(head_dim=4, num_groups=2, state_dim=3, chunk_size=4), **SIZES)
VOCABULARY = DraftVocabulary(torch.arange(0, V, 2), V)
REAL = V - 1
"""Rows of the vocabulary that are no padding."""


def batch(seed: int) -> Batch:
    tokens = torch.randint(0, V, (B, S + 1), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones(B, S, dtype=torch.float64)
    mask[0, 3 : 3 + seed % 3] = 0.0
    return Batch(tokens=tokens[:, :-1], labels=tokens[:, 1:], loss_mask=mask)


def architecture(config: TransformerConfig, *, reduced: bool = True) -> EagleConfig:
    return EagleConfig.of_target(config, draft_vocab_size=len(VOCABULARY) if reduced else None)


def parts(config: TransformerConfig, groups: ProcessGroups, *, reduced: bool = True) -> tuple[Teacher, TargetEnds, EagleHead]:
    """A target that runs, its ends, and a head."""
    head_config = architecture(config, reduced=reduced)
    vocabulary = VOCABULARY if reduced else None
    model = GPTModel(config, groups, dtype=torch.float64, seed=1, unpadded_vocab_size=REAL)
    head = EagleHead(head_config, groups, vocabulary=vocabulary, unpadded_vocab_size=REAL, dtype=torch.float64)
    return Teacher(model, capture=head_config.aux_modules), TargetEnds(model, vocabulary), head


def settings(ends: TargetEnds, config: TransformerConfig, **changes: Any) -> FeatureStoreConfig:
    given = {"target": "seed 1", "ends": ends.digest(), "seq_len": S, "hidden_size": D, "dtype": "float64"}
    return FeatureStoreConfig(**{**given, "aux_modules": architecture(config).aux_modules, **changes})


def fill(folder: Path, groups: ProcessGroups, config: TransformerConfig, count: int = 4, shard_samples: int = 3) -> int:
    teacher, ends, head = parts(config, groups)
    found = settings(ends, config)
    writer = FeatureStoreWriter(folder, found, name=str(groups.dp.rank), shard_samples=shard_samples) if writes(teacher) else None
    steps = [[batch(seed)] for seed in range(count)][groups.dp.rank :: groups.dp.size]
    ran = record_features(teacher, head.architecture.aux_modules, steps, writer)
    if writer is not None:
        writer.close()
    return ran


Label = Callable[[Sequence[Batch]], list[Batch]]


def from_disk(folder: Path, groups: ProcessGroups, ends: TargetEnds, config: TransformerConfig) -> Label:
    """The same samples out of a store, in place of those that the target labels."""
    store = FeatureStore(folder, ends=ends.digest(), aux_modules=architecture(config).aux_modules)
    rows = {tuple(store.batch([number], ONE).tokens[0].tolist()): number for number in range(len(store))}

    def label(batches: Sequence[Batch]) -> list[Batch]:
        return [store.batch([rows[tuple(row.tolist())] for row in one.tokens], groups) for one in batches]

    return label


def curve(groups: ProcessGroups, config: TransformerConfig, store: Path | None = None) -> Curve:
    """Two steps of gradient descent, on what the target says now or on what it said to the store."""
    teacher, ends, head = parts(config, groups)
    if store is None:
        label = teacher.label
    else:
        # The ends alone are built.
        model = GPTModel(config, groups, dtype=torch.float64, seed=1, unpadded_vocab_size=REAL, layers=range(0))
        ends = TargetEnds(model, VOCABULARY)
        label = from_disk(store, groups, ends, config)
    shards = list(named_shards(head))
    initial = {shard.name: shard.parameter.detach().numpy().copy() for shard in shards}
    sync = DistributedDataParallel(DistributedDataParallelConfig(), head, groups)
    optimizer = MegatronOptimizer(OptimizerConfig(optimizer="sgd", lr=1.0, clip_grad=0.0, weight_decay=0.0), sync, groups)
    objective, mine = EagleObjective(target=ends, num_steps=3), slice(groups.dp.rank, None, groups.dp.size)
    numbers = []
    for step in range(2):
        micro = label([batch(2 * step + i) for i in range(2)][mine])
        report = train_step(head, micro, objective, sync, optimizer, lr=0.2)
        numbers += [report.loss, report.grad_norm, *(value for _, value in sorted(report.metrics.items()))]
    numbers.append(evaluate(head, label([batch(i) for i in range(2)][mine]), objective).mean.item())
    trained = {shard.name: shard.parameter.detach().numpy().copy() for shard in shards}
    return Curve(numbers=numbers, initial=initial, trained=trained, slices={shard.name: shard.spec.slices(groups) for shard in shards})


@functools.cache
def serial(config: TransformerConfig) -> Curve:
    return curve(ONE, config)


@pytest.mark.parametrize("config", [DENSE, HYBRID], ids=["dense", "hybrid"])
def test_features_on_disk_teach_as_the_target_that_made_them(tmp_path: Path, config: TransformerConfig) -> None:
    assert fill(tmp_path, ONE, config) == 4
    assert fill(tmp_path, ONE, config) == 0, "what is there is not written again"
    check_curve(curve(ONE, config, tmp_path), serial(config), tolerance=1e-14)


def check(degrees: dict[str, Any], expected: Curve, store: Path, written: Path, weights: dict[str, Tensor]) -> None:
    groups = ProcessGroups.build(ParallelPlan(**degrees))
    check_curve(curve(groups, DENSE), expected)
    check_curve(curve(groups, DENSE, store), expected)
    assert fill(written, groups, DENSE) == 4 // groups.dp.size
    head = EagleHead(architecture(DENSE), groups, vocabulary=VOCABULARY, dtype=torch.float64, seed=5)
    load_published(head, weights)
    found = published_weights(head)
    assert all(torch.equal(found[name], value) for name, value in weights.items())


@pytest.mark.world(2)
@pytest.mark.parametrize("degrees", TWO_RANKS, ids=str)
def test_two_ranks_learn_write_and_publish_as_one(world: Any, tmp_path: Path, degrees: dict[str, Any]) -> None:
    fill(tmp_path / "one", ONE, DENSE)
    weights = published_weights(EagleHead(architecture(DENSE), ONE, vocabulary=VOCABULARY, dtype=torch.float64, seed=4))
    world(check, degrees=degrees, expected=serial(DENSE), store=tmp_path / "one", written=tmp_path / "two", weights=weights)
    _, ends, head = parts(DENSE, ONE)
    one, two = (
        FeatureStore(tmp_path / name, ends=ends.digest(), aux_modules=head.architecture.aux_modules).batch(range(8), ONE)
        for name in ("one", "two")
    )
    assert torch.equal(one.tokens, two.tokens) and torch.equal(one.labels, two.labels) and torch.equal(one.loss_mask, two.loss_mask)
    for name in one.extras:
        torch.testing.assert_close(one.extras[name], two.extras[name], rtol=1e-10, atol=1e-10)


@torch.no_grad()
def by_the_formula(teacher: Teacher, head: EagleHead, given: Batch, num_steps: int, decay: float, *, reduced: bool) -> tuple[float, float]:
    """Loss sum and how many drafts in a row agree, from whole distributions of each row."""
    model: Any = teacher.chunks[0]
    (labelled,) = teacher.label([given])
    states = [labelled.extras[f"teacher_hidden.{name}"] for name in head.architecture.aux_modules]
    whole = teacher.output(labelled).logits().view(B, S, -1)[..., :REAL]
    ids = VOCABULARY.token_ids if reduced else torch.arange(REAL)
    draft = head(given.tokens.flatten(), given.step())[0]
    logits = [x.logits().view(B, S, -1)[..., : len(ids)] for x in draft.unroll(states, model.embedding, num_steps)]
    total, runs = 0.0, []
    for b in range(B):
        for t in range(S - 1):
            run, alive, counts = 0, True, t + num_steps < S
            for k in range(min(num_steps, S - 1 - t)):
                theirs, weight = whole[b, t + 1 + k], given.loss_mask[b, t + 1 + k].item()
                p, q = F.log_softmax(theirs[ids], -1), F.log_softmax(logits[k][b, t], -1)
                favourite = theirs.argmax()
                total += decay**k * weight * float((p.exp() * (p - q)).sum()) * bool((ids == favourite).any())
                alive = alive and bool(ids[q.argmax()] == favourite)
                counts, run = counts and weight > 0, run + alive
            runs += [run] if counts else []
    return total, sum(runs) / len(runs)


@pytest.mark.parametrize(("reduced", "cap"), [(True, None), (False, None), (True, 0.5)])
def test_the_loss_is_that_of_the_formula(reduced: bool, cap: float | None) -> None:
    teacher, ends, head = parts(dataclasses.replace(DENSE, final_logit_softcapping=cap), ONE, reduced=reduced)
    given = batch(2)
    report = EagleObjective(target=ends, num_steps=3, decay=0.5)(head(given.tokens.flatten(), given.step())[0], teacher.label([given])[0])
    total, accepted = by_the_formula(teacher, head, given, 3, 0.5, reduced=reduced)
    assert report.sum.item() == pytest.approx(total, rel=1e-12)
    assert (report.metrics["accepted_tokens"] / report.counts["accepted_tokens"]).item() == pytest.approx(accepted)
    assert report.count == given.loss_mask[:, 1:].sum()
    report.sum.backward()
    assert all(parameter.grad is not None and parameter.grad.abs().max() > 0 for parameter in head.parameters())
    assert not any(parameter.requires_grad for parameter in teacher.chunks[0].parameters())


def check_argmax(logits: Tensor) -> None:
    tp = ProcessGroups.build(ParallelPlan(tp=2)).tp
    mine = logits.chunk(2, -1)[tp.rank]
    for size in (8, 7, 4, 3):
        assert torch.equal(vocab_parallel_argmax(mine, tp, vocab_size=size), logits[:, :size].argmax(-1))


@pytest.mark.world(2)
def test_the_favourite_is_found_over_two_ranks(world: Any) -> None:
    logits = torch.randn(50, 8, generator=torch.Generator().manual_seed(0)).round()
    # Of equal ones the first.
    logits += torch.arange(8, 0, -1) * 1e-3
    world(check_argmax, logits=logits)


def successors(seed: int, count: int = 4) -> Batch:
    """A text in which each token says what the next one is."""
    rows = [torch.randint(0, V, (count, 1), generator=torch.Generator().manual_seed(seed))]
    for _ in range(S):
        rows.append((5 * rows[-1] + 7) % REAL)
    tokens = torch.cat(rows, dim=1)
    return Batch(tokens=tokens[:, :-1], labels=tokens[:, 1:], loss_mask=torch.ones(count, S))


@pytest.mark.journey
def test_a_head_that_has_learnt_drafts_better_than_chance() -> None:
    # A target that knows the text, to begin with.
    model = GPTModel(DENSE, ONE, dtype=torch.float64, seed=1, unpadded_vocab_size=REAL)

    def learn(module: Any, objective: Any, label: Label, steps: int) -> None:
        sync = DistributedDataParallel(DistributedDataParallelConfig(), module, ONE)
        optimizer = MegatronOptimizer(OptimizerConfig(lr=1e-2, weight_decay=0.0), sync, ONE)
        for step in range(steps):
            train_step(module, label([successors(step, 16)]), objective, sync, optimizer, lr=1e-2)
        sync.close()

    learn(model, CrossEntropyObjective(), list, 60)
    config = architecture(DENSE, reduced=False)
    head = EagleHead(config, ONE, unpadded_vocab_size=REAL, dtype=torch.float64)
    teacher, ends = Teacher(model, capture=config.aux_modules), TargetEnds(model)
    objective = EagleObjective(target=ends, num_steps=3)
    held_out = teacher.label([successors(1000, 64)])

    def accepted() -> float:
        report = evaluate(head, held_out, objective)
        return (report.metrics["accepted_tokens"] / report.count).item()

    before = accepted()
    learn(head, objective, teacher.label, 60)
    after = accepted()
    # By chance about one of 23 tokens; three at the most.
    assert before < 0.5 and 1.5 < after <= 3.0, (before, after)


KILLED = """
import os, signal, sys
sys.path[:0] = [{root!r}, {tests!r}]
import test_eagle_training as own
teacher, ends, head = own.parts(own.DENSE, own.ONE)
writer = own.FeatureStoreWriter({folder!r}, own.settings(ends, own.DENSE), shard_samples=3)
steps = ([own.batch(seed)] if seed < 2 else os.kill(os.getpid(), signal.SIGKILL) for seed in range(4))
own.record_features(teacher, head.architecture.aux_modules, steps, writer)
"""


def test_an_extraction_that_was_killed_goes_on(tmp_path: Path) -> None:
    tests = Path(__file__).parent
    code = KILLED.format(root=str(tests.parents[2]), tests=str(tests), folder=str(tmp_path / "store"))
    status, _, errors = run_script(code)
    assert status == -signal.SIGKILL, errors
    _, ends, head = parts(DENSE, ONE)
    modules = head.architecture.aux_modules
    # Of four samples three were a shard; the fourth was in the one that was begun.
    assert [path.name for path in sorted((tmp_path / "store").iterdir())] == [".shard-0-000001.partial", "shard-0-000000", "store.json"]
    assert len(FeatureStore(tmp_path / "store", ends=ends.digest(), aux_modules=modules)) == 3
    assert fill(tmp_path / "store", ONE, DENSE) == 3, "the second batch is run again for its second sample"
    assert not list((tmp_path / "store").glob(".shard*"))
    check_curve(curve(ONE, DENSE, tmp_path / "store"), serial(DENSE), tolerance=1e-14)


def test_stores_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    fill(tmp_path, ONE, DENSE)
    teacher, ends, head = parts(DENSE, ONE)
    modules = head.architecture.aux_modules
    other = TargetEnds(GPTModel(DENSE, ONE, dtype=torch.float64, seed=2, unpadded_vocab_size=REAL))
    with pytest.raises(FeatureStoreError, match="holds features of seed 1, whose embedding and output have the hash"):
        FeatureStore(tmp_path, ends=other.digest(), aux_modules=modules)
    with pytest.raises(FeatureStoreError, match=r"holds features of aux_modules=.*, not \('layers.0',\); extract again"):
        FeatureStore(tmp_path, ends=ends.digest(), aux_modules=("layers.0",))
    with pytest.raises(FeatureStoreError, match="was made with .*seed 1.*, not with .*seed 9.*; write to another folder"):
        FeatureStoreWriter(tmp_path, settings(ends, DENSE, target="seed 9"))
    with pytest.raises(FeatureStoreError, match="is no store: it has no store.json"):
        FeatureStore(tmp_path / "none", ends=ends.digest(), aux_modules=modules)
    store = FeatureStore(tmp_path, ends=ends.digest(), aux_modules=modules)
    with pytest.raises(FeatureStoreError, match="has no sample 8 among its 8"):
        store.batch([0, 8], ONE)
    with (
        pytest.raises(FeatureStoreError, match="must be 3 of shape .* and dtype float64"),
        FeatureStoreWriter(tmp_path / "new", settings(ends, DENSE)) as writer,
    ):
        writer.add(batch(0), torch.zeros(B * S, D), [torch.zeros(B * S, D)] * 2)
    with pytest.raises(ValueError, match="dtype='int8' must be one of float64, float32, float16, bfloat16"):
        settings(ends, DENSE, dtype="int8")
    given = batch(0)
    with pytest.raises(ValueError, match="the batch has no extra 'teacher_hidden'; take batches from a FeatureStore"):
        EagleObjective(target=ends)(head(given.tokens.flatten(), given.step())[0], given)
    with pytest.raises(ValueError, match="give both one vocabulary"):
        EagleObjective(target=TargetEnds(teacher.chunks[0]))(head(given.tokens.flatten(), given.step())[0], given)
    shard = next(tmp_path.glob("shard-*"))
    (shard / "aux.npy").write_bytes((shard / "aux.npy").read_bytes()[:-8])
    with pytest.raises(FeatureStoreError, match="is damaged: .*remove it and extract again"):
        FeatureStore(tmp_path, ends=ends.digest(), aux_modules=modules)


def test_bfloat16_states_keep_their_bits(tmp_path: Path) -> None:
    _, ends, head = parts(DENSE, ONE)
    modules = head.architecture.aux_modules
    states = [torch.randn(B * S, D).bfloat16() for _ in range(3)]
    with FeatureStoreWriter(tmp_path, settings(ends, DENSE, dtype="bfloat16")) as writer:
        writer.add(batch(0), states[0], states[1:])
    found = FeatureStore(tmp_path, ends=ends.digest(), aux_modules=modules)
    order = [batch(0).tokens.tolist().index(found.batch([number], ONE).tokens[0].tolist()) for number in range(B)]
    for name, value in zip(["", *(f".{name}" for name in modules)], states, strict=True):
        expected = value.view(B, S, D)[order].flatten(0, 1)
        assert torch.equal(found.batch(range(B), ONE).extras[f"teacher_hidden{name}"], expected)
    assert dataclasses.replace(found.config, dtype="float64").sample_bytes == S * (3 * D * 8 + 12)
