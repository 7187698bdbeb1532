# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Memory of a cache comes back as zeros; where there is no GPU, managed memory is refused by name."""

import gc
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_inference import (
    DynamicInferenceContext,
    InferenceConfig,
    PagedAttention,
    SamplingParams,
    UnifiedMemoryCompileTimeoutError,
    UnifiedMemoryUnsupportedError,
    advise_managed_tensor_accessed_by,
    advise_managed_tensor_preferred_location,
    create_unified_mempool,
    prefetch_managed_module_parameters,
    prefetch_managed_tensor,
)
from mcore_inference.memory import _memory, _unified, cache_memory
from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.models import GPTModel, TransformerConfig

GREEDY = SamplingParams(temperature=0, num_tokens_to_generate=24)
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has managed memory")


def test_memory_is_given_up_and_comes_back_as_zeros() -> None:
    memory = cache_memory(torch.device("cpu"))
    tensors = [memory.zeros((3, 5), torch.float32).fill_(1), memory.zeros((7,), torch.bfloat16).fill_(2)]
    assert memory.is_allocated and not memory.keeps_contents
    for _ in range(2):
        memory.free()
        assert not memory.is_allocated and all(tensor.untyped_storage().size() == 0 for tensor in tensors)
    memory.allocate_again()
    assert memory.is_allocated and all(not tensor.any() for tensor in tensors)


class FakeRange:
    """Addresses on a device of 1,000 bytes, of which ``room`` are free."""

    room = 1000

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._bytes, self.num_bytes = torch.zeros(num_bytes, dtype=torch.uint8), num_bytes
        self.is_mapped = False
        self.map()

    def take(self) -> torch.Tensor:
        return self._bytes

    def map(self) -> None:
        if not self.is_mapped:
            if FakeRange.room < self.num_bytes:
                raise torch.OutOfMemoryError("full")
            FakeRange.room -= self.num_bytes
            self.is_mapped = True

    def unmap(self) -> None:
        FakeRange.room += self.num_bytes * self.is_mapped
        self.is_mapped = False


@pytest.mark.parametrize("reserves", [False, True])
def test_a_tensor_that_was_released_comes_back_no_more(reserves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_memory, "ReservedRange", FakeRange)
    monkeypatch.setattr(FakeRange, "room", 1000)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (FakeRange.room, 1000))
    memory: Any = (_memory.ReservedMemory if reserves else _memory.PlainMemory)(torch.device("cpu"))
    kept, released = memory.zeros((10,), torch.float32), memory.zeros((20,), torch.float32)
    # Equal ones are other ones.
    for tensor in (torch.zeros(10), released, released):
        memory.release(tensor)
    assert kept.untyped_storage().size() == 40 and memory.is_allocated
    assert FakeRange.room == 960 if reserves else not released.untyped_storage().size()
    memory.free()
    memory.allocate_again()
    assert memory.is_allocated and kept.tolist() == [0.0] * 10
    assert FakeRange.room == 960 if reserves else not released.untyped_storage().size()


@pytest.mark.parametrize(("unused", "used", "empties"), [(200, 300, False), (460, 100, True), (700, 0, True)])
def test_torch_gives_memory_up_only_where_it_is_needed(unused: int, used: int, empties: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def empty_cache() -> None:
        calls.append(unused)
        FakeRange.room += unused

    monkeypatch.setattr(_memory, "ReservedRange", FakeRange)
    monkeypatch.setattr(FakeRange, "room", 1000)
    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (FakeRange.room, 1000))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    memory = _memory.ReservedMemory(torch.device("cpu"))
    tensors = [memory.zeros((50,), torch.float32).fill_(1) for _ in range(2)]
    memory.free()
    FakeRange.room -= unused + used
    memory.allocate_again()
    assert memory.is_allocated and bool(calls) == empties and not any(tensor.any() for tensor in tensors)
    memory.free()
    FakeRange.room = 300
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    with pytest.raises(torch.OutOfMemoryError):
        memory.allocate_again()
    assert not memory.is_allocated and FakeRange.room == 300


@no_gpu
def test_managed_memory_is_refused_without_a_gpu() -> None:
    with pytest.raises(UnifiedMemoryUnsupportedError, match="unified_memory_level=0"):
        create_unified_mempool()
    with pytest.raises(UnifiedMemoryUnsupportedError, match="unified_memory_level=0"):
        cache_memory(torch.device("cpu"), 1)
    for function in (prefetch_managed_tensor, advise_managed_tensor_preferred_location, advise_managed_tensor_accessed_by):
        with pytest.raises(ValueError, match="not contiguous"):
            function(torch.zeros(2, 3).T, device=0)
        with pytest.raises(UnifiedMemoryUnsupportedError):
            function(torch.zeros(2), device=0)


def check_levels(plan: dict[str, int], lacking: list[int]) -> list[str]:
    """Which memory this rank's cache has, and the warnings; a stand-in is managed memory where there is a compiler."""
    rank = torch.distributed.get_rank()

    class Managed(_memory.PlainMemory):
        def __init__(self, device: torch.device, level: int) -> None:
            if rank in lacking:
                raise UnifiedMemoryUnsupportedError("unified memory needs a C compiler")
            super().__init__(device)

    _memory.ManagedMemory = Managed  # type: ignore[misc]
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("mcore_inference.memory").addHandler(handler)
    groups = ProcessGroups.build(ParallelPlan(**plan, sequence_parallel=False))
    config = TransformerConfig(num_layers=2, hidden_size=16, num_attention_heads=4, num_query_groups=2, vocab_size=64)
    model = GPTModel(config, groups, attention_core=PagedAttention())
    try:
        context = DynamicInferenceContext.for_model(model, InferenceConfig(num_blocks=8, max_sequence_length=64, unified_memory_level=1))
    except UnifiedMemoryUnsupportedError as error:
        return [str(error), *warnings]
    return [type(context.memory).__name__, *warnings]


@pytest.mark.world(2)
@pytest.mark.parametrize("plan", [{"tp": 2}, {"pp": 2}], ids=["tp", "pp"])
@pytest.mark.parametrize("lacking", [[], [1], [0, 1]])
def test_ranks_of_a_model_have_managed_memory_together_or_not(world: Callable[..., Any], plan: dict[str, int], lacking: list[int]) -> None:
    first, second = world(check_levels, plan=plan, lacking=lacking)
    if len(lacking) == 1:
        text = "unified_memory_level=1 is 0 on all of them: 1 of the 2 ranks of the model have no managed memory"
        assert first == ["PlainMemory", text]
        assert second == ["PlainMemory", f"{text}, this one too: unified memory needs a C compiler"]
    else:
        assert first == second == ["unified memory needs a C compiler" if lacking else "Managed"]


@pytest.mark.parametrize("level", [-1, 3, True, 1.0])
def test_unknown_levels_are_refused(level: Any) -> None:
    with pytest.raises(ValueError, match="unified_memory_level"):
        InferenceConfig(unified_memory_level=level)


def test_a_folder_that_takes_no_allocator_is_refused_as_a_machine_without_managed_memory_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    (tmp_path / "file").touch()
    with pytest.raises(UnifiedMemoryUnsupportedError, match="cannot be kept or loaded: .*file.*; set XDG_CACHE_HOME to a folder"):
        _unified._allocator()


def test_the_allocator_is_compiled_once_and_a_missing_compiler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiler = tmp_path / "cc"
    compiler.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\necho library > "$2"\n')
    compiler.chmod(0o700)
    monkeypatch.setenv("CC", str(compiler))
    library = _unified._compiled()
    assert library.read_text() == "library\n" and [path.name for path in library.parent.iterdir()] == [library.name]
    compiler.write_text("#!/bin/sh\nexit 1\n")
    assert _unified._compiled() == library
    library.unlink()
    with pytest.raises(UnifiedMemoryUnsupportedError, match="could not compile"):
        _unified._compiled()
    compiler.write_text("#!/bin/sh\nexec sleep 30\n")
    monkeypatch.setattr(_unified, "_COMPILE_TIMEOUT_S", 0.2)
    with pytest.raises(UnifiedMemoryCompileTimeoutError, match="took more than 0.2 s .* unified_memory_level=0"):
        _unified._compiled()
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(UnifiedMemoryUnsupportedError, match="C compiler"):
        _unified._compiled()


@pytest.mark.gpu
@pytest.mark.parametrize("level", [0, 1, 2])
def test_suspended_engines_keep_addresses_graphs_and_tokens(
    level: int, make_engine: Callable[..., Any], make_model: Callable[..., Any]
) -> None:
    model = make_model(device="cuda", dtype=torch.bfloat16)

    def engine() -> Any:
        return make_engine(model, block_size_tokens=16, num_blocks=1 << 15, unified_memory_level=level)

    prompts = [[1, 2, 3], [4, 5, 6, 7, 8]]
    expected = [record.generated_tokens for record in engine().generate(prompts, GREEDY)]
    gc.collect()
    torch.cuda.empty_cache()
    ours = engine()
    address, size = ours.context.cache.pages.data_ptr(), ours.context.cache.num_bytes
    ids = [ours.add_request(prompt, GREEDY) for prompt in prompts]
    done = {}
    for step in range(40):
        if step in (3, 9, 17):
            graphs, before = ours._executor.graphs, torch.cuda.mem_get_info()[0]
            recorded = set(graphs._recorded)
            ours.suspend()
            assert ours.is_suspended
            if level:
                assert place_of(ours.context.cache.pages) == -1
            else:
                assert torch.cuda.mem_get_info()[0] - before > 0.9 * size
            ours.resume()
            assert ours.context.cache.pages.data_ptr() == address and set(graphs._recorded) == recorded
        done |= {record.request_id: record.generated_tokens for record in ours.step()}
    assert [done[number] for number in ids] == expected
    before = torch.cuda.mem_get_info()[0]
    ours.close()
    assert ours.is_suspended and not graphs._recorded
    del ours, graphs
    gc.collect()
    torch.cuda.empty_cache()
    assert level or torch.cuda.mem_get_info()[0] - before > 0.9 * size


def place_of(tensor: torch.Tensor) -> int:
    """Where a tensor in managed memory was sent last: the number of a GPU, or -1 for the host."""
    from mcore_inference.memory._driver import call, driver

    name = driver().CUmem_range_attribute.CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION
    return int(call("cuMemRangeGetAttribute", 4, name, tensor.data_ptr(), tensor.nbytes))


@pytest.mark.gpu
@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_released_tensor_gives_its_memory_back_on_a_gpu(level: int) -> None:
    memory = cache_memory(torch.device("cuda", 0), level)
    kept, released = (memory.zeros((size,), torch.float32) for size in (1 << 20, 1 << 27))
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    memory.release(released)
    if level:
        assert not released.untyped_storage().size()
    else:
        assert torch.cuda.mem_get_info()[0] - before >= 1 << 29
    memory.free()
    memory.allocate_again()
    again = memory.zeros((1 << 20,), torch.float32)
    assert memory.is_allocated and not kept.any() and not again.any()


@pytest.mark.gpu
def test_managed_tensors_move_and_keep_their_contents() -> None:
    pool = create_unified_mempool()
    with torch.cuda.use_mem_pool(pool):
        tensor = torch.arange(1 << 24, device="cuda")
        module = torch.nn.Linear(256, 256, device="cuda")
    weight = module.weight.detach().clone()
    for place in (-1, 0, -1, 0):
        advise_managed_tensor_preferred_location(tensor, device=place)
        prefetch_managed_tensor(tensor, device=place)
        assert prefetch_managed_module_parameters(module, device=place) == 4 * (256 * 256 + 256)
        torch.cuda.synchronize()
        assert torch.equal(tensor, torch.arange(1 << 24, device="cuda")) and torch.equal(module.weight, weight)
    advise_managed_tensor_accessed_by(tensor, device=0)
