# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Work that the ranks do together while training goes on, one piece at a time."""

import threading
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from mcore_ckpt._core._control import Control

__all__ = ["Background"]


class Background:
    """A thread, and a group of its own for what it tells the threads of the other ranks.

    Two threads that use one group would meet in another order on each rank; so nothing else may use this one.

    Args:
        group: of the ranks; None as for `Control`.
        own: a gloo group of the same ranks; None makes one when it is first needed, where ``group`` is the whole world.
        timeout_s: how long a rank may be waited for in a group that is made here.
    """

    def __init__(self, group: dist.ProcessGroup | None, own: dist.ProcessGroup | None, timeout_s: float) -> None:
        self._group, self._own, self._timeout_s = group, own, timeout_s
        self._control: Control | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def control(self) -> Control:
        """The ranks, over the group of its own. The first call is collective.

        Raises:
            ValueError: no such group can be made, or the one that was given has other ranks.
        """
        if self._control is None:
            ranks = Control(self._group)
            own = self._own
            if own is None and ranks.size > 1:
                if ranks.size != dist.get_world_size():
                    raise ValueError(
                        f"group has {ranks.size} of {dist.get_world_size()} ranks; an asynchronous save needs background_group, "
                        'made by all ranks with torch.distributed.new_group(ranks, backend="gloo")'
                    )
                made = dist.new_group(backend="gloo", timeout=timedelta(seconds=self._timeout_s))
                assert isinstance(made, dist.ProcessGroup)
                own = made
            control = Control(own) if own is not None else ranks
            if control.ranks != ranks.ranks:
                raise ValueError(f"background_group has the ranks {control.ranks}, group has {ranks.ranks}; they must be the same")
            self._control = control
        return self._control

    def start(self, work: Callable[[], None]) -> None:
        """Begin ``work``; what was begun before must have been waited for."""
        assert self._thread is None

        def run() -> None:
            try:
                work()
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=run, name="keep", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the work is done, and raise what it raised."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
