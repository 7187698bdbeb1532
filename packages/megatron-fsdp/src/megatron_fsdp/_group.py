# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Parameters of one unit that share a flat buffer: their shards, gathered form and gradients."""

from collections.abc import Sequence

import torch
from torch import nn

from megatron_fsdp._buffer import FlatBuffer, local_view
from megatron_fsdp._flat_shard import FlatShard
from megatron_fsdp._layout import plan_layout
from megatron_fsdp._policy import MixedPrecisionPolicy, Strategy
from megatron_fsdp._ranks import Ranks, Topology, wait
from megatron_fsdp._uneven import Place
from megatron_fsdp._units import ParameterSite


class ManagedParameter:
    """One parameter in its two forms; exactly one of them is registered in the module at a time."""

    def __init__(self, site: ParameterSite, place: Place, sharded: nn.Parameter, full: nn.Parameter) -> None:
        self.names = site.names
        self.original = site.parameter
        self.place = place
        self.sharded = sharded
        """What the optimizer steps: this rank's rows in the main dtype, a DTensor when there are ranks."""
        self.full = full
        """What forward and backward use: a view of the gathered buffer in the compute dtype."""
        self._slots = site.slots

    @property
    def name(self) -> str:
        return self.names[0]

    def register(self, *, full: bool) -> None:
        """Put the whole or the sharded form into the module tree."""
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
        self, sites: Sequence[ParameterSite], strategy: Strategy, policy: MixedPrecisionPolicy, topology: Topology, *, mean: bool
    ) -> None:
        first = sites[0].parameter
        self.topology, self.strategy = topology, strategy
        self.device = first.device
        self.layout = plan_layout([tuple(site.parameter.shape) for site in sites], topology.shards.size)
        self.grad_dtype = policy.gradient_dtype(first.dtype)
        self._comm_dtype = policy.grad_comm_dtype or self.grad_dtype
        self._divisor = topology.size if mean else 1
        self._gather: torch.Tensor | None = None
        self._gather_source: torch.Tensor | None = None
        self._full_grad: torch.Tensor | None = None
        self._written: set[int] = set()
        self.arrived: set[int] = set()
        """Parameters that got a gradient in this backward."""
        self._reduction: torch.Tensor | None = None
        self._remaining: tuple[Ranks, ...] = ()
        self._keeps_full_grad = strategy is Strategy.optim and topology.shards.size > 1
        self._grads: list[torch.Tensor] = []
        self.grad: torch.Tensor | None = None
        self._build(sites, policy, first)

    def _build(self, sites: Sequence[ParameterSite], policy: MixedPrecisionPolicy, first: nn.Parameter) -> None:
        shards, shard_numel = self.topology.shards, self.layout.shard_numel
        main_dtype, compute_dtype = policy.main_dtype(first.dtype, trainable=first.requires_grad), policy.compute_dtype(first.dtype)
        mine = slice(shards.rank * shard_numel, (shards.rank + 1) * shard_numel)
        whole = torch.zeros(self.layout.numel, dtype=first.dtype, device=self.device)
        with torch.no_grad():
            for site, segment in zip(sites, self.layout.segments, strict=True):
                whole[segment.offset : segment.offset + segment.numel] = site.parameter.detach().reshape(-1)
        for ranks in self.topology.all_ranks:
            ranks.broadcast(whole)
        self.buffer = FlatBuffer(self.layout, compute_dtype, self.device, storage=whole.to(compute_dtype))
        # A replicated buffer of the main dtype is the main copy as well: gathering then happens in place.
        self._aliased = main_dtype == compute_dtype and (self.strategy < Strategy.optim_grads_params or shards.size == 1)
        self.main = self.buffer.flat[mine] if self._aliased else whole[mine].to(main_dtype, copy=True)
        self.parameters: list[ManagedParameter] = []
        for site, segment in zip(sites, self.layout.segments, strict=True):
            place = Place(segment, self.layout, self.topology)
            trainable = site.parameter.requires_grad
            sharded = place.parameter(local_view(self.main, segment, shards.rank, shard_numel), requires_grad=trainable)
            if trainable and self.grad_dtype != main_dtype:
                sharded.grad_dtype = self.grad_dtype
            full = nn.Parameter(self.buffer.view(segment), requires_grad=trainable)
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
    def gathering(self) -> bool:
        return self._gather is not None or (self.reshards and self.buffer.allocated)

    def start_gather(self) -> None:
        """Start filling the gathered buffer from the main shards of all ranks; ``finish_gather`` ends it."""
        self.buffer.allocate()
        full = self.buffer.flat
        with torch.no_grad():
            if self.topology.shards.size == 1:
                if not self._aliased:
                    full.copy_(self.main)
                return
            self._gather_source = self.main.to(full.dtype)
            self._gather = self.topology.shards.gather_into(full, self._gather_source)

    def finish_gather(self) -> None:
        """Wait until the gathered buffer can be read."""
        if self._gather is not None:
            wait(self._gather)
            self._gather = self._gather_source = None

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

    def add_gradient(self, index: int) -> None:
        """Move the whole gradient of a parameter from autograd into the buffer that will be reduced."""
        full, segment = self.parameters[index].full, self.layout.segments[index]
        self.arrived.add(index)
        if full.grad is None:
            return
        if self._reduction is not None and self._keeps_full_grad:
            self._reduction = wait(self._reduction)
        if self._full_grad is None:
            self._full_grad = torch.empty(self.layout.numel, dtype=self.grad_dtype, device=self.device)
        view = self._full_grad[segment.offset : segment.offset + segment.numel].view(segment.shape)
        if index in self._written:
            view.add_(full.grad)
        else:
            view.copy_(full.grad)
            self._written.add(index)
        full.grad = None

    def start_reduce(self) -> None:
        """Start summing the gathered gradients over ranks; parameters without one count as zero."""
        self.finish_reduce()
        if self._full_grad is None:
            self._full_grad = torch.zeros(self.layout.numel, dtype=self.grad_dtype, device=self.device)
        elif len(self._written) < len(self.parameters):
            for index, segment in enumerate(self.layout.segments):
                if index not in self._written:
                    self._full_grad[segment.offset : segment.offset + segment.numel].zero_()
        outgoing = self._full_grad.to(self._comm_dtype)
        shards, replicas = self.topology.shards, self.topology.replicas
        if shards.size > 1:
            self._reduction, self._remaining = shards.reduce_scatter(outgoing), replicas
        elif replicas:
            self._reduction, self._remaining = replicas[0].start_all_reduce(outgoing), replicas[1:]
        else:
            self._reduction, self._remaining = outgoing, ()
        # One strategy keeps its whole buffer; the others keep it no longer than the reduction needs it.
        if not self._keeps_full_grad:
            self._full_grad = None
        self._written.clear()

    def finish_reduce(self) -> None:
        """Wait for the reduction and add it to the shard that the optimizer reads."""
        if self._reduction is None:
            return
        reduced = wait(self._reduction)
        self._reduction = None
        for ranks in self._remaining:
            reduced = ranks.all_reduce(reduced)
        # Padding between parameters is never initialised, and never read as a gradient.
        reduced = reduced.to(self.grad_dtype)
        if self._divisor != 1:
            reduced = reduced / self._divisor
        grad = self._gradient()
        trainable = [index for index, parameter in enumerate(self.parameters) if parameter.sharded.requires_grad]
        # A missing `grad` is how torch's zero_grad says that accumulation starts anew.
        fresh = [index for index in trainable if self.parameters[index].sharded.grad is None]
        if len(fresh) == len(trainable):
            grad.copy_(reduced)
        else:
            for index in fresh:
                self._rows(grad, self.parameters[index]).zero_()
            grad += reduced
        for index in trainable:
            self.parameters[index].sharded.grad = self._grads[index]

    def flat_shards(self) -> dict[str, FlatShard]:
        """This rank's range of every parameter that has one, by name."""
        found, replica = {}, 0
        for ranks in self.topology.replicas:
            replica = replica * ranks.size + ranks.rank
        for parameter in self.parameters:
            (first, last), row = parameter.place.rows, parameter.place.segment.row_numel
            if first == last or row == 0:
                continue
            found[parameter.name] = FlatShard(
                shape=parameter.place.shape,
                start=first * row,
                end=last * row,
                boxes=tuple((offset, size) for offset, size, _ in parameter.place.boxes()),
                parameter=self._rows(self.main, parameter).view(-1),
                gradient=self._rows(self._gradient(), parameter).view(-1) if parameter.sharded.requires_grad else None,
                replica=replica,
            )
        return found

    def _gradient(self) -> torch.Tensor:
        """The reduced gradient of this rank's slice, which stays where it is once it exists."""
        if self.grad is None:
            self.grad = torch.zeros(self.layout.shard_numel, dtype=self.grad_dtype, device=self.device)
            self._grads = [parameter.place.wrap(self._rows(self.grad, parameter)) for parameter in self.parameters]
        return self.grad

    def _rows(self, flat: torch.Tensor, parameter: ManagedParameter) -> torch.Tensor:
        return local_view(flat, parameter.place.segment, self.topology.shards.rank, self.layout.shard_numel)

    def drop_gradients(self) -> None:
        """Forget every gradient, reduced or not."""
        self.drop_unreduced()
        for parameter in self.parameters:
            parameter.sharded.grad = None

    def drop_unreduced(self) -> None:
        """Forget gradients that were not reduced, as after a backward that failed."""
        if self._reduction is not None:
            wait(self._reduction)
        self._reduction = None
        self._written.clear()
        if not self._keeps_full_grad:
            self._full_grad = None
        for parameter in self.parameters:
            parameter.full.grad = None
