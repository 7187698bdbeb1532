# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Ranks that are slower than those with the same work."""

import time
from typing import Any

import torch
from torch import nn

from mcore_parallel.comm import all_gather
from mcore_parallel.groups import ProcessGroups
from mcore_parallel.pipeline import ModelChunks


class StragglerProbe:
    """Times the forwards of each rank in every n-th step and compares the ranks of each pipeline stage; a ``probe`` of ``Trainer``.

    Waiting for other replicas and stages is not in a forward, waiting for ranks that share its tensors is: a slow GPU shows as the slow
    ranks of one replica. The numbers are ``straggler/rank``, the slowest one, ``straggler/slowdown``, its time divided by the median of
    its stage (1 when all are alike), and ``straggler/forward_s``, its time.

    Args:
        model: as given to ``Trainer``.
        groups: the layout.
        every: steps from one measurement to the next.

    Raises:
        ValueError: ``every`` below 1.
    """

    def __init__(self, model: nn.Module, groups: ProcessGroups, *, every: int = 10) -> None:
        if every < 1:
            raise ValueError(f"every={every} must be at least 1")
        self.groups, self.every = groups, every
        chunks: list[nn.Module] = list(model) if isinstance(model, ModelChunks) else [model]
        self._device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self._hooks: list[Any] = []
        for chunk in chunks:
            self._hooks += [chunk.register_forward_pre_hook(self._begin), chunk.register_forward_hook(self._end)]
        self._steps = 0
        self._marks: list[Any] = []

    def __call__(self) -> dict[str, float]:
        """Call after each step, on every rank; empty but for every n-th."""
        measured, self._steps = self._measures, self._steps + 1
        if not measured:
            return {}
        seconds = self._seconds()
        row = torch.tensor([[float(self.groups.pp.rank), seconds]], dtype=torch.float64, device=self._device)
        return _slowest([(int(stage), value) for stage, value in all_gather(row, self.groups.world).tolist()])

    def close(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    @property
    def _measures(self) -> bool:
        return self._steps % self.every == self.every - 1

    def _begin(self, module: nn.Module, inputs: Any) -> None:
        self._mark(module)

    def _end(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._mark(module)

    def _mark(self, module: nn.Module) -> None:
        """A moment, of the device where the work is done there."""
        if not (module.training and self._measures):
            return
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def _seconds(self) -> float:
        marks, self._marks = self._marks, []
        pairs = list(zip(marks[::2], marks[1::2], strict=True))
        if self._device.type != "cuda":
            return sum(end - begin for begin, end in pairs)
        if pairs:
            pairs[-1][1].synchronize()
        return sum(begin.elapsed_time(end) for begin, end in pairs) / 1000


def _slowest(times: list[tuple[int, float]]) -> dict[str, float]:
    """The rank that is slowest for its stage.

    Args:
        times: (stage, seconds) of each rank.
    """
    import statistics

    medians = {stage: statistics.median(value for other, value in times if other == stage) for stage, _ in times}
    slowdowns = [value / medians[stage] if medians[stage] > 0 else 1.0 for stage, value in times]
    rank = max(range(len(times)), key=slowdowns.__getitem__)
    return {"straggler/rank": float(rank), "straggler/slowdown": slowdowns[rank], "straggler/forward_s": times[rank][1]}
