# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Named ranges, and the window of steps that is traced."""

import gzip
import json
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from mcore_parallel import ProcessGroups
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.nn import Step
from mcore_parallel.training import NvtxRanges, ProfileConfig


class Sink:
    """Remembers ranges as a tree of indented lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.depth = 0

    def range_push(self, message: str, /) -> None:
        self.lines.append("  " * self.depth + message)
        self.depth += 1

    def range_pop(self) -> None:
        self.depth -= 1
        assert self.depth >= 0


def test_ranges_nest_and_a_wrong_pop_is_refused() -> None:
    sink = Sink()
    ranges = NvtxRanges(sink=sink)
    ranges.push("outer")
    with ranges.range("inner"):
        assert ranges.depth == 2
        with pytest.raises(RuntimeError, match="innermost range is 'inner', not 'outer'"):
            ranges.pop("outer")
    ranges.pop("outer")
    with pytest.raises(RuntimeError, match="no range is open"):
        ranges.pop()
    assert sink.lines == ["outer", "  inner"] and sink.depth == 0


def test_an_exception_closes_what_it_left_open() -> None:
    sink = Sink()
    ranges = NvtxRanges(sink=sink)
    with pytest.raises(ZeroDivisionError), ranges.range("outer"):
        ranges.push("forgotten")
        _ = 1 / 0
    assert ranges.depth == sink.depth == 0


def test_threads_have_stacks_of_their_own() -> None:
    ranges = NvtxRanges(sink=Sink())
    depths = []
    ranges.push("here")
    thread = threading.Thread(target=lambda: depths.append(ranges.depth))
    thread.start()
    thread.join()
    assert depths == [0] and ranges.depth == 1


def test_off_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    ranges = NvtxRanges()
    assert not ranges.enabled
    ranges.push("a")
    ranges.pop("b")
    model = nn.Linear(2, 2)
    with ranges.range("c"), ranges.annotate(model):
        assert not model._forward_hooks
    with pytest.raises(ValueError, match="enabled=True needs a CUDA device"):
        NvtxRanges(enabled=True)


def test_a_decorator_asks_at_the_call_whether_it_is_on() -> None:
    sink = Sink()
    ranges = NvtxRanges(sink=sink)

    @ranges.decorate()
    def double(x: int) -> int:
        return 2 * x

    ranges.enabled = False
    assert double(2) == 4 and not sink.lines
    ranges.enabled = True
    assert double(3) == 6
    assert sink.lines[0].endswith("double")


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))


def test_modules_show_nested_with_shapes_and_bytes_in_both_directions() -> None:
    sink = Sink()
    ranges = NvtxRanges(sink=sink)
    model = Branch()
    x = torch.ones(2, 4, requires_grad=True)
    with ranges.annotate(model, "branch"):
        y = (2.0 * x).sin()
        model(y).sum().backward()
    shape = "[2, 4] float32 0.0 MiB"
    forward = [f"branch {shape}", f"  norm {shape}", f"  inner {shape}"]
    backward = [f"grad branch {shape}", f"  grad inner {shape}", f"  grad norm {shape}"]
    assert sink.lines == forward + backward
    assert sink.depth == ranges.depth == 0
    sink.lines.clear()
    model(y)
    assert not sink.lines, "the hooks are gone"


def test_a_model_trains_with_the_same_bits_under_ranges_and_an_exception_leaves_none_open() -> None:
    config = TransformerConfig(num_layers=2, hidden_size=16, num_attention_heads=2, ffn_hidden_size=32, vocab_size=32)
    model = GPTModel(config, ProcessGroups.single(), seed=1)
    tokens, step = torch.arange(16), Step.causal(2, 8)

    def grads() -> list[Tensor]:
        model.zero_grad()
        output, _ = model(tokens, step)
        output.loss_sum(tokens, torch.ones(16)).backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    wanted, sink = grads(), Sink()
    ranges = NvtxRanges(sink=sink)
    with ranges.annotate(model, depth=3):
        assert all(torch.equal(a, b) for a, b in zip(grads(), wanted, strict=True))
        assert ranges.depth == sink.depth == 0
        names = {line.strip().split(" [")[0] for line in sink.lines}
        assert {"model", "layers.0", "layers.1.mlp", "grad layers.1", "grad layers.0.attention"} <= names
        assert not any("attention.qkv" in name for name in names)
        with pytest.raises(RuntimeError), ranges.range("step"):
            model(tokens[:3], step)
        assert ranges.depth == sink.depth == 0


def test_a_range_costs_microseconds() -> None:
    class Silent:
        def range_push(self, message: str, /) -> None: ...
        def range_pop(self) -> None: ...

    on, off = NvtxRanges(sink=Silent()), NvtxRanges(enabled=False)
    costs = {}
    for ranges in (on, off):
        begin = time.process_time()
        for _ in range(20_000):
            ranges.push("x")
            ranges.pop("x")
        costs[ranges.enabled] = (time.process_time() - begin) / 20_000
    assert costs[True] < 20e-6 and costs[False] < 4e-6, costs


def test_a_window_writes_the_trace_of_its_steps(tmp_path: Path) -> None:
    config = ProfileConfig(tool="torch", step_start=2, step_end=4, output=str(tmp_path / "traces"))
    open_at = []
    with config.build(rank=0) as window:
        for step in range(1, 6):
            window.begin_step(step)
            torch.ones(7, 11) @ torch.ones(11, 13)
            open_at.append(window.is_open)
            window.end_step(step)
    assert open_at == [False, True, True, False, False]
    trace, table = window.files
    assert (trace.name, table.name) == ("rank0.trace.json.gz", "rank0.txt")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    products = [event for event in events if event.get("name") == "aten::mm"]
    assert len(products) == 2 and products[0]["args"]["Input Dims"][0] == [7, 11]
    assert "aten::mm" in table.read_text()


def test_a_window_closes_when_training_fails_inside(tmp_path: Path) -> None:
    window = ProfileConfig(tool="torch", step_start=1, step_end=9, output=str(tmp_path)).build()
    with pytest.raises(ZeroDivisionError), window:
        window.begin_step(1)
        _ = 1 / 0
    assert not window.is_open and len(window.files) == 2
    window.close()
    assert len(window.files) == 2


def test_other_ranks_and_runs_behind_the_window_trace_nothing(tmp_path: Path) -> None:
    config = ProfileConfig(tool="torch", step_start=2, step_end=3, output=str(tmp_path))
    for window, first in ((config.build(rank=1), 1), (config.build(), 7)):
        with window:
            for step in range(first, first + 4):
                window.begin_step(step)
                window.end_step(step)
        assert window.files == []


def test_windows_that_cannot_be_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="tool='perf'"):
        ProfileConfig(tool="perf")  # type: ignore[arg-type]
    for begin, end in ((0, 2), (5, 5)):
        with pytest.raises(ValueError, match=f"step_start={begin} and step_end={end}"):
            ProfileConfig(step_start=begin, step_end=end)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match='tool="nsys" needs a CUDA device'):
        ProfileConfig(tool="nsys").build()
    ProfileConfig(tool="nsys").build(rank=1).close()
