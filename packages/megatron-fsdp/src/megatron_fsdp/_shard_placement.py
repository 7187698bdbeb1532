# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Where the data axes may cut a parameter, when not just anywhere between its rows."""

from dataclasses import dataclass

from megatron_fsdp._stability import experimental_api


@experimental_api
@dataclass(frozen=True)
class TensorAtomic:
    """Nowhere: one rank holds the whole parameter, its gradient and its optimizer state; ranks share parameters out by their bytes.

    For optimizers that look at whole matrices. Other ranks have an empty shard [0, ...].
    """


@experimental_api
@dataclass(frozen=True)
class BlockAtomic:
    """Between blocks of rows: every shard is whole blocks, but for the rows that the parameter has beyond its last whole block.

    Example:
        >>> BlockAtomic(32).block_size
        32
    """

    block_size: int
    """Rows of dimension 0 in a block: 32 for formats that scale blocks of 32."""

    def __post_init__(self) -> None:
        if isinstance(self.block_size, bool) or not isinstance(self.block_size, int) or self.block_size < 1:
            raise ValueError(f"block_size={self.block_size!r} must be a positive number of rows, for instance 32")


ShardPlacement = TensorAtomic | BlockAtomic
