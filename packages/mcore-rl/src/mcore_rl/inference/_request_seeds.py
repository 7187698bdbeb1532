# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Seeds that draws follow, whatever else an engine is asked."""

from mcore_rl._stability import experimental_api


@experimental_api
class RequestSeeds:
    """A seed for each request, of its number alone; interfaces that are given one object count their requests together.

    Requests are numbered as they come. Those that wait for an answer before, as later turns of a conversation do, come when that is there:
    all take the same seeds in another run, and which takes which depends on how fast answers are.

    Args:
        seed: of them all.

    Example:
        >>> one, other = RequestSeeds(1), RequestSeeds(1)
        >>> [one.following(), one.following()] == [other.following(), other.following()]
        True
    """

    def __init__(self, seed: int) -> None:
        self._seed, self._num_asked = seed, 0

    def following(self) -> int:
        """Of the next request, from 0 up to 2^63."""
        # Whoever asks an engine of this process has imported it already.
        from mcore_inference.sampling import request_seed

        self._num_asked += 1
        return request_seed(self._seed, self._num_asked - 1)
