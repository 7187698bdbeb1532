# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Steps that are run again, timed and traced, stragglers, and restarts, on GPUs."""

import dataclasses
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.guard import Attempt, RestartConfig, run_with_restarts
from mcore_parallel.models import GPTModel, ModelOutput, TransformerConfig
from mcore_parallel.optim import ConstantSchedule, MegatronOptimizer, OptimizerConfig
from mcore_parallel.training import (
    Batch,
    CrossEntropyObjective,
    LossReport,
    ProfileConfig,
    Rerun,
    RerunConfig,
    RerunReport,
    StragglerProbe,
    Timers,
    Trainer,
    TrainerConfig,
)
from tests.support.world import run

pytestmark = pytest.mark.gpu
CONFIG = TransformerConfig(num_layers=2, hidden_size=256, num_attention_heads=4, ffn_hidden_size=512, vocab_size=512)


def data(consumed: int) -> Iterator[list[Batch]]:
    while True:
        generator = torch.Generator().manual_seed(consumed)
        tokens = torch.randint(512, (2, 129), generator=generator).cuda()
        yield [Batch(tokens=tokens[:, :-1], labels=tokens[:, 1:], loss_mask=torch.ones(2, 128, device="cuda"))]
        consumed += 2


class Faulty:
    """Cross entropy that is no number in one call."""

    def __init__(self, call: int) -> None:
        self.call, self.count = call, 0

    def __call__(self, output: ModelOutput, batch: Batch) -> LossReport:
        report = CrossEntropyObjective()(output, batch)
        self.count += 1
        return dataclasses.replace(report, sum=report.sum * math.nan) if self.count == self.call else report


def train(
    call: int, rerun: Rerun | None = None, groups: ProcessGroups | None = None, timers_every: int = 0, **options: Any
) -> tuple[Trainer, StragglerProbe]:
    torch.manual_seed(1)
    groups = ProcessGroups.single() if groups is None else groups
    model = GPTModel(CONFIG, groups, dtype=torch.bfloat16, device="cuda")
    sync = DistributedDataParallel(DistributedDataParallelConfig(), model, groups)
    optimizer = MegatronOptimizer(OptimizerConfig(lr=1e-3), sync, groups)
    probe = StragglerProbe(model, groups, every=2)
    parts = (model, sync, optimizer, Faulty(call), data, ConstantSchedule(max_lr=1e-3))
    trainer = Trainer(TrainerConfig(steps=6, timers_every=timers_every), *parts, probe=probe, rerun=rerun, **options)
    trainer.run()
    return trainer, probe


def test_a_passing_fault_is_named_and_leaves_the_loss_alone() -> None:
    reports: list[RerunReport] = []
    found, _ = train(4, Rerun(RerunConfig(mode="validate"), notify=reports.append))
    clean, _ = train(0, Rerun(RerunConfig(mode="validate"), notify=reports.append))
    assert [(report.step, report.verdict) for report in reports] == [(4, "transient")]
    assert found.state == clean.state
    for one, other in zip(found.model.parameters(), clean.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-3)


def test_the_forward_is_timed_on_the_device() -> None:
    groups = ProcessGroups.single()
    model = GPTModel(CONFIG, groups, dtype=torch.bfloat16, device="cuda")
    probe = StragglerProbe(model, groups, every=1)
    batch = next(data(0))[0]
    model(batch.tokens.flatten(), batch.step())
    found = probe()
    assert found["straggler/rank"] == 0 and found["straggler/slowdown"] == 1 and 0 < found["straggler/forward_s"] < 60
    assert probe()["straggler/forward_s"] == 0


class Rows:
    """A writer that keeps what it is given."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def write(self, step: int, values: Any) -> None:
        self.rows.append(dict(values))

    def close(self) -> None:
        pass


def test_the_parts_of_a_step_are_timed_on_the_device_and_traced(tmp_path: Path) -> None:
    rows = Rows()
    window = ProfileConfig(tool="torch", step_start=3, step_end=5, output=str(tmp_path)).build()
    train(0, timers_every=2, timers=Timers(device=torch.device("cuda")), profile=window, writers=[rows])
    # Steps 5 and 6 are behind the window.
    last = rows.rows[5]
    parts = sum(last[f"time/{name}"] for name in ("batch", "forward-backward", "grad-sync", "optimizer"))
    mean = (rows.rows[4]["step_s"] + last["step_s"]) / 2
    assert 0.3 * mean < parts < 1.2 * mean
    assert [path.name for path in window.files] == ["rank0.trace.json.gz", "rank0.txt", "rank0.communication.json"]
    found = window.communication
    assert found is not None and found.num_steps == 2 and found.compute_s > 0 and found.exposed_s == found.communication_s == 0
    assert found.compute_s + found.other_s == pytest.approx(found.span_s)
    assert [("communication/exposed_share" in row) for row in rows.rows] == [False, False, False, True, False, False]


def check_exposed(folder: str) -> None:
    groups = ProcessGroups.build(ParallelPlan(dp=2))
    window = ProfileConfig(tool="torch", step_start=3, step_end=5, ranks=(0, 1), output=folder).build(rank=groups.world.rank)
    train(0, groups=groups, profile=window)
    found = window.communication
    assert found is not None and 0 < found.exposed_s <= found.communication_s < found.span_s
    assert found.compute_s + found.exposed_s + found.other_s == pytest.approx(found.span_s)
    assert any("AllReduce" in name or "ReduceScatter" in name for name in found.exposed_by_collective), found


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_sums_of_gradients_show_as_communication(tmp_path: Path) -> None:
    run(check_exposed, 2, backend="nccl", folder=str(tmp_path))


def check_restart() -> None:
    rank, port = dist.get_rank(), [0]
    store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    port = [0 if store is None else store.port]
    dist.broadcast_object_list(port)
    dist.barrier()
    dist.destroy_process_group()
    store = store or dist.TCPStore("127.0.0.1", port[0], is_master=False)
    begin = time.monotonic()

    def work(attempt: Attempt) -> float:
        device = torch.device("cuda", rank)
        dist.init_process_group("nccl", store=attempt.store, rank=rank, world_size=2, device_id=device)
        x = torch.ones(1024, device=device)
        dist.all_reduce(x)
        if rank == 1 and attempt.number == 0:
            torch.cuda.synchronize()
            raise OSError("gone")
        # In the first attempt this one waits for ever.
        dist.all_reduce(x)
        value = x[0].item()
        dist.destroy_process_group()
        return value

    assert run_with_restarts(work, store, rank=rank, world_size=2, config=RestartConfig(max_restarts=1, timeout_s=60.0)) == 4.0
    assert time.monotonic() - begin < 60.0


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_rank_that_waits_in_nccl_comes_back_when_another_fails() -> None:
    run(check_restart, 2, backend="nccl", timeout_s=120.0)
