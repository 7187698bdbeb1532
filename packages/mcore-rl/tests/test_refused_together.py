# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What one rank refuses ends the call of all others at once, with the rank and its reason."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mcore_inference import DynamicInferenceContext, DynamicInferenceEngine, InferenceConfig, PagedAttention
from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.data import ByteTokenizer
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.optim import MegatronOptimizer, OptimizerConfig
from mcore_rl import (
    BestAndWorst,
    ContrastiveRollout,
    DisjointLoop,
    DPOObjective,
    FrozenWeights,
    GenericGenerationArgs,
    GRPOConfig,
    GRPOObjective,
    Learner,
    MegatronLocal,
    MemorySwitch,
    Placement,
    RolloutServer,
    TokenRollout,
    WeightTransfer,
    dpo_iteration,
    grpo_iteration,
    preference_margins,
)
from mcore_rl._loop import _update as update_module
from mcore_rl._rollouts._collect import own_failure_first
from mcore_rl.envs import CharacterShare
from tests.support.world import run

TOKENIZER = ByteTokenizer()
SIZES = TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=2, ffn_hidden_size=24, vocab_size=264)
LONG_S, SOON_S = 60.0, 20.0
"""A limit that no test waits for, and the most that a rank with it may wait on a slow machine."""
CONFIG = GRPOConfig(
    num_groups=2, group_size=2, seq_len=16, micro_batch_size=2, rollout_timeout_s=50.0,
    generation_args=GenericGenerationArgs(temperature=1.0, max_tokens=4),
)  # fmt: skip


def learner_of(groups: ProcessGroups, objective: Any = None, device: str = "cpu") -> Learner:
    model = GPTModel(SIZES, groups, unpadded_vocab_size=TOKENIZER.vocab_size, device=device)
    sync = DistributedDataParallel(DistributedDataParallelConfig(), model, groups)
    optimizer = MegatronOptimizer(OptimizerConfig(lr=1e-3), sync, groups)
    parts: dict[str, Any] = {"model": model, "groups": groups, "sync": sync, "optimizer": optimizer}
    if objective is not None:
        parts["reference"] = FrozenWeights(model)
    return Learner(objective=objective or GRPOObjective(), transfer=WeightTransfer(timeout_s=LONG_S), **parts)


def engine_of(groups: ProcessGroups | None = None, device: str = "cpu", **options: Any) -> DynamicInferenceEngine:
    model = GPTModel(SIZES, groups or ProcessGroups.single(), attention_core=PagedAttention(), device=device).eval()
    context = DynamicInferenceContext.for_model(model, InferenceConfig(max_sequence_length=16, max_requests=4, block_size_tokens=16))
    return DynamicInferenceEngine(model, context, TOKENIZER, vocab_size=TOKENIZER.vocab_size, **options)


def outcome(call: Callable[[], Any]) -> tuple[str, float]:
    """What it raised, and after how long."""
    dist.barrier()
    begin, message = time.monotonic(), ""
    try:
        call()
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    return message, time.monotonic() - begin


def iterate(device: str = "cpu") -> list[tuple[str, float]]:
    """The second rank refuses what it is asked, suspends no engine, cannot write its micro-batches; then all make an iteration."""
    second, groups = dist.get_rank() == 1, ProcessGroups.build(ParallelPlan(dp=2))
    learner, engine = learner_of(groups, device=device), engine_of(device=device)
    agent, interface = CharacterShare(["a", "b"], "abc"), MegatronLocal(engine)

    def once(config: GRPOConfig = CONFIG, train_policy: bool = True) -> None:
        parts: dict[str, Any] = {"agent": agent, "interface": interface, "engine": engine, "learner": learner, "lr": 1e-3}
        grpo_iteration(config, **parts, train_policy=train_policy)

    own = dataclasses.replace(CONFIG, kl_in_reward=0.1) if second else CONFIG
    results = [outcome(lambda: once(own)), outcome(lambda: once(train_policy=not second))]
    suspending = dataclasses.replace(CONFIG, memory=MemorySwitch(suspend_engine=True))
    resume = engine.resume

    def fail(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no room")

    if second:
        engine.resume = fail  # type: ignore[method-assign]
    results.append(outcome(lambda: once(suspending)))
    engine.resume = resume  # type: ignore[method-assign]
    engine.resume()
    write = update_module.mini_batches
    if second:
        update_module.mini_batches = fail
    results.append(outcome(once))
    update_module.mini_batches = write
    results.append(outcome(once))
    return results


@pytest.mark.world(2)
def test_an_iteration_that_one_rank_refuses_ends_on_all_and_the_next_one_is_made(world) -> None:
    check_iterations(world(iterate))


@pytest.mark.gpu
def test_an_iteration_that_one_gpu_refuses_ends_on_all_and_the_next_one_is_made() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    check_iterations(run(iterate, 2, backend="nccl", timeout_s=120.0, device="cuda"))


def check_iterations(results: list[list[tuple[str, float]]]) -> None:
    first, second = results
    reasons = [
        ("an iteration", "ValueError: kl_in_reward=0.1 needs a frozen reference"),
        ("an iteration", "ValueError: train_policy=False leaves nothing to train without a critic"),
        ("rollouts", "OutOfMemoryError: no room"),
        ("micro-batches", "OutOfMemoryError: no room"),
    ]
    for (purpose, reason), (told, waited_s), (own, _) in zip(reasons, first, second, strict=False):
        assert own.startswith(reason) and told.startswith(f"RuntimeError: rank 1 refused ({purpose}): {reason}"), (told, own)
        assert waited_s < SOON_S
    assert first[-1][0] == second[-1][0] == ""


def prefer() -> list[tuple[str, float]]:
    second, groups = dist.get_rank() == 1, ProcessGroups.build(ParallelPlan(dp=2))
    learner, engine = learner_of(groups, DPOObjective(beta=0.1)), engine_of()
    pairs, config = (
        BestAndWorst(CharacterShare(["a"], "abc"), group_size=2),
        dataclasses.replace(CONFIG, micro_batch_size=3 if second else 2),
    )
    parts: dict[str, Any] = {"pairs": pairs, "interface": MegatronLocal(engine), "engine": engine, "learner": learner, "lr": 1e-3}
    results = [outcome(lambda: dpo_iteration(config, **parts))]

    def row(length: int, reward: float) -> TokenRollout:
        tokens, written = list(range(1, length + 1)), [False, *[True] * (length - 1)]
        return TokenRollout(
            trajectory=tokens, generation_mask=written, logprobs=[0.0] * (length - 1), reward=reward, env_id="e", problem_id="p"
        )

    pair = ContrastiveRollout(chosen=row(40 if second else 4, 1.0), rejected=row(4, 0.0))
    results.append(outcome(lambda: preference_margins([pair], learner, seq_len=8, micro_batch_size=2)))
    return results


@pytest.mark.world(2)
def test_pairs_that_one_rank_refuses_end_the_call_of_all(world) -> None:
    first, second = world(prefer)
    for purpose, (told, waited_s), (own, _) in zip(("an iteration", "pairs"), first, second, strict=True):
        assert own and not own.startswith("RuntimeError: rank") and waited_s < SOON_S
        assert told == f"RuntimeError: rank 1 refused ({purpose}): {own}"


def make_loop(trainer_refuses: bool) -> tuple[str, float]:
    placement = Placement.split(ParallelPlan())
    options: dict[str, Any] = {"max_lag": 0, "timeout_s": LONG_S}

    def begin() -> None:
        if placement.groups is not None:
            config = dataclasses.replace(CONFIG, kl_in_reward=0.1) if trainer_refuses else CONFIG
            loop = DisjointLoop(config, placement, learner=learner_of(placement.groups), **options)
        else:
            engine = engine_of()
            server = RolloutServer(agent=CharacterShare(["a"], "abc"), interface=MegatronLocal(engine), engine=engine)
            switch = MemorySwitch() if trainer_refuses else MemorySwitch(suspend_engine=True)
            loop = DisjointLoop(dataclasses.replace(CONFIG, memory=switch), placement, server=server, **options)
        with loop:
            loop.begin()

    return outcome(begin)


@pytest.mark.world(2)
@pytest.mark.parametrize(
    ("trainer_refuses", "reason"), [(True, "kl_in_reward=0.1 needs a frozen reference"), (False, "memory=MemorySwitch(")]
)
def test_a_loop_that_one_half_cannot_make_does_not_begin_on_the_other(world, trainer_refuses: bool, reason: str) -> None:
    results = world(make_loop, trainer_refuses=trainer_refuses)
    (own, _), (told, waited_s) = results if trainer_refuses else results[::-1]
    name = "rank 0 (trains)" if trainer_refuses else "rank 1 (serves)"
    assert own.startswith(f"ValueError: {reason}") and told == f"RuntimeError: {name} refused (the loop): {own}" and waited_s < SOON_S


def warm_the_critic() -> tuple[str, float]:
    """The trainer alone knows that it has no critic."""
    placement = Placement.split(ParallelPlan())
    options: dict[str, Any] = {"max_lag": 0, "timeout_s": LONG_S}
    if placement.groups is not None:
        loop = DisjointLoop(CONFIG, placement, learner=learner_of(placement.groups), **options)
    else:
        engine = engine_of()
        server = RolloutServer(agent=CharacterShare(["a"], "abc"), interface=MegatronLocal(engine), engine=engine)
        loop = DisjointLoop(CONFIG, placement, server=server, **options)
    with loop:
        return outcome(lambda: loop.iterate(1e-3, train_policy=False))


@pytest.mark.world(2)
def test_a_half_that_cannot_do_its_part_ends_the_iteration_of_the_other(world) -> None:
    (own, _), (told, waited_s) = world(warm_the_critic)
    assert own.startswith("ValueError: train_policy=False leaves nothing to train without a critic")
    assert told.startswith("RuntimeError: ranks failed: ") and "train_policy=False" in told and waited_s < SOON_S


def test_what_failed_here_is_told_before_what_another_rank_refused() -> None:
    with pytest.raises(KeyError, match="own"), own_failure_first(KeyError("own")):
        raise RuntimeError("rank 1 refused (rollouts): ValueError: its own")
    with pytest.raises(RuntimeError, match="rank 1 refused"), own_failure_first(None):
        raise RuntimeError("rank 1 refused (rollouts): ValueError: its own")
