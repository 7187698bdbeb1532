# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Which parameters are gathered together: units of the module tree, and groups in them that share a flat buffer."""

import fnmatch
import hashlib
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from megatron_fsdp._collectives import Ranks
from megatron_fsdp._context import ShardContext
from megatron_fsdp._eight_bit import FLOAT8_ALIGNMENT, is_quantized
from megatron_fsdp._layout import FlatLayout, plan_atomic, plan_layout
from megatron_fsdp._parameters import ModelPart, ParameterSite, as_dtensor
from megatron_fsdp._policy import BlockAtomic, KeepsFloat32, ShardPlacement, Strategy, TensorAtomic
from megatron_fsdp._topology import Topology

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

UnitMatcher = type[nn.Module] | str | Callable[[str, nn.Module], bool]
"""A class, the path it is imported by, a pattern for qualified or class names, or a predicate ``(name, module) -> bool``."""


@dataclass(frozen=True)
class UnitPlan:
    """A module whose parameters are gathered when it runs, less those of units inside it."""

    name: str
    module: nn.Module
    sites: list[ParameterSite] = field(default_factory=list)


def plan_units(root: nn.Module, matchers: Sequence[UnitMatcher] | UnitMatcher | None = ()) -> list[UnitPlan]:
    """Divide a tree into units, the root first, then in definition order.

    A parameter belongs to the innermost unit around it; a tied one to the innermost unit around all its places, so that
    it is gathered whenever one of them runs.

    Raises:
        ValueError: no parameters, no module matches, or a match cannot be a unit because it is never called.
    """
    matchers = () if matchers is None else matchers
    all_matchers = (matchers,) if isinstance(matchers, (str, type)) or callable(matchers) else tuple(matchers)
    wanted = [_class_at(matcher) or matcher for matcher in all_matchers]
    plans = {"": UnitPlan("", root)}
    for name, module in root.named_modules():
        if name and any(_module_matches(matcher, name, module) for matcher in wanted):
            if isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)):
                raise ValueError(
                    f"fsdp_unit_modules matches {name!r}, a {type(module).__name__} that is never called; name its children instead"
                )
            plans[name] = UnitPlan(name, module)
    if wanted and len(plans) == 1 and not any(isinstance(matcher, type) and isinstance(root, matcher) for matcher in wanted):
        raise ValueError(f"fsdp_unit_modules={[_describe(matcher) for matcher in wanted]} matches no module of {type(root).__name__}")
    for site in _sites(root):
        owners = [_units_around(name, plans) for name in site.names]
        shared = [unit for unit in owners[0] if all(unit in others for others in owners[1:])]
        plans[shared[-1]].sites.append(site)
    if not any(plan.sites for plan in plans.values()):
        raise ValueError(f"module={type(root).__name__} has no parameters to shard")
    return list(plans.values())


def _sites(root: nn.Module) -> list[ParameterSite]:
    places_of: dict[nn.Parameter, list[tuple[str, nn.Module, str]]] = {}
    for prefix, module in root.named_modules(remove_duplicate=False):
        _check_float32(prefix or type(module).__name__, module)
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                places_of.setdefault(parameter, []).append((f"{prefix}.{attribute}" if prefix else attribute, module, attribute))
    sites = []
    for parameter, places in places_of.items():
        # A module that occurs twice gives two names to one slot.
        slots = {(id(module), attribute): (module, attribute) for _, module, attribute in places}
        sites.append(ParameterSite(parameter, tuple(name for name, _, _ in places), tuple(slots.values())))
    return sites


def _check_float32(place: str, module: nn.Module) -> None:
    if not isinstance(module, KeepsFloat32):
        return
    names = module.float32_parameters()
    if isinstance(names, str):
        raise ValueError(f"float32_parameters() of {place} is the string {names!r}; return a tuple of names")
    for name in names:
        # Not by the list of its parameters: what wraps a module has its attributes alone.
        if not hasattr(module, name):
            raise ValueError(
                f"float32_parameters() of {place} names {name!r}, which is no parameter of its own; leave it out, or let the module that "
                "has it name it"
            )


def _units_around(name: str, plans: dict[str, UnitPlan]) -> list[str]:
    """Names of the units around a parameter, outermost first."""
    parts = name.split(".")[:-1]
    prefixes = (".".join(parts[:depth]) for depth in range(len(parts) + 1))
    return [prefix for prefix in prefixes if prefix in plans]


def _class_at(path: UnitMatcher) -> type[nn.Module] | None:
    """The class that a path like ``torch.nn.Linear`` names; what is not imported yet has made no module."""
    if not isinstance(path, str) or "." not in path:
        return None
    home, _, name = path.rpartition(".")
    candidate = getattr(sys.modules.get(home), name, None)
    return candidate if isinstance(candidate, type) and issubclass(candidate, nn.Module) else None


def _module_matches(matcher: UnitMatcher, name: str, module: nn.Module) -> bool:
    if isinstance(matcher, type):
        return isinstance(module, matcher)
    if isinstance(matcher, str):
        return fnmatch.fnmatchcase(name, matcher) or fnmatch.fnmatchcase(type(module).__name__, matcher)
    if callable(matcher) and not isinstance(matcher, nn.Module):
        return bool(matcher(name, module))
    raise ValueError(f"fsdp_unit_modules has {matcher!r}; use classes, name patterns or predicates (name, module) -> bool")


def _describe(matcher: UnitMatcher) -> str:
    return getattr(matcher, "__name__", str(matcher))


Placements = Mapping[str, int | Mapping[str, int]]
"""Pattern for parameter names -> {mesh axis: tensor dim}, or the dim alone for the axis ``tp_dim``."""


def model_part(name: str, parameter: nn.Parameter, cuts: Mapping[str, int] | None, topology: Topology) -> ModelPart:
    """The part that a parameter is: as its DTensor says, or as the caller does.

    Args:
        name: of the parameter, for messages.
        parameter: of the module.
        cuts: axis -> dim, from the caller; None if it said nothing.
        topology: where the axes are.

    Raises:
        ValueError: an axis or dim that does not exist, two axes on one dim, a DTensor on another mesh or with partial sums.
    """
    dtensor = as_dtensor(parameter)
    if dtensor is not None:
        if cuts is not None:
            raise ValueError(f"placements name {name!r}, a DTensor, which has its own; leave it out")
        cuts = _dtensor_cuts(name, dtensor, topology)
    if cuts is None:
        return ModelPart.whole(tuple(parameter.shape))
    local = tuple(parameter.shape) if dtensor is None else tuple(dtensor.to_local().shape)
    shape, offset = list(local), [0] * len(local)
    for axis, dim in cuts.items():
        if axis not in topology.model_axes:
            raise ValueError(
                f"{name!r} is divided over axis {axis!r}, but the mesh of this parameter has model axes {sorted(topology.model_axes)}; "
                "pass a mesh with all axes"
            )
        if not 0 <= dim < len(local):
            raise ValueError(f"{name!r} is divided over {axis!r} along dim {dim}, but has {len(local)} dims; count from 0")
        if list(cuts.values()).count(dim) > 1:
            raise ValueError(f"{name!r} is divided along dim {dim} over {sorted(cuts)}; at most one axis a dim is supported")
        ranks = topology.model_ranks(axis)
        if dtensor is None:
            shape[dim], offset[dim] = local[dim] * ranks.size, local[dim] * ranks.rank
        else:
            shape[dim] = dtensor.shape[dim]
            offset[dim] = min(-(-shape[dim] // ranks.size) * ranks.rank, shape[dim])
    return ModelPart(tuple(shape), tuple(offset), local, tuple(cuts.items()))


def _dtensor_cuts(name: str, dtensor: "DTensor", topology: Topology) -> dict[str, int]:
    from torch.distributed.tensor import Replicate, Shard

    axes = dtensor.device_mesh.mesh_dim_names or ()
    if len(axes) != len(dtensor.placements):
        raise ValueError(f"{name!r} is a DTensor on a mesh without names; name its axes, and pass a device_mesh that has them too")
    cuts = {}
    for axis, placement in zip(axes, dtensor.placements, strict=True):
        if axis not in topology.model_axes:
            raise ValueError(
                f"{name!r} is a DTensor over mesh axis {axis!r}, but device_mesh has model axes {sorted(topology.model_axes)}; "
                "pass the whole mesh with dp_shard_dim"
            )
        if type(placement) is Shard:
            cuts[axis] = placement.dim
        elif not isinstance(placement, Replicate):
            raise ValueError(f"{name!r} has placement {placement} over {axis!r}; only Shard and Replicate can be sharded further")
    return cuts


def read_placements(placements: Placements, tp_dim: str | None, names: list[str]) -> dict[str, dict[str, int]]:
    """Axis -> dim of each parameter that a pattern matches; the first pattern wins.

    Raises:
        ValueError: a pattern matches nothing, or gives a bare dim without ``tp_dim``.
    """
    axes_by_name: dict[str, dict[str, int]] = {}
    for pattern, value in placements.items():
        if isinstance(value, int) and tp_dim is None:
            raise ValueError(f"placements[{pattern!r}]={value} is a dim without an axis; set tp_dim, or write {{'tp': {value}}}")
        matched = fnmatch.filter(names, pattern)
        if not matched:
            raise ValueError(f"placements has {pattern!r}, which matches no parameter; there are {names[:5]}...")
        for name in matched:
            axes_by_name.setdefault(name, dict(value) if isinstance(value, Mapping) else {str(tp_dim): value})
    return axes_by_name


ParameterMatcher = str | Callable[[str, nn.Parameter], bool]
"""An ``fnmatch`` pattern for parameter names, or a predicate ``(name, parameter) -> bool``."""


@dataclass(frozen=True)
class GroupPlan:
    """Parameters of one unit that can share a buffer, and where they lie."""

    sites: list[ParameterSite]
    parts: list[ModelPart]
    strategy: Strategy
    topology: Topology
    eight_bit: bool
    quantized: bool
    """Whether the module holds them as scaled bytes already."""
    layout: FlatLayout

    @property
    def keeps_whole_gradient(self) -> bool:
        """Whether the buffer of whole gradients stays between steps."""
        return self.strategy is Strategy.optim and self.topology.shards.size > 1

    def dtypes(self, context: ShardContext) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
        """Of main parameters, of what is gathered and of gradients."""
        first, policy = self.sites[0].current, context.policy
        if self.sites[0].in_float32:
            policy = policy.in_float32()
        main = policy.main_dtype(first.dtype, trainable=first.requires_grad or self.quantized)
        gathered = torch.uint8 if self.quantized else policy.compute_dtype(first.dtype)
        return main, gathered, policy.gradient_dtype(first.dtype)

    def aliases(self, context: ShardContext) -> bool:
        """Whether the gathered buffer is the main copy as well, so that gathering happens in place."""
        main, compute, _ = self.dtypes(context)
        whole = self.strategy < Strategy.optim_grads_params or self.topology.num_shards == 1
        return main == compute and whole and not context.cpu_offload

    def reshards(self, context: ShardContext) -> bool:
        """Whether the gathered buffer is given back when its unit does not compute."""
        return self.strategy is Strategy.optim_grads_params and not self.aliases(context)


class ParameterGrouping:
    """Which mesh, strategy and model part each parameter has.

    Args:
        plans: all units.
        strategy: of parameters that ``strategies`` does not name.
        strategies: pattern for parameter names -> strategy; the first match wins.
        dense: ranks of ordinary parameters.
        expert: ranks of those that ``expert_parameters`` match; None without experts.
        expert_parameters: matchers.
        separate_parameters: matchers of those that share a buffer with no other.
        eight_bit_parameters: matchers of those that are gathered as scaled bytes.
        shard_placements: pattern -> where data axes may cut; the first match wins.
        placements: how the module itself is divided.
        tp_dim: axis of placements that name only a dim.

    Raises:
        ValueError: a matcher that matches nothing, experts without a mesh or a mesh without experts, a placement that cannot be.
    """

    def __init__(
        self,
        plans: Sequence[UnitPlan],
        *,
        strategy: Strategy,
        strategies: Mapping[str, Any],
        dense: Topology,
        expert: Topology | None,
        expert_parameters: Sequence[ParameterMatcher] | ParameterMatcher,
        separate_parameters: Sequence[ParameterMatcher] | ParameterMatcher,
        eight_bit_parameters: Sequence[ParameterMatcher] | ParameterMatcher,
        shard_placements: Mapping[str, ShardPlacement],
        placements: Placements,
        tp_dim: str | None,
    ) -> None:
        sites = {site.name: site for plan in plans for site in plan.sites}
        self.dense, self._expert = dense, expert
        self._experts = _matched("expert_parameters", expert_parameters, sites.values())
        if bool(self._experts) != (expert is not None):
            raise ValueError("expert_parameters and expt_device_mesh belong together; pass both, or neither")
        self._separate = _matched("separate_parameters", separate_parameters, sites.values())
        self._strategies = {
            name: Strategy.parse(value, f"parameter_strategies[{pattern!r}]")
            for pattern, value in reversed(list(strategies.items()))
            for name in _matched("parameter_strategies", pattern, sites.values())
        }
        self._default = strategy
        self._eight_bit = _matched("eight_bit_parameters", eight_bit_parameters, sites.values())
        for name in sorted(self._eight_bit):
            own = self._strategies.get(name, strategy)
            if own is not Strategy.optim_grads_params or not sites[name].parameter.ndim:
                raise ValueError(
                    f"eight_bit_parameters match {name!r}, which is whole on every rank (strategy {own.name}, "
                    f"{sites[name].parameter.ndim} dims); match parameters that are gathered"
                )
            if is_quantized(sites[name].parameter):
                raise ValueError(
                    f"eight_bit_parameters match {name!r}, which is quantised by its module; leave it out, its bytes are gathered"
                )
            if sites[name].in_float32:
                raise ValueError(f"eight_bit_parameters match {name!r}, which its module keeps in float32; leave it out")
        chosen = {self._strategies.get(name, strategy) for name in sites}
        if dense.outer.size > 1 and chosen != {Strategy.optim_grads_params}:
            raise ValueError(
                "outer_dp_sharding_strategy='optim' needs zero_dp_strategy='optim_grads_params' for all parameters, "
                f"found {sorted(choice.name for choice in chosen)}"
            )
        # One tensor type for all: torch's optimizers step no mixture.
        self._plain = chosen == {Strategy.no_shard} and not any(topology.model_axes for topology in (dense, expert) if topology)
        for pattern, placement in shard_placements.items():
            if not isinstance(placement, ShardPlacement):
                raise ValueError(f"shard_placements[{pattern!r}]={placement!r} is no placement; use TensorAtomic() or BlockAtomic(rows)")
        self._shard_placements = {
            name: placement
            for pattern, placement in reversed(list(shard_placements.items()))
            for name in _matched("shard_placements", pattern, sites.values())
        }
        self._loads: dict[int, list[int]] = {}
        """Bytes of whole parameters that each rank of a topology was given."""
        cuts = read_placements(placements, tp_dim, list(sites))
        self._parts = {name: model_part(name, site.parameter, cuts.get(name), self._of(name)) for name, site in sites.items()}

    def _of(self, name: str) -> Topology:
        return self._expert if self._expert is not None and name in self._experts else self.dense

    @property
    def topologies(self) -> list[Topology]:
        return [self.dense] if self._expert is None else [self.dense, self._expert]

    @property
    def all_ranks(self) -> list[Ranks]:
        """Everybody who reduces anything with this rank."""
        return [ranks for topology in self.topologies for ranks in topology.all_ranks]

    def groups(self, sites: Sequence[ParameterSite]) -> list[GroupPlan]:
        """Divide parameters of a unit: one dtype in each form, one mesh, strategy and placement, all trainable or frozen, scalar or not.

        Call it once for every unit, in one order on all ranks: whole parameters go to the ranks that have the least so far.
        """
        kinds: dict[tuple[Any, ...], list[ParameterSite]] = {}
        for site in sites:
            parameter, name = site.parameter, site.name
            key = (
                parameter.dtype,
                site.in_float32,
                parameter.requires_grad,
                parameter.ndim == 0,
                self._strategies.get(name, self._default),
                name in self._experts,
                name if name in self._separate else "",
                name in self._eight_bit,
                is_quantized(parameter),
                self._block_of(name, parameter),
            )
            kinds.setdefault(key, []).append(site)
        return [self._group(kind) for kind in kinds.values()]

    def _block_of(self, name: str, parameter: nn.Parameter) -> tuple[ShardPlacement, int] | None:
        placement = self._shard_placements.get(name)
        if placement is None:
            return None
        # Slices are multiples of a block, so that one buffer with blocks of many sizes would be mostly padding.
        return placement, math.prod(parameter.shape[1:]) if isinstance(placement, BlockAtomic) else 0

    def _group(self, sites: list[ParameterSite]) -> GroupPlan:
        name, scalar = sites[0].name, sites[0].parameter.ndim == 0
        strategy, topology = self._strategies.get(name, self._default), self._of(name)
        # A scalar has no dimension to divide.
        topology = topology.replicated() if scalar or strategy is Strategy.no_shard else topology
        topology = topology.plain() if self._plain else topology
        parts = [self._parts[site.name] for site in sites]
        shapes, placement = [part.local_shape for part in parts], self._shard_placements.get(name)
        quantized = is_quantized(sites[0].parameter)
        alignment = FLOAT8_ALIGNMENT if quantized else 1
        if isinstance(placement, TensorAtomic) and topology.num_shards > 1:
            loads = self._loads.setdefault(id(self._of(name)), [0] * topology.num_shards)
            layout = plan_atomic(shapes, topology.num_shards, loads, alignment=alignment)
            for segment in (segment for segment in layout.segments if segment.numel):
                loads[segment.offset // layout.shard_numel] += segment.numel * sites[0].parameter.element_size()
        else:
            block_rows = placement.block_size if isinstance(placement, BlockAtomic) and not scalar else None
            layout = plan_layout(shapes, topology.num_shards, block_rows=block_rows, alignment=alignment)
        return GroupPlan(sites, parts, strategy, topology, name in self._eight_bit, quantized, layout)

    def check_same(self, plans: Sequence[UnitPlan], device: torch.device) -> None:
        """Refuse models that differ between data ranks: their buffers would be cut and summed without a word.

        Raises:
            ValueError: they differ.
        """
        for topology in self.topologies:
            text = repr(
                [
                    (
                        plan.name,
                        site.names,
                        self._parts[site.name].local_shape,
                        str(site.parameter.dtype),
                        site.in_float32,
                        site.parameter.requires_grad,
                    )
                    for plan in plans
                    for site in plan.sites
                    if self._of(site.name) is topology
                ]
            )
            own_digest = torch.tensor([digest(text)], dtype=torch.int64, device=device)
            for ranks in topology.all_ranks:
                if len(ranks.all_gather(own_digest).unique()) != 1:
                    raise ValueError(
                        "ranks hold modules with different parameters; build the same module with the same units on every rank"
                    )


def digest(text: str) -> int:
    """A number that fits int64 and differs where the text does."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def _matched(field: str, matchers: Sequence[ParameterMatcher] | ParameterMatcher, sites: Iterable[ParameterSite]) -> set[str]:
    """First names of the parameters of which any name matches."""
    names: set[str] = set()
    sites = list(sites)
    for matcher in (matchers,) if isinstance(matchers, str) or callable(matchers) else matchers:
        if not isinstance(matcher, str) and not callable(matcher):
            raise ValueError(f"{field} has {matcher!r}; use name patterns or predicates (name, parameter) -> bool")
        matched = {site.name for site in sites if any(_parameter_matches(matcher, name, site.parameter) for name in site.names)}
        if not matched:
            raise ValueError(f"{field} has {matcher!r}, which matches no parameter; there are {[site.name for site in sites[:5]]}...")
        names |= matched
    return names


def _parameter_matches(matcher: ParameterMatcher, name: str, parameter: nn.Parameter) -> bool:
    return fnmatch.fnmatchcase(name, matcher) if isinstance(matcher, str) else bool(matcher(name, parameter))
