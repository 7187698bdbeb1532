# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A whole iteration as one graph."""

from collections import Counter
from collections.abc import Callable, Collection, Hashable
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

    The recordings of all kinds lie in one pool of memory, which is as large as the largest needs it when that is recorded first
    (``record``). Without a warm-up each has its own: what the work makes once and keeps (gradients, states of an optimizer) lies there.

    Args:
        work: from tensors (also inside tuples, dicts, dataclasses) to tensors. What it leaves in parameters, gradients and
            optimizer state stays at its address.
        warmup_steps: calls of each kind that run as ever.
        resident: inputs, by number or by the name of a keyword, whose tensors stay where they are: weights, a cache, tables. They are
            neither cloned nor copied; the work reads and writes the tensors of the caller, and the gradients of those that are leaves.
        capture: records; None for CUDA graphs, and where there is no CUDA device everything runs as ever.

    Raises:
        ValueError: a negative number of steps, or of an input.

    Example:
        >>> graph = IterationGraph(lambda x, *, table: table[x], resident=("table",))
        >>> graph(torch.tensor([2, 0]), table=torch.tensor([5, 6, 7]))
        tensor([7, 5])
    """

    def __init__(
        self,
        work: Callable[..., Any],
        *,
        warmup_steps: int = 3,
        resident: Collection[int | str] = (),
        capture: Capture | None = None,
    ) -> None:
        if warmup_steps < 0:
            raise ValueError(f"warmup_steps={warmup_steps} must not be negative")
        if isinstance(resident, str) or any(isinstance(name, int) and name < 0 for name in resident):
            raise ValueError(f"resident={resident!r} must be numbers of inputs, from 0, and names of keywords, as a tuple")
        self._work, self.warmup_steps, self.resident = work, warmup_steps, frozenset(resident)
        self._capture = capture if capture is not None or why_not() else CudaCapture()
        self._pool: Any = None
        self._recorded: dict[Hashable, _Recorded] = {}
        self._calls: Counter[Hashable] = Counter()
        self._eager: Counter[str] = Counter()
        self._replays = self._bytes = 0

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """Run the iteration on these inputs; results are overwritten by the next call, whatever its inputs.

        Raises:
            CaptureError: the work cannot be recorded.
            TypeError: an input that is neither hashable nor made of tensors.
            ValueError: a tensor that does not lie on the device of the others; a resident input that is not there, holds no tensor, or
                lies elsewhere than the one that was recorded.
        """
        if self._capture is None:
            self._eager[why_not()] += 1
            return self._work(*inputs, **options)
        tree = self._taken_apart(inputs, options)
        recorded = self._recorded.get(tree.key)
        if recorded is None and self._calls[tree.key] < self.warmup_steps:
            return self._warm(self._capture, tree, inputs, options)
        if recorded is None:
            recorded = self._record(self._capture, tree, inputs, options)
        self._replays += 1
        return recorded.run(tree.tensors)

    def record(self, *inputs: Any, **options: Any) -> None:
        """Record the kind of these inputs, so that every call of it replays; nothing happens where that was done, or without a device.

        What is left of the warm-up runs here, on these inputs: it changes what the work changes.

        Raises:
            CaptureError: as of a call.
            TypeError: as of a call.
            ValueError: as of a call.
        """
        if self._capture is None:
            return
        tree = self._taken_apart(inputs, options)
        if tree.key in self._recorded:
            return
        while self._calls[tree.key] < self.warmup_steps:
            self._warm(self._capture, tree, inputs, options)
        self._record(self._capture, tree, inputs, options)

    def report(self) -> GraphReport:
        """What became of the calls so far."""
        return GraphReport(graphs=len(self._recorded), replays=self._replays, memory_bytes=self._bytes, eager=Counter(self._eager))

    def _taken_apart(self, inputs: tuple[Any, ...], options: dict[str, Any]) -> Tree:
        tree = Tree.of((inputs, options))
        if len(homes := {tensor.device for tensor in tree.tensors}) > 1:
            raise ValueError(f"inputs lie on {', '.join(sorted(map(str, homes)))}; move all to one device before the iteration")
        if tree.key not in self._recorded:
            self._residents(inputs, options)
        return tree

    def _residents(self, inputs: tuple[Any, ...], options: dict[str, Any]) -> dict[int, str]:
        """Of the tensors of these inputs the numbers of the resident ones, and what they are called."""
        residents: dict[int, str] = {}
        missing, first = set(self.resident), 0
        for name, value in (*enumerate(inputs), *options.items()):
            count = len(Tree.of(value).tensors)
            if name in self.resident and count:
                missing.remove(name)
                residents |= dict.fromkeys(range(first, first + count), repr(name) if isinstance(name, str) else f"number {name}")
            first += count
        if missing:
            names = ", ".join(sorted(map(repr, missing)))
            raise ValueError(f"resident names {names}, and no such input brings a tensor; pass it, or leave it out of resident")
        return residents

    def _warm(self, capture: Capture, tree: Tree, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
        self._calls[tree.key] += 1
        self._eager["warm-up"] += 1
        return capture.warm(lambda: self._work(*inputs, **options))

    def _record(self, capture: Capture, tree: Tree, inputs: tuple[Any, ...], options: dict[str, Any]) -> "_Recorded":
        before = _allocated()
        residents = self._residents(inputs, options)
        held = [_resident(tensor) if place in residents else _copy(tensor) for place, tensor in enumerate(tree.tensors)]
        arguments, keywords = tree.rebuilt(held)
        if self._pool is None or not self.warmup_steps:
            self._pool = capture.pool()
        outputs, replay = capture.record(lambda: self._work(*arguments, **keywords), self._pool)
        recorded = _Recorded([tensor.detach() for tensor in held], residents, outputs, replay)
        self._recorded[tree.key] = recorded
        self._bytes += _allocated() - before
        return recorded


@dataclass(frozen=True)
class _Recorded:
    inputs: list[Tensor]
    """That it reads; the resident ones are the caller's, and kept while it may be replayed."""
    residents: dict[int, str]
    outputs: Any
    replay: Callable[[], None]

    def run(self, tensors: list[Tensor]) -> Any:
        for place, name in self.residents.items():
            if _place(tensors[place]) != _place(self.inputs[place]):
                raise ValueError(
                    f"input {name} is resident, and lies at another address or with other strides than when it was recorded; write into "
                    "the tensor that was recorded, take another IterationGraph, or leave it out of resident"
                )
        with torch.no_grad():
            copied = [place for place in range(len(tensors)) if place not in self.residents]
            copy_tensors([self.inputs[place] for place in copied], [tensors[place] for place in copied])
        self.replay()
        return self.outputs


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _resident(tensor: Tensor) -> Tensor:
    # The gradient of a leaf is the caller's too.
    return tensor if tensor.is_leaf else tensor.detach().requires_grad_(tensor.requires_grad)


def _place(tensor: Tensor) -> tuple[int, tuple[int, ...]]:
    return tensor.data_ptr(), tensor.stride()


def _allocated() -> int:
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
