# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Runs that begin again in the same processes."""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.guard import Attempt, RankFailedError, RanksLostError, RestartConfig, run_with_restarts
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.optim import ConstantSchedule, MegatronOptimizer, OptimizerConfig
from mcore_parallel.training import Batch, CrossEntropyObjective, TensorShard, Trainer, TrainerConfig

CONFIG = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, ffn_hidden_size=8, vocab_size=16)
# The first rank's store, which outlives its check.
STORES: list[dist.Store] = []
ONCE = RestartConfig(max_restarts=1, timeout_s=20.0)


def leave_world() -> tuple[dist.Store, int, int]:
    """A store that the ranks of the world share, without its groups."""
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    port = [0 if store is None else store.port]
    dist.broadcast_object_list(port)
    dist.barrier()
    dist.destroy_process_group()
    STORES.append(store or dist.TCPStore("127.0.0.1", port[0], is_master=False))
    return STORES[0], rank, size


def connect(attempt: Attempt) -> None:
    dist.init_process_group("gloo", store=attempt.store, rank=attempt.rank, world_size=attempt.world_size, timeout=timedelta(seconds=30))


class RankMemory:
    """The newest checkpoint of a rank, in its memory."""

    def __init__(self) -> None:
        self.saved: dict[int, tuple[dict[str, torch.Tensor], str]] = {}

    def save(self, step: int, state: Mapping[str, TensorShard], extra: Mapping[str, Any]) -> None:
        self.saved[step] = ({name: shard.data.clone() for name, shard in state.items()}, json.dumps(extra))

    def load(self, state: Mapping[str, TensorShard]) -> tuple[int, dict[str, Any]]:
        tensors, extra = self.saved[max(self.saved)]
        for name, shard in state.items():
            shard.data.copy_(tensors[name])
        return max(self.saved), json.loads(extra)

    def latest(self) -> int | None:
        return max(self.saved, default=None)


def train(attempt: Attempt, kept: RankMemory, fails_at: Callable[[int, int], bool], seen: list[int]) -> list[torch.Tensor]:
    """Seven steps over all ranks, saved at every second one."""
    connect(attempt)
    groups = ProcessGroups.build(ParallelPlan(dp=attempt.world_size))

    def data(consumed: int) -> Iterator[list[Batch]]:
        while True:
            if fails_at(attempt.number, consumed // attempt.world_size + 1):
                raise OSError("the disk is gone")
            tokens = (torch.arange(9) + consumed + groups.dp.rank)[None] % 16
            yield [Batch(tokens=tokens[:, :-1], labels=tokens[:, 1:], loss_mask=torch.ones(1, 8))]
            consumed += attempt.world_size

    model = GPTModel(CONFIG, groups, seed=1)
    sync = DistributedDataParallel(DistributedDataParallelConfig(), model, groups)
    optimizer = MegatronOptimizer(OptimizerConfig(lr=0.01), sync, groups)
    rhythm = TrainerConfig(steps=7, save_every=2)
    trainer = Trainer(rhythm, model, sync, optimizer, CrossEntropyObjective(), data, ConstantSchedule(max_lr=0.01), checkpointer=kept)
    seen.append(trainer.resume().step)
    try:
        trainer.run()
    finally:
        sync.close()
    dist.destroy_process_group()
    return [parameter.detach().clone() for parameter in model.parameters()]


def check_training_goes_on() -> None:
    store, rank, size = leave_world()
    told: list[str] = []

    def run(name: str, fails_at: Callable[[int, int], bool], seen: list[int]) -> list[torch.Tensor]:
        memory = RankMemory()
        part = dist.PrefixStore(name, store)
        setting = {"rank": rank, "world_size": size, "config": ONCE, "notify": told.append}
        return run_with_restarts(lambda attempt: train(attempt, memory, fails_at, seen), part, **setting)

    straight = run("straight", lambda number, step: False, [])
    assert not told
    seen: list[int] = []
    restarted = run("restarted", lambda number, step: rank == 1 and number == 0 and step == 4, seen)
    assert seen == [0, 2], "the second attempt begins at the newest checkpoint"
    assert all(torch.equal(one, other) for one, other in zip(straight, restarted, strict=True))
    if rank == 0:
        assert told == ["restart 1 of at most 1 after rank 1: OSError: the disk is gone"]


@pytest.mark.world(3)
def test_a_run_whose_rank_fails_once_ends_with_the_same_bits(world) -> None:
    world(check_training_goes_on)


def check_bound() -> None:
    store, rank, size = leave_world()
    calls = []

    def work(attempt: Attempt) -> None:
        calls.append(attempt.number)
        connect(attempt)
        if rank == 1:
            raise OSError("again")
        if rank == 0:
            # Not in a collective: Python that another rank's failure has to end.
            while True:
                time.sleep(0.01)
        dist.all_reduce(torch.ones(2))

    with pytest.raises(OSError if rank == 1 else RankFailedError, match="again") as caught:
        run_with_restarts(work, dist.PrefixStore("bound", store), rank=rank, world_size=size, config=ONCE)
    assert calls == [0, 1]
    if rank != 1:
        assert str(caught.value) == "rank 1: OSError: again (after 1 restarts in these processes)"

    def refused(attempt: Attempt) -> None:
        calls.append(attempt.number)
        store.set(f"began {rank}", "")
        if rank == 2:
            store.wait(["began 0", "began 1"])
            raise ValueError("steps=-1")
        while True:
            time.sleep(0.01)

    with pytest.raises(ValueError if rank == 2 else RankFailedError, match="steps=-1"):
        run_with_restarts(refused, dist.PrefixStore("final", store), rank=rank, world_size=size, config=ONCE, final=(ValueError,))
    assert calls == [0, 1, 0], "what would come again is not tried again"


@pytest.mark.world(3)
def test_restarts_are_bounded_and_the_rank_that_failed_is_named(world) -> None:
    world(check_bound)


def check_stuck() -> None:
    store, rank, size = leave_world()
    stacks: list[str] = []

    def work(attempt: Attempt) -> None:
        if rank == 0:
            store.wait(["asleep"])  # however much later the other began
            raise OSError("gone")
        if rank == 1:
            store.set("asleep", "")
            time.sleep(5.0)  # C that no exception interrupts
        while True:
            time.sleep(0.01)

    config = RestartConfig(max_restarts=1, timeout_s=3.0)
    if rank == 1:
        with pytest.raises(RanksLostError, match=r"rank 1: did not come back within 3 s"):
            run_with_restarts(work, store, rank=rank, world_size=size, config=config, on_stuck=stacks.append)
        assert len(stacks) == 1 and "in work: time.sleep(5.0)" in stacks[0], stacks
    else:
        with pytest.raises(RanksLostError, match=r"rank 1 is lost \(rank 1: did not come back within 3 s\) after rank 0: OSError: gone"):
            run_with_restarts(work, store, rank=rank, world_size=size, config=config)


@pytest.mark.journey
@pytest.mark.world(3)
def test_a_rank_that_does_not_come_back_is_named(world) -> None:
    world(check_stuck)


def test_settings_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="max_restarts=-1"):
        RestartConfig(max_restarts=-1)
    for limit_s in (0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"timeout_s={limit_s} must be positive and finite"):
            RestartConfig(timeout_s=limit_s)
