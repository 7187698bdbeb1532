# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Named streams of random numbers, which differ between some ranks and agree between others."""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from mcore_parallel.groups import ProcessGroups


class RandomStreams:
    """Random numbers for operators that draw from torch's default generator, dropout for instance.

    Each stream has a position of its own: ``fork`` lends it to the default generator and takes it back at the end.
    A pass that autograd repeats must begin at the positions of the first one: give ``repeatable`` to
    ``torch.utils.checkpoint.checkpoint(..., use_reentrant=False, context_fn=streams.repeatable)``.

    Args:
        device: whose default generator the operators draw from.

    Example:
        >>> streams = RandomStreams(torch.device("cpu"))
        >>> streams.add("masks", 7)
        >>> with streams.fork("masks"):
        ...     first = torch.rand(2)
        >>> with streams.fork("masks"):
        ...     bool((torch.rand(2) == first).any())
        False
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._states: dict[str, Tensor] = {}
        self._seeds: dict[int, str] = {}

    @classmethod
    def for_groups(cls, seed: int, groups: ProcessGroups, device: torch.device, *, replicas_differ: bool = False) -> "RandomStreams":
        """The streams of a model in parallel layers.

        ``"data-parallel"`` agrees over tp, for work that all tp ranks repeat; ``"model-parallel"`` differs over tp;
        ``"expert-parallel"`` differs over ep and the experts' tp. All differ over pp and agree over dp.

        Args:
            seed: of the run.
            groups: where this rank lies.
            device: as in the constructor.
            replicas_differ: let all streams differ over dp as well.
        """
        place = [groups.pp.rank, groups.dp.rank if replicas_differ else 0]
        streams = cls(device)
        streams.add("data-parallel", derive_seed(seed, "data-parallel", *place))
        streams.add("model-parallel", derive_seed(seed, "model-parallel", *place, groups.tp.rank))
        streams.add("expert-parallel", derive_seed(seed, "expert-parallel", *place, groups.ep.rank, groups.expt_tp.rank))
        return streams

    @property
    def names(self) -> tuple[str, ...]:
        """Of the streams that are not lent."""
        return tuple(sorted(self._states))

    def add(self, name: str, seed: int) -> None:
        """Begin a stream.

        Raises:
            ValueError: the name or the seed is taken.
        """
        if name in self._states:
            raise ValueError(f"stream {name!r} exists already; choose another name")
        if seed in self._seeds:
            raise ValueError(f"seed={seed} of stream {name!r} is that of {self._seeds[seed]!r}, so that both would draw the same numbers")
        self._seeds[seed] = name
        self._states[name] = torch.Generator(self.device).manual_seed(seed).get_state()

    @contextmanager
    def fork(self, name: str) -> Iterator[None]:
        """Operators inside draw from this stream; forks may nest.

        Raises:
            KeyError: no such stream, or it is lent already.
        """
        if name not in self._states:
            raise KeyError(f"no free stream {name!r}; free: {sorted(self._states)}")
        outer, state = self._current(), self._states.pop(name)
        self._set_current(state)
        try:
            yield
        finally:
            self._states[name] = self._current()
            self._set_current(outer)

    def state(self) -> dict[str, Tensor]:
        """Positions of all streams, for a checkpoint."""
        return {name: state.clone() for name, state in self._states.items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go to positions that ``state`` returned.

        Raises:
            ValueError: other streams than there are here.
        """
        if set(state) != set(self._states):
            raise ValueError(f"positions of {sorted(state)} do not fit the streams {sorted(self._states)}")
        self._states = {name: state[name].clone() for name in self._states}

    def repeatable(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Contexts for a pass and for its repetition, which draws the same numbers and leaves no trace."""
        return nullcontext(), self._from(self.state())

    @contextmanager
    def _from(self, positions: Mapping[str, Tensor]) -> Iterator[None]:
        now = self.state()
        self.load_state(positions)
        try:
            yield
        finally:
            self.load_state(now)

    def _current(self) -> Tensor:
        return torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else torch.get_rng_state()

    def _set_current(self, state: Tensor) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(state, self.device)
        else:
            torch.set_rng_state(state)


def derive_seed(seed: int, name: str, *place: int) -> int:
    """A 64-bit seed of a stream at a place; a hash, so that no two places come near to one another.

    Example:
        >>> derive_seed(1, "a", 0) != derive_seed(1, "a", 1)
        True
    """
    text = f"{seed}/{name}/{'/'.join(map(str, place))}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
