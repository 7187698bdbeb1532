# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""In which order units are gathered and collectives started, and what a rank does before it leaves that order."""

import datetime
import hashlib
from collections.abc import Hashable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from megatron_fsdp._collectives import Ranks


class GatherOrder:
    """Order of units in a forward, and which to gather ahead.

    Args:
        depth: how many units may be gathered ahead of the running one.
        names: of the units, the root's first.
        num_bytes: of each unit's gathered parameters.
        budget: most bytes that may be gathered ahead; None leaves the bound to ``depth``.

    Example:
        >>> order = GatherOrder(2, ["", "entry", "layer"], num_bytes=[4, 4, 4], budget=4)
        >>> for unit in (0, 1, 2): order.visit(unit)
        >>> order.freeze()
        >>> order.following(0), order.preceding(2)
        ([1], [1])
    """

    def __init__(self, depth: int, names: Sequence[str], *, num_bytes: Sequence[int], budget: int | None = None) -> None:
        self._numbers = {name: number for number, name in enumerate(names)}
        self._depth, self._num_bytes, self._budget = depth, num_bytes, budget
        self._recording: list[int] = []
        self._order: tuple[int, ...] | None = None
        self._position: dict[int, int] = {}
        self._lists: tuple[dict[int, list[int]], dict[int, list[int]]] = {}, {}

    def choose(self, forward: Mapping[str, Sequence[str]], backward: Mapping[str, Sequence[str]]) -> None:
        """As ``MegatronFSDP.set_prefetch``."""
        for where, lists in (("forward", forward), ("backward", backward)):
            for unit, ahead in lists.items():
                shown = f"{where}={{{unit!r}: {list(ahead)}}}"
                if unknown := sorted({unit, *ahead} - set(self._numbers)):
                    raise ValueError(f"{shown} names {unknown[0]!r}, which is no unit; units are {', '.join(map(repr, self._numbers))}")
                if unit in ahead or any(self._numbers[each] == 0 for each in ahead):
                    raise ValueError(f"{shown} must name neither the unit itself nor the root; leave them out")
        self._lists = self._numbered(forward), self._numbered(backward)

    @property
    def frozen(self) -> bool:
        return self._order is not None

    def restart(self) -> None:
        """A forward begins."""
        self._recording.clear()

    def visit(self, unit: int) -> None:
        """A unit begins; a unit that runs twice counts where it ran first."""
        if not self.frozen and unit not in self._recording:
            self._recording.append(unit)

    def freeze(self) -> None:
        """A forward is complete: keep its order."""
        if not self.frozen:
            self._order = tuple(self._recording)
            self._position = {unit: position for position, unit in enumerate(self._order)}

    def following(self, unit: int) -> list[int]:
        """Units to gather ahead in a forward."""
        if unit in self._lists[0]:
            return self._affordable(self._lists[0][unit])
        position = self._position.get(unit)
        return [] if position is None or self._order is None else self._affordable(self._order[position + 1 :][: self._depth])

    def preceding(self, unit: int) -> list[int]:
        """Units to gather ahead in a backward."""
        if unit in self._lists[1]:
            return self._affordable(self._lists[1][unit])
        position = self._position.get(unit)
        return [] if position is None or self._order is None else self._affordable(self._order[:position][::-1][: self._depth])

    def _numbered(self, lists: Mapping[str, Sequence[str]]) -> dict[int, list[int]]:
        return {self._numbers[unit]: [self._numbers[each] for each in ahead] for unit, ahead in lists.items()}

    def is_last(self, unit: int) -> bool:
        """Whether a backward begins with this unit."""
        return self._order is not None and self._order[-1] == unit

    def _affordable(self, units: Sequence[int]) -> list[int]:
        affordable: list[int] = []
        spent = 0
        for unit in units:
            spent += self._num_bytes[unit]
            if self._budget is not None and spent > self._budget:
                break
            affordable.append(unit)
        return affordable


class Agreement:
    """Compares what ranks do next, call by call, while the order of communication is learnt.

    Args:
        all_ranks: process groups that together connect all ranks of the model.
        device: of the tensors that are exchanged.

    Example:
        >>> Agreement((Ranks(),), torch.device("cpu")).check("forward of", 0, ["layers.0"])
    """

    def __init__(self, all_ranks: Sequence[Ranks], device: torch.device) -> None:
        self._all_ranks = tuple(ranks for ranks in all_ranks if ranks.size > 1)
        self._device = device
        self._count = 0

    def check(self, what: str, unit: int, names: Sequence[str]) -> None:
        """A collective: compare the unit that each rank is at; ``len(names)`` stands for the end.

        Raises:
            RuntimeError: on every rank, when they differ; names the units and the ranks.
        """
        self._count += 1
        if not self._all_ranks:
            return
        ranks_at: dict[int, list[int]] = {}
        for index, rank in rows_of_all(self._all_ranks, (unit, dist.get_rank()), self._device):
            ranks_at.setdefault(index, []).append(rank)
        if len(ranks_at) == 1:
            return
        parts = []
        for index, ranks in ranks_at.items():
            name = repr(names[index]) if index < len(names) else "the end"
            parts.append(f"{name} on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}")
        raise RuntimeError(
            f"ranks differ at call {self._count}: {what} {' and '.join(parts)}; every rank must call the same units of fsdp_unit_modules "
            "in the same order, so leave out modules that some ranks skip"
        )


def rows_of_all(all_ranks: Sequence[Ranks], row: tuple[int, ...], device: torch.device) -> list[tuple[int, ...]]:
    """The distinct rows of numbers that the ranks give, sorted; a collective over groups that together connect them."""
    table = torch.tensor([row], dtype=torch.int64, device=device)
    for ranks in all_ranks:
        table = ranks.all_gather(table)
    return sorted(set(map(tuple, table.tolist())))


RENDEZVOUS_TIMEOUT_S = 300.0
"""After which a rank that others do not follow gives up; below the ten minutes after which backends do."""


class CollectiveOrder:
    """Collectives of each phase of training (a forward, a backward) in the order in which all ranks last started them.

    While a rank keeps to the plan it asks nobody. Before a collective that is not the plan's next one, and at the end of a phase
    that took another course, it waits for the other ranks in the store of the default process group. If all come to the same, that is
    the plan from now on. Otherwise whoever left the plan gets an error, in place of a collective that would be
    taken for another one.

    Args:
        all_ranks: process groups that together connect all ranks of the model.
        device: of the tensors that are exchanged once, to set up the rendezvous.
    """

    def __init__(self, all_ranks: Sequence[Ranks], device: torch.device) -> None:
        self._all_ranks, self._device = [ranks for ranks in all_ranks if ranks.size > 1], device
        self._plans: dict[Hashable, list[str]] = {}
        self._phase: Hashable = None
        self._calls: list[str] = []
        self._left = False
        """Whether this phase has left its plan."""
        self._rendezvous: _Rendezvous | None = None

    @property
    def num_rendezvous(self) -> int:
        return 0 if self._rendezvous is None else self._rendezvous.count

    def begin(self, phase: Hashable) -> None:
        """A phase begins; calls before the first one, or after the end of one, are not looked at."""
        self._phase, self._calls, self._left = phase, [], False

    def call(self, what: str) -> None:
        """This rank is about to start a collective.

        Raises:
            RuntimeError: it is not the plan's next one, and not all ranks are about to start it.
        """
        if self._phase is None or not self._all_ranks:
            return
        plan, position = self._plans.get(self._phase), len(self._calls)
        self._calls.append(what)
        if plan is None or self._left or (position < len(plan) and plan[position] == what):
            return
        self._left = True
        self._rendezvous_at(f"is about to start the {what}", position)

    def end(self, *, agreed: bool) -> None:
        """The phase is over; what it started is the plan of the next one of its kind.

        Args:
            agreed: the ranks compared every call of it by other means. They must do so in the first one, where they set up the rendezvous.

        Raises:
            RuntimeError: it took another course than the plan's, and not all ranks took the same.
        """
        if self._phase is None or not self._all_ranks:
            return
        if self._rendezvous is None:
            self._rendezvous = _Rendezvous(self._all_ranks, self._device)
        if self._calls != self._plans.get(self._phase):
            if not agreed:
                self._rendezvous_at("is over with this phase", len(self._calls))
            self._plans[self._phase] = self._calls
        self._phase = None

    def drop(self) -> None:
        """The phase failed."""
        self._phase = None

    def _rendezvous_at(self, does: str, position: int) -> None:
        plan = self._plans.get(self._phase, [])
        common = f"the {plan[position]}" if position < len(plan) else "nothing more"
        assert self._rendezvous is not None, "the first phase, which has no plan to leave, makes it"
        missing = self._rendezvous.wait("\n".join([repr(self._phase), does, *self._calls]))
        if missing:
            raise RuntimeError(
                f"rank {dist.get_rank()} {does}, where the ranks' common order has {common}, and {missing} of "
                f"{self._rendezvous.size} ranks did not follow within {RENDEZVOUS_TIMEOUT_S:g} s; every rank must call the same units "
                "of fsdp_unit_modules in the same order, so leave out modules that some ranks skip"
            )


class _Rendezvous:
    """Where ranks wait until all of them say the same; the ranks make it together."""

    def __init__(self, all_ranks: Sequence[Ranks], device: torch.device) -> None:
        members = [rank for (rank,) in rows_of_all(all_ranks, (dist.get_rank(),), device)]
        self.size, self.count = len(members), 0
        store: Store = dist.distributed_c10d._get_default_store()
        whose = hashlib.sha256(repr(members).encode()).hexdigest()[:16]
        # Several models may have the same ranks.
        number = store.add(f"megatron_fsdp/{whose}", 1) if dist.get_rank() == members[0] else 0
        ((number,),) = [row for row in rows_of_all(all_ranks, (number,), device) if row != (0,)]
        self._store = PrefixStore(f"megatron_fsdp/{whose}/{number}", store)
        self._before: list[str] = []

    def wait(self, says: str) -> int:
        """How many ranks did not come to say the same in time."""
        self.count += 1
        key = f"{self.count}/{hashlib.sha256(says.encode()).hexdigest()}"
        everybody = f"{key}/all"
        if self._store.add(key, 1) == self.size:
            self._store.set(everybody, "")
            for old in self._before:
                # All have left the rendezvous before this one.
                self._store.delete_key(old)
        try:
            self._store.wait([everybody], datetime.timedelta(seconds=RENDEZVOUS_TIMEOUT_S))
        except RuntimeError:
            return self.size - self._store.add(key, 0)
        self._before = [key, everybody]
        return 0
