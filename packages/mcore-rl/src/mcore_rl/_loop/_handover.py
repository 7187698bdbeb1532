# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The rollouts of the next iteration on their way to those who train on them, while those of this one are trained on."""

import dataclasses
import logging
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mcore_parallel import ProcessGroups
from mcore_rl._config import GRPOConfig
from mcore_rl._loop._loop import rollout_means
from mcore_rl._loop._update import MiniBatch, mini_batches
from mcore_rl._ranks._placement import Placement, exchange_parcels
from mcore_rl._rollouts._collect import Collection, delivered, own_failure_first, share_of
from mcore_rl._rollouts._stream import RolloutStream

_log = logging.getLogger(__name__)
_CLOSE_S = 10.0


@dataclass(frozen=True, kw_only=True)
class RolloutBatch:
    """Rollouts of one iteration, the same on every rank but for ``written`` and the rollouts themselves."""

    collected: Collection
    version: int
    """Refits before the first of them was begun."""
    seconds: float
    """Of drawing them, on the rank that took longest."""
    num_posed: tuple[int, ...]
    """Problems that each rank that serves had posed by then."""
    means: Mapping[str, Any]
    """Fields of the report that they say."""
    token_versions: Mapping[int, int]
    """Number of tokens by the weights that drew them, of those of which that is known."""
    written: "Future[list[MiniBatch]] | None" = None
    """Their micro-batches on the host, or why there are none; None where that is for ``update`` to do."""

    @classmethod
    def of(
        cls, config: GRPOConfig, collected: Collection, served: Sequence[Mapping[str, Any]], version: int, num_asked: int
    ) -> "RolloutBatch":
        """What the serving ranks say of their shares put together.

        Args:
            config: of the iteration.
            collected: the rollouts.
            served: seconds of each rank that serves, and how many problems it had posed.
            version: as of the field.
            num_asked: answers that were asked for.
        """
        return cls(
            collected=collected,
            version=version,
            seconds=max(part["seconds"] for part in served),
            num_posed=tuple(part["num_posed"] for part in served),
            means=rollout_means(config, collected, num_asked),
            token_versions=collected.token_versions,
        )

    def token_lag(self, version: int) -> float | None:
        """Mean age of the tokens whose weights are known."""
        lags = self.tokens_by_lag(version)
        count = sum(lags.values())
        return sum(lag * number for lag, number in lags.items()) / count if count else None

    def tokens_by_lag(self, version: int) -> dict[int, int]:
        """Number of tokens by their age in refits, the youngest first."""
        return {version - drawn: number for drawn, number in sorted(self.token_versions.items(), reverse=True)}


class Handover:
    """One batch of rollouts, from the engines to the trainers, in a thread of its own: drawn to their end, exchanged, decoded, and written
    into micro-batches. Nothing of it touches a device.

    Args:
        config: of the iteration.
        placement: every rank of it makes one for the same iteration.
        stream: of a rank that serves.
        layout: of the policy, on a rank that trains.
        timeout_s: limit of waiting, from ``result`` on.
    """

    def __init__(
        self, config: GRPOConfig, placement: Placement, stream: RolloutStream | None, layout: ProcessGroups | None, timeout_s: float
    ) -> None:
        self._config, self._placement, self._stream, self._layout, self._timeout_s = config, placement, stream, layout, timeout_s
        self._is_drawn = threading.Event()
        self._batch: Future[RolloutBatch] = Future()
        # Without a close it ends with the process.
        self._thread = threading.Thread(target=self._run, name="mcore-handover", daemon=True)
        self._thread.start()

    def result(self) -> RolloutBatch:
        """The batch; waits for it, on all ranks together.

        Raises:
            RankTimeoutError: a rank did not come within ``timeout_s``; named.
            RuntimeError: a rank failed, on the others; what it raised, on itself.
        """
        if self._stream is not None:
            self._stream.expect()
            self._is_drawn.wait()
        # Who stays away is named here: the thread waits for as long as the engines draw.
        self._placement.gather(None, self._timeout_s, "rollouts")
        # What the thread raised may be a TimeoutError itself.
        wait([self._batch], 2 * self._timeout_s)
        if not self._batch.done():
            raise RuntimeError(
                f"the rollouts of all ranks were not exchanged and packed within twice timeout_s={self._timeout_s:g}; raise it"
            )
        return self._batch.result()

    def close(self) -> None:
        """Wait until the thread has ended, which it does once the streams of all ranks are closed, or have drawn what it hands over."""
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            _log.warning("other ranks did not give up what was drawn ahead within %g s; the process ends without them", _CLOSE_S)

    def _run(self) -> None:
        try:
            self._batch.set_result(self._hand_over())
        except Exception as error:
            self._batch.set_exception(error)

    def _hand_over(self) -> RolloutBatch:
        replica, drawn = (None if self._layout is None else self._layout.dp.rank), []
        sent: dict[str, Any] = share_of([], 0, None, replica=replica)
        failure = lost = None
        try:
            if self._stream is not None:
                taken = self._stream.draw()
                about = {name: getattr(taken, name) for name in ("seconds", "num_posed", "num_asked", "oldest")}
                drawn, lost = taken.groups, taken.lost
                sent = {**share_of(drawn, taken.num_filtered, None, lost=lost), **about}
        except Exception as error:
            failure = error
            sent = share_of([], 0, failure)
        finally:
            self._is_drawn.set()
        placement = self._placement
        with own_failure_first(failure):
            shares = placement.gather_ahead(sent, self._timeout_s, "rollouts")

        def swap(parcels: list[Tensor], sizes: list[int]) -> list[Tensor]:
            return exchange_parcels(placement, parcels, sizes, self._timeout_s, "rollouts", ahead=True)

        collected = delivered(self._config, shares, placement.world.rank, drawn, swap, lost=lost)
        served = shares[placement.num_trainers :]
        oldest, num_asked = min(part["oldest"] for part in served), sum(part["num_asked"] for part in served)
        batch = RolloutBatch.of(self._config, collected, served, oldest, num_asked)
        return batch if self._layout is None else dataclasses.replace(batch, written=self._written(collected, self._layout))

    def _written(self, collected: Collection, layout: ProcessGroups) -> "Future[list[MiniBatch]]":
        """A failure is of the training, of which the other half is told then."""
        written: Future[list[MiniBatch]] = Future()
        try:
            written.set_result(mini_batches(self._config, collected, layout))
        except Exception as error:
            written.set_exception(error)
        return written
