# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Random numbers that depend on (seed, position) only: Philox 4x32-10 in torch."""

import torch
from torch import Tensor

from mcore_inference._stability import experimental_api

_LOW32 = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

    All words are int64 tensors that hold unsigned 32-bit values.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # Signed 64-bit products wrap to the right bits; the mask undoes the sign that the shift drags in.
        low, high = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((high >> 32) & _LOW32) ^ c1 ^ k0,
            high & _LOW32,
            ((low >> 32) & _LOW32) ^ c3 ^ k1,
            low & _LOW32,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW32, (k1 + _KEY_STEPS[1]) & _LOW32
    return c0, c1, c2, c3


@experimental_api
def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """One number of [0, 1) for each pair of seed and output position, whatever else is in the batch.

    Args:
        seeds: [R] int64, any bits.
        positions: [R] int64.

    Returns:
        [R] float64 with 53 random bits.
    """
    zero = torch.zeros_like(positions)
    counter = (positions & _LOW32, (positions >> 32) & _LOW32, zero, zero)
    word0, word1, _, _ = philox(counter, (seeds & _LOW32, (seeds >> 32) & _LOW32))
    return ((word0 << 21) ^ (word1 >> 11)).to(torch.float64) * 2.0**-53


@experimental_api
def request_seed(engine_seed: int, request_id: int) -> int:
    """Seed of a request that brought none: a 63-bit mix (splitmix64) of the engine's seed and the request's number."""
    value = (engine_seed * 0x9E3779B97F4A7C15 + request_id + 0x632BE59BD9B4E019) % 2**64
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        value = ((value ^ (value >> shift)) * factor) % 2**64
    return (value ^ (value >> 31)) >> 1
