# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A backward in two parts: first the gradient of the input, later those of the weights."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Root = tuple[GradientEdge, Tensor]
"""Where a backward begins, and with which gradient."""


class DeferredGrads(Protocol):
    """What a node written in Python offers: to compute the gradients of some inputs when it is told to, not in its backward."""

    @property
    def inputs(self) -> tuple[int, ...]:
        """Numbers of those inputs."""
        ...

    jobs: list[tuple[int, Callable[[], Tensor | None]]] | None
    """While it is a list the backward appends (number of an input, what computes its gradient) and returns None for that input."""


@runtime_checkable
class _Defers(Protocol):
    @property
    def later(self) -> DeferredGrads | None: ...


@dataclass
class SplitBackward:
    """The backward of one micro-batch through one chunk.

    The nodes of the graph that lead to the chunk's input are the trunk. The first part runs the trunk and nothing else,
    and notes the gradient that comes into every trunk node from which a branch leads off to weights. The second part
    runs those nodes once more, now for their branches only. Each GEMM of a linear layer is thus computed once, the one
    with the weight in the first part, the one with the input in the second.

    A chunk without input (the first of all) has a trunk as well: it ends above the leaf that lies deepest, the embedding.

    A node written in Python computes all of its gradients or none, unless it keeps a ``DeferredGrads`` as ``later`` on its context,
    as the tensor-parallel GEMMs do. Three kinds of weights have their gradient computed in the first part and only accumulated
    in the second: those of other nodes written in Python, those that several trunk nodes read without a node in between, and those
    of nodes whose saved tensors are recomputed or fetched, which would happen once more for each of them.

    All that the forward saved lives until the second part is over.
    """

    roots: Sequence[Root]
    activation: Tensor | None
    _branches: "list[_Branch]" = field(default_factory=list)
    _ready: list[Root] = field(default_factory=list)

    def input_grad(self) -> Tensor | None:
        """First part; returns the gradient of the activation, None if the graph does not lead to it."""
        graph = _Graph([edge for edge, _ in self.roots])
        end = None if self.activation is None else get_gradient_edge(self.activation).node
        if self.activation is None:
            end = graph.above_deepest_leaf()
        trunk = graph.leading_to(end) if end is not None else set()
        self._ready = [root for root in self.roots if root[0].node not in trunk]
        inside = [root for root in self.roots if root[0].node in trunk]
        if end is None or not inside:
            self.roots = ()
            return None
        self._branches, at_once = graph.branches(trunk, end if self.activation is None else None)
        # The embedding's node itself runs in the second part: the trunk ends where its gradients come in.
        ends = graph.inputs_of(end) if self.activation is None else [GradientEdge(end, 0)]
        handles = [branch.listen() for branch in self._branches if branch.node is not end]
        deferring = [branch for branch in self._branches if branch.later is not None]
        for branch in deferring:
            branch.later.jobs = branch.jobs  # type: ignore[union-attr]
        try:
            grads = torch.autograd.grad(
                [edge for edge, _ in inside],
                [*ends, *at_once],
                [grad for _, grad in inside],
                retain_graph=True,
                allow_unused=True,
            )
        finally:
            for handle in handles:
                handle.remove()
            for branch in deferring:
                branch.later.jobs = None  # type: ignore[union-attr]
        self.roots = ()
        self._ready += [(edge, grad) for edge, grad in zip(at_once, grads[len(ends) :], strict=True) if grad is not None]
        if self.activation is not None:
            return grads[0]
        for branch in self._branches:
            if branch.node is end:
                branch.grads = [(edge.output_nr, grad) for edge, grad in zip(ends, grads, strict=False) if grad is not None]
        return None

    def weight_grads(self) -> None:
        """Second part; accumulates into the weights."""
        for branch in self._branches:
            self._ready += branch.run()
        self._branches = []
        ready, self._ready = self._ready, []
        if ready:
            torch.autograd.backward([edge for edge, _ in ready], [grad for _, grad in ready])  # type: ignore[arg-type]


@dataclass(eq=False)
class _Branch:
    """A trunk node, where its branches begin, and what came in."""

    node: Node
    begins: list[GradientEdge]
    """Reached from no other trunk node."""
    later: DeferredGrads | None = None
    """Of a node written in Python."""
    grads: list[tuple[int, Tensor]] = field(default_factory=list)
    jobs: list[tuple[int, Callable[[], Tensor | None]]] = field(default_factory=list)
    edges: dict[int, GradientEdge] = field(init=False)
    """Where the results of jobs go; once its first part has run, torch 2.11 no longer tells."""

    def __post_init__(self) -> None:
        inputs = () if self.later is None else self.later.inputs
        functions = enumerate(self.node.next_functions)
        self.edges = {number: GradientEdge(*function) for number, function in functions if number in inputs}  # type: ignore[arg-type]

    def listen(self) -> Any:
        def note(incoming: Sequence[Tensor | None]) -> None:
            self.grads = [(number, grad) for number, grad in enumerate(incoming) if grad is not None]

        return self.node.register_prehook(note)

    def run(self) -> Iterator[Root]:
        grads, self.grads = self.grads, []
        if self.later is not None:
            jobs, self.jobs = self.jobs, []
            for number, job in jobs:
                with torch.no_grad():
                    grad = job()
                if grad is not None:
                    yield self.edges[number], grad
        elif grads:
            into = [GradientEdge(self.node, number) for number, _ in grads]
            grads_in = torch.autograd.grad(into, self.begins, [grad for _, grad in grads], allow_unused=True)
            for edge, grad in zip(self.begins, grads_in, strict=True):
                if grad is not None:
                    yield edge, grad


class _Graph:
    """The part of an autograd graph below some edges, as it stands after the forward."""

    def __init__(self, roots: Sequence[GradientEdge]) -> None:
        self.roots = roots
        self.upward: list[Node] = []
        """Every node once, each behind all those it leads to."""
        self._next: dict[Node, list[tuple[Node, int]]] = {}
        stack = [(root.node, False) for root in roots]
        while stack:
            node, finished = stack.pop()
            if finished:
                self.upward.append(node)
            elif node not in self._next:
                self._next[node] = [(other, number) for other, number in node.next_functions if other is not None]
                stack.append((node, True))
                stack += [(other, False) for other, _ in self._next[node] if other not in self._next]

    def leading_to(self, end: Node) -> set[Node]:
        reached = {end}
        for node in self.upward:
            if any(other in reached for other, _ in self._next[node]):
                reached.add(node)
        return reached if end in self._next else set()

    def above_deepest_leaf(self) -> Node | None:
        """On the longest way down, the topmost node from which nothing but the leaf at its end can be reached.

        The node above the leaf if there is no such node; None if all roots are leaves.
        """
        depth: dict[Node, int] = dict.fromkeys((root.node for root in self.roots), 0)
        parent: dict[Node, Node] = {}
        for node in reversed(self.upward):
            for other, _ in self._next[node]:
                if depth.get(other, -1) < depth[node] + 1:
                    depth[other], parent[other] = depth[node] + 1, node
        leaves = [node for node in self.upward if not self._next[node]]
        if not leaves:
            return None
        end = parent.get(max(leaves, key=depth.__getitem__))
        while end is not None and len(self._next[end]) == 1 and (above := parent.get(end)) is not None and len(self._next[above]) == 1:
            end = above
        return end

    def inputs_of(self, end: Node) -> list[GradientEdge]:
        numbers = {number for node in self.upward for other, number in self._next[node] if other is end}
        numbers |= {root.output_nr for root in self.roots if root.node is end}
        return [GradientEdge(end, number) for number in sorted(numbers)]

    def branches(self, trunk: set[Node], unrun: Node | None) -> "tuple[list[_Branch], list[GradientEdge]]":
        """Branches for the second part, and the leaves whose gradient the first part has to bring.

        Args:
            trunk: its nodes.
            unrun: the node that the first part does not run.
        """
        bush = _connected(
            {node: [other for other, _ in self._next[node] if other not in trunk] for node in self.upward if node not in trunk}
        )
        begins: dict[Node, dict[Node, list[GradientEdge]]] = {}
        """Bush -> trunk node -> where it leads into the bush."""
        feeder: dict[Node, Node | None] = {}
        """The trunk node from which a bush node is reached; None for several."""
        leaves: dict[Node, list[GradientEdge]] = {}
        for node in reversed(self.upward):
            for other, number in self._next[node]:
                if other in trunk:
                    continue
                if node in trunk or node in feeder:
                    source = node if node in trunk else feeder[node]
                    feeder[other] = source if feeder.get(other, source) is source else None
                if node in trunk and (edge := GradientEdge(other, number)) not in begins.setdefault(bush[other], {}).setdefault(node, []):
                    begins[bush[other]][node].append(edge)
            if node not in trunk and not self._next[node]:
                leaves.setdefault(bush[node], []).append(GradientEdge(node, 0))
        later: dict[Node, _Branch] = {}
        at_once: list[GradientEdge] = []
        for name, sources in begins.items():
            if all(
                _can_wait(node, edges, unrun) and (_later(node, unrun) is not None or all(feeder[edge.node] is node for edge in edges))
                for node, edges in sources.items()
            ):
                for node, edges in sources.items():
                    later.setdefault(node, _Branch(node, [], _later(node, unrun))).begins.extend(edges)
            else:
                at_once += leaves[name]
        return list(later.values()), at_once


def _later(node: Node, unrun: Node | None) -> DeferredGrads | None:
    return node.later if node is not unrun and isinstance(node, _Defers) else None


def _can_wait(node: Node, edges: Sequence[GradientEdge], unrun: Node | None) -> bool:
    """Whether the gradients of a node on these edges can be computed later, by themselves."""
    if node is unrun:
        return True
    if not isinstance(node, torch.autograd.function.BackwardCFunction):
        return not any(_has_hook(getattr(node, name)) for name in _saved_names(type(node)))
    later = _later(node, unrun)
    wanted = {(edge.node, edge.output_nr) for edge in edges}
    return later is not None and all(
        number in later.inputs for number, function in enumerate(node.next_functions) if tuple(function) in wanted
    )


@functools.cache
def _saved_names(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def _has_hook(saved: Any) -> bool:
    if isinstance(saved, tuple | list):
        return any(map(_has_hook, saved))
    # A torch whose saved tensors do not show their hook gives the same gradients, and recomputes for each of these nodes.
    return getattr(saved, "unpack_hook", None) is not None


def _connected(edges: dict[Node, list[Node]]) -> dict[Node, Node]:
    """For each node one that stands for all nodes connected with it, whatever the direction."""
    name = {node: node for node in edges}

    def find(node: Node) -> Node:
        while name[node] is not node:
            name[node] = name[name[node]]
            node = name[node]
        return node

    for node, others in edges.items():
        for other in others:
            name[find(node)] = find(other)
    return {node: find(node) for node in edges}
