# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The order in which collectives are started, and what a rank does before it leaves that order."""

import datetime
import hashlib
from collections.abc import Hashable, Sequence

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from megatron_fsdp._agreement import rows_of_all
from megatron_fsdp._ranks import Ranks

MEETING_TIMEOUT_S = 300.0
"""After which a rank that others do not follow gives up; below the ten minutes after which backends do."""


class CallPlan:
    """Collectives of each phase of training (a forward, a backward) in the order in which all ranks last started them.

    While a rank keeps to the plan it asks nobody. Before a collective that is not the plan's next one, and at the end of a phase
    that took another course, it meets the other ranks in the store of the default process group. If all come to the same, that is
    the plan from now on. Otherwise whoever left the plan gets an error, in place of a collective that would be
    taken for another one.

    Args:
        all_ranks: process groups that together connect all ranks of the model.
        device: of the tensors that are exchanged once, in the first meeting.
    """

    def __init__(self, all_ranks: Sequence[Ranks], device: torch.device) -> None:
        self._all_ranks, self._device = [ranks for ranks in all_ranks if ranks.size > 1], device
        self._plans: dict[Hashable, list[str]] = {}
        self._phase: Hashable = None
        self._calls: list[str] = []
        self._left = False
        """Whether this phase has left its plan."""
        self._meeting: _Meeting | None = None

    @property
    def num_meetings(self) -> int:
        return 0 if self._meeting is None else self._meeting.count

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
        self._meet(f"is about to start the {what}", position)

    def end(self, *, agreed: bool) -> None:
        """The phase is over; what it started is the plan of the next one of its kind.

        Args:
            agreed: the ranks compared every call of it by other means. They must do so in the first one, where they make their meeting.

        Raises:
            RuntimeError: it took another course than the plan's, and not all ranks took the same.
        """
        if self._phase is None or not self._all_ranks:
            return
        if self._meeting is None:
            self._meeting = _Meeting(self._all_ranks, self._device)
        if self._calls != self._plans.get(self._phase):
            if not agreed:
                self._meet("is over with this phase", len(self._calls))
            self._plans[self._phase] = self._calls
        self._phase = None

    def drop(self) -> None:
        """The phase failed."""
        self._phase = None

    def _meet(self, does: str, position: int) -> None:
        plan = self._plans.get(self._phase, [])
        common = f"the {plan[position]}" if position < len(plan) else "nothing more"
        assert self._meeting is not None, "the first phase, which has no plan to leave, makes it"
        missing = self._meeting.wait("\n".join([repr(self._phase), does, *self._calls]))
        if missing:
            raise RuntimeError(
                f"rank {dist.get_rank()} {does}, where the ranks' common order has {common}, and {missing} of {self._meeting.size} ranks "
                f"did not follow within {MEETING_TIMEOUT_S:g} s; every rank must call the same units of fsdp_unit_modules in the same "
                "order, so leave out modules that some ranks skip"
            )


class _Meeting:
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
                # All have left the meeting before this one.
                self._store.delete_key(old)
        try:
            self._store.wait([everybody], datetime.timedelta(seconds=MEETING_TIMEOUT_S))
        except RuntimeError:
            return self.size - self._store.add(key, 0)
        self._before = [key, everybody]
        return 0
