# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A pipeline whose stages lie on several grids."""

from collections.abc import Sequence
from itertools import zip_longest

from torch import Tensor

from mcore_parallel.comm import Arrival, BridgeBatch, BridgeCommunicator, P2PCommunicator, TensorSpec
from mcore_parallel.groups import Group


class ChainLink:
    """The link of one grid's stages in a pipeline that runs on through other grids (an encoder, then a language model).

    The stages of all grids are numbered through. Inside the grid tensors travel between the ranks of its pipeline group, at
    its ends over bridges. Run it with ``run_schedule(plan, forward, link.stages, communicator=link, hidden=...)``, where the plan is for
    all stages and ``hidden`` says what travels inside this grid.

    Args:
        group: this grid's pipeline group.
        first_stage: number of its first stage in the whole pipeline.
        num_stages: of the whole pipeline.
        batch: the micro-batches as the bridges cut them; all alike.
        before: bridge from the grid before, on this grid's first stage.
        after: bridge to the grid after, on this grid's last stage.

    Raises:
        ValueError: an end inside the whole pipeline without a bridge.
    """

    def __init__(
        self,
        group: Group,
        *,
        first_stage: int,
        num_stages: int,
        batch: BridgeBatch,
        before: BridgeCommunicator | None = None,
        after: BridgeCommunicator | None = None,
    ) -> None:
        stage = first_stage + group.rank
        for name, bridge, inner in (
            ("before", before, group.is_first and stage > 0),
            ("after", after, group.is_last and stage < num_stages - 1),
        ):
            if inner and bridge is None:
                raise ValueError(f"stage {stage} of {num_stages} is an end of its grid, but {name} is None; give the bridge")
        self.stages = Group(tuple(range(num_stages)), stage)
        """This stage among all, to hand to ``run_schedule``; it has no communicator."""
        self._first, self._inner, self._size = first_stage, P2PCommunicator(group), group.size
        self._batch, self._before, self._after = batch, before, after

    def transfer(self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[TensorSpec, int]]) -> list[Arrival]:
        """As ``P2PCommunicator.transfer``, with numbers of stages of the whole pipeline.

        Raises:
            ValueError: a stage that is no neighbour over a bridge: model chunks cannot take turns over several grids.
        """
        here = range(self._first, self._first + self._size)
        for _, stage in (*sends, *receives):
            if stage not in here and abs(stage - self.stages.rank) != 1:
                raise ValueError(f"stage {self.stages.rank} has no link to stage {stage} of another grid; use one model chunk a stage")
        inner = self._inner.transfer(
            [(x, stage - self._first) for x, stage in sends if stage in here],
            [(spec, stage - self._first) for spec, stage in receives if stage in here],
        )
        came = {stage: iter(self._over_bridge(sends, receives, stage)) for stage in (here.start - 1, here.stop)}
        rest = iter(inner)
        return [next(rest) if stage in here else next(came[stage]) for _, stage in receives]

    def finish(self) -> None:
        """As ``P2PCommunicator.finish``."""
        self._inner.finish()
        for bridge in (self._before, self._after):
            if bridge is not None:
                bridge.finish()

    def _over_bridge(self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[TensorSpec, int]], stage: int) -> list[Arrival]:
        going = [x for x, to in sends if to == stage]
        coming = [spec for spec, source in receives if source == stage]
        bridge = self._before if stage < self._first else self._after
        if bridge is None:
            return []
        if bridge is self._before:
            both, send, receive = bridge.send_backward_recv_forward, bridge.send_backward, bridge.recv_forward
        else:
            both, send, receive = bridge.send_forward_recv_backward, bridge.send_forward, bridge.recv_backward
        outputs: list[Tensor] = []
        for x, spec in zip_longest(going, coming):
            if x is None:
                outputs.append(receive(self._batch))
            elif spec is None:
                send(x, self._batch)
            else:
                outputs.append(both(x, self._batch, self._batch))
        return [Arrival(x.detach(), ()) for x in outputs]
