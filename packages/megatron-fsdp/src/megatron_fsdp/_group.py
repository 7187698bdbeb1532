# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Parameters of one unit that share a flat buffer: their shards, gathered form and gradients."""

import functools
import weakref
from collections.abc import Sequence

import torch
from torch import nn

from megatron_fsdp._buffer import FlatBuffer, local_view
from megatron_fsdp._collectives import ShardSum, all_reduce, reduce_scatter, start_gather, wait
from megatron_fsdp._dtensor import as_dtensor, local
from megatron_fsdp._eight_bit import EightBitFormat, EightBitGather
from megatron_fsdp._flat_shard import FlatShard
from megatron_fsdp._lane import Lanes, Ticket, Work
from megatron_fsdp._layout import plan_layout
from megatron_fsdp._placement import ModelPart
from megatron_fsdp._policy import MixedPrecisionPolicy, Strategy
from megatron_fsdp._topology import Topology
from megatron_fsdp._uneven import Place
from megatron_fsdp._units import ParameterSite


class ManagedParameter:
    """One parameter in its two forms; exactly one of them is registered in the module at a time."""

    def __init__(self, site: ParameterSite, place: Place, sharded: nn.Parameter, full: nn.Parameter) -> None:
        self.names = site.names
        # Weak, or the whole parameter would stay as long as its shard.
        self._original = weakref.ref(site.parameter)
        self.place = place
        self.sharded = sharded
        """What the optimizer steps: this rank's rows in the main dtype, a DTensor when there are ranks."""
        self.full = full
        """What forward and backward use: a view of the gathered buffer in the compute dtype."""
        self._slots = site.slots

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def original(self) -> nn.Parameter | None:
        """The module's own parameter, as long as somebody (an optimizer) holds it."""
        return self._original()

    def register(self, *, full: bool) -> None:
        """Put the whole or the sharded form into the module tree.

        Raises:
            RuntimeError: somebody else put another parameter there.
        """
        for name, (module, attribute) in zip(self.names, self._slots, strict=False):
            found = module._parameters.get(attribute)
            if full and found is not self.sharded and found is not self.full:
                raise RuntimeError(
                    f"{name!r} was bound to another parameter after fully_shard, where it would be neither sharded nor summed over ranks; "
                    "tie, replace or add parameters before"
                )
        if full and self.full.requires_grad != self.sharded.requires_grad:
            self.full.requires_grad_(self.sharded.requires_grad)
        parameter = self.full if full else self.sharded
        for module, attribute in self._slots:
            module._parameters[attribute] = parameter


class ParameterGroup:
    """Parameters of one unit with one dtype, all trainable or all frozen, in one flat buffer.

    ``main`` [shard_numel] holds this rank's slice in the main dtype, ``full`` [numel] the gathered buffer in the compute
    dtype, ``grad`` [shard_numel] the reduced gradient of the slice.
    """

    def __init__(
        self,
        sites: Sequence[ParameterSite],
        parts: Sequence[ModelPart],
        strategy: Strategy,
        policy: MixedPrecisionPolicy,
        topology: Topology,
        *,
        divisor: int,
        lanes: Lanes,
        eight_bit: EightBitFormat | None = None,
    ) -> None:
        first = sites[0].current
        self.topology, self.strategy = topology, strategy
        self.device = first.device
        self.layout = plan_layout([part.local_shape for part in parts], topology.num_shards)
        self.grad_dtype = policy.gradient_dtype(first.dtype)
        self._comm_dtype = policy.grad_comm_dtype or self.grad_dtype
        self._divisor, self._lanes = divisor, lanes
        self._gathering: Ticket | None = None
        self._inner: torch.Tensor | None = None
        """What this rank gives to gathers, where the outer axis cuts it again."""
        self._full_grad: torch.Tensor | None = None
        self._written: set[int] = set()
        self.arrived: set[int] = set()
        """Parameters that got a gradient in this backward."""
        self._reducing: Ticket | None = None
        self._crosses = True
        """Whether the running reduction ends in the gradient, or in ``_partial``."""
        self._held: list[object] = []
        """Buffers that the running reduction reads."""
        self._partial: torch.Tensor | None = None
        """Sum over the shard ranks that is not yet one over the outer axis."""
        self._keeps_full_grad = strategy is Strategy.optim and topology.shards.size > 1
        self._grads: list[torch.Tensor] = []
        self.grad: torch.Tensor | None = None
        self._build(sites, parts, policy, first)
        self._eight_bit = None if eight_bit is None or not self.reshards else EightBitGather(eight_bit, self.layout, topology)

    def _build(self, sites: Sequence[ParameterSite], parts: Sequence[ModelPart], policy: MixedPrecisionPolicy, first: nn.Parameter) -> None:
        shard, shard_numel = self.topology.shard, self.layout.shard_numel
        main_dtype, compute_dtype = policy.main_dtype(first.dtype, trainable=first.requires_grad), policy.compute_dtype(first.dtype)
        mine = slice(shard * shard_numel, (shard + 1) * shard_numel)
        whole = torch.zeros(self.layout.numel, dtype=first.dtype, device=self.device)
        with torch.no_grad():
            for site, segment in zip(sites, self.layout.segments, strict=True):
                whole[segment.offset : segment.offset + segment.numel] = local(site.current.detach()).reshape(-1)
        for ranks in self.topology.all_ranks:
            ranks.broadcast(whole)
        self.buffer = FlatBuffer(self.layout, compute_dtype, self.device, storage=whole.to(compute_dtype))
        # A replicated buffer of the main dtype is the main copy as well: gathering then happens in place.
        self._aliased = main_dtype == compute_dtype and (self.strategy < Strategy.optim_grads_params or self.topology.num_shards == 1)
        self.main = self.buffer.flat[mine] if self._aliased else whole[mine].to(main_dtype, copy=True)
        self.parameters: list[ManagedParameter] = []
        for site, part, segment in zip(sites, parts, self.layout.segments, strict=True):
            place = Place(segment, self.layout, self.topology, part)
            trainable = site.current.requires_grad
            sharded = place.parameter(local_view(self.main, segment, shard, shard_numel), requires_grad=trainable)
            if trainable and self.grad_dtype != main_dtype:
                sharded.grad_dtype = self.grad_dtype
            full = nn.Parameter(_like(site.current, self.buffer.view(segment)), requires_grad=trainable)
            self.parameters.append(ManagedParameter(site, place, sharded, full))
        if self.reshards:
            self.buffer.release()

    # Parameters

    @property
    def reshards(self) -> bool:
        """Whether the gathered buffer is given back when its unit does not compute."""
        return self.strategy is Strategy.optim_grads_params and not self._aliased

    @property
    def trainable(self) -> bool:
        return any(parameter.sharded.requires_grad for parameter in self.parameters)

    @property
    def num_bytes(self) -> int:
        """Of the gathered buffer."""
        return self.layout.numel * self.buffer.flat.element_size()

    @property
    def gathering(self) -> bool:
        return self._gathering is not None or (self.reshards and self.buffer.allocated)

    def start_gather(self) -> None:
        """Start filling the gathered buffer from the main shards of all ranks; ``finish_gather`` ends it."""
        self.finish_gather()
        with self._lanes.memory.allocating():
            self.buffer.allocate()
        restore = None if self._eight_bit is None else functools.partial(self._eight_bit.end, self.buffer.flat)
        self._gathering = self._lanes.gather.launch(self._begin_gather, restore)

    @torch.no_grad()
    def _begin_gather(self) -> Work | None:
        if self._eight_bit is not None:
            return self._eight_bit.begin(self.main)
        full, source, shards = self.buffer.flat, self.main, self.topology.shards
        if self.keeps_shard:
            if self._inner is None:
                self._inner = torch.empty(full.numel() // shards.size, dtype=full.dtype, device=full.device)
                wait(start_gather(self._inner, source.to(full.dtype), self.topology.outer))
            source = self._inner
        if source.dtype != full.dtype:
            # Rounded where it belongs in the gathered buffer, and gathered from there.
            source = full.view(shards.size, -1)[shards.rank].copy_(source)
        return start_gather(full, source, shards)

    @property
    def keeps_shard(self) -> bool:
        """Whether what it gives to gathers is made once for each value of the main parameters."""
        return self.topology.outer.size > 1

    @property
    def remembers(self) -> bool:
        """Whether a forward after a change of the main parameters must be told of it."""
        return self.keeps_shard or self._eight_bit is not None or not self.reshards

    def main_changed(self) -> None:
        """The next gather uses the new main parameters."""
        self._inner = None
        if self._eight_bit is not None:
            self._eight_bit.main_changed()

    def finish_gather(self) -> None:
        """Let the computation wait until the gathered buffer can be read."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None

    def release(self) -> None:
        """Give the gathered buffer back, if the strategy does so."""
        self.finish_gather()
        if self.reshards:
            self.buffer.release()

    # Gradients

    @property
    def complete(self) -> bool:
        """Whether every trainable parameter got its gradient in this backward."""
        return len(self.arrived) == sum(parameter.sharded.requires_grad for parameter in self.parameters)

    @property
    def has_unreduced(self) -> bool:
        return bool(self._written)

    @property
    def num_held_bytes(self) -> int:
        """Of the buffer that is free again when the running reduction is over."""
        temporary = self._reducing is not None and not self._keeps_full_grad and self._held[0] is not self.grad
        return self.layout.numel * self.grad_dtype.itemsize if temporary else 0

    def add_gradient(self, index: int) -> None:
        """Move the whole gradient of a parameter from autograd into the buffer that will be reduced."""
        full, segment = self.parameters[index].full, self.layout.segments[index]
        self.arrived.add(index)
        if full.grad is None:
            return
        if self._keeps_full_grad:
            self.finish_reduce()
        view = self._gradients()[segment.offset : segment.offset + segment.numel].view(segment.shape)
        gradient = _local_gradient(full)
        if index in self._written:
            view.add_(gradient)
        else:
            view.copy_(gradient)
            self._written.add(index)
        full.grad = None

    def _gradients(self) -> torch.Tensor:
        """The buffer of whole gradients; what lies between parameters is zero."""
        if self._full_grad is None:
            fresh = self._partial is None and not self._stale_gradients()
            if fresh and self.topology.num_shards == 1 and self._comm_dtype == self.grad_dtype:
                # Nothing is cut and nothing to add to, so that the sum can be made where the optimizer reads it.
                self._full_grad = self._gradient()
            else:
                with self._lanes.memory.allocating():
                    self._full_grad = torch.empty(self.layout.numel, dtype=self.grad_dtype, device=self.device)
                for begin, end in self.layout.gaps:
                    self._full_grad[begin:end].zero_()
        return self._full_grad

    def start_reduce(self, *, outer: bool = True) -> None:
        """Start summing the gathered gradients over ranks; parameters without one count as zero.

        Args:
            outer: also over the outer axis; else the sum over the shard ranks is kept for a later call.
        """
        self.finish_reduce()
        full = self._gradients()
        if full is self.grad and not outer:
            full = full.clone()
        for index, segment in enumerate(self.layout.segments):
            if index not in self._written:
                full[segment.offset : segment.offset + segment.numel].zero_()
        self._written.clear()
        stale = self._stale_gradients()
        direct = outer and not stale and self._partial is None and not self.keeps_shard
        total = ShardSum(full, self.topology.shards, self._comm_dtype, out=self._gradient() if direct else None)
        self._reducing = self._lanes.reduce.launch(total.begin, total.end)
        self._held = [full, total]
        self._crosses = outer
        if outer:
            self._cross(total, stale)
        # One strategy keeps its whole buffer; the others keep it no longer than the reduction needs it.
        if not self._keeps_full_grad:
            self._full_grad = None

    def start_outer_reduce(self) -> None:
        """Start summing over the outer axis what ``start_reduce`` kept from it."""
        self.finish_reduce()
        self._crosses = True
        self._held = [None]
        self._cross(None, self._stale_gradients())

    def _cross(self, total: ShardSum | None, stale: list[int]) -> None:
        """Start what follows the sum over the shard ranks."""
        beside = self._lanes.cross if self.keeps_shard or self.topology.replicas else self._lanes.reduce
        begin = functools.partial(self._end_reduction, total, self._partial, stale)
        self._reducing = beside.launch(begin, after=self._reducing)
        self._held.append(self._partial)
        self._partial = None

    @torch.no_grad()
    def _end_reduction(self, total: ShardSum | None, partial: torch.Tensor | None, stale: list[int]) -> None:
        grad, outer = self._gradient(), self.topology.outer
        reduced = partial if total is None else total.result
        if reduced is None:
            reduced = grad.new_zeros(grad.numel() * outer.size)
        elif total is not None and partial is not None:
            reduced.add_(partial)
        if outer.size > 1:
            reduced = reduce_scatter(reduced, outer)
        for position, ranks in enumerate(self.topology.replicas):
            # What was not summed over shards crosses ranks for the first time.
            all_reduce(reduced, ranks, self._comm_dtype if position == 0 and self.topology.shards.size == 1 else self.grad_dtype)
        if self._divisor != 1:
            reduced.div_(self._divisor)
        if reduced is grad:
            return
        if stale:
            for index, parameter in enumerate(self.parameters):
                if index not in stale:
                    self._rows(grad, parameter).zero_()
            grad.add_(reduced)
        else:
            grad.copy_(reduced)

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
            for index, parameter in enumerate(self.parameters):
                if parameter.sharded.requires_grad:
                    parameter.sharded.grad = self._grads[index]
        self._held = []

    def _stale_gradients(self) -> list[int]:
        """Parameters whose reduced gradient is to be added to; a missing ``grad`` is how zero_grad says that accumulation starts anew."""
        return [index for index, parameter in enumerate(self.parameters) if parameter.sharded.grad is not None]

    def flat_shards(self) -> dict[str, FlatShard]:
        """This rank's range of every parameter that has one, by name."""
        found = {}
        for parameter in self.parameters:
            (first, last), row = parameter.place.rows, parameter.place.segment.row_numel
            if first == last or row == 0:
                continue
            found[parameter.name] = FlatShard(
                shape=parameter.place.segment.shape,
                start=first * row,
                end=last * row,
                boxes=tuple((offset, size) for offset, size, _ in parameter.place.boxes()),
                parameter=self._rows(self.main, parameter).view(-1),
                gradient=self._rows(self._gradient(), parameter).view(-1) if parameter.sharded.requires_grad else None,
                replica=self.topology.replica,
            )
        return found

    def _gradient(self) -> torch.Tensor:
        """The reduced gradient of this rank's slice, which stays where it is once it exists."""
        if self.grad is None:
            with self._lanes.memory.allocating():
                self.grad = torch.zeros(self.layout.shard_numel, dtype=self.grad_dtype, device=self.device)
            self._grads = [parameter.place.wrap(self._rows(self.grad, parameter)) for parameter in self.parameters]
        return self.grad

    def _rows(self, flat: torch.Tensor, parameter: ManagedParameter) -> torch.Tensor:
        return local_view(flat, parameter.place.segment, self.topology.shard, self.layout.shard_numel)

    def drop_gradients(self) -> None:
        """Forget every gradient, reduced or not."""
        self.drop_unreduced()
        for parameter in self.parameters:
            parameter.sharded.grad = None

    def drop_unreduced(self) -> None:
        """Forget gradients that were not reduced."""
        if self._reducing is not None:
            self._reducing.wait()
        self._reducing = self._partial = None
        self._held = []
        self._written.clear()
        if not self._keeps_full_grad:
            self._full_grad = None
        for parameter in self.parameters:
            parameter.full.grad = None


def _like(parameter: nn.Parameter, block: torch.Tensor) -> torch.Tensor:
    """The block as the module's parameter was: a DTensor over the module's own mesh, or plain."""
    dtensor = as_dtensor(parameter)
    if dtensor is None:
        return block
    shape, stride = dtensor.shape, dtensor.stride()
    return type(dtensor).from_local(block, dtensor.device_mesh, dtensor.placements, run_check=False, shape=shape, stride=stride)


def _local_gradient(full: nn.Parameter) -> torch.Tensor:
    """This rank's block of the gradient, complete over the module's own mesh."""
    assert full.grad is not None
    parameter, gradient = as_dtensor(full), as_dtensor(full.grad)
    if parameter is None or gradient is None:
        return full.grad
    return gradient.redistribute(placements=parameter.placements).to_local()
