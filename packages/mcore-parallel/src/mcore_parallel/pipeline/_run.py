# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Carries out the actions of one pipeline stage."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from mcore_parallel.comm import Arrival, P2PCommunicator, TensorSpec
from mcore_parallel.groups import Group
from mcore_parallel.pipeline._clock import Transfer, transfers_from, transfers_to
from mcore_parallel.pipeline._overlap import Overlap
from mcore_parallel.pipeline._plan import Exchange, PipelinePlan
from mcore_parallel.pipeline._schedule import Action, Combined, Entry, parts
from mcore_parallel.pipeline._split import SplitBackward


class StageForward(Protocol):
    """The forward of one chunk of a stage.

    Takes the number of the micro-batch and the hidden states of the chunk before (None on the first of all).
    Returns the hidden states for the next chunk, or on the last one the loss (a scalar: the sum that is
    differentiated), and beside it an auxiliary loss of this chunk, already weighted, or None.
    """

    def __call__(self, microbatch: int, hidden: Tensor | None) -> tuple[Tensor, Tensor | None]: ...


class Link(Protocol):
    """Carries tensors between stages (``P2PCommunicator``)."""

    def transfer(self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[TensorSpec, int]]) -> Sequence[Arrival]: ...

    def finish(self) -> None: ...


def run_schedule(
    plan: PipelinePlan,
    forward: StageForward | Sequence[StageForward],
    group: Group,
    *,
    hidden: TensorSpec | Callable[[int], TensorSpec] | None = None,
    no_sync: Callable[[], AbstractContextManager[None]] = nullcontext,
    communicator: Link | None = None,
    overlap: Overlap | None = None,
) -> None:
    """Run the actions of this stage; gradients accumulate in the parameters.

    All losses (of the last stage and the auxiliary ones of every stage) have weight one in the gradient. The output of
    a chunk is let go as soon as it is sent; what its backward needs lives until then. Without a backward among the
    actions nothing is recorded for one.

    Args:
        plan: what all stages do (``plan_pipeline``); the same on every rank of the group.
        forward: the chunks of this stage; a single one need not be in a sequence.
        group: the pipeline group; a group of one runs without communication.
        hidden: shape and dtype of the hidden states between chunks, the same on both sides; a function of the micro-batch
            when shapes differ. Not needed by a group of one.
        no_sync: context of every backward but the last of each chunk (``DistributedDataParallel.no_sync``).
        communicator: for a caller that keeps one; None makes a new one.
        overlap: interleaves the parts of ``Combined`` actions; without one they run in turn, the backward first.

    Raises:
        ValueError: the plan is for other numbers of stages or chunks, ``hidden`` is missing, a chunk's output is not what
            ``hidden`` says, or the loss is not a scalar.
    """
    chunks = [forward] if callable(forward) else list(forward)
    if len(plan.tables) != group.size:
        raise ValueError(f"the plan is for {len(plan.tables)} stages, but the pipeline group has {group.size} ranks; plan for {group.size}")
    if len(chunks) != plan.num_chunks:
        raise ValueError(f"the plan is for {plan.num_chunks} chunks a stage, but forward has {len(chunks)}; give one forward a chunk")
    if group.size > 1 and hidden is None:
        raise ValueError(f"hidden must say what travels between the {group.size} pipeline stages")
    table = plan.tables[group.rank]
    records = any(action.kind in "BI" for entry in table for action in parts(entry))
    runner = _Runner(chunks, group, hidden, communicator or P2PCommunicator(group), records)
    last = {action.chunk: position for position, entry in enumerate(table) for action in parts(entry) if action.kind in "BW"}
    for position, (entry, exchange) in enumerate(zip([*table, None], plan.exchanges[group.rank], strict=True)):
        runner.exchange(exchange)
        if entry is not None:
            with nullcontext() if position in last.values() else no_sync():
                runner.run(entry, overlap)
    runner.link.finish()


@dataclass
class _Live:
    """What is kept of a micro-batch between its forward and its backward."""

    activation: Tensor | None
    roots: list[tuple[GradientEdge, Tensor | None]]
    """Where its backward begins and with which gradient; None for the one that the next chunk sends."""
    split: SplitBackward | None = None


@dataclass
class _Runner:
    """One stage at work."""

    chunks: Sequence[StageForward]
    group: Group
    hidden: TensorSpec | Callable[[int], TensorSpec] | None
    link: Link
    records: bool
    """Whether there are backwards."""
    live: dict[tuple[int, int], _Live] = field(default_factory=dict)
    inbox: dict[Transfer, Arrival] = field(default_factory=dict)
    outbox: dict[Transfer, Tensor] = field(default_factory=dict)

    def spec(self, microbatch: int) -> TensorSpec | None:
        return self.hidden(microbatch) if callable(self.hidden) else self.hidden

    def exchange(self, exchange: Exchange) -> None:
        """Start the transfers; what comes is waited for by the action that uses it."""
        receives: list[tuple[TensorSpec, int]] = []
        for transfer in exchange.receives:
            spec = self.spec(transfer.microbatch)
            assert spec is not None
            receives.append((spec, transfer.sender))
        sends = [(self.outbox.pop(transfer), transfer.receiver) for transfer in exchange.sends]
        self.inbox |= zip(exchange.receives, self.link.transfer(sends, receives), strict=True)

    def run(self, entry: Entry, overlap: Overlap | None) -> None:
        """One entry of the table."""
        stages, chunks = self.group.size, len(self.chunks)
        inputs = {transfer.kind: self.inbox.pop(transfer).wait() for transfer in transfers_to(entry, self.group.rank, stages, chunks)}
        activation, grad = inputs.get("activation"), inputs.get("gradient")
        results: dict[str, Tensor | None] = {}
        if isinstance(entry, Combined):
            pair = entry
            if overlap is None:
                results["gradient"] = self._backward(pair.backward, grad)
                results["activation"] = self._forward(pair.forward, activation)
            else:
                results["activation"], results["gradient"] = overlap.run(
                    lambda: self._forward(pair.forward, activation), lambda: self._backward(pair.backward, grad)
                )
        elif entry.kind == "F":
            results["activation"] = self._forward(entry, activation)
        else:
            results["gradient"] = self._backward(entry, grad)
        for transfer in transfers_from(entry, self.group.rank, stages, chunks):
            tensor = results[transfer.kind]
            assert tensor is not None
            if transfer.receiver == self.group.rank:
                self.inbox[transfer] = Arrival(tensor, ())
            else:
                self.outbox[transfer] = tensor

    def _forward(self, action: Action, activation: Tensor | None) -> Tensor | None:
        with torch.set_grad_enabled(self.records):
            if activation is not None and self.records:
                activation.requires_grad_()
            output, aux = self.chunks[action.chunk](action.microbatch, activation)
        is_last = self.group.is_last and action.chunk == len(self.chunks) - 1
        if is_last and output.dim():
            raise ValueError(f"the last stage must return a scalar loss, found shape {tuple(output.shape)}")
        if not is_last and self.group.size > 1:
            _check_output(output, self.spec(action.microbatch), self.group.rank, action.chunk)
        if self.records:
            # Only gradient edges stay: the graph keeps what it saved, the output itself may go.
            roots: list[tuple[GradientEdge, Tensor | None]] = []
            if output.requires_grad:
                roots.append((get_gradient_edge(output), torch.ones_like(output) if is_last else None))
            if aux is not None and aux.requires_grad:
                roots.append((get_gradient_edge(aux), torch.ones_like(aux)))
            self.live[action.microbatch, action.chunk] = _Live(activation, roots)
        return None if is_last else output.detach()

    def _backward(self, action: Action, received: Tensor | None) -> Tensor | None:
        """Differentiate; returns the gradient of what the chunk received, None from W and from the first chunk of all."""
        key = (action.microbatch, action.chunk)
        if action.kind == "W":
            split = self.live.pop(key).split
            assert split is not None
            split.weight_grads()
            return None
        live = self.live[key] if action.kind == "I" else self.live.pop(key)
        roots: list[tuple[GradientEdge, Tensor]] = []
        for edge, grad in live.roots:
            begin = received if grad is None else grad
            assert begin is not None
            roots.append((edge, begin))
        if action.kind == "I":
            live.split, live.roots = SplitBackward(roots, live.activation), []
            input_grad = live.split.input_grad()
        else:
            if roots:
                torch.autograd.backward([edge for edge, _ in roots], [grad for _, grad in roots])  # type: ignore[arg-type]
            input_grad = None if live.activation is None else live.activation.grad
        if live.activation is None:
            return None
        # A chunk that does not use what it received still owes its neighbour a gradient.
        return torch.zeros_like(live.activation) if input_grad is None else input_grad


def _check_output(output: Tensor, spec: TensorSpec | None, stage: int, chunk: int) -> None:
    assert spec is not None
    if tuple(output.shape) != tuple(spec.shape) or output.dtype != spec.dtype:
        raise ValueError(
            f"stage {stage}{f' chunk {chunk}' if chunk else ''} returned {tuple(output.shape)} {output.dtype}, but hidden announces "
            f"{tuple(spec.shape)} {spec.dtype} to the next stage"
        )
