# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Engines over several ranks of a run: which of their ranks ask, and how the engines share the problems."""

import contextlib
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from mcore_parallel import Group, ProcessGroups
from mcore_rl._rollouts._collect import Drawn
from mcore_rl.inference import InferenceInterface


@runtime_checkable
class _DrawsTogether(Protocol):
    """An interface that lets the other ranks of its engine follow the one that asks."""

    def drawing(self) -> contextlib.AbstractContextManager[bool]: ...


def spans_ranks(engine: object) -> bool:
    """Whether an engine is divided over several ranks, as far as its ``model`` says so."""
    return (layout := _layout(engine)) is not None and layout.tp_pp.size > 1


def engines_of(engine: object, world: Group) -> Group:
    """The engines that share the problems, this rank's among them: its number is ``rank`` of ``size``.

    Raises:
        ValueError: the layout of engines over several ranks leaves ranks out.
    """
    layout = _layout(engine)
    if layout is None or layout.tp_pp.size == 1:
        return world
    if layout.tp_pp.size * layout.dp.size != world.size:
        raise ValueError(
            f"engines of tp={layout.tp.size} pp={layout.pp.size} dp={layout.dp.size} do not take the {world.size} ranks of the policy; "
            f"build their groups with tp * pp * dp = {world.size}"
        )
    return layout.dp


def draw_share(
    interface: InferenceInterface | None,
    engine: object,
    world: Group,
    num_groups: int,
    ask: Callable[[int], Drawn],
    *,
    failure: Exception | None = None,
) -> Drawn:
    """What this rank's engine draws of an iteration, on the rank that asks it; nothing on the others, which follow that one. A failure
    waits for ``exchange``.

    Args:
        interface: answers; None where nobody is asked.
        engine: behind it.
        world: ranks that share the groups.
        num_groups: of all engines.
        ask: draws so many groups.
        failure: why this rank asks nothing. It follows all the same: the others of its engine may not know.

    Raises:
        ValueError: as of ``engines_of``; or an engine over several ranks whose interface keeps them together by no ``drawing``.
    """
    engines, together = engines_of(engine, world), isinstance(interface, _DrawsTogether)
    if spans_ranks(engine) and not together:
        raise ValueError(
            f"interface is a {type(interface).__name__}, which does not keep the ranks of its engine together; pass MegatronLocal, or give "
            "it the drawing() of one"
        )
    drawn = Drawn(groups=[])
    try:
        with interface.drawing() if isinstance(interface, _DrawsTogether) else contextlib.nullcontext(True) as asks:
            if asks and failure is None:
                drawn = ask(len(range(engines.rank, num_groups, engines.size)))
    except Exception as error:
        failure = failure or drawn.failure or error
    return drawn if failure is None else Drawn(groups=[], failure=failure)


def _layout(engine: object) -> ProcessGroups | None:
    groups = getattr(getattr(engine, "model", None), "groups", None)
    return groups if isinstance(groups, ProcessGroups) else None
