# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A whole iteration as one graph."""

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mcore_parallel.graphs._capture import Capture, CudaCapture, why_not
from mcore_parallel.graphs._module import GraphReport
from mcore_parallel.graphs._pair import copy_tensors
from mcore_parallel.graphs._tree import Tree


class IterationGraph:
    """Forward, backward, and the update if it is part of the work, launched as one.

    The first calls run the work as ever: they are steps of the training like any other. Then it is recorded once for each kind of
    inputs, and each call copies its inputs and replays. The work may not read a value of the device; numbers of the host that
    change (the learning rate) are passed as tensors on the device, which ``MegatronOptimizer.step`` takes. A pipeline's transfers
    between ranks cannot be part of it.

    Args:
        work: from tensors (also inside tuples, dicts, dataclasses) to tensors. What it leaves in parameters, gradients and
            optimizer state stays at its address.
        warmup_steps: calls of each kind that run as ever.
        capture: records; None for CUDA graphs, and where there is no CUDA device everything runs as ever.

    Raises:
        ValueError: a negative number of steps.
    """

    def __init__(self, work: Callable[..., Any], *, warmup_steps: int = 3, capture: Capture | None = None) -> None:
        if warmup_steps < 0:
            raise ValueError(f"warmup_steps={warmup_steps} must not be negative")
        self._work, self.warmup_steps = work, warmup_steps
        self._capture = capture if capture is not None or why_not() else CudaCapture()
        self._recorded: dict[Hashable, _Recorded] = {}
        self._calls: Counter[Hashable] = Counter()
        self._eager: Counter[str] = Counter()
        self._replays = self._bytes = 0

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """Run the iteration on these inputs; results are overwritten by the next call with inputs of the same kind.

        Raises:
            CaptureError: the work cannot be recorded.
            TypeError: an input that is neither hashable nor made of tensors.
            ValueError: a tensor that does not lie on the device of the others.
        """
        if self._capture is None:
            self._eager[why_not()] += 1
            return self._work(*inputs, **options)
        tree = Tree.of((inputs, options))
        if len(homes := {tensor.device for tensor in tree.tensors}) > 1:
            raise ValueError(f"inputs lie on {', '.join(sorted(map(str, homes)))}; move all to one device before the iteration")
        self._calls[tree.key] += 1
        if self._calls[tree.key] <= self.warmup_steps:
            self._eager["warm-up"] += 1
            return self._capture.warm(lambda: self._work(*inputs, **options))
        recorded = self._recorded.get(tree.key)
        if recorded is None:
            before = _allocated()
            recorded = self._recorded[tree.key] = self._record(self._capture, tree)
            self._bytes += _allocated() - before
        self._replays += 1
        with torch.no_grad():
            copy_tensors(recorded.inputs, tree.tensors)
        recorded.replay()
        return recorded.outputs

    def report(self) -> GraphReport:
        """What became of the calls so far."""
        return GraphReport(graphs=len(self._recorded), replays=self._replays, memory_bytes=self._bytes, eager=Counter(self._eager))

    def _record(self, capture: Capture, tree: Tree) -> "_Recorded":
        inputs = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in tree.tensors]
        arguments, options = tree.rebuilt(inputs)
        outputs, replay = capture.record(lambda: self._work(*arguments, **options), capture.pool())
        return _Recorded([tensor.detach() for tensor in inputs], outputs, replay)


@dataclass(frozen=True)
class _Recorded:
    inputs: list[Tensor]
    outputs: Any
    replay: Callable[[], None]


def _allocated() -> int:
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
