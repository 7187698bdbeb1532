# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Parameters of one unit that share a flat buffer: their shards and gathered form."""

import functools
from collections.abc import Sequence

import torch
from torch import nn

from megatron_fsdp._buffers import FlatBuffer, GradBufferView, local_view
from megatron_fsdp._collectives import Ranks, Work, start_gather, wait
from megatron_fsdp._context import ShardContext, WorkHandle
from megatron_fsdp._eight_bit import EightBitFormat, EightBitGather, Float8Form, whole_values
from megatron_fsdp._gradients import Gradients
from megatron_fsdp._parameter_grouping import GroupPlan
from megatron_fsdp._parameters import FlatShard, ManagedParameter, Place, as_dtensor, local


class ParameterGroup:
    """Parameters of one unit with one dtype, all trainable or all frozen, in one flat buffer.

    ``main`` [shard_numel] holds this rank's slice in the main dtype, ``buffer`` [numel] what is gathered in the compute dtype,
    ``gradients`` those of both.

    Args:
        plan: which parameters, and where they lie.
        context: of the model.
        eight_bit: how they are gathered, where as scaled bytes.
        flat_view: [numel] of the compute dtype that the gathered buffer uses; None gives it memory of its own.
        grad_view: likewise for whole gradients.
    """

    def __init__(
        self,
        plan: GroupPlan,
        context: ShardContext,
        *,
        eight_bit: EightBitFormat | None = None,
        flat_view: torch.Tensor | None = None,
        grad_view: GradBufferView | None = None,
    ) -> None:
        self.topology, self.strategy, self.layout, self.device = plan.topology, plan.strategy, plan.layout, context.device
        self.reshards = plan.reshards(context)
        """Whether the gathered buffer is given back when its unit does not compute."""
        self._context, self._streams = context, context.streams
        self._gathering: WorkHandle | None = None
        self._inner: torch.Tensor | None = None
        """What this rank gives to gathers, where the outer axis cuts it again."""
        self.parameters: list[ManagedParameter] = []
        self._quantized: list[Float8Form] = []
        """Of the parameters, where these are quantised themselves."""
        self._build(plan, flat_view)
        self.gradients = Gradients(self.parameters, plan, context, dtype=plan.dtypes(context)[2], grad_view=grad_view)
        forms = self._quantized or ([eight_bit] * len(self.parameters) if eight_bit is not None and self.reshards else [])
        self._eight_bit = EightBitGather(forms, self.layout, self.topology) if forms else None
        if self._quantized and not self.reshards:
            self.start_gather()
            self.finish_gather()

    def _build(self, plan: GroupPlan, flat_view: torch.Tensor | None) -> None:
        shard, shard_numel = self.topology.shard, self.layout.shard_numel
        main_dtype, compute_dtype, grad_dtype = plan.dtypes(self._context)
        own_slice = slice(shard * shard_numel, (shard + 1) * shard_numel)
        whole = torch.zeros(self.layout.numel, dtype=main_dtype if plan.quantized else plan.sites[0].current.dtype, device=self.device)
        with torch.no_grad():
            for site, segment in zip(plan.sites, self.layout.segments, strict=True):
                values = whole_values(site.current) if plan.quantized else local(site.current.detach())
                whole[segment.offset : segment.offset + segment.numel] = values.reshape(-1)
        for ranks in self.topology.all_ranks:
            ranks.broadcast(whole)
        flat = flat_view
        if flat is None:
            flat = torch.zeros_like(whole, dtype=compute_dtype) if plan.quantized else whole.to(compute_dtype)
        self.buffer = FlatBuffer(self.layout, flat, borrowed=flat_view is not None)
        self.main = self.buffer.flat[own_slice] if plan.aliases(self._context) else self._context.zeros(shard_numel, main_dtype)
        if not plan.aliases(self._context):
            self.main.copy_(whole[own_slice])
        for site, part, segment in zip(plan.sites, plan.parts, self.layout.segments, strict=True):
            place = Place(segment, self.layout, self.topology, part)
            trainable = site.current.requires_grad
            sharded = nn.Parameter(place.wrap(local_view(self.main, segment, shard, shard_numel)), requires_grad=trainable)
            if trainable and grad_dtype != main_dtype:
                sharded.grad_dtype = grad_dtype
            block = self.buffer.view(segment)
            if plan.quantized:
                self._quantized.append(Float8Form(site.name, site.current, block))
                full = self._quantized[-1].full
            else:
                full = nn.Parameter(_like(site.current, block), requires_grad=trainable)
            self.parameters.append(ManagedParameter(site, place, sharded, full))
        if self.reshards:
            self.buffer.release()

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
        self._context.calls.call(f"gather of {self.parameters[0].name!r}")
        with self._streams.memory.allocating():
            self.buffer.allocate()
        restore = None if self._eight_bit is None else functools.partial(self._eight_bit.end, self.buffer.flat)
        self._gathering = self._streams.gather.launch(self._begin_gather, restore)

    @torch.no_grad()
    def _begin_gather(self) -> Work | None:
        if self._eight_bit is not None:
            return self._eight_bit.begin(functools.partial(self._context.on_device, self.main), self.buffer.flat)
        full, shards = self.buffer.flat, self.topology.shards
        if self.keeps_shard and self._inner is None:
            self._inner = torch.empty(full.numel() // shards.size, dtype=full.dtype, device=full.device)
            wait(start_gather(self._inner, self._context.on_device(self.main).to(full.dtype), self.topology.outer))
        source = self._context.on_device(self.main) if self._inner is None else self._inner
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
            for form in self._quantized:
                form.release()

    @torch.no_grad()
    def broadcast_main(self) -> None:
        """Overwrite the main parameters by those of the first copy."""
        main = self._context.on_device(self.main)
        for ranks in self.topology.replicas:
            ranks.broadcast(main)
        if main is not self.main:
            self.main.copy_(main)

    def flat_shards(self) -> dict[str, FlatShard]:
        """This rank's range of every parameter that has one, by name; its gradient stays where it is from now on."""
        shards = {}
        for index, parameter in enumerate(self.parameters):
            place = parameter.place
            (first, last), row = place.rows, place.segment.row_numel
            if first == last or row == 0:
                continue
            shards[parameter.name] = FlatShard(
                shape=place.segment.shape,
                start=first * row,
                end=last * row,
                boxes=tuple((offset, size) for offset, size, _ in place.boxes()),
                parameter=local_view(self.main, place.segment, self.topology.shard, self.layout.shard_numel).view(-1),
                gradient=self.gradients.flat(index) if parameter.sharded.requires_grad else None,
                replica=self.topology.replica,
            )
        return shards


def _like(parameter: nn.Parameter, block: torch.Tensor) -> torch.Tensor:
    """The block as the module's parameter was: a DTensor over the module's own mesh, or plain."""
    dtensor = as_dtensor(parameter)
    if dtensor is None:
        return block
    shape, stride = dtensor.shape, dtensor.stride()
    return type(dtensor).from_local(block, dtensor.device_mesh, dtensor.placements, run_check=False, shape=shape, stride=stride)


def gradient_norm(groups: Sequence[ParameterGroup], norm_type: float = 2.0) -> torch.Tensor:
    """Norm of all reduced gradients as one vector; every parameter counts once, on every rank the same.

    Returns:
        A scalar, float32 (float64 if any gradient is).

    Raises:
        ValueError: ``norm_type`` is not positive.
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type={norm_type} must be positive")
    dtype = functools.reduce(torch.promote_types, (group.gradients.dtype for group in groups), torch.float32)
    total = torch.zeros((), dtype=dtype, device=groups[0].device)
    # Gradients cut over the same ranks, whose squares add up over them.
    cuts: dict[tuple[str, ...], tuple[list[Ranks], list[torch.Tensor]]] = {}
    for group in groups:
        for parameter in group.parameters:
            topology = group.topology
            ranks = [topology.shards, topology.outer, *(topology.model_ranks(axis) for axis, _ in parameter.place.part.cuts)]
            ranks = [one for one in ranks if one.size > 1]
            _, gradients = cuts.setdefault(tuple(one.name for one in ranks), (ranks, []))
            if parameter.sharded.grad is not None:
                gradients.append(local(parameter.sharded.grad))
    for ranks, gradients in cuts.values():
        norm = _vector_norm(gradients, norm_type, dtype, total.device).to(total.device)
        if norm_type == float("inf"):
            for one in ranks:
                norm = one.all_reduce(norm, "max")
            total = torch.maximum(total, norm)
            continue
        power = norm**norm_type
        for one in ranks:
            power = one.all_reduce(power)
        total = total + power
    return total if norm_type == float("inf") else total ** (1 / norm_type)


def clip_gradients(groups: Sequence[ParameterGroup], max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Scale all reduced gradients so that their norm is at most ``max_norm``; return the norm before."""
    norm = gradient_norm(groups, norm_type)
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    reduced = (item.sharded.grad for group in groups for item in group.parameters)
    gradients = [local(gradient) for gradient in reduced if gradient is not None]
    scales = {device: scale.to(device) for device in {gradient.device for gradient in gradients}}
    for gradient in gradients:
        gradient.mul_(scales[gradient.device])
    return norm


def _vector_norm(gradients: list[torch.Tensor], norm_type: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    # The infinity norm of nothing is undefined in torch, and zero here.
    norms = [torch.linalg.vector_norm(gradient, norm_type, dtype=dtype) for gradient in gradients if gradient.numel()]
    return torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.zeros((), dtype=dtype, device=device)
