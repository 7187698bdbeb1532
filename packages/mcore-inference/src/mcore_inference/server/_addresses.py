# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Addresses whose requests are refused too often: a bucket of refusals for each, which fills up with time."""

from collections import OrderedDict

_BURST_S = 10.0
"""Of refusals that an address may have at once."""
_MAX_ADDRESSES = 4096


class RefusalLimiter:
    """Counts refused requests by the address of their client.

    Args:
        per_s: refusals of one address a second, in the long run.
    """

    def __init__(self, per_s: float) -> None:
        self._per_s = per_s
        self._capacity = max(1.0, per_s * _BURST_S)
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Refusals that an address may have, and when that was so; the one that was refused last comes last."""

    def count(self, address: str, now: float) -> None:
        """A request of the address was refused."""
        self._left[address] = max(0.0, self._now(address, now) - 1.0), now
        self._left.move_to_end(address)
        if len(self._left) > _MAX_ADDRESSES:
            self._left.popitem(last=False)

    def is_over(self, address: str, now: float) -> bool:
        """Whether the address had too many refusals lately."""
        return address in self._left and self._now(address, now) < 1.0

    def _now(self, address: str, now: float) -> float:
        left, then = self._left.get(address, (self._capacity, now))
        return min(self._capacity, left + (now - then) * self._per_s)
