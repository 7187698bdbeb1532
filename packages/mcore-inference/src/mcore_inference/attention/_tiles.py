# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""How the rows of a prefill are cut into tiles, one a program."""

import numpy as np

from mcore_inference._stability import experimental_api

TILE_LINES = 128
"""Query heads times tokens of a tile."""
FEWEST_KEYS = 16
"""Of a tile: one side of a matmul."""
SHARED_BYTES = 200 * 1024
"""Of a multiprocessor's memory, with a part left for what the compiler adds."""


def tile_tokens(group: int) -> int:
    """Tokens of a tile, when ``group`` query heads share a key-value head."""
    return max(1, TILE_LINES // group)


@experimental_api
def prefill_tiles(lengths_P: np.ndarray, rows_P: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray]:
    """Row and first token in it of every tile.

    Args:
        lengths_P: tokens of each prefill row.
        rows_P: numbers of these rows in the step.
        group: query heads of a key-value head.

    Example:
        >>> [part.tolist() for part in prefill_tiles(np.array([40, 3]), np.array([7, 8]), 4)]
        [[7, 7, 8], [0, 32, 0]]
    """
    size = tile_tokens(group)
    counts_P = -(-lengths_P // size)
    rows_N = np.repeat(rows_P, counts_P)
    number_N = np.arange(int(counts_P.sum())) - np.repeat(np.cumsum(counts_P) - counts_P, counts_P)
    return rows_N, number_N * size


@experimental_api
def fits_packed(width: int, itemsize: int) -> bool:
    """Whether the kernel of decode steps has room for two stages of keys and values of such heads: 256 channels in 16 bits, 128 in 32.

    Args:
        width: channels of a head.
        itemsize: bytes of a value of the model's activations.

    Example:
        >>> fits_packed(256, 2), fits_packed(320, 2)
        (True, False)
    """
    return padded_width(width) * itemsize <= 512


def fits_tiles(width: int, itemsize: int) -> bool:
    """Whether the kernel of prompts has room for a tile of queries beside the fewest keys and values: 512 channels in 16 bits, 256 in 32.

    Args:
        width: channels of a head.
        itemsize: bytes of a value of the model's activations.

    Example:
        >>> fits_tiles(320, 2), fits_tiles(320, 4)
        (True, False)
    """
    return tile_bytes(TILE_LINES, FEWEST_KEYS, 1, width, itemsize) <= SHARED_BYTES


def tile_bytes(lines: int, keys: int, stages: int, width: int, itemsize: int) -> int:
    """Of queries, and of the keys and values of all stages beside them."""
    return (lines + 2 * keys * stages) * padded_width(width) * itemsize


def padded_width(width: int) -> int:
    """Channels that a kernel holds of a head: the power of two that it fits in."""
    return 1 << (width - 1).bit_length()


def fits_latents(rank: int, width: int, itemsize: int) -> bool:
    """Whether the kernel of latents can hold sums of ``rank`` channels and scores of ``width``, in the registers of a program.

    float32 has no matrix instructions that are exact, and sums of products by single instructions take more.
    """
    most = 512 if itemsize == 2 else 128
    return 0 < rank <= most and width - rank <= most // 2
