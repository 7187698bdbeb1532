# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What the ranks of one engine must have alike, since each of them schedules and draws for itself."""

from collections.abc import Mapping

import torch

from mcore_inference.context import DynamicInferenceContext
from mcore_parallel import ProcessGroups
from mcore_parallel.comm import all_reduce


def check_equal_ranks(groups: ProcessGroups, context: DynamicInferenceContext, *, vocab_size: int, seed: int) -> None:
    """See that the tensor-parallel ranks of all stages have equal sizes and seeds; all of them call it together.

    Raises:
        ValueError: on all of them; names the first field that differs.
    """
    if groups.tp_pp.size == 1:
        return
    fields = {
        "num_blocks": context.allocator.usable_count,
        "num_snapshots": context.allocator.snapshots.total_count,
        "max_requests": context.max_requests,
        "max_tokens": context.max_tokens,
        "max_sequence_length": context.max_sequence_length,
        "block_size_tokens": context.block_size,
        "vocab_size": vocab_size,
        "seed": seed,
    }
    for name, (least, most) in _ranges(fields, groups, context.device).items():
        if least != most:
            raise ValueError(
                f"{name} is {fields[name]} here and from {least} to {most} over the tp={groups.tp.size} pp={groups.pp.size} ranks of this "
                "engine, which would draw different tokens; give all of them the same"
            )


def _ranges(fields: Mapping[str, int], groups: ProcessGroups, device: torch.device) -> dict[str, tuple[int, int]]:
    own = torch.tensor(list(fields.values()), dtype=torch.int64, device=device)
    # All bits turned, the largest is the least one, of a seed of 64 bits too.
    most, turned = all_reduce(torch.stack([own, ~own]), groups.tp_pp, op="max").tolist()
    return {name: (~least, largest) for name, least, largest in zip(fields, turned, most, strict=True)}
