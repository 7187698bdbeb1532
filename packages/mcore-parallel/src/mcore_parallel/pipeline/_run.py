# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Carries out the actions of one pipeline stage."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from mcore_parallel._groups import Group
from mcore_parallel.comm import P2PCommunicator, TensorSpec
from mcore_parallel.pipeline._plan import exchanges
from mcore_parallel.pipeline._schedule import Action


class StageForward(Protocol):
    """The forward of one stage.

    Takes the number of the micro-batch and the hidden states of the previous stage (None on the first stage).
    Returns the hidden states for the next stage, or on the last stage the loss (a scalar: the sum that is
    differentiated), and beside it an auxiliary loss of this stage, already weighted, or None.
    """

    def __call__(self, microbatch: int, hidden: Tensor | None) -> tuple[Tensor, Tensor | None]: ...


def run_schedule(
    actions: Sequence[Action],
    forward: StageForward,
    group: Group,
    *,
    hidden: TensorSpec | Callable[[int], TensorSpec] | None = None,
    no_sync: Callable[[], AbstractContextManager[None]] = nullcontext,
    communicator: P2PCommunicator | None = None,
) -> None:
    """Run the actions of this stage; gradients accumulate in the parameters.

    All losses (of the last stage and the auxiliary ones of every stage) have weight one in the gradient. The output of
    a stage is let go as soon as it is sent; what its backward needs lives until then. Without a backward among the
    actions nothing is recorded for one.

    Args:
        actions: what to do, in order (``one_f_one_b``, ``forward_only``); all stages run the same kind of schedule.
        forward: the stage.
        group: the pipeline group; a group of one runs without communication.
        hidden: shape and dtype of the hidden states between stages, the same on both sides; a function of the micro-batch
            when shapes differ. Not needed by a group of one.
        no_sync: context of every backward but the last (``DistributedDataParallel.no_sync``).
        communicator: for a caller that keeps one; None makes a new one.

    Raises:
        ValueError: ``hidden`` is missing, the stage's output is not what ``hidden`` says, or the loss is not a scalar.
    """
    if group.size > 1 and hidden is None:
        raise ValueError(f"hidden must say what travels between the {group.size} pipeline stages")
    spec_of = hidden if callable(hidden) else lambda microbatch: hidden
    link = communicator or P2PCommunicator(group)
    backwards = sum(action.kind == "B" for action in actions)
    live: dict[int, _Live] = {}
    to_next = to_previous = None
    for action, transfer in zip([*actions, None], exchanges(actions, group.size, group.rank), strict=True):
        activation, grad = link.exchange(
            send_next=to_next,
            recv_next=None if transfer.recv_grad is None else spec_of(transfer.recv_grad),
            send_previous=to_previous,
            recv_previous=None if transfer.recv_activation is None else spec_of(transfer.recv_activation),
        )
        to_next = to_previous = None
        if action is None:
            break
        if action.kind == "F":
            with torch.set_grad_enabled(backwards > 0):
                if activation is not None and backwards:
                    activation.requires_grad_()
                output, aux = forward(action.microbatch, activation)
            if group.is_last:
                if output.dim():
                    raise ValueError(f"the last stage must return a scalar loss, found shape {tuple(output.shape)}")
            else:
                _check_output(output, spec_of(action.microbatch), group)
                to_next = output.detach()
            if backwards:
                live[action.microbatch] = _live(activation, output, aux, group.is_last)
            # Only the gradient edge stays: the graph keeps what it saved, the output itself may go.
            del output, aux
        else:
            backwards -= 1
            with nullcontext() if backwards == 0 else no_sync():
                to_previous = _backward(live.pop(action.microbatch), grad)
    link.finish()


@dataclass(frozen=True)
class _Live:
    """What is kept of a micro-batch between its forward and its backward."""

    activation: Tensor | None
    roots: list[tuple[GradientEdge, Tensor | None]]
    """Where its backward begins and with which gradient; None for the one that the next stage sends."""


def _live(activation: Tensor | None, output: Tensor, aux: Tensor | None, is_last: bool) -> _Live:
    roots: list[tuple[GradientEdge, Tensor | None]] = []
    if output.requires_grad:
        roots.append((get_gradient_edge(output), torch.ones_like(output) if is_last else None))
    if aux is not None and aux.requires_grad:
        roots.append((get_gradient_edge(aux), torch.ones_like(aux)))
    return _Live(activation, roots)


def _backward(live: _Live, received: Tensor | None) -> Tensor | None:
    """Differentiate one micro-batch; returns the gradient of what the stage received."""
    if live.roots:
        edges = [edge for edge, _ in live.roots]
        torch.autograd.backward(edges, [received if grad is None else grad for _, grad in live.roots])  # type: ignore[arg-type]
    if live.activation is None:
        return None
    # A stage that does not use what it received still owes its neighbour a gradient.
    return torch.zeros_like(live.activation) if live.activation.grad is None else live.activation.grad


def _check_output(output: Tensor, spec: TensorSpec | None, group: Group) -> None:
    assert spec is not None
    if tuple(output.shape) != tuple(spec.shape) or output.dtype != spec.dtype:
        raise ValueError(
            f"stage {group.rank} returned {tuple(output.shape)} {output.dtype}, but hidden announces "
            f"{tuple(spec.shape)} {spec.dtype} to the next stage"
        )
