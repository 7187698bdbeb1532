# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Constant addresses, units captured in CUDA graphs, and shards on the host, on GPUs."""

import functools
import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import MegatronFSDP, MixedPrecisionPolicy, TensorAtomic, fully_shard, fully_shard_optimizer
from tests.support.world import run

needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
pytestmark = pytest.mark.gpu
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


class Inner(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up = nn.RMSNorm(width), nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


class Block(nn.Module):
    """A unit whose inside is captured in its first forward, when its parameters are gathered; the hooks of the unit run around it."""

    def __init__(self, width: int, *, captures: bool) -> None:
        super().__init__()
        self.inner, self.captures, self.captured = Inner(width), captures, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.captures and not self.captured and torch.is_grad_enabled():
            self.captured = True
            torch.cuda.make_graphed_callables(self.inner, (x.detach().clone().requires_grad_(),))
        return self.inner(x)


class Net(nn.Module):
    def __init__(self, width: int, depth: int, *, captures: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(512, width)
        self.blocks = nn.ModuleList(Block(width, captures=captures) for _ in range(depth))
        self.head = nn.Linear(width, 512, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(*, width: int = 256, depth: int = 6, captures: bool = False, **options: Any) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = Net(width, depth, captures=captures).cuda()
    model, optimizer = fully_shard(net, torch.optim.AdamW(net.parameters(), lr=1e-3), fsdp_unit_modules=Block, **options)
    assert optimizer is not None
    return model, optimizer


def accumulate(model: MegatronFSDP, step: int) -> list[torch.Tensor]:
    """Losses of two micro-batches, whose gradients are added up."""
    losses = []
    tokens = torch.randint(512, (4, 128), generator=torch.Generator().manual_seed(100 * step + dist.get_rank())).cuda()
    for part in tokens.chunk(2):
        loss = nn.functional.cross_entropy(model(part).flatten(0, 1).float(), part.flatten())
        loss.backward()
        losses.append(loss.detach())
    return losses


def train(model: MegatronFSDP, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    losses: list[torch.Tensor] = []
    for step in range(steps):
        losses += accumulate(model, step)
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses).tolist()


def assert_close(actual: list[float], expected: list[float], rtol: float) -> None:
    torch.testing.assert_close(torch.tensor(actual), torch.tensor(expected), rtol=rtol, atol=0)


def addresses(model: MegatronFSDP, optimizer: torch.optim.Optimizer) -> list[tuple[int, int]]:
    """Of two weights, in every forward of every unit of two steps."""
    seen: list[tuple[int, int]] = []
    for block in model.module.blocks:
        block.inner.register_forward_hook(lambda inner, *_: seen.append((inner.up.weight.data_ptr(), inner.down.weight.data_ptr())))
    train(model, optimizer, 2)
    return seen


def check_double_buffer() -> None:
    for policy in (MixedPrecisionPolicy(), BF16):
        expected = train(*build(mixed_precision=policy), 4)
        for registered in (False, True):
            model, optimizer = build(mixed_precision=policy, fsdp_double_buffer=True, nccl_ub=registered)
            assert_close(train(model, optimizer, 4), expected, 1e-5)
            seen, depth = addresses(model, optimizer), len(model.module.blocks)
            assert all(seen[:depth] == seen[at : at + depth] for at in range(0, len(seen), depth))
            assert seen[0] == seen[2] == seen[4] != seen[1] == seen[3]
            model.close()
            torch.cuda.synchronize()


@needs_two
def test_units_take_turns_in_two_buffers():
    run(check_double_buffer, 2, backend="nccl", timeout_s=110.0)


def check_graphs() -> None:
    for options in (
        {"fsdp_double_buffer": True},
        {"fsdp_double_buffer": True, "mixed_precision": BF16},
        {"zero_dp_strategy": "optim_grads"},
    ):
        expected = train(*build(**options), 5)
        model, optimizer = build(captures=True, **options)
        actual = train(model, optimizer, 5)
        assert all(block.captured for block in model.module.blocks)
        assert_close(actual, expected, 1e-2 if "mixed_precision" in options else 1e-5)


@needs_two
def test_units_captured_in_graphs_train_as_others():
    run(check_graphs, 2, backend="nccl", timeout_s=110.0)


def check_late_gradients() -> None:
    actual = []
    for elsewhere in (False, True):
        model, _ = build(depth=2)
        side, graph_views, late = torch.cuda.Stream(), [], []
        if elsewhere:
            for block in model.module.blocks:
                block.inner.register_forward_pre_hook(functools.partial(_keep_graph, side, graph_views))
            for parameter in model.runtime.parameters:
                parameter.full.register_hook(functools.partial(_delay, side, late))
        accumulate(model, 0)
        actual.append({name: gradient.to_local().clone() for name, gradient in model.gradients().items()})
        assert len(late) == (2 * 2 * 3 if elsewhere else 0)
    for name, gradient in actual[0].items():
        torch.testing.assert_close(actual[1][name], gradient, rtol=1e-4, atol=1e-6)


def _keep_graph(side: torch.cuda.Stream, graph_views: list[torch.Tensor], inner: Inner, _: Any) -> None:
    """Autograd sums gradients on the stream of the oldest graph that is alive, which captured graphs keep."""
    if len(graph_views) < 2 * 3:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            graph_views.extend(parameter.view_as(parameter) for parameter in inner.parameters())


def _delay(side: torch.cuda.Stream, late: list[None], gradient: torch.Tensor) -> torch.Tensor:
    if torch.cuda.current_stream() == side:
        torch.cuda._sleep(10_000_000)
        late.append(None)
    return gradient


@needs_two
def test_gradients_that_autograd_sums_late_on_another_stream_are_reduced():
    run(check_late_gradients, 2, backend="nccl", timeout_s=60.0)


def check_offload() -> None:
    for options in (
        *({"zero_dp_strategy": strategy} for strategy in range(4)),
        {"mixed_precision": BF16},
        {"fsdp_double_buffer": True, "mixed_precision": BF16},
        {"eight_bit_parameters": "*.up.weight"},
    ):
        first, before = build(**options)
        expected = train(first, before, 4)
        model, optimizer = build(**options, cpu_offload=True)
        # What is rounded may be rounded otherwise after a step that differs in the last bit.
        rtol = 1e-2 if {"mixed_precision", "eight_bit_parameters"} & options.keys() else 1e-4
        assert_close(train(model, optimizer, 4), expected, rtol)
        for group in model.runtime.groups:
            assert group.main.is_pinned() and group.buffer.flat.is_cuda
            assert group.gradients.reduced is None or group.gradients.reduced.is_pinned()
        assert not any(value.is_cuda for state in optimizer.state.values() for value in state.values())
        # State moves between the two, and whole tensors are gathered by the devices.
        saved = model.state_dict()
        first.load_state_dict(saved)
        first.load_optimizer_state_dict(before, model.optimizer_state_dict(optimizer))
        whole = dict(first.full_state_dict())
        assert all(torch.equal(value, whole[name]) for name, value in model.full_state_dict())
        assert_close(train(model, optimizer, 2), train(first, before, 2), rtol)


@needs_two
def test_shards_on_the_host_train_as_those_on_the_device():
    run(check_offload, 2, backend="nccl", timeout_s=110.0)


def check_offloaded_memory() -> None:
    held = []
    for offload in (False, True):
        gc.collect()
        before = torch.cuda.memory_allocated()
        model, optimizer = build(width=1024, depth=8, mixed_precision=BF16, cpu_offload=offload)
        train(model, optimizer, 2)
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated() - before)
        shards = sum(group.main.nbytes for group in model.runtime.groups)
        del model, optimizer
    # Float32 main parameters and two moments of this rank.
    assert held[0] - held[1] > 2.5 * shards, (held, shards)


@needs_two
def test_shards_on_the_host_take_no_memory_of_the_device():
    run(check_offloaded_memory, 2, backend="nccl", timeout_s=110.0)


def check_muon() -> None:
    torch.manual_seed(0)
    net = Net(256, 4, captures=False).cuda()
    blocks = {name: parameter for name, parameter in net.named_parameters() if name.startswith("blocks") and parameter.ndim == 2}
    muon = torch.optim.Muon(blocks.values(), lr=0.02)
    adamw = torch.optim.AdamW([parameter for name, parameter in net.named_parameters() if name not in blocks], lr=1e-2)
    model, _ = fully_shard(net, muon, fsdp_unit_modules=Block, mixed_precision=BF16, shard_placements=dict.fromkeys(blocks, TensorAtomic()))
    fully_shard_optimizer(adamw, model)
    tokens = torch.arange(256).view(2, 128).cuda()
    losses = []
    for _ in range(30):
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())
        loss.backward()
        for optimizer in (muon, adamw):
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    actual = {name: shard.to_local().numel() for name, shard in model.sharded_parameters().items() if name in blocks}
    assert all(size in (0, 256 * 1024) for size in actual.values())


@needs_two
def test_muon_steps_whole_matrices():
    run(check_muon, 2, backend="nccl", timeout_s=110.0)
