# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Trainer and engine take turns with the memory of one device, and learn what they learn without."""

import dataclasses
import gc
from typing import Any

import pytest
import torch

from mcore_inference import DynamicInferenceContext, DynamicInferenceEngine, InferenceConfig, PagedAttention, SamplingParams
from mcore_parallel import ProcessGroups
from mcore_parallel.data import ByteTokenizer
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.models import GPTModel, TransformerConfig, add_value_head
from mcore_parallel.optim import MegatronOptimizer, OptimizerConfig
from mcore_parallel.optim._offload import ParkedTensors
from mcore_rl import (
    Critic,
    GAEConfig,
    GenericGenerationArgs,
    GRPOConfig,
    GRPOObjective,
    Learner,
    MegatronLocal,
    MemorySwitch,
    ValueObjective,
    grpo_iteration,
    refit,
)
from mcore_rl._loop import _loop as loop_module
from mcore_rl.envs import CharacterShare

TOKENIZER = ByteTokenizer()
ALL = MemorySwitch(offload_optimizer=True, release_gradients=True, suspend_engine=True)
STREAMED = MemorySwitch(stream_optimizer=True, release_gradients=True, suspend_engine=True)
HALF_STREAMED = MemorySwitch(stream_optimizer=True, resident_gb=1e-4, suspend_engine=True)


def build(device: str = "cpu", width: int = 32) -> tuple[Learner, DynamicInferenceEngine]:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    sizes = TransformerConfig(num_layers=2, hidden_size=width, num_attention_heads=2, vocab_size=TOKENIZER.vocab_size)
    groups = ProcessGroups.single()
    model = GPTModel(sizes, groups, device=device, dtype=dtype)
    sync = DistributedDataParallel(DistributedDataParallelConfig(), model, groups)
    optimizer = MegatronOptimizer(OptimizerConfig(lr=1e-2, weight_decay=0.0), sync, groups)
    copy = GPTModel(sizes, groups, attention_core=PagedAttention(), device=device, dtype=dtype).eval()
    limits = InferenceConfig(max_sequence_length=32, max_requests=16, block_size_tokens=16)
    engine = DynamicInferenceEngine(copy, DynamicInferenceContext.for_model(copy, limits), TOKENIZER)
    refit(model, groups, engine)
    return Learner(model=model, groups=groups, objective=GRPOObjective(), sync=sync, optimizer=optimizer), engine


def build_critic(learner: Learner) -> Critic:
    """Of the policy's sizes."""
    values = GPTModel(learner.model.config, learner.groups)  # type: ignore[arg-type]
    head = add_value_head(values)
    sync = DistributedDataParallel(DistributedDataParallelConfig(), values, learner.groups)
    optimizer = MegatronOptimizer(OptimizerConfig(lr=1e-2, weight_decay=0.0), sync, learner.groups)
    return Critic(model=values, objective=ValueObjective(head=head), sync=sync, optimizer=optimizer, lr=1e-2)


def held_memory(critic: Critic) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """States of the optimizer, and gradients."""
    optimizer, sync = critic.optimizer, critic.sync
    assert isinstance(optimizer, MegatronOptimizer) and isinstance(sync, DistributedDataParallel)
    return [storage.data for unit in optimizer._units for _, storage in unit.storages()], [buffer.data for buffer in sync.grad_buffers]


def iterate(switch: MemorySwitch, count: int, device: str = "cpu") -> list[torch.Tensor]:
    learner, engine = build(device)
    config = GRPOConfig(
        num_groups=2, group_size=4, seq_len=16, memory=switch, generation_args=GenericGenerationArgs(temperature=1.0, max_tokens=8)
    )
    for _ in range(count):
        agent = CharacterShare(["a", "b"], "abcdefgh")
        grpo_iteration(config, agent=agent, interface=MegatronLocal(engine), engine=engine, learner=learner, lr=1e-2)
        assert engine.is_suspended == switch.suspend_engine
    return [parameter.detach().clone() for parameter in learner.model.parameters()]


@pytest.mark.parametrize("switch", [ALL, STREAMED, HALF_STREAMED])
def test_a_policy_learns_the_same_with_and_without_turns(switch: MemorySwitch) -> None:
    staying, switching = (torch.cat([weights.flatten() for weights in iterate(one, 3)]) for one in (MemorySwitch(), switch))
    # Which requests share a step of the engine is a matter of time, and so are last bits: Adam makes steps of gradients that are only that.
    assert ((staying - switching).abs() > 1e-5).float().mean() < 1e-3


def test_the_trainer_has_its_memory_before_the_answers_of_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    learner, engine = build()
    optimizer: Any = learner.optimizer
    seen, real = [], loop_module.exchange

    def exchange(*arguments: Any, **options: Any) -> Any:
        seen.append((engine.is_suspended, optimizer._parked.are_parked))
        return real(*arguments, **options)

    monkeypatch.setattr(loop_module, "exchange", exchange)
    config = GRPOConfig(
        num_groups=2, group_size=4, seq_len=16, memory=ALL, generation_args=GenericGenerationArgs(temperature=1.0, max_tokens=8)
    )
    parts: dict[str, Any] = {"agent": CharacterShare(["a", "b"], "ab"), "interface": MegatronLocal(engine), "engine": engine}
    report = grpo_iteration(config, **parts, learner=learner, lr=1e-2)
    assert seen == [(True, False)]
    assert report.generate_s > 0 and report.exchange_s > 0 and report.pack_s > 0
    parts_s = report.to_generation_s + report.generate_s + report.to_training_s + report.exchange_s
    assert parts_s == pytest.approx(report.rollout_s) and report.pack_s + report.score_s < report.train_s


def test_an_engine_beside_a_trainer_leaves_it_what_torch_keeps() -> None:
    learner, engine = build()
    calls: list[str] = []
    whole, within = engine.suspend, engine.suspend_within_process
    engine.suspend = lambda: (calls.append("suspend"), whole())[1]  # type: ignore[method-assign]
    engine.suspend_within_process = lambda: (calls.append("within"), within())[1]  # type: ignore[method-assign]
    ALL.training(engine)
    with ALL.generating(optimizer=learner.optimizer, sync=learner.sync, engine=engine):
        assert not engine.is_suspended
    assert calls == ["within", "within"] and engine.is_suspended


class Plain:
    """An engine of another kind."""

    is_suspended = False

    def suspend(self) -> None:
        self.is_suspended = True

    def resume(self) -> None:
        self.is_suspended = False


def test_an_engine_of_another_kind_is_suspended_as_it_can() -> None:
    engine = Plain()
    switch = MemorySwitch(suspend_engine=True)
    switch.training(engine)
    assert engine.is_suspended
    with switch.generating(optimizer=None, sync=None, engine=engine):
        assert not engine.is_suspended
    assert engine.is_suspended


def test_all_memory_comes_back_when_generation_fails() -> None:
    learner, engine = build()
    parts: dict[str, Any] = {"optimizer": learner.optimizer, "sync": learner.sync, "engine": engine}
    buffers: Any = learner.sync
    optimizer: Any = learner.optimizer
    held = [storage.data for unit in optimizer._units for _, storage in unit.storages()]
    before = [tensor.clone() for tensor in held]
    ALL.training(engine)
    with pytest.raises(RuntimeError, match="inside"), ALL.generating(**parts):
        assert not engine.is_suspended
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in held)
        assert all(buffer.data.untyped_storage().nbytes() == 0 for buffer in buffers.grad_buffers)
        raise RuntimeError("inside")
    assert engine.is_suspended and all(torch.equal(one, other) for one, other in zip(held, before, strict=True))
    assert all(buffer.data.untyped_storage().nbytes() for buffer in buffers.grad_buffers)


def test_a_block_inside_a_block_leaves_the_trainer_whole() -> None:
    learner, engine = build()
    parts: dict[str, Any] = {"optimizer": learner.optimizer, "sync": learner.sync, "engine": engine}
    with pytest.raises(RuntimeError, match="not suspended"), ALL.generating(**parts):
        raise AssertionError("an engine with memory")
    ALL.training(engine)
    with ALL.generating(**parts), pytest.raises(RuntimeError, match="do not nest blocks"), ALL.generating(**parts):
        raise AssertionError("a block inside a block")
    with ALL.generating(**parts):
        assert not engine.is_suspended


def test_streamed_state_never_comes_back_as_a_whole() -> None:
    learner, engine = build()
    optimizer: Any = learner.optimizer
    held = [storage.data for unit in optimizer._units for _, storage in unit.storages()]
    STREAMED.training(engine)
    for _ in range(2):
        with STREAMED.generating(optimizer=optimizer, sync=learner.sync, engine=engine):
            assert all(tensor.untyped_storage().nbytes() == 0 for tensor in held)
        optimizer.step()
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in held)
    assert optimizer.step_count == 2
    with pytest.raises(ValueError, match="stream_optimizer=True leaves it in host memory; set one of them"):
        MemorySwitch(offload_optimizer=True, stream_optimizer=True)


@pytest.mark.parametrize("kind", ["offload_optimizer", "stream_optimizer"])
def test_what_has_room_of_the_state_stays(kind: str) -> None:
    learner, engine = build()
    optimizer: Any = learner.optimizer
    groups = [[storage.data for _, storage in unit.storages()] for unit in optimizer._resident]
    optimizer._parked = ParkedTensors(groups, window_bytes=1)
    sizes = [window.num_bytes for window in optimizer._parked._windows]
    switch = MemorySwitch(**{kind: True}, resident_gb=sum(sizes[:3]) / 2**30, suspend_engine=True)
    switch.training(engine)
    for _ in range(2):
        with switch.generating(optimizer=optimizer, sync=learner.sync, engine=engine):
            held = [all(tensor.untyped_storage().nbytes() for tensor in window.tensors) for window in optimizer._parked._windows]
            assert held == [number < 3 for number in range(len(sizes))]
        assert optimizer._parked.are_parked == (kind == "stream_optimizer")
        optimizer.step()
    assert optimizer.step_count == 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"resident_gb": 1.0}, "resident_gb=1.0 is what stays of a state that leaves; set offload_optimizer or stream_optimizer"),
        ({"resident_gb": -1.0, "stream_optimizer": True}, "resident_gb=-1.0 must be a finite number of at least 0"),
        ({"resident_gb": float("nan"), "stream_optimizer": True}, "resident_gb=nan must be"),
    ],
)
def test_shares_that_cannot_be_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MemorySwitch(**fields)


@pytest.mark.parametrize("field", ["offload_optimizer", "stream_optimizer", "release_gradients", "suspend_engine"])
def test_a_part_that_cannot_is_named(field: str) -> None:
    switch = MemorySwitch(**{field: True})
    with pytest.raises(ValueError, match=f"{field}=True needs .*, and the .* is a object; set {field}=False"):
        switch.check(optimizer=object(), sync=object(), engine=object())


def draws_with_a_critic(switch: MemorySwitch, monkeypatch: pytest.MonkeyPatch) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Bytes that the critic's states and gradients have while answers are drawn, and its weights behind two iterations."""
    learner, engine = build()
    learner = dataclasses.replace(learner, critic=build_critic(learner))
    assert learner.critic is not None
    states, gradients = held_memory(learner.critic)
    sizes, real = [], loop_module._draw

    def draw(*arguments: Any, **options: Any) -> Any:
        sizes.append([sum(tensor.untyped_storage().nbytes() for tensor in tensors) for tensors in (states, gradients)])
        return real(*arguments, **options)

    monkeypatch.setattr(loop_module, "_draw", draw)
    config = GRPOConfig(
        num_groups=8,
        group_size=1,
        seq_len=16,
        memory=switch,
        gae=GAEConfig(),
        generation_args=GenericGenerationArgs(temperature=1.0, max_tokens=8),
    )
    for _ in range(2):
        agent = CharacterShare(["a", "b"], "abcdefgh")
        grpo_iteration(config, agent=agent, interface=MegatronLocal(engine), engine=engine, learner=learner, lr=1e-2)
    return sizes, [parameter.detach().clone() for parameter in learner.critic.model.parameters()]


def test_a_critic_gives_up_what_the_policy_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, staying = draws_with_a_critic(MemorySwitch(), monkeypatch)
    assert all(size > 0 for sizes in kept for size in sizes)
    for switch in (ALL, STREAMED):
        sizes, switching = draws_with_a_critic(switch, monkeypatch)
        assert sizes == [[0, 0], [0, 0]]
        apart = torch.cat([(one - other).abs().flatten() for one, other in zip(staying, switching, strict=True)])
        # As of the policy above.
        assert (apart > 1e-5).float().mean() < 1e-3


def test_a_critic_has_its_memory_again_when_generation_fails_and_when_there_is_too_little_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    learner, engine = build()
    critic = build_critic(learner)
    parts: dict[str, Any] = {"optimizer": learner.optimizer, "sync": learner.sync, "engine": engine, "critic": critic}
    states, gradients = held_memory(critic)
    for number, tensor in enumerate(states):
        tensor.fill_(number + 1)
    ALL.training(engine)
    with pytest.raises(RuntimeError, match="inside"), ALL.generating(**parts):
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in (*states, *gradients))
        raise RuntimeError("inside")
    assert all(tensor.eq(number + 1).all() for number, tensor in enumerate(states))
    assert all(not tensor.any() for tensor in gradients)

    def refused(keep_bytes: int = 0) -> None:
        raise torch.OutOfMemoryError("no room")

    # The critic's state does not leave, and all that had left before comes back.
    monkeypatch.setattr(critic.optimizer, "offload_to_cpu", refused)
    policy: Any = learner.optimizer
    with pytest.raises(torch.OutOfMemoryError, match="no room"), ALL.generating(**parts):
        raise AssertionError("a critic that stays")
    assert not policy._parked.are_parked and engine.is_suspended


def test_of_a_share_that_stays_the_critic_has_none() -> None:
    learner, engine = build()
    critic = build_critic(learner)
    optimizers: list[Any] = [learner.optimizer, critic.optimizer]
    switch = MemorySwitch(offload_optimizer=True, resident_gb=1.0)
    with switch.generating(optimizer=learner.optimizer, sync=learner.sync, engine=engine, critic=critic):
        assert [optimizer._parked.are_parked for optimizer in optimizers] == [False, True]
    assert [optimizer._parked.are_parked for optimizer in optimizers] == [False, False]


@pytest.mark.parametrize(
    ("field", "part"), [("offload_optimizer", "optimizer"), ("stream_optimizer", "optimizer"), ("release_gradients", "sync")]
)
def test_a_part_of_the_critic_that_cannot_is_named(field: str, part: str) -> None:
    learner, engine = build()
    critic: Any = dataclasses.replace(build_critic(learner), **{part: object()})
    with pytest.raises(ValueError, match=f"{field}=True needs .*, and the critic's {part} is a object; set {field}=False"):
        MemorySwitch(**{field: True}).check(optimizer=learner.optimizer, sync=learner.sync, engine=engine, critic=critic)


@pytest.mark.gpu
def test_turns_on_a_gpu_keep_bits_and_take_no_more_memory() -> None:
    learner, engine = build("cuda", 1024)
    parts: dict[str, Any] = {"optimizer": learner.optimizer, "sync": learner.sync, "engine": engine}
    optimizer: Any = learner.optimizer
    held = [storage.data for unit in optimizer._units for _, storage in unit.storages()]
    for tensor in held:
        tensor.copy_(torch.randn(tensor.shape))
    before = [tensor.clone() for tensor in held]
    peaks = []
    ALL.training(engine)
    for _ in range(6):
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        with ALL.generating(**parts):
            engine.generate([[1, 2, 3]] * 4, SamplingParams(num_tokens_to_generate=4))
        optimizer._parked.wait()
        assert all(torch.equal(one, other) for one, other in zip(held, before, strict=True))
        peaks.append(torch.cuda.max_memory_allocated())
    assert max(peaks[1:]) <= 1.01 * min(peaks[1:])
