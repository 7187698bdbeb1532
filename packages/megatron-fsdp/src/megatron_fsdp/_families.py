# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Families of parameters: dense ones and experts on meshes of their own, and what each of them shards."""

import fnmatch
import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megatron_fsdp._layout import FlatLayout, plan_atomic, plan_layout
from megatron_fsdp._placement import ModelPart, Placements, model_part, read_placements
from megatron_fsdp._policy import Strategy
from megatron_fsdp._ranks import Ranks
from megatron_fsdp._setting import Setting
from megatron_fsdp._shard_placement import BlockAtomic, ShardPlacement, TensorAtomic
from megatron_fsdp._te import ALIGNMENT, is_quantized
from megatron_fsdp._topology import Topology
from megatron_fsdp._units import ParameterSite, UnitPlan

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

    def dtypes(self, setting: Setting) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
        """Of main parameters, of what is gathered and of gradients."""
        first, policy = self.sites[0].current, setting.policy
        main = policy.main_dtype(first.dtype, trainable=first.requires_grad or self.quantized)
        gathered = torch.uint8 if self.quantized else policy.compute_dtype(first.dtype)
        return main, gathered, policy.gradient_dtype(first.dtype)

    def aliases(self, setting: Setting) -> bool:
        """Whether the gathered buffer is the main copy as well, so that gathering happens in place."""
        main, compute, _ = self.dtypes(setting)
        whole = self.strategy < Strategy.optim_grads_params or self.topology.num_shards == 1
        return main == compute and whole and not setting.cpu_offload

    def reshards(self, setting: Setting) -> bool:
        """Whether the gathered buffer is given back when its unit does not compute."""
        return self.strategy is Strategy.optim_grads_params and not self.aliases(setting)


class Families:
    """Which mesh, strategy and model part each parameter has.

    Args:
        plans: all units.
        strategy: of parameters that ``strategies`` does not name.
        strategies: pattern for parameter names -> strategy; the first match wins.
        dense: ranks of ordinary parameters.
        expert: ranks of those that ``expert_parameters`` match; None without experts.
        expert_parameters: matchers.
        separate_parameters: matchers of those that share a buffer with no other.
        eight_bit_parameters: matchers of those that are gathered in 8 bits.
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
        """Divide parameters of a unit: one dtype, family, strategy and placement, all trainable or all frozen, all scalar or none.

        Call it once for every unit, in one order on all ranks: whole parameters go to the ranks that have the least so far.
        """
        kinds: dict[tuple[Any, ...], list[ParameterSite]] = {}
        for site in sites:
            parameter, name = site.parameter, site.name
            key = (
                parameter.dtype,
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
        alignment = ALIGNMENT if quantized else 1
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
                    (plan.name, site.names, self._parts[site.name].local_shape, str(site.parameter.dtype), site.parameter.requires_grad)
                    for plan in plans
                    for site in plan.sites
                    if self._of(site.name) is topology
                ]
            )
            mine = torch.tensor([digest(text)], dtype=torch.int64, device=device)
            for ranks in topology.all_ranks:
                if len(ranks.all_gather(mine).unique()) != 1:
                    raise ValueError(
                        "ranks hold modules with different parameters; build the same module with the same units on every rank"
                    )


def digest(text: str) -> int:
    """A number that fits int64 and differs where the text does."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def _matched(field: str, matchers: Sequence[ParameterMatcher] | ParameterMatcher, sites: Iterable[ParameterSite]) -> set[str]:
    """First names of the parameters of which any name matches."""
    found: set[str] = set()
    sites = list(sites)
    for matcher in (matchers,) if isinstance(matchers, str) or callable(matchers) else matchers:
        if not isinstance(matcher, str) and not callable(matcher):
            raise ValueError(f"{field} has {matcher!r}; use name patterns or predicates (name, parameter) -> bool")
        matched = {site.name for site in sites if any(_matches(matcher, name, site.parameter) for name in site.names)}
        if not matched:
            raise ValueError(f"{field} has {matcher!r}, which matches no parameter; there are {[site.name for site in sites[:5]]}...")
        found |= matched
    return found


def _matches(matcher: ParameterMatcher, name: str, parameter: nn.Parameter) -> bool:
    return fnmatch.fnmatchcase(name, matcher) if isinstance(matcher, str) else bool(matcher(name, parameter))
