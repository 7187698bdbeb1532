# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Whole iterations, and steps with resident inputs, that are replayed."""

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_parallel.graphs import (
    IterationGraph,
    Recording,
    recordings_under_way,
)
from tests.support.tape_capture import TapeCapture


def test_a_whole_iteration_is_one_graph() -> None:
    def run(capture: TapeCapture | None) -> list[float]:
        weight = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
        moment = torch.zeros_like(weight)

        def work(x: Tensor, *, lr: Tensor) -> Tensor:
            loss = torch.tanh(x @ weight).square().sum()
            (grad,) = torch.autograd.grad(loss, weight)
            with torch.no_grad():
                moment.mul_(0.9).add_(grad)
                weight.sub_(lr * moment)
            return loss.detach()

        step = work if capture is None else IterationGraph(work, warmup_steps=2, capture=capture)
        losses = []
        for number in range(6):
            x = torch.randn(3 if number != 4 else 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
            losses.append(float(step(x, lr=torch.tensor(0.1 / (number + 1), dtype=torch.float64))))
        if isinstance(step, IterationGraph):
            assert step.report().graphs == 1 and step.report().replays == 3
            assert step.report().eager == {"warm-up": 3}
        return losses

    assert run(TapeCapture()) == run(None)


def decoding(x: Tensor, cache: Tensor, *, at: Tensor, tables: dict[str, Tensor]) -> Tensor:
    """Writes a line of a cache, and reads all of it and a table."""
    cache.index_copy_(0, at, x[:1])
    return x @ tables["weight"] + cache.sum(0)


def test_resident_inputs_are_read_and_written_where_they_lie() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, cache = torch.randn(4, 4, dtype=torch.float64, generator=generator), torch.zeros(8, 4, dtype=torch.float64)
    graph = IterationGraph(decoding, warmup_steps=1, resident=(1, "tables"), capture=TapeCapture())
    wanted_cache = cache.clone()
    for number in range(6):
        x, at = torch.randn(2 + number % 2, 4, dtype=torch.float64, generator=generator), torch.tensor([number])
        if number == 4:
            weight.mul_(2.0)
        wanted = decoding(x, wanted_cache, at=at, tables={"weight": weight})
        # Another object at the same place is the same tensor.
        assert torch.equal(graph(x, cache.view(8, 4), at=at, tables={"weight": weight}), wanted)
        assert torch.equal(cache, wanted_cache)
    assert graph.report().graphs == 2 and graph.report().replays == 4
    held = [recorded.inputs for recorded in graph._recorded.values()]
    assert all(inputs[1].data_ptr() == cache.data_ptr() and inputs[3].data_ptr() == weight.data_ptr() for inputs in held)
    assert all(inputs[0].data_ptr() != x.data_ptr() for inputs in held), "other inputs have memory of the recording"


def test_gradients_of_a_resident_weight_are_the_callers() -> None:
    def work(x: Tensor, weight: Tensor) -> Tensor:
        loss = (x @ weight).square().sum()
        loss.backward()
        return loss.detach()

    weights = [torch.eye(4, dtype=torch.float64).requires_grad_() for _ in range(2)]
    graph = IterationGraph(work, warmup_steps=1, resident=(1,), capture=TapeCapture())
    for number in range(4):
        x = torch.full((2, 4), float(number + 1), dtype=torch.float64)
        assert torch.equal(graph(x, weights[0]), work(x, weights[1]))
        assert weights[0].grad is not None and weights[1].grad is not None
        assert torch.equal(weights[0].grad, weights[1].grad)
    assert graph.report().replays == 3


def test_a_resident_input_elsewhere_is_refused_by_name_and_changes_nothing() -> None:
    weight, cache = torch.eye(4), torch.zeros(4, 4)
    graph = IterationGraph(decoding, warmup_steps=0, resident=(1, "tables"), capture=TapeCapture())
    call: Any = {"at": torch.tensor([1]), "tables": {"weight": weight}}
    graph(torch.ones(2, 4), cache, **call)
    before = cache.clone()
    for other in (cache.clone(), cache.T):
        with pytest.raises(ValueError, match=r"input number 1 is resident, and lies at another address or with other strides.*recorded"):
            graph(torch.zeros(2, 4), other, **call)
    with pytest.raises(ValueError, match="input 'tables' is resident"):
        graph(torch.zeros(2, 4), cache, at=torch.tensor([1]), tables={"weight": weight.clone()})
    assert torch.equal(cache, before) and graph.report().graphs == 1
    # Of another kind the recording is another, and so may be the place.
    graph(torch.ones(3, 4), cache.clone(), **call)
    assert graph.report().graphs == 2


def test_resident_inputs_that_are_not_there_are_refused_by_name() -> None:
    graph = IterationGraph(decoding, resident=(2, "cash"), capture=TapeCapture())
    with pytest.raises(ValueError, match=r"resident names 'cash', 2, and no such input brings a tensor"):
        graph(torch.ones(2, 4), torch.zeros(4, 4), at=torch.tensor([1]), tables={"weight": torch.eye(4)})
    for resident in ("cache", (-1,)):
        with pytest.raises(ValueError, match="must be numbers of inputs, from 0, and names of keywords"):
            IterationGraph(decoding, resident=resident, capture=TapeCapture())


def test_recordings_of_all_sizes_share_a_pool_and_may_be_made_before_the_first_call() -> None:
    capture, ran = TapeCapture(), []
    total = torch.zeros(())

    def work(x: Tensor) -> Tensor:
        ran.append(len(x))
        total.add_(x.sum())
        return x + 1.0

    graph = IterationGraph(work, warmup_steps=2, capture=capture)
    graph(torch.zeros(8))
    for size in (8, 4, 2):
        graph.record(torch.zeros(size))
    # What is left of the warm-up, and the recording.
    assert ran == [8, 8, 8, 4, 4, 4, 2, 2, 2]
    graph.record(torch.zeros(4))
    for size in (2, 8, 4):
        assert torch.equal(graph(torch.full((size,), 2.0)), torch.full((size,), 3.0))
    assert len(ran) == 9 and total == 28.0 and graph.report().replays == 3
    assert capture.recorded == 3 and len(set(map(id, capture.pools))) == 1
    # What work makes once would lie in the memory of its recording.
    other = IterationGraph(work, warmup_steps=0, capture=capture)
    other(torch.zeros(2))
    other(torch.zeros(3))
    assert len(set(map(id, capture.pools))) == 3


def test_a_recording_is_under_way_until_it_ends_and_one_that_fails_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Graph:
        def capture_begin(self, **options: Any) -> None:
            calls.append("begin")

        def capture_end(self) -> None:
            calls.append("end")

        def replay(self) -> None:
            calls.append("replay")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    seen: weakref.WeakSet[Recording] = weakref.WeakSet()

    def record(*, fails: bool) -> Callable[[], None]:
        recording = Recording()
        with recording.begun(None):
            assert recordings_under_way() == {recording}
            seen.update(recordings_under_way())
            if fails:
                raise RuntimeError("cannot be recorded")
        assert not recordings_under_way()
        return recording.replay

    replay = record(fails=False)
    with contextlib.suppress(RuntimeError):
        record(fails=True)
    assert len(seen) == 1 and not recordings_under_way()
    replay()
    assert calls == ["begin", "end", "begin", "end", "replay"]
    del replay
    assert not seen
