# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Flat optimizer state that one data-parallel rank gathered: each buffer whole, of one model-parallel rank.

``distrib_optim.pt`` of the older form and, in ``torch_dist``, the entries of ``dp_zero_gather_scatter`` (deprecated) hold the same. Of both
only the ranges that are asked for are read.
"""

from collections.abc import Mapping
from typing import Any

from mcore_ckpt._errors import CheckpointingException, list_names
from mcore_ckpt._formats import StoredTensor
from mcore_ckpt.megatron._flat import Domain, Flat

__all__ = ["gathered_domain", "is_gathered"]

_KINDS = ("param", "exp_avg", "exp_avg_sq")


def is_gathered(content: Any) -> bool:
    """Whether it is of a release (0.7 and later) that keeps no padding between buckets."""
    return isinstance(content, Mapping) and bool(content.get("buckets_coalesced"))


def gathered_domain(where: str, content: Mapping[Any, Any], chain: int, number: int) -> Domain:
    """The buffers of one rank.

    Args:
        where: for messages.
        content: of which `is_gathered`, read with its tensors deferred.
        chain: as in `Domain`, as is ``number``.

    Raises:
        CheckpointingException: a buffer or a state of one is missing, or the states of one differ in length.
    """
    numbers = sorted(key for key in content if type(key) is int)
    if missing := sorted(set(range(max(numbers, default=0) + 1)) - set(numbers)):
        raise CheckpointingException(f"{where}: no buffer {missing[0]} of the flat optimizer state")
    buffers = []
    for buffer in numbers:
        for states in content[buffer].values() if isinstance(content[buffer], Mapping) else ():
            found = {kind: states.get(kind) for kind in _KINDS} if isinstance(states, Mapping) else {}
            flat = {kind: value for kind, value in found.items() if isinstance(value, StoredTensor) and len(value.shape) == 1}
            if absent := [kind for kind in _KINDS if kind not in flat]:
                raise CheckpointingException(f"{where}: buffer {buffer} of the flat optimizer state has no flat {list_names(absent)}")
            lengths = {kind: value.shape[0] for kind, value in flat.items()}
            if len(set(lengths.values())) > 1:
                raise CheckpointingException(f"{where}: the states of buffer {buffer} have different lengths, {lengths}")
            buffers.append([{kind: Flat(value.dtype, value.shape[0], value.read) for kind, value in flat.items()}])
    return Domain(chain, number, buffers, coalesced=True)
