# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What attention over a paged cache is told about one step."""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from mcore_inference._stability import experimental_api
from mcore_inference.attention._decode_contexts import ContinuedRows
from mcore_inference.attention._rotation import HeadRotation
from mcore_inference.cache import PagedKVCache


# T tokens of a step, R rows (requests) of it, B blocks of the longest one.
@experimental_api
@dataclass(frozen=True, kw_only=True)
class DecodeRows:
    """Rows of one token for the torch path; they are the first R rows of the step."""

    context_RL: Tensor
    """[R, L] int64, slot of each token of the context, the new one included. Padding repeats the row's first slot, so that
    a row never reads what another one wrote."""
    visible_RL: Tensor
    """[R, L] bool, False for padding."""
    positions_R: Tensor
    """[R] int64, of the new token."""


@experimental_api
@dataclass(frozen=True, kw_only=True)
class PrefillRows:
    """P rows of several tokens (a prompt or a part of one) for the torch path; their tokens follow those of the decode rows."""

    first_token: int
    """Number of the first prefill token in the step."""
    tokens_PQ: Tensor
    """[P, Q] int64, each row's tokens counted from ``first_token``; padding repeats the row's last token."""
    rows_T: Tensor
    """[T - first_token] int64, where in the flattened [P, Q] each token's result lies."""
    context_PL: Tensor
    """[P, L] int64, as in ``DecodeRows``."""
    visible_PQL: Tensor | None
    """[P, Q, L] bool, causal and without padding; None when every row starts at position 0: a causal kernel needs no
    mask then, since padding comes last."""
    positions_PQ: Tensor
    """[P, Q] int64, of the new tokens."""


@experimental_api
@dataclass(frozen=True, kw_only=True)
class GatheredRows:
    """What the torch path reads."""

    decode: DecodeRows | ContinuedRows | None
    """``ContinuedRows`` have no others beside them."""
    prefill: PrefillRows | None


@experimental_api
@dataclass(frozen=True, kw_only=True)
class HostRows:
    """The rows of a step as the host knows them, for libraries that plan there."""

    lengths_R: np.ndarray
    """[R] tokens of each row in the step."""
    contexts_R: np.ndarray
    """[R] tokens of each row in the cache, those of the step included."""
    tables_RB: np.ndarray
    """[R, B] blocks of each row; -1 behind the last."""


@experimental_api
@dataclass(frozen=True, kw_only=True)
class TableRows:
    """What the kernels read: all on the device, nothing as large as a context."""

    tables_RB: Tensor
    """[R, B] int32, blocks of each row in the order of its tokens."""
    starts_R: Tensor
    """[R + 1] int32, first token of each row in the step, and T."""
    contexts_R: Tensor
    """[R] int32, tokens of each row in the cache, those of the step included; 0 for padding."""
    num_decode: int
    """Rows of one token; they come first."""
    tiles: tuple[Tensor, Tensor] | None
    """Of the other rows that had tokens in the cache before: (row, first token in it) of each tile (``prefill_tiles``), int32 [N] each;
    None where there are none."""
    whole_tiles: tuple[Tensor, Tensor] | None
    """Likewise of rows whose whole context lies in the step."""
    block_size: int
    longest: int
    """Tokens that a context can have."""
    longest_query: int
    """Tokens of the step that a row can have."""
    host: HostRows | None = None
    """None where a recording is replayed, whose rows the host does not know."""

    @property
    def has_prefill(self) -> bool:
        return self.tiles is not None or self.whole_tiles is not None


@experimental_api
@dataclass(frozen=True, kw_only=True)
class PagedStep:
    """What ``Step.attention`` carries for ``PagedAttention``; made once a step, read by every layer."""

    cache: PagedKVCache
    slots_T: Tensor
    """[T] int64, where the keys and values of the step's tokens are written."""
    rows: TableRows | GatheredRows
    rotation: HeadRotation | None = None
    """In place of this package's kernel; None for that."""
    finished: Tensor | None = None
    """int32 zeros, one for each decode row and key-value head, which launches count in and leave zero; it stays at its address. Without it
    decode steps take no packed heads."""
