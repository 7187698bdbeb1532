# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Iterations over pairs, and pairs of a file."""

import asyncio
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.data import ByteTokenizer
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.optim import MegatronOptimizer, OptimizerConfig
from mcore_rl import (
    AdvantageConfig,
    Aggregation,
    ContrastiveRollout,
    ContrastiveRolloutGenerator,
    DPOObjective,
    FrozenWeights,
    GenericGenerationArgs,
    GRPOConfig,
    GRPOObjective,
    InferenceInterface,
    Learner,
    MemorySwitch,
    PackingConfig,
    PreferencePairs,
    dpo_iteration,
    grpo_iteration,
    preference_margins,
)
from mcore_rl._loop import _dpo

TOKENIZER = ByteTokenizer()
SIZES = TransformerConfig(
    num_layers=2, hidden_size=16, num_attention_heads=2, ffn_hidden_size=24, vocab_size=-(-TOKENIZER.vocab_size // 8) * 8
)
CONFIG = GRPOConfig(num_groups=6, group_size=2, seq_len=16, micro_batch_size=4, num_mini_batches=3)


def write(path: Path, count: int = 8, **changes: Any) -> Path:
    lines = [{"prompt": f"{n}", "chosen": "good" + "!" * (n % 3), "rejected": "bad", **changes} for n in range(count)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def learner(groups: ProcessGroups) -> Learner:
    model = GPTModel(SIZES, groups, dtype=torch.float64)
    sync = DistributedDataParallel(DistributedDataParallelConfig(), model, groups)
    optimizer = MegatronOptimizer(OptimizerConfig(lr=1e-3, weight_decay=0.0), sync, groups)
    parts: dict[str, Any] = {"model": model, "groups": groups, "sync": sync, "optimizer": optimizer}
    return Learner(**parts, objective=DPOObjective(), reference=FrozenWeights(model))


def iterate(plan: ParallelPlan | None, path: Path, config: GRPOConfig = CONFIG) -> tuple[list[float], list[float], float]:
    groups = ProcessGroups.single() if plan is None else ProcessGroups.build(plan)
    own, pairs = learner(groups), PreferencePairs(path, TOKENIZER, max_tokens=17, num_evaluation=2)
    pairs.start_at(0, rank=groups.world.rank, num_ranks=groups.world.size)
    reports = [dpo_iteration(config, pairs=pairs, interface=None, engine=None, learner=own, lr=1e-3) for _ in range(3)]
    updates = [update for report in reports for update in report.updates]
    margins = preference_margins(pairs.evaluation, own, seq_len=16, micro_batch_size=4)
    return [update.loss for update in updates], [update.metrics["margin"] for update in updates], margins.mean().item()


def test_the_margin_grows_and_what_was_kept_back_is_preferred(tmp_path: Path) -> None:
    losses, margins, kept_back = iterate(None, write(tmp_path / "pairs.jsonl"))
    assert len(losses) == 9 and losses[0] == pytest.approx(math.log(2)) and losses[-1] < 0.6
    assert margins[0] == pytest.approx(0, abs=1e-9) and margins[8] > margins[4] > margins[1] > 0 and kept_back > 1


@pytest.mark.world(2, shared=True)
@pytest.mark.parametrize("plan", [ParallelPlan(dp=2), ParallelPlan(tp=2), ParallelPlan(pp=2)], ids=["dp", "tp", "pp"])
def test_layouts_learn_alike(world, plan: ParallelPlan, tmp_path: Path) -> None:
    path = write(tmp_path / "pairs.jsonl")
    # One update an iteration: the ranks hold the same pairs in another order.
    config = dataclasses.replace(CONFIG, num_mini_batches=1)
    one, other = world(iterate, plan=plan, path=path, config=config)
    expected = iterate(None, path, config)
    for ours in (one, other):
        assert ours[0] == pytest.approx(expected[0], rel=1e-9) and ours[1] == pytest.approx(expected[1], rel=1e-6, abs=1e-9)
        assert ours[2] == pytest.approx(expected[2], rel=1e-6)


def test_pairs_are_shared_by_number_and_seen_once_an_epoch(tmp_path: Path) -> None:
    path = write(tmp_path / "pairs.jsonl", 7)

    def taken(rank: int, num_ranks: int, position: int = 0) -> list[str]:
        pairs = PreferencePairs(path, TOKENIZER, max_tokens=20, num_evaluation=1)
        pairs.start_at(position, rank=rank, num_ranks=num_ranks)
        some = asyncio.run(pairs.get_contrastive_rollouts(None, num_pairs=6, args=GenericGenerationArgs()))
        assert pairs.num_posed == 6
        return [pair.chosen.problem_id for pair in some]

    first, second = taken(0, 1), taken(0, 1, 6)
    assert sorted(first) == sorted(second) == [f"line {n}" for n in range(2, 8)] and first != second
    assert taken(0, 2) + taken(1, 2) == first[::2] + second[::2] + first[1::2] + second[1::2]
    [pair] = PreferencePairs(path, TOKENIZER, max_tokens=20, num_evaluation=1).evaluation
    end = [] if TOKENIZER.eod is None else [TOKENIZER.eod]
    assert list(pair.chosen.trajectory) == [*TOKENIZER.tokenize("0good"), *end] and pair.prompt_length == 1


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("{", {}, ":1 is no JSON; write one pair a line"),
        ('{"prompt": "a", "chosen": "b"}', {}, r':1 must be \{"prompt": TEXT, "chosen": TEXT, "rejected": TEXT\}, found'),
        ('{"prompt": "a", "chosen": ["b"], "rejected": "c"}', {}, ":1 must be"),
        ('\n{"prompt": "a", "chosen": "b", "rejected": "b"}', {}, ":2 prefers an answer to itself; leave the line out"),
        ('{"prompt": "a", "chosen": "bbbbbbbb", "rejected": "c"}', {"max_tokens": 4}, "tokens, and 4 fit; raise train.seq_len"),
        (
            '{"prompt": "a", "chosen": "b", "rejected": "c"}',
            {"num_evaluation": 1},
            "has 1 pairs, num_evaluation=1 of which are not trained",
        ),
        ("", {}, "has 0 pairs"),
        ("", {"num_evaluation": -1}, "num_evaluation=-1 must not be negative"),
    ],
)
def test_files_that_hold_no_pairs_are_refused_by_line(text: str, options: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text(text)
    with pytest.raises(ValueError, match=message):
        PreferencePairs(tmp_path / "pairs.jsonl", TOKENIZER, **{"max_tokens": 20, **options})
    with pytest.raises(ValueError, match="is no file; name one of JSON lines"):
        PreferencePairs(tmp_path / "nothing", TOKENIZER, max_tokens=20)


class Nobody(ContrastiveRolloutGenerator):
    def __init__(self, wait_s: float = 0.0, failure: Exception | None = None) -> None:
        self.wait_s, self.failure = wait_s, failure

    async def get_contrastive_rollouts(
        self, interface: InferenceInterface, *, num_pairs: int, args: GenericGenerationArgs, timeout_s: float | None = None
    ) -> list[ContrastiveRollout]:
        await asyncio.sleep(self.wait_s)
        if self.failure is not None:
            raise self.failure
        return []


@pytest.mark.parametrize(
    ("pairs", "error", "message"),
    [
        (Nobody(), RuntimeError, "no pair of 6: in every group all answers earned the same"),
        (Nobody(wait_s=5), TimeoutError, "6 pairs were not there within rollout_timeout_s=0.2; raise it"),
        (Nobody(failure=ConnectionError("gone")), ConnectionError, "gone"),
    ],
    ids=["none", "late", "failed"],
)
def test_pairs_that_do_not_come_are_an_error(pairs: Nobody, error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The late one does not keep its time.
    monkeypatch.setattr(_dpo, "_GRACE_S", 0.0)
    config = dataclasses.replace(CONFIG, rollout_timeout_s=0.2 if pairs.wait_s else 60.0)
    with pytest.raises(error, match=message):
        dpo_iteration(config, pairs=pairs, interface=None, engine=None, learner=learner(ProcessGroups.single()), lr=1e-3)


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        ({}, {"objective": GRPOObjective()}, "objective is a GRPOObjective; pairs are trained on with DPOObjective"),
        ({}, {"reference": None}, "DPO compares with a frozen reference"),
        ({"micro_batch_size": 3}, {}, "micro_batch_size=3 must be even"),
        ({"num_mini_batches": 4}, {}, "num_groups=6 pairs must be divisible by num_mini_batches=4"),
        ({"packing": PackingConfig(bin_size=32)}, {}, "packing=.* has no effect on pairs"),
        ({"advantage": AdvantageConfig(scale="none")}, {}, "advantage=.* has no effect on pairs"),
        ({"reward_clip": (-1.0, 1.0)}, {}, "reward_clip=.* has no effect on pairs"),
        ({"aggregation": Aggregation(mode="sequence_mean")}, {}, "aggregation=.* has no effect on pairs"),
        ({"memory": MemorySwitch(stream_optimizer=True)}, {}, "memory=.*stream_optimizer=True.* has no effect without an engine"),
    ],
)
def test_what_pairs_cannot_be_trained_with_is_refused(config: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    own = dataclasses.replace(learner(ProcessGroups.single()), **changes)
    with pytest.raises(ValueError, match=message):
        dpo_iteration(dataclasses.replace(CONFIG, **config), pairs=Nobody(), interface=None, engine=None, learner=own, lr=1e-3)


def test_rewards_are_not_trained_on_with_the_objective_of_pairs() -> None:
    nobody: Any = None
    with pytest.raises(ValueError, match="DPOObjective learns from pairs; call dpo_iteration"):
        grpo_iteration(CONFIG, agent=nobody, interface=nobody, engine=nobody, learner=learner(ProcessGroups.single()), lr=1e-3)
