# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Processes of one device hand weights over in memory that both map: equal weights, nothing left behind, and who fails is named."""

import contextlib
import dataclasses
import gc
import inspect
import os
import signal
import time
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import rebuild_cuda_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mcore_inference import DynamicInferenceContext, DynamicInferenceEngine, InferenceConfig, PagedAttention
from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.data import ByteTokenizer
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_rl import Placement, RefitTimeoutError, WeightTransfer, refit
from mcore_rl._refit import _ipc as ipc_module
from mcore_rl._refit import _transfer as transfer_module
from mcore_rl._refit._shared_memory import SharedMemory, map_memory
from tests.support.world import leave_together

CPU = torch.device("cpu")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SIZES = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=2, ffn_hidden_size=48, vocab_size=64)


class Engine:
    """Takes whole weights; ``before`` runs ahead of each."""

    def __init__(self, device: torch.device = CPU, before: Any = None) -> None:
        # Says where the engine is, and nothing of a layout.
        self.model = nn.Linear(1, 1, device=device)
        self.weights: dict[str, Tensor] = {}
        self._before = before

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for number, (name, tensor) in enumerate(weights):
            assert tensor.device == self.model.weight.device
            self.weights[name] = tensor.cpu() if tensor.is_cuda else tensor.clone()
            if self._before is not None:
                self._before(number)


def on(kind: str) -> torch.device:
    """The one device of all ranks."""
    return torch.device("cuda", 0) if kind == "cuda" else CPU


def trained(placement: Placement, device: torch.device = CPU) -> GPTModel | None:
    return None if placement.groups is None else GPTModel(SIZES, placement.groups, seed=3, device=device)


def state_of(model: GPTModel | None) -> dict[str, Tensor]:
    return {} if model is None else {name: value.cpu() for name, value in model.state_dict().items()}


def num_mapped() -> int:
    """Shared memory of the host that the process maps or has open."""
    maps = Path("/proc/self/maps").read_text(encoding="ascii").count("memfd:mcore_rl")
    for number in Path("/proc/self/fd").iterdir():
        # That of the folder itself is gone by then.
        with contextlib.suppress(OSError):
            maps += "memfd:mcore_rl" in os.readlink(number)
    return maps


def num_tensors() -> int:
    return sum(type(item) is Tensor for item in gc.get_objects())


def num_left(device: torch.device, before: int = 0) -> int:
    """What a refit left behind: mappings of the host and tensors that only a collection frees, or bytes of this process on a GPU, which
    stay while another process maps them."""
    if device.type == "cpu":
        before_collection = num_tensors()
        gc.collect()
        return num_mapped() + before_collection - num_tensors()
    torch.cuda.ipc_collect()
    return torch.cuda.memory_allocated(device) - before


def num_allocated(device: torch.device) -> int:
    """Once all ranks are this far: the first work on a GPU takes seconds."""
    dist.barrier()
    if device.type == "cpu":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def watch(transfer: WeightTransfer, log: list[Any]) -> None:
    """Note by what way each bucket goes, and how much memory both ends map then."""
    take = transfer._take

    def watched(schedule: Any, under_way: Any, *others: Any) -> Iterator[tuple[str, Tensor]]:
        neighbours = transfer._neighbours
        assert neighbours is not None
        slots = sum(one.memory.num_bytes for one in neighbours._outgoing.values() if one.memory is not None)
        log.append((sorted(transfer.ipc_peers), len(under_way.transfers), slots, num_mapped() > 0))
        return take(schedule, under_way, *others)

    transfer._take = watched  # type: ignore[method-assign]


def carry(plan: ParallelPlan, bucket_bytes: int, kind: str = "cpu") -> Any:
    placement, device = Placement.split(plan), on(kind)
    engine, transfer = Engine(device), WeightTransfer(bucket_bytes=bucket_bytes, timeout_s=30.0)
    model, log, equal = trained(placement, device), [], True
    watch(transfer, log)
    before = num_allocated(device)
    for _ in range(3):
        refit(model, placement.groups, None if placement.trains else engine, transfer, placement=placement)
        assert num_left(device, before) == 0
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, state_of(model))
        if not placement.trains:
            equal = equal and engine.weights.keys() == values[0].keys()
            equal = equal and all(torch.equal(engine.weights[name], value) for name, value in values[0].items())
        if model is not None:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.5)
    if device.type == "cuda" and placement.trains and transfer.ipc_peers:
        assert 0 < torch.cuda.max_memory_allocated(device) - before <= bucket_bytes // 2 + 512
    assert transfer.plan is not None
    sources = {copy.destination_rank: copy.source_rank for copy in transfer.plan.copies}
    return equal, log, sources


@pytest.mark.world(2)
@pytest.mark.parametrize("kind", DEVICES)
@pytest.mark.parametrize("bucket_bytes", [1 << 28, 40_000, 3000])
def test_an_engine_beside_its_trainer_maps_at_most_half_a_bucket(world, bucket_bytes: int, kind: str) -> None:
    (_, trainer, _), (equal, engine, _) = world(carry, plan=ParallelPlan(), bucket_bytes=bucket_bytes, kind=kind)
    assert equal and len(trainer) == len(engine) >= 3
    assert all(neighbours == [1] and transfers == 0 and 0 < slot <= bucket_bytes // 2 for neighbours, transfers, slot, _ in trainer)
    assert all(
        neighbours == [0] and transfers == 0 and slot == 0 and maps == (kind == "cpu") for neighbours, transfers, slot, maps in engine
    )


@pytest.mark.world(4)
def test_replicas_and_several_engines_of_one_device_share_the_limit(world) -> None:
    results = world(carry, plan=ParallelPlan(dp=2), bucket_bytes=12_000)
    assert all(equal for equal, *_ in results)
    assert results[0][2] == {2: 0, 3: 1}
    for rank, (_, log, _) in enumerate(results):
        assert all(neighbours == [(rank + 2) % 4] for neighbours, *_ in log)


def carry_to_two() -> Any:
    return carry(ParallelPlan(), 12_000)


@pytest.mark.world(3)
def test_the_slots_of_several_engines_are_half_a_bucket_together(world) -> None:
    (_, trainer, _), *engines = world(carry_to_two)
    assert all(neighbours == [1, 2] and 0 < slots <= 6000 for neighbours, _, slots, _ in trainer)
    assert all(equal for equal, *_ in engines)


# -- ways that are closed ----------------------------------------------------------------------------------------------


def carry_without(way: str, kind: str) -> Any:
    def fail(*_: Any) -> Any:
        raise RuntimeError("no handle of another process")

    if way == "map" and dist.get_rank() == 1:
        ipc_module.map_memory = fail
    if way == "connect" and dist.get_rank() == 0:
        # A name at which nobody listens.
        ipc_module.Listener.address = property(lambda listener: [*listener._place, b"\0mcore-nobody".hex()])  # type: ignore[assignment]
    if way == "place" and dist.get_rank() == 0:
        place_of = transfer_module.place_of
        transfer_module.place_of = lambda device: [*(place_of(device) or [])[:1], "another device"]
    return carry(ParallelPlan(), 12_000, kind)


@pytest.mark.world(2)
@pytest.mark.parametrize("kind", DEVICES)
@pytest.mark.parametrize("way", ["map", "connect", "place"])
def test_where_memory_cannot_be_shared_the_world_carries_the_weights(world, way: str, kind: str) -> None:
    (_, trainer, _), (equal, engine, _) = world(carry_without, way=way, kind=kind)
    assert equal
    assert all(neighbours == [] and transfers == 1 and slots == 0 for neighbours, transfers, slots, _ in [*trainer, *engine])


# -- peak ------------------------------------------------------------------------------------------------------------


class LargestHeld(TorchDispatchMode):
    """Memory of the tensors that operations give, beside that of a model: the most at a time."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.num_bytes = 0
        self._own = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
        self._live: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage()).data_ptr() not in self._own:
                self._live[id(storage)] = weakref.ref(storage)
        live = [storage for ref in self._live.values() if (storage := ref()) is not None]
        self.num_bytes = max(self.num_bytes, sum(storage.nbytes() for storage in live))
        self._live = {id(storage): weakref.ref(storage) for storage in live}
        return result


def carry_large(bucket_bytes: int, beside: bool) -> tuple[int, int, dict[str, Tensor]]:
    """What this rank held at most beside its model, bytes of the largest weight, and all weights."""
    if not beside:
        transfer_module.place_of = lambda device: None
    placement, transfer = Placement.split(ParallelPlan()), WeightTransfer(bucket_bytes=bucket_bytes, timeout_s=30.0)
    sizes = dataclasses.replace(SIZES, vocab_size=1000)
    if placement.groups is None:
        own = GPTModel(sizes, ProcessGroups.single(), attention_core=PagedAttention(), seed=5).eval()
        context = DynamicInferenceContext.for_model(own, InferenceConfig(max_sequence_length=32, max_requests=4, block_size_tokens=8))
        model, engine = None, DynamicInferenceEngine(own, context, ByteTokenizer())
    else:
        model = own = GPTModel(sizes, placement.groups, seed=3)
        engine = None
    # The layouts are exchanged once.
    refit(model, placement.groups, engine, transfer, placement=placement)
    with torch.no_grad():
        for parameter in [] if model is None else model.parameters():
            parameter.mul_(0.5)
    with LargestHeld(own) as held:
        refit(model, placement.groups, engine, transfer, placement=placement)
    assert num_left(CPU) == 0 and transfer.ipc_peers == ({1 - dist.get_rank()} if beside else set())
    return held.num_bytes, max(parameter.nbytes for parameter in own.parameters()), state_of(own)


@pytest.mark.world(2)
@pytest.mark.parametrize("beside", [True, False], ids=["beside", "apart"])
def test_what_both_hold_beside_their_models_is_one_bucket_though_a_weight_is_larger(world, beside: bool) -> None:
    bucket_bytes = 40_000
    (trainer, largest, expected), (engine, _, weights) = world(carry_large, bucket_bytes=bucket_bytes, beside=beside)
    assert weights.keys() == expected.keys() and all(torch.equal(weights[name], value) for name, value in expected.items())
    assert largest > 3 * bucket_bytes
    # Both map the one slot of half a bucket; apart, one half is taken while the next is between the ranks.
    most = bucket_bytes // 2 if beside else bucket_bytes
    assert most // 2 < trainer <= most and most // 2 < engine <= most


# -- faults ------------------------------------------------------------------------------------------------------------


def fail(lost: int, how: str, kind: str) -> Any:
    """What the other rank hears, after how long, and what is left of the refit."""
    placement, device = Placement.split(ParallelPlan()), on(kind)
    transfer, model = WeightTransfer(bucket_bytes=12_000, timeout_s=4.0 if how == "dies" else 2.0), trained(placement, device)
    dist.barrier()
    refit(model, placement.groups, None if placement.trains else Engine(device), transfer, placement=placement)

    def stop(*_: Any) -> None:
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        # Longer than the others wait.
        time.sleep(4.0)

    engine = None if placement.trains else Engine(device, (lambda number: number == 3 and stop()) if lost == 1 else None)
    if lost == 0 and placement.trains:
        neighbours: Any = transfer._neighbours
        exchange, turns = neighbours.exchange, []
        neighbours.exchange = lambda *inputs: (turns.append(1), len(turns) == 3 and stop(), exchange(*inputs))[2]
    before, begin, message = num_allocated(device), time.monotonic(), ""
    try:
        refit(model, placement.groups, engine, transfer, placement=placement)
    except RefitTimeoutError as error:
        message = str(error)
    waited_s, left = time.monotonic() - begin, num_left(device, before)
    if how == "stalls":
        leave_together()
    return message, waited_s, left


@pytest.mark.world(2)
@pytest.mark.parametrize("kind", DEVICES)
@pytest.mark.parametrize("lost", [0, 1], ids=["trainer", "engine"])
def test_a_neighbour_that_dies_with_the_memory_is_named_at_once(world, lost: int, kind: str) -> None:
    message, waited_s, left = world(fail, doomed=(lost,), lost=lost, how="dies", kind=kind)[1 - lost]
    # A process may take longer to let a GPU go than to close its connections.
    closed = f"rank {lost} did not {'take' if lost else 'send'} weights, its connection is closed (bucket "
    assert message.startswith(f"rank {lost} died, no process is left (bucket ") or (kind == "cuda" and message.startswith(closed))
    assert waited_s < 4.0
    assert left == 0


@pytest.mark.journey
@pytest.mark.world(2)
@pytest.mark.parametrize(("lost", "what"), [(0, "send"), (1, "take")], ids=["trainer", "engine"])
def test_a_neighbour_that_stalls_is_named_at_the_limit(world, lost: int, what: str) -> None:
    message, waited_s, left = world(fail, lost=lost, how="stalls", kind="cpu")[1 - lost]
    assert message.startswith(f"rank {lost} did not {what} weights within timeout_s=2 (bucket ") and 2.0 <= waited_s < 4.0
    assert left == 0


def recover(kind: str) -> Any:
    """The engine gives up a load; the next refits find nothing of it."""
    placement, device = Placement.split(ParallelPlan()), on(kind)
    transfer, engine, model = WeightTransfer(bucket_bytes=12_000, timeout_s=2.0), Engine(device), trained(placement, device)
    before, message = num_allocated(device), ""
    stream = transfer.weights(model, placement.groups, None if placement.trains else engine, placement=placement)
    if placement.trains:
        with pytest.raises(RefitTimeoutError) as caught:
            list(stream)
        message = str(caught.value)
    else:
        next(stream)
    # The engine comes to it when the trainer has given it up.
    dist.barrier()
    if model is not None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
    # The generator of the engine is still there, as a frame of an exception keeps it.
    for _ in range(2):
        refit(model, placement.groups, None if placement.trains else engine, transfer, placement=placement)
        stream.close()
    return message, num_left(device, before), engine.weights if model is None else state_of(model)


@pytest.mark.journey
@pytest.mark.world(2)
@pytest.mark.parametrize("kind", DEVICES)
def test_a_load_that_an_engine_gave_up_leaves_nothing(world, kind: str) -> None:
    (message, held, expected), (_, mapped, weights) = world(recover, kind=kind)
    assert message.startswith("rank 1 did not take weights within timeout_s=2 (")
    assert held == mapped == 0
    assert weights.keys() == expected.keys() and all(torch.equal(weights[name], value) for name, value in expected.items())


# -- memory ------------------------------------------------------------------------------------------------------------


def test_torch_describes_the_memory_of_a_gpu_as_it_is_sent() -> None:
    kept = [*inspect.signature(rebuild_cuda_tensor).parameters][6:]
    assert kept == [
        "storage_device", "storage_handle", "storage_size_bytes", "storage_offset_bytes", "requires_grad", "ref_counter_handle",
        "ref_counter_offset", "event_handle", "event_sync_required",
    ]  # fmt: skip


def test_memory_is_one_and_the_same_until_both_let_it_go() -> None:
    before = num_mapped()
    own = SharedMemory(100, CPU)
    other = map_memory(own.handle, own.fds, CPU)
    own.tensor.copy_(torch.arange(100, dtype=torch.uint8))
    assert torch.equal(other, torch.arange(100, dtype=torch.uint8))
    own.free()
    # What is mapped stays.
    assert other[99] == 99 and num_mapped() > before
    del other
    assert num_mapped() == before
