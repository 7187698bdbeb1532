# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The public entry: sharding a module and its optimizer."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megatron_fsdp._context import RegisteredMemory, ShardContext, Streams
from megatron_fsdp._eight_bit import EightBitFormat, Float8Format
from megatron_fsdp._materialize import ResetParameters, materialize
from megatron_fsdp._module import MegatronFSDP
from megatron_fsdp._module_calls import is_hooked
from megatron_fsdp._optimizer import check_optimizer, fully_shard_optimizer
from megatron_fsdp._options import ShardOptions
from megatron_fsdp._order import CollectiveOrder
from megatron_fsdp._parameter_grouping import ParameterGrouping, ParameterMatcher, Placements, UnitMatcher, plan_units
from megatron_fsdp._parameters import place_of
from megatron_fsdp._policy import MixedPrecisionPolicy, ShardPlacement, Strategy
from megatron_fsdp._runtime import Runtime
from megatron_fsdp._topology import MeshAxes
from megatron_fsdp._unit import build_unit, plan_double_buffers


def fully_shard_model(
    module: nn.Module,
    *,
    zero_dp_strategy: str | int | Strategy = "optim_grads_params",
    fsdp_unit_modules: Sequence[UnitMatcher] | UnitMatcher | None = (),
    device_mesh: DeviceMesh | None = None,
    process_group: dist.ProcessGroup | None = None,
    dp_shard_dim: str | None = None,
    dp_outer_dim: str | None = None,
    outer_dp_sharding_strategy: str | int | Strategy = "no_shard",
    tp_dim: str | None = None,
    placements: Placements | None = None,
    expt_device_mesh: DeviceMesh | None = None,
    expert_parameters: Sequence[ParameterMatcher] | ParameterMatcher = (),
    parameter_strategies: Mapping[str, str | int | Strategy] | None = None,
    separate_parameters: Sequence[ParameterMatcher] | ParameterMatcher = (),
    eight_bit_parameters: Sequence[ParameterMatcher] | ParameterMatcher = (),
    eight_bit_format: EightBitFormat | None = None,
    shard_placements: Mapping[str, ShardPlacement] | None = None,
    mixed_precision: MixedPrecisionPolicy | None = None,
    gradient_reduce: Literal["mean", "sum"] | None = None,
    num_prefetch_units: int = 1,
    prefetch_bytes: int | None = None,
    fsdp_double_buffer: bool = False,
    maxpool_double_buffer: bool = False,
    cpu_offload: bool = False,
    nccl_ub: bool = False,
    disable_symmetric_registration: bool = False,
    device: torch.device | str | None = None,
    reset_parameters: ResetParameters | None = None,
    **foreign: Any,
) -> MegatronFSDP:
    """Shard a module; the same arguments as ``fully_shard``, without the optimizer."""
    return _shard(module, ShardOptions.read(locals()))


def fully_shard(
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    zero_dp_strategy: str | int | Strategy = "optim_grads_params",
    fsdp_unit_modules: Sequence[UnitMatcher] | UnitMatcher | None = (),
    device_mesh: DeviceMesh | None = None,
    process_group: dist.ProcessGroup | None = None,
    dp_shard_dim: str | None = None,
    dp_outer_dim: str | None = None,
    outer_dp_sharding_strategy: str | int | Strategy = "no_shard",
    tp_dim: str | None = None,
    placements: Placements | None = None,
    expt_device_mesh: DeviceMesh | None = None,
    expert_parameters: Sequence[ParameterMatcher] | ParameterMatcher = (),
    parameter_strategies: Mapping[str, str | int | Strategy] | None = None,
    separate_parameters: Sequence[ParameterMatcher] | ParameterMatcher = (),
    eight_bit_parameters: Sequence[ParameterMatcher] | ParameterMatcher = (),
    eight_bit_format: EightBitFormat | None = None,
    shard_placements: Mapping[str, ShardPlacement] | None = None,
    mixed_precision: MixedPrecisionPolicy | None = None,
    gradient_reduce: Literal["mean", "sum"] | None = None,
    num_prefetch_units: int = 1,
    prefetch_bytes: int | None = None,
    fsdp_double_buffer: bool = False,
    maxpool_double_buffer: bool = False,
    cpu_offload: bool = False,
    nccl_ub: bool = False,
    disable_symmetric_registration: bool = False,
    device: torch.device | str | None = None,
    reset_parameters: ResetParameters | None = None,
    **foreign: Any,
) -> tuple[MegatronFSDP, torch.optim.Optimizer | None]:
    """Divide parameters, gradients and optimizer state of a module among data-parallel ranks.

    Training equals replicated data parallelism. Every rank starts from the first rank's values.

    Args:
        module: any module, on its final device, or built on the meta device.
        optimizer: elementwise torch optimizer over ``module.parameters()``, not stepped yet. Its groups are kept.
        zero_dp_strategy: ``no_shard`` (0), ``optim`` (1), ``optim_grads`` (2) or ``optim_grads_params`` (3).
        fsdp_unit_modules: which submodules are gathered and released as one: classes or their import paths, ``fnmatch`` patterns for
            qualified or class names, predicates ``(name, module) -> bool``. The rest belongs to the root, which is one unit.
        device_mesh: the data axes: (shard,), or (replicate, shard) to shard within nodes and replicate across them; with further axes
            when ``dp_shard_dim`` names the one that shards.
        process_group: the ranks to shard over instead of a mesh. Default: all, or one rank if torch.distributed is not set up.
        dp_shard_dim: name of the axis of the mesh that cuts parameters.
        dp_outer_dim: name of the axis that holds copies of the shards: gradients are summed inside ``dp_shard_dim`` first.
        outer_dp_sharding_strategy: ``no_shard`` (0), or ``optim`` (1) to cut main parameters and optimizer state of each shard over
            ``dp_outer_dim`` too; parameters are gathered over it once a step.
        tp_dim: name of the axis over which the module is divided already, for ``placements`` that give a dim alone.
        placements: how the module's own parameters are divided: pattern for names -> dim along ``tp_dim``, or -> {axis: dim}. Parameters
            that are DTensors say it themselves; others are whole, with complete gradients, on every rank of the axes that are not for data.
        expt_device_mesh: mesh of the experts, with the data axes' names of ``device_mesh``: (edp,), or (edp, ep) with ``dp_shard_dim``.
        expert_parameters: which parameters are experts: ``fnmatch`` patterns or predicates ``(name, parameter) -> bool``.
        parameter_strategies: pattern for parameter names -> strategy, where it is not ``zero_dp_strategy``; the first match wins.
        separate_parameters: which parameters have a flat buffer of their own, so that what a rank holds of them follows from their shape
            alone, whatever else their unit owns.
        eight_bit_parameters: which parameters are gathered as scaled 8-bit copies of the main ones, made once a step. Forward and backward
            compute with what the copies stand for; the optimizer steps the main ones.
        eight_bit_format: how the copies are made; None means ``Float8Format()``.
        shard_placements: pattern for parameter names -> ``TensorAtomic()`` or ``BlockAtomic(rows)``, where the data axes must not cut
            between any two rows; the first match wins.
        mixed_precision: dtypes; by default the module's own for compute, float32 for main parameters and gradients.
        gradient_reduce: ``mean`` over ranks, or ``sum`` for callers who divide by a global count themselves. None means ``mean``.
        num_prefetch_units: units gathered ahead of the running one; the bound on memory is that many plus the running one
            and the root.
        prefetch_bytes: most bytes of parameters gathered ahead; a unit that is larger is not gathered ahead. None sets no such bound.
        fsdp_double_buffer: gathered parameters and whole gradients of units lie in two persistent buffers that units take turns in, so that
            none is allocated in a step and each has one address; at most one unit is then gathered ahead. Units must be alike.
        maxpool_double_buffer: they need not: the two buffers are as large as the largest unit.
        cpu_offload: main parameters, reduced gradients and optimizer state lie in the memory of the host, where the optimizer steps.
        nccl_ub: gathered parameters and gradients lie in memory registered with NCCL, from the second step on; ignored by other backends.
        disable_symmetric_registration: register it plainly, and not as windows that lie alike on all ranks.
        device: where a module from the meta device goes; default is the CPU.
        reset_parameters: initialises one module from the meta device; default is its own ``reset_parameters()``.
        foreign: other keywords of Megatron-FSDP: those with a counterpart here stand for it, those that describe what always happens are
            taken with that value only.

    Returns:
        The sharded module, and the same optimizer (None if none was given).

    Raises:
        TypeError: a keyword that does not exist, or something else than a module, an optimizer or a mesh.
        ValueError: an argument is wrong, ranks hold different models, or the module has no parameters; the message says what to do.

    Example:
        >>> layer = nn.Linear(4, 2)
        >>> model, optimizer = fully_shard(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()
    """
    options = ShardOptions.read(locals())
    if optimizer is not None:
        check_optimizer(optimizer)
    model = _shard(module, options)
    return model, None if optimizer is None else fully_shard_optimizer(optimizer, model)


def _shard(module: nn.Module, options: ShardOptions) -> MegatronFSDP:
    # On one rank without a process group parameters do not tell.
    if isinstance(module, MegatronFSDP) or any(place_of(parameter) is not None for parameter in module.parameters()) or is_hooked(module):
        raise ValueError("module is sharded already; pass the plain module")
    to = torch.device(options.device or "cpu")
    devices = {to if parameter.is_meta else parameter.device for parameter in module.parameters()}
    if len(devices) > 1:
        raise ValueError(f"module has parameters on {sorted(map(str, devices))}; move it to one device first")
    plans = plan_units(module, options.fsdp_unit_modules)
    device = devices.pop()
    outer_strategy = Strategy.parse(options.outer_dp_sharding_strategy, "outer_dp_sharding_strategy")
    axes = MeshAxes(shard=options.dp_shard_dim, outer=options.dp_outer_dim, outer_strategy=outer_strategy)
    dense = axes.topology("device_mesh", device, options.device_mesh, options.process_group)
    expert = None if options.expt_device_mesh is None else axes.topology("expt_device_mesh", device, options.expt_device_mesh, None)
    # A mesh gives axes over all ranks the default group, each of them the same: one of the module's may be one of data.
    exchanged = {topology.model_ranks(axis).name for topology in (dense, expert) if topology for axis in topology.model_axes}
    grouping = ParameterGrouping(
        plans,
        strategy=Strategy.parse(options.zero_dp_strategy),
        strategies=options.parameter_strategies or {},
        dense=dense.apart_from(exchanged, device),
        expert=expert and expert.apart_from(exchanged, device),
        expert_parameters=options.expert_parameters,
        separate_parameters=options.separate_parameters,
        eight_bit_parameters=options.eight_bit_parameters,
        shard_placements=options.shard_placements or {},
        placements=options.placements or {},
        tp_dim=options.tp_dim,
    )
    grouping.check_same(plans, device)
    all_ranks = grouping.all_ranks
    memory = RegisteredMemory(all_ranks, device, symmetric=not options.disable_symmetric_registration) if options.nccl_ub else None
    context = ShardContext(
        policy=options.mixed_precision or MixedPrecisionPolicy(),
        # A gradient of experts is complete on fewer ranks, each of which has seen the samples of several.
        divisor=1 if options.gradient_reduce == "sum" else grouping.dense.size,
        device=device,
        streams=Streams(device, memory),
        calls=CollectiveOrder(all_ranks, device),
        cpu_offload=options.cpu_offload,
    )
    groups = [grouping.groups(plan.sites) for plan in plans]
    buffers = plan_double_buffers(plans, groups, context, largest=options.maxpool_double_buffer) if options.fsdp_double_buffer else None
    form = options.eight_bit_format or Float8Format()
    units = {
        index: build_unit(index, plans[index], groups[index], context, buffers=buffers, form=form)
        for index in materialize(module, plans, to, options.reset_parameters)
    }
    for buffer in module.buffers():
        for ranks in grouping.dense.all_ranks:
            ranks.broadcast(buffer)
    runtime = Runtime(
        [units[index] for index in range(len(plans))],
        context,
        all_ranks,
        num_prefetch_units=options.num_prefetch_units,
        prefetch_bytes=options.prefetch_bytes,
        memory=memory,
    )
    return MegatronFSDP(module, runtime, is_first=grouping.dense.is_first)
