# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What is measured of a run beside its loss."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from mcore_parallel.data_parallel import DistributedDataParallel
from mcore_parallel.graphs import GraphedModel
from mcore_parallel.training import ProfileWindow, StepDumps, StragglerProbe, Timers
from mcore_tools.assembly import Parts, clip_after_steps
from mcore_tools.recipes import RunConfig


@dataclass(frozen=True, kw_only=True)
class Instruments:
    """Of one rank."""

    timers: Timers | None
    profile: ProfileWindow
    dumps: StepDumps | None
    probe: Callable[[], dict[str, float]] | None
    """Further numbers of each step; with ``qk_clip`` it bounds the weights, too."""
    graphs: GraphedModel | None

    @classmethod
    def build(cls, config: RunConfig, parts: Parts, device: torch.device) -> "Instruments":
        """Those that the run asks for; what they write lies in its folder."""
        world = parts.groups.world
        traces = dataclasses.replace(config.profile, output=str(Path(config.output) / config.profile.output))
        return cls(
            timers=Timers(group=world, device=device) if config.log.timers_interval else None,
            profile=traces.build(rank=world.rank, model=parts.model),
            dumps=_dumps(config, parts),
            probe=joined(_probe(config, parts), clip_after_steps(config, parts)),
            graphs=parts.graphs,
        )

    def remarks(self) -> tuple[str, ...]:
        """What profiler and graphs have to say at the end."""
        remarks = [str(self.profile.communication)] if self.profile.communication else []
        remarks += [f"profile: {path}" for path in self.profile.files]
        remarks += [] if self.graphs is None else [graph_remark(self.graphs)]
        return tuple(remarks)


def graph_remark(graphs: GraphedModel) -> str:
    """What was captured and replayed, and what was not, and why."""
    report = graphs.report()
    eager = ", ".join(f"{count} {reason}" for reason, count in report.eager.items()) or "none"
    counts = f"{report.graphs} captured, {report.replays} replays, {report.memory_bytes / 2**20:.0f} MiB"
    return f"cuda graphs: {counts}; eager calls: {eager}"


def _dumps(config: RunConfig, parts: Parts) -> StepDumps | None:
    """What is written down of some steps; None for nothing."""
    if not config.dumps.every:
        return None
    assert isinstance(parts.sync, DistributedDataParallel), "RunConfig refuses dumps of fsdp"
    placed = dataclasses.replace(config.dumps, output=str(Path(config.output) / config.dumps.output))
    return placed.build(parts.model, parts.groups, parts.sync)


def joined(*probes: Callable[[], dict[str, float]] | None) -> Callable[[], dict[str, float]] | None:
    """The numbers of all that there are."""
    present = [probe for probe in probes if probe is not None]
    return (lambda: {name: value for probe in present for name, value in probe().items()}) if present else None


def _probe(config: RunConfig, parts: Parts) -> Callable[[], dict[str, float]] | None:
    """Further numbers of a step: the slowest rank."""
    every = config.log.straggler_interval
    return StragglerProbe(parts.model, parts.groups, every=every) if every else None
