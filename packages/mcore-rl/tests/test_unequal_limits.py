# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Ranks of a refit give up at different times: all are told, engines keep their weights, and the next refit works or is refused by name."""

import threading
import time
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mcore_inference import DynamicInferenceContext, DynamicInferenceEngine, InferenceConfig, PagedAttention
from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.data import ByteTokenizer
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_rl import Placement, RankTimeoutError, WeightTransfer, refit
from mcore_rl._ranks._rendezvous import rendezvous, withdraw
from mcore_rl._refit import _transfer as transfer_module

TOKENIZER = ByteTokenizer()
SIZES = TransformerConfig(num_layers=2, hidden_size=16, num_attention_heads=2, ffn_hidden_size=24, vocab_size=264)
LONG_S, SOON_S = 60.0, 20.0
"""A limit that no test waits for, and the most that a rank with it may wait on a slow machine."""


def engine_of(seed: int) -> DynamicInferenceEngine:
    model = GPTModel(SIZES, ProcessGroups.single(), attention_core=PagedAttention(), seed=seed).eval()
    context = DynamicInferenceContext.for_model(model, InferenceConfig(max_sequence_length=16, max_requests=4, block_size_tokens=8))
    return DynamicInferenceEngine(model, context, TOKENIZER, seed=0, vocab_size=TOKENIZER.vocab_size)


def state(model: Any) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def store() -> Any:
    return dist.distributed_c10d._get_default_store()


def wait_for_who_gives_up() -> None:
    while not store().check(["given up"]):
        time.sleep(0.01)


def attempt(call: Callable[[], Any]) -> tuple[str, float]:
    """What it raised, and after how long."""
    begin, message = time.monotonic(), ""
    try:
        call()
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    return message, time.monotonic() - begin


def come_late(apart: bool) -> Any:
    """The second rank comes when the first one has given up; the third would wait for long. Then all come."""
    rank, limits = dist.get_rank(), {0: 0.5, 1: LONG_S, 2: LONG_S}
    placement = Placement.split(ParallelPlan()) if apart else None
    groups = ProcessGroups.build(ParallelPlan(dp=3)) if placement is None else placement.groups
    model = None if groups is None else GPTModel(SIZES, groups, seed=1)
    engine = None if placement is not None and placement.trains else engine_of(seed=2 + rank)
    transfer = WeightTransfer(timeout_s=LONG_S)
    refit(model, groups, engine, transfer, placement=placement)
    before = {} if engine is None else state(engine.model)
    version = 0 if engine is None else engine.weight_version
    if model is not None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
    dist.barrier()
    transfer.timeout_s = limits[rank]
    if rank == 1:
        wait_for_who_gives_up()
    first = attempt(lambda: refit(model, groups, engine, transfer, placement=placement))
    if rank == 0:
        store().set("given up", "1")
    is_unchanged = engine is None or (equal(before, state(engine.model)) and engine.weight_version == version and engine.can_step)
    transfer.timeout_s = LONG_S
    second = attempt(lambda: refit(model, groups, engine, transfer, placement=placement))
    taken = engine is not None and model is not None and equal(state(engine.model), state(model)) and engine.weight_version == version + 1
    return first, is_unchanged, second, taken


@pytest.mark.world(3)
def test_a_rank_that_comes_after_another_gave_up_is_told_and_the_next_refit_works(world) -> None:
    results = world(come_late, apart=False)
    messages = [first for (first, _), *_ in results]
    assert messages[0] == "RefitTimeoutError: rank 1 did not come within timeout_s=0.5 (weights); look at the log of that rank"
    assert messages[1].endswith("rank 0 gave up after timeout_s=0.5, before this rank came (weights); begin again on all ranks")
    assert messages[2] == f"{messages[0]}; rank 0 gave up first"
    for (_, waited_s), kept, second, taken in results:
        assert waited_s < SOON_S and kept and second[0] == "" and taken


@pytest.mark.world(3)
def test_with_ranks_of_their_own_all_are_told_and_the_next_refit_is_refused(world) -> None:
    """Messages between the halves were given up, and their connection with them."""
    for rank, ((first, waited_s), kept, (second, again_s), _) in enumerate(world(come_late, apart=True)):
        assert first.startswith(f"RefitTimeoutError: rank {1 if rank == 0 else 0} (") and waited_s < SOON_S, first
        assert second.startswith("RefitTimeoutError: rank ") and again_s < SOON_S, second
        assert kept


def give_up_in_a_bucket(apart: bool) -> Any:
    """An engine stops between two buckets until the trainer has given up; another one is in the middle of its load, too."""
    if apart:
        # As ranks of several machines.
        transfer_module.place_of = lambda device: None
    placement, log = Placement.split(ParallelPlan()), []
    rank, model = placement.world.rank, None if placement.groups is None else GPTModel(SIZES, placement.groups, seed=1)

    class Slow:
        def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
            self.weights = {}
            for name, tensor in weights:
                self.weights[name] = tensor.clone()
                if rank == 1 and len(self.weights) == 3:
                    wait_for_who_gives_up()

    engine = None if placement.trains else Slow()
    transfer = WeightTransfer(bucket_bytes=6000, timeout_s=LONG_S)
    store().set("given up", "not yet")
    refit(model, placement.groups, engine, transfer, placement=placement)
    store().delete_key("given up") if rank == 0 else None
    dist.barrier()
    transfer.timeout_s = 0.5 if rank == 0 else LONG_S
    log.append(attempt(lambda: refit(model, placement.groups, engine, transfer, placement=placement)))
    if rank == 0:
        store().set("given up", "1")
    transfer.timeout_s = LONG_S
    log.append(attempt(lambda: refit(model, placement.groups, engine, transfer, placement=placement)))
    return log, None if engine is None else engine.weights, None if model is None else state(model)


@pytest.mark.world(3)
def test_neighbours_hear_at_once_who_gave_up_in_a_bucket_and_the_next_refit_works(world) -> None:
    (trainer, _, expected), *engines = world(give_up_in_a_bucket, apart=False)
    assert trainer[0][0].startswith("RefitTimeoutError: rank 1 did not take weights within timeout_s=0.5 (bucket ")
    for log, weights, _ in engines:
        assert log[0][0].startswith("RefitTimeoutError: rank 0 gave up (bucket ") and equal(weights, expected)
    for log, *_ in ((trainer,), *engines):
        assert log[0][1] < SOON_S and log[1][0] == ""


@pytest.mark.world(3)
def test_where_a_connection_went_with_a_transfer_every_later_refit_is_refused_on_all_ranks(world) -> None:
    logs = [log for log, *_ in world(give_up_in_a_bucket, apart=True)]
    assert logs[0][0][0].startswith("RefitTimeoutError: rank 1 did not take weights within timeout_s=0.5 (bucket ")
    for log in logs:
        (first, waited_s), (second, again_s) = log
        assert first.startswith("RefitTimeoutError: rank ") and waited_s < SOON_S
        assert "gave up a transfer with rank" in second and second.endswith("start the ranks anew, with a longer timeout_s")
        assert again_s < SOON_S


class Refusing:
    """An engine that does not ask for weights."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        raise ValueError("version=-1 must not be negative")


class Whole:
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.weights = {name: tensor.clone() for name, tensor in weights}


def refuse_alone() -> Any:
    groups = ProcessGroups.build(ParallelPlan(tp=2))
    model, transfer = GPTModel(SIZES, groups, seed=1), WeightTransfer(timeout_s=LONG_S)
    first = attempt(lambda: refit(model, groups, Refusing() if dist.get_rank() else Whole(), transfer))
    return first, attempt(lambda: refit(model, groups, Whole(), transfer))[0]


@pytest.mark.world(2)
def test_what_an_engine_refuses_before_its_first_weight_ends_the_call_of_all(world) -> None:
    (other, again), (own, once_more) = world(refuse_alone)
    assert own[0] == "ValueError: version=-1 must not be negative"
    assert other[0] == "RefitTimeoutError: rank 1 gave up (weights): ValueError: version=-1 must not be negative" and other[1] < SOON_S
    assert again == once_more == ""


def refuse_beside_a_trainer() -> Any:
    placement, transfer = Placement.split(ParallelPlan()), WeightTransfer(timeout_s=LONG_S)
    model = None if placement.groups is None else GPTModel(SIZES, placement.groups, seed=1)

    def load(engine: Any) -> tuple[str, float]:
        taker = None if placement.trains else engine
        return attempt(lambda: refit(model, placement.groups, taker, transfer, placement=placement))

    return load(Refusing()), load(Whole())[0]


@pytest.mark.world(2)
def test_what_an_engine_of_its_own_refuses_ends_the_call_of_the_trainer(world) -> None:
    (trainer, again), (own, once_more) = world(refuse_beside_a_trainer)
    assert own[0] == "ValueError: version=-1 must not be negative"
    assert "gave up (weights): ValueError: version=-1 must not be negative" in trainer[0] and trainer[1] < SOON_S
    assert again == once_more == ""


# -- the rendezvous alone ----------------------------------------------------------------------------------------------


def group_of(shared: Any, rank: int, size: int) -> Any:
    return SimpleNamespace(rank=rank, size=size, ranks=range(size), pg=SimpleNamespace(get_group_store=lambda: shared))


def together(*calls: Callable[[], Any]) -> list[str]:
    """What each raised, all in threads of their own."""
    messages = [""] * len(calls)

    def run(number: int, call: Callable[[], Any]) -> None:
        messages[number] = attempt(call)[0]

    threads = [threading.Thread(target=run, args=each) for each in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
        assert not thread.is_alive()
    return messages


def test_who_cannot_come_is_named_to_those_who_wait_and_to_those_who_come_later() -> None:
    shared = dist.HashStore()
    groups = [group_of(shared, rank, 3) for rank in range(3)]
    waits = [lambda group=group: rendezvous(group, LONG_S, "weights") for group in groups]
    messages = together(waits[0], lambda: withdraw(groups[1], "weights", OSError("no memory")))
    expected = "RankTimeoutError: rank 1 gave up (weights): OSError: no memory"
    assert messages == [expected, ""] and attempt(waits[2])[0] == expected
    # All are at the same turn again, and the store keeps one verdict however many there were.
    for _ in range(3):
        assert together(*waits) == ["", "", ""]
    assert [turn for turn in range(1, 5) if shared.check([f"mcore_rl rendezvous/turn {turn}"])] == [4]


def test_whoever_gave_up_more_often_waits_for_the_others_to_follow() -> None:
    shared = dist.HashStore()
    first, second, third = (group_of(shared, rank, 3) for rank in range(3))
    for _ in range(3):
        # More calls than there are ranks: their sum says nothing.
        with pytest.raises(RankTimeoutError, match="rank 1 and rank 2 did not come within timeout_s=0.01"):
            rendezvous(first, 0.01, "weights")
    for group in (second, third):
        for _ in range(3):
            with pytest.raises(RankTimeoutError, match="rank 0 gave up after timeout_s=0.01, before this rank came"):
                rendezvous(group, LONG_S, "weights")
    assert together(*(lambda group=group: rendezvous(group, LONG_S, "weights") for group in (first, second, third))) == [""] * 3


def test_who_is_interrupted_while_it_waits_does_not_count_as_there() -> None:
    shared = dist.HashStore()

    class Interrupted:
        def __getattr__(self, name: str) -> Any:
            return self._check if name == "check" else getattr(shared, name)

        def _check(self, keys: list[str]) -> bool:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rendezvous(group_of(Interrupted(), 0, 2), LONG_S, "weights")
    with pytest.raises(RankTimeoutError, match=r"^rank 0 gave up \(weights\): KeyboardInterrupt: $"):
        rendezvous(group_of(shared, 1, 2), LONG_S, "weights")
