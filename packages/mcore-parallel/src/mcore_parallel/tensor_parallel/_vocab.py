# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""How a vocabulary is cut into row blocks, and which ids are legal."""

import torch
from torch import Tensor

from mcore_parallel.groups import Group


def pad_vocab_size(vocab_size: int, tp: int, multiple: int = 128) -> int:
    """The smallest size of at least ``vocab_size`` that each of ``tp`` ranks holds a multiple of ``multiple`` rows of.

    Raises:
        ValueError: an argument below one.

    Example:
        >>> pad_vocab_size(50257, tp=2)
        50432
    """
    for name, value in (("vocab_size", vocab_size), ("tp", tp), ("multiple", multiple)):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    step = multiple * tp
    return -(-vocab_size // step) * step


def owned_rows(ids_T: Tensor, rows: int, group: Group) -> tuple[Tensor, Tensor]:
    """Local row of each id (0 where another rank owns it) and whether this rank owns it; ``rows`` are held here."""
    local_T = ids_T - group.rank * rows
    owned_T = (local_T >= 0) & (local_T < rows)
    return torch.where(owned_T, local_T, 0), owned_T


def check_ids(ids: Tensor, name: str, vocab_size: int, *, lowest: int | None = 0) -> None:
    """Reject ids outside [lowest, vocab_size) on CPU, where looking costs no synchronisation.

    Raises:
        ValueError: names the smallest or largest id.
    """
    if torch.compiler.is_compiling() or ids.device.type != "cpu" or ids.numel() == 0:
        return
    low, high = (int(value) for value in ids.aminmax())
    if high >= vocab_size or (lowest is not None and low < lowest):
        bad = high if high >= vocab_size else low
        raise ValueError(f"{name} holds {bad}, but ids of a vocabulary of {vocab_size} rows lie in [0, {vocab_size}); check the tokenizer")
