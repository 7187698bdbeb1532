# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Which parameters are gathered together: a plan over the module tree."""

import fnmatch
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import nn

UnitMatcher = type[nn.Module] | str | Callable[[str, nn.Module], bool]
"""A class, the path it is imported by, a pattern for qualified or class names, or a predicate ``(name, module) -> bool``."""


@dataclass(frozen=True)
class ParameterSite:
    """One parameter and every place of the tree that refers to it."""

    parameter: nn.Parameter
    names: tuple[str, ...]
    """Qualified names; more than one when the parameter is tied."""
    slots: tuple[tuple[nn.Module, str], ...]
    """(module, attribute) of each name."""

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def current(self) -> nn.Parameter:
        """What is registered now: the parameter, or what a module from the meta device got in its place."""
        module, attribute = self.slots[0]
        found = module._parameters[attribute]
        assert found is not None, "a plan holds parameters only"
        return found


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
    given = (matchers,) if isinstance(matchers, (str, type)) or callable(matchers) else tuple(matchers)
    wanted = [_class_at(matcher) or matcher for matcher in given]
    plans = {"": UnitPlan("", root)}
    for name, module in root.named_modules():
        if name and any(_matches(matcher, name, module) for matcher in wanted):
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
    found: dict[nn.Parameter, list[tuple[str, nn.Module, str]]] = {}
    for prefix, module in root.named_modules(remove_duplicate=False):
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                found.setdefault(parameter, []).append((f"{prefix}.{attribute}" if prefix else attribute, module, attribute))
    sites = []
    for parameter, places in found.items():
        # A module that occurs twice gives two names to one slot.
        slots = {(id(module), attribute): (module, attribute) for _, module, attribute in places}
        sites.append(ParameterSite(parameter, tuple(name for name, _, _ in places), tuple(slots.values())))
    return sites


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
    found = getattr(sys.modules.get(home), name, None)
    return found if isinstance(found, type) and issubclass(found, nn.Module) else None


def _matches(matcher: UnitMatcher, name: str, module: nn.Module) -> bool:
    if isinstance(matcher, type):
        return isinstance(module, matcher)
    if isinstance(matcher, str):
        return fnmatch.fnmatchcase(name, matcher) or fnmatch.fnmatchcase(type(module).__name__, matcher)
    if callable(matcher) and not isinstance(matcher, nn.Module):
        return bool(matcher(name, module))
    raise ValueError(f"fsdp_unit_modules has {matcher!r}; use classes, name patterns or predicates (name, module) -> bool")


def _describe(matcher: UnitMatcher) -> str:
    return getattr(matcher, "__name__", str(matcher))
