# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The training loop."""

import dataclasses
import io
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.models import TransformerConfig
from mcore_parallel.optim import CosineSchedule
from mcore_parallel.training import (
    Batch,
    JsonLinesWriter,
    NonFiniteLossError,
    RichProgress,
    TensorBoardWriter,
    TensorShard,
    Trainer,
    TrainerConfig,
    TrainerState,
)
from tests.support.trainers import Rows, build_trainer, counting

CONFIG = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=4, ffn_hidden_size=64, vocab_size=16)


class Memory:
    """A checkpointer that keeps the newest step of one rank."""

    def __init__(self) -> None:
        self.saved: dict[int, tuple[dict[str, torch.Tensor], str]] = {}

    def save(self, step: int, state: Mapping[str, TensorShard], extra: Mapping[str, Any]) -> None:
        self.saved[step] = ({name: shard.data.clone() for name, shard in state.items()}, json.dumps(extra))

    def load(self, state: Mapping[str, TensorShard]) -> tuple[int, dict[str, Any]]:
        step = max(self.saved)
        tensors, extra = self.saved[step]
        assert set(tensors) == set(state)
        for name, shard in state.items():
            shard.data.copy_(tensors[name])
        return step, json.loads(extra)

    def latest(self) -> int | None:
        return max(self.saved, default=None)


def data(consumed: int) -> Iterator[list[Batch]]:
    """Two micro-batches of two rows a step, without end."""
    while True:
        yield [counting(consumed), counting(consumed + 2)]
        consumed += 4


def trainer(config: TrainerConfig, source=data, *, dtype=torch.float32, warmup_steps: int = 2, **options: Any) -> Trainer:
    schedule = CosineSchedule(max_lr=0.01, decay_steps=1000, warmup_steps=warmup_steps)
    return build_trainer(config, source, model=CONFIG, schedule=schedule, dtype=dtype, **options)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_rule_is_learnt_and_every_step_leaves_a_line(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "train.jsonl"
    seen = []

    def probe() -> dict[str, float]:
        seen.append(len(lines(path)))
        return {"expert_load": 1.5}

    config = TrainerConfig(steps=40, eval_every=20)
    loop = trainer(config, writers=[JsonLinesWriter(path)], evaluation=lambda: [counting(3, 4)], probe=probe)
    assert loop.run() == TrainerState(step=40, consumed_samples=160)
    records = lines(path)
    assert [record["step"] for record in records] == list(range(1, 41))
    assert seen == list(range(40)), "a line is not on disk before the next step"
    assert abs(records[0]["loss"] - math.log(16)) < 0.1
    assert records[-1]["loss"] < 0.1
    assert [record["step"] for record in records if "eval/loss" in record] == [20, 40]
    assert records[39]["eval/loss"] < records[19]["eval/loss"]
    assert records[1]["lr"] == 0.005 and records[2]["lr"] == 0.01
    assert {"grad_norm", "num_tokens", "tokens_per_s", "step_s", "aux", "skipped_steps", "expert_load"} <= set(records[0])
    assert records[0]["num_tokens"] == 32
    assert records[0]["tokens_per_s"] == pytest.approx(32 / records[0]["step_s"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_run_ends_with_the_same_bits(dtype: torch.dtype) -> None:
    straight, memory = trainer(TrainerConfig(steps=6), dtype=dtype), Memory()
    straight.run()
    trainer(TrainerConfig(steps=3, save_every=2), dtype=dtype, checkpointer=memory).run()
    assert sorted(memory.saved) == [2, 3], "the last step is saved too"
    resumed = trainer(TrainerConfig(steps=6), dtype=dtype, checkpointer=memory)
    with torch.no_grad():
        for parameter in resumed.model.parameters():
            parameter.fill_(torch.nan)
    assert resumed.resume() == TrainerState(step=3, consumed_samples=12)
    assert resumed.run() == straight.state
    for name, shard in straight.tensors().items():
        assert torch.equal(shard.data, resumed.tensors()[name].data), name


def test_a_run_without_a_checkpoint_resumes_at_the_start() -> None:
    assert trainer(TrainerConfig(steps=1), checkpointer=Memory()).resume() == TrainerState()


def test_the_end_of_the_data_ends_the_run() -> None:
    assert trainer(TrainerConfig(steps=10), lambda consumed: [[counting(0)], [counting(4)]]).run().step == 2


def spoilt(consumed: int) -> Iterator[list[Batch]]:
    """Every third step has a weight that is not finite."""
    for number in range(9):
        yield [counting(number, mask=math.inf if number % 3 == 2 else 1.0)]


def test_skipped_steps_are_counted_and_too_many_are_an_error(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    loop = trainer(TrainerConfig(steps=9, max_skipped_steps=2), spoilt, writers=[JsonLinesWriter(path)])
    with pytest.raises(NonFiniteLossError, match=r"step 9: loss=.*max_skipped_steps=2") as caught:
        loop.run()
    assert caught.value.step == 9
    records = lines(path)
    assert [record["skipped_steps"] for record in records] == [0, 0, 1, 1, 1, 2, 2, 2]
    rate = loop.schedule.lr
    assert [record["lr"] for record in records] == [rate(n) for n in (0, 1, 2, 2, 3, 4, 4, 5)], "a skipped step does not advance the rate"
    assert records[2]["loss"] is None
    assert trainer(TrainerConfig(steps=9, max_skipped_steps=3), spoilt).run().skipped_steps == 3


def test_the_rate_waits_while_the_loss_scale_is_too_large() -> None:
    scaling = {"fp16": True, "initial_loss_scale": 2.0**20, "hysteresis": 1}
    config, numbers = TrainerConfig(steps=16), Rows()
    loop = trainer(config, dtype=torch.float16, warmup_steps=50, rule=scaling, writers=[numbers])
    state = loop.run()
    assert 0 < state.skipped_steps == 16 - loop.optimizer.step_count < 16
    before = [0, *(int(values["skipped_steps"]) for values in numbers.rows)]
    assert [values["lr"] for values in numbers.rows] == [loop.schedule.lr(step - before[step]) for step in range(16)]
    assert [values["loss_scale"] for values in numbers.rows] == [2.0 ** (20 - skipped) for skipped in before[1:]]
    bounded = trainer(TrainerConfig(steps=16), dtype=torch.float16, rule={**scaling, "min_loss_scale": 2.0**19})
    with pytest.raises(NonFiniteLossError, match=r"max_skipped_steps=0"):
        bounded.run()


def test_a_rhythm_without_its_part_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"save_every=1 needs a checkpointer"):
        trainer(TrainerConfig(steps=1, save_every=1))
    with pytest.raises(ValueError, match=r"eval_every=1 needs evaluation batches"):
        trainer(TrainerConfig(steps=1, eval_every=1))
    with pytest.raises(ValueError, match=r"resume needs a checkpointer"):
        trainer(TrainerConfig(steps=1)).resume()
    with pytest.raises(ValueError, match=r"steps=-1 must not be negative"):
        TrainerConfig(steps=-1)


def test_progress_shows_loss_speed_and_norm() -> None:
    from rich.console import Console

    screen = io.StringIO()
    progress = RichProgress(5, Console(file=screen, force_terminal=True, width=120, color_system=None))
    progress.write(3, {"loss": 1.25, "tokens_per_s": 123456.0, "grad_norm": 0.5, "eval/loss": 2.0})
    progress.close()
    for text in ("step 3/5", "loss 1.2500", "123,456 tokens/s", "norm 0.5", "eval 2.0000"):
        assert text in screen.getvalue()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_gets_every_number(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer = TensorBoardWriter(tmp_path)
    writer.write(1, {"loss": 2.0})
    writer.write(2, {"loss": 1.5, "eval/loss": 1.0})
    writer.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 2.0), (2, 1.5)]
    assert [event.value for event in events.Scalars("eval/loss")] == [1.0]


def check_only_the_first_rank_writes(folder: str) -> TrainerState:
    groups = ProcessGroups.build(ParallelPlan(pp=2, dp=2))
    mine = [slice(begin, begin + 2) for begin in (0, 2)][groups.dp.rank]

    def share(consumed: int) -> Iterator[list[Batch]]:
        for step in range(3):
            whole = counting(consumed + 4 * step, 4)
            yield [dataclasses.replace(whole, **{name: getattr(whole, name)[mine] for name in ("tokens", "labels", "loss_mask")})]

    writer = JsonLinesWriter(Path(folder) / f"{groups.world.rank}.jsonl")
    return trainer(TrainerConfig(steps=5), share, groups=groups, writers=[writer]).run()


@pytest.mark.world(4)
def test_only_the_first_rank_writes_and_it_speaks_for_all(world, tmp_path: Path) -> None:
    assert world(check_only_the_first_rank_writes, folder=str(tmp_path)) == [TrainerState(step=3, consumed_samples=12)] * 4
    records = [lines(tmp_path / f"{rank}.jsonl") for rank in range(4)]
    assert [len(found) for found in records] == [3, 0, 0, 0]
    writer = JsonLinesWriter(tmp_path / "one.jsonl")
    trainer(TrainerConfig(steps=3), lambda consumed: [[counting(4 * step, 4)] for step in range(3)], writers=[writer]).run()
    for found, wanted in zip(records[0], lines(tmp_path / "one.jsonl"), strict=True):
        assert found["num_tokens"] == wanted["num_tokens"] == 32
        assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
