# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Seeds that draws follow, whatever else an engine is asked."""

import hashlib

from mcore_rl._stability import experimental_api


@experimental_api
class RequestSeeds:
    """A seed for each request, of its number alone, or of its name (``InferenceRequest.draw``); interfaces that are given one object count
    their requests together.

    Requests without a name are numbered as they come. Those of conversations, whose later turns come when an answer before is there, have
    names: which of a group they belong to, and which turn they are. So have those about problems that are posed elsewhere, in any order.
    They draw the same in another run, however fast answers are. Names
    begin with the ``env_id`` of the agent: agents that share one object need different ones, else they draw with the same seeds.

    Args:
        seed: of them all.

    Example:
        >>> one, other = RequestSeeds(1), RequestSeeds(1)
        >>> [one.following(), one.following()] == [other.following(), other.following()]
        True
    """

    def __init__(self, seed: int) -> None:
        self._seed, self._num_asked = seed, 0

    def of(self, draw: str | None) -> int:
        """Of the request with this name, or of the next one without, from 0 up to 2^63."""
        if draw is None:
            return self.following()
        return int.from_bytes(hashlib.blake2b(f"{self._seed} {draw}".encode(), digest_size=8).digest(), "little") >> 1

    def following(self) -> int:
        """Of the next request, from 0 up to 2^63."""
        # Whoever asks an engine of this process has imported it already.
        from mcore_inference.sampling import request_seed

        self._num_asked += 1
        return request_seed(self._seed, self._num_asked - 1)
