# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Gradients of parameters that share a flat buffer: whole ones as autograd makes them, and their sum over ranks."""

import contextlib
import functools
from collections.abc import Callable, Sequence

import torch
from torch import nn

from megatron_fsdp._buffers import GradBufferView, local_view
from megatron_fsdp._collectives import ShardSum, all_reduce, reduce_scatter
from megatron_fsdp._context import ShardContext, WorkHandle
from megatron_fsdp._parameter_grouping import GroupPlan
from megatron_fsdp._parameters import ManagedParameter, as_dtensor

BorrowedGradBuffer = Callable[[], contextlib.AbstractContextManager[tuple[torch.Tensor, bool]]]
"""Enters with memory for the whole gradient of a parameter, and whether it is to be overwritten."""


class Gradients:
    """The gradients of one group: ``reduced`` [shard_numel] is the sum over ranks of this rank's slice, which the optimizer reads."""

    def __init__(
        self,
        parameters: Sequence[ManagedParameter],
        plan: GroupPlan,
        context: ShardContext,
        *,
        dtype: torch.dtype,
        grad_view: GradBufferView | None,
    ) -> None:
        self.layout, self.topology = plan.layout, plan.topology
        self.dtype = dtype
        self.arrived: set[int] = set()
        """Parameters that got a gradient in this backward."""
        self.reduced: torch.Tensor | None = None
        self._parameters, self._context, self._streams, self._view = parameters, context, context.streams, grad_view
        self._comm_dtype = context.policy.grad_comm_dtype or dtype
        self._whole: torch.Tensor | None = None
        self._written: set[int] = set()
        self._contributed: set[int] = set()
        """Parameters of which this rank has given a gradient to reductions since the last ``settle``."""
        self._doubtful: set[int] = set()
        """Parameters that were reduced and have a gradient only if another rank gave one."""
        self._reducing: WorkHandle | None = None
        self._crosses = True
        """Whether the running reduction ends in ``reduced``, or in ``_partial``."""
        self._held: list[object] = []
        """Buffers that the running reduction reads."""
        self._partial: torch.Tensor | None = None
        """Sum over the shard ranks that is not yet one over the outer axis."""
        self._keeps_whole = plan.keeps_whole_gradient
        # Page-locked memory takes long to get.
        self._keeps_reduced = context.cpu_offload
        self._reduced_parts: list[torch.Tensor] = []
        if grad_view is not None:
            grad_view.join(self)

    # Whole

    @property
    def complete(self) -> bool:
        """Whether every trainable parameter got its gradient in this backward."""
        return len(self.arrived) == sum(parameter.sharded.requires_grad for parameter in self._parameters)

    @property
    def has_unreduced(self) -> bool:
        return bool(self._written)

    @property
    def num_held_bytes(self) -> int:
        """Of the buffer that is free again when the running reduction is over."""
        temporary = self._reducing is not None and not self._keeps_whole and self._held[0] is not self.reduced
        return self.layout.numel * self.dtype.itemsize if temporary else 0

    def add(self, index: int) -> None:
        """Move the whole gradient of a parameter from autograd into the buffer that will be reduced."""
        full = self._parameters[index].full
        if full.grad is None:
            self.arrived.add(index)
            return
        if full.grad.layout is not torch.strided:
            name = self._parameters[index].name
            raise RuntimeError(f"the gradient of {name!r} is sparse, and ranks sum dense ones; build its layer with sparse=False")
        view, fresh = self.borrow(index)
        (view.copy_ if fresh else view.add_)(_local_gradient(full))
        full.grad = None

    def borrow(self, index: int) -> tuple[torch.Tensor, bool]:
        """Where the whole gradient of a parameter is summed, and whether that holds nothing yet, to be overwritten."""
        if self._keeps_whole:
            self.finish_reduce()
        segment, fresh = self.layout.segments[index], index not in self._written
        # Before the parameter counts as written: whoever uses the same memory may have to leave it.
        whole = self._make_whole()
        self._written.add(index)
        self.arrived.add(index)
        return whole[segment.offset : segment.offset + segment.numel].view(segment.shape), fresh

    def _make_whole(self) -> torch.Tensor:
        """The buffer of whole gradients; what lies between parameters is zero."""
        if self._whole is None:
            fresh = self._partial is None and self._reducing is None and not self._stale()
            at_home = self._context.home == self._context.device
            if fresh and at_home and self.topology.num_shards == 1 and self._comm_dtype == self.dtype:
                # Nothing is cut and there is nothing to add to, so that the sum can be made where the optimizer reads it.
                self._whole = self._make_reduced()
            else:
                # What comes late must not be written where its own reduction reads.
                self._whole = None if self._view is None or self._reducing is not None else self._view.claim()
                if self._whole is None:
                    with self._streams.memory.allocating():
                        self._whole = torch.empty(self.layout.numel, dtype=self.dtype, device=self._context.device)
                for begin, end in self.layout.gaps:
                    self._whole[begin:end].zero_()
        return self._whole

    # Reduced

    def start_reduce(self, *, outer: bool = True) -> None:
        """Start summing the gathered gradients over ranks; parameters without one count as zero.

        Args:
            outer: also over the outer axis; else the sum over the shard ranks is kept for a later call.
        """
        self.finish_reduce()
        self._context.calls.call(f"sum of the gradient of {self._parameters[0].name!r}")
        full = self._make_whole()
        if not outer and self.topology.shards.size == 1 and (full is self.reduced or self._view is not None):
            # What is kept for later would lie where others write.
            full = full.clone()
        for index, segment in enumerate(self.layout.segments):
            if index not in self._written:
                full[segment.offset : segment.offset + segment.numel].zero_()
        self._contributed |= self._written
        self._written.clear()
        stale = self._stale()
        direct = outer and not stale and self._partial is None and self.topology.outer.size == 1 and not self._context.cpu_offload
        total = ShardSum(full, self.topology.shards, self._comm_dtype, out=self._make_reduced() if direct else None)
        self._reducing = self._streams.reduce.launch(total.begin, total.end)
        self._held = [full, total]
        self._crosses = outer
        if outer:
            self._cross(total, stale)
        # One strategy keeps its whole buffer; the others keep it no longer than the reduction needs it.
        if not self._keeps_whole:
            self._whole = None

    def start_outer_reduce(self) -> None:
        """Start summing over the outer axis what ``start_reduce`` kept from it."""
        self.finish_reduce()
        self._crosses = True
        self._held = [None]
        self._cross(None, self._stale())

    def _cross(self, total: ShardSum | None, stale: list[int]) -> None:
        """Start what follows the sum over the shard ranks."""
        beside = self._streams.cross if self.topology.outer.size > 1 or self.topology.replicas else self._streams.reduce
        begin = functools.partial(self._end_reduction, total, self._partial, stale)
        self._reducing = beside.launch(begin, after=self._reducing)
        self._held.append(self._partial)
        self._partial = None

    @torch.no_grad()
    def _end_reduction(self, total: ShardSum | None, partial: torch.Tensor | None, stale: list[int]) -> None:
        grad, outer = self._make_reduced(), self.topology.outer
        result = partial if total is None else total.result
        if result is None:
            result = torch.zeros(grad.numel() * outer.size, dtype=self.dtype, device=self._context.device)
        elif total is not None and partial is not None:
            result.add_(partial)
        if outer.size > 1:
            result = reduce_scatter(result, outer)
        for position, ranks in enumerate(self.topology.replicas):
            # What was not summed over shards crosses ranks for the first time.
            all_reduce(result, ranks, self._comm_dtype if position == 0 and self.topology.shards.size == 1 else self.dtype)
        if self._context.divisor != 1:
            result.div_(self._context.divisor)
        if result is grad:
            return
        if stale:
            # Added up where it was reduced, so that the host need not wait for it.
            before = self._context.on_device(grad)
            for index, parameter in enumerate(self._parameters):
                if index not in stale:
                    self._rows(before, parameter).zero_()
            result = before.add_(result)
        if result is not grad:
            grad.copy_(result, non_blocking=True)

    def finish_reduce(self) -> None:
        """Let the computation wait until the reduction is in the gradient that the optimizer reads."""
        if self._reducing is None:
            return
        self._reducing.wait()
        self._reducing = None
        if not self._crosses:
            total = self._held[1]
            assert isinstance(total, ShardSum), "the reduction of a shard is held until it is over"
            self._partial = total.result if self._partial is None else self._partial.add_(total.result)
        else:
            for index, parameter in enumerate(self._parameters):
                if index in self._contributed:
                    parameter.sharded.grad = self._reduced_parts[index]
                elif parameter.sharded.requires_grad and parameter.sharded.grad is None:
                    self._doubtful.add(index)
        self._held = []

    @property
    def contributions(self) -> list[bool]:
        """For each parameter, whether this rank gave a gradient to reductions since the last ``settle``."""
        return [index in self._contributed for index in range(len(self._parameters))]

    def settle(self, contributed: Callable[[], Sequence[bool]]) -> None:
        """Reductions are over: a parameter has a gradient if any rank gave one, and none otherwise.

        Args:
            contributed: for each parameter, whether any rank did; called only if that decides something.
        """
        for index, has_gradient in enumerate(contributed() if self._doubtful else ()):
            if has_gradient and index in self._doubtful:
                self._parameters[index].sharded.grad = self._reduced_parts[index]
        self._contributed.clear()
        self._doubtful.clear()

    def _stale(self) -> list[int]:
        """Parameters whose reduced gradient is to be added to; a missing ``grad`` is how zero_grad says that accumulation starts anew."""
        return [index for index, item in enumerate(self._parameters) if item.sharded.grad is not None or index in self._doubtful]

    def flat(self, index: int) -> torch.Tensor:
        """This rank's range of the reduced gradient of a parameter, which stays where it is from now on."""
        self._keeps_reduced = True
        return self._rows(self._make_reduced(), self._parameters[index]).view(-1)

    def _make_reduced(self) -> torch.Tensor:
        if self.reduced is None:
            with self._streams.memory.allocating():
                self.reduced = self._context.zeros(self.layout.shard_numel, self.dtype)
            self._reduced_parts = [parameter.place.wrap(self._rows(self.reduced, parameter)) for parameter in self._parameters]
        return self.reduced

    def _rows(self, flat: torch.Tensor, parameter: ManagedParameter) -> torch.Tensor:
        return local_view(flat, parameter.place.segment, self.topology.shard, self.layout.shard_numel)

    # Neither

    def offload(self) -> None:
        """Forget every gradient, and give back all memory of them but what lies in a slot."""
        self.drop()
        self._whole = None
        if self.reduced is not None:
            self.reduced.untyped_storage().resize_(0)

    def take_memory(self) -> None:
        """Undo ``offload``, with zeros."""
        if self.reduced is not None and not self.reduced.untyped_storage().nbytes():
            self.reduced.untyped_storage().resize_(self.reduced.nbytes)
            self.reduced.zero_()

    def drop(self) -> None:
        """Forget every gradient, reduced or not."""
        self.drop_unreduced()
        for parameter in self._parameters:
            parameter.sharded.grad = None
        self.release()

    def drop_unreduced(self) -> None:
        """Forget gradients that were not reduced."""
        if self._reducing is not None:
            self._reducing.wait()
        self._reducing = self._partial = None
        self._held = []
        for indices in (self._written, self._contributed, self._doubtful):
            indices.clear()
        if not self._keeps_whole:
            self._whole = None
        for parameter in self._parameters:
            parameter.full.grad = None

    def release(self) -> None:
        """Give the memory of the reduced gradient back until the next reduction, if there is none and nobody counts on its place."""
        if not self._keeps_reduced and self._reducing is None and not self._written and not self._stale():
            self.reduced, self._reduced_parts = None, []


def _local_gradient(full: nn.Parameter) -> torch.Tensor:
    """This rank's block of the gradient, complete over the module's own mesh."""
    assert full.grad is not None
    parameter, gradient = as_dtensor(full), as_dtensor(full.grad)
    if parameter is None or gradient is None:
        return full.grad
    return gradient.redistribute(placements=parameter.placements).to_local()
