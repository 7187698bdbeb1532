# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Recordings of an engine: one pool of memory, two runs before each, and the memory back when all are forgotten."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_inference.engine._recording_pool import RecordingPool
from tests.support.decode_graphs import EagerCapture


class Watched(EagerCapture):
    """Notes what is asked of it."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.log = log
        log.append("made")

    def warm(self, work: Callable[[], Any]) -> Any:
        self.log.append("warm")
        return super().warm(work)

    def record(self, work: Callable[[], Any], pool: list[Tensor]) -> tuple[Any, Callable[[], None]]:
        self.log.append(f"record into {self.pools.index(pool)}")
        return super().record(work, pool)


def test_recordings_share_a_pool_until_it_is_cleared() -> None:
    log: list[str] = []
    source = torch.zeros(3)
    pool = RecordingPool(lambda: Watched(log))
    assert not log, "nobody records before it is needed"
    one, result = pool.record(lambda: source + 1)
    two, other = pool.record(lambda: source[:2] * 3)
    assert log == ["made", *["warm", "warm", "record into 0"] * 2]
    source.fill_(2)
    one()
    assert result.tolist() == [3, 3, 3]
    two()
    assert other.tolist() == [6, 6] and result.isnan().all(), "a replay overwrites what the others left"
    pool.clear()
    pool.record(lambda: source)
    assert log[-1] == "record into 1" and log.count("made") == 1


@pytest.mark.gpu
def test_cuda_recordings_share_memory_and_give_it_back_on_a_gpu() -> None:
    source = torch.rand(1 << 20, device="cuda")

    def compute(count: int) -> Tensor:
        return torch.cat([source[:count]] * 16).sin().view(16, -1).sum(0)

    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    pool = RecordingPool()
    sizes = [(1 << 20) - (step << 15) for step in range(8)]
    recorded = [pool.record(lambda size=size: compute(size)) for size in sizes]
    alone = 2 * 16 * source.nbytes
    assert torch.cuda.memory_reserved() - before < 3 * alone, "eight recordings of two such intermediate results each"
    for _ in range(2):
        source.uniform_()
        for size, (replay, result) in zip(sizes, recorded, strict=True):
            replay()
            torch.testing.assert_close(result, compute(size))
    del recorded, replay, result
    pool.clear()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() - before < alone // 2
    replay, result = pool.record(lambda: compute(1 << 10))
    replay()
    torch.testing.assert_close(result, compute(1 << 10))
