# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Whether ranks that exchange rows without counts agree on their sizes."""

import torch

from mcore_parallel import Group
from mcore_parallel.comm import all_gather


def check_equal(what: str, value: int, group: Group, device: torch.device) -> None:
    """Compare a size over ranks; every rank of the group takes part, and the host waits.

    Raises:
        ValueError: names the first rank with another size than the group's first one, and both sizes.
    """
    if group.size == 1:
        return
    values = all_gather(torch.tensor([value], device=device), group).tolist()
    for rank, other in zip(group.ranks, values, strict=True):
        if other != values[0]:
            raise ValueError(
                f"rank {rank} has {what}={other}, rank {group.ranks[0]} has {values[0]}: with moe_pad_expert_input_to_capacity=True ranks "
                "that exchange tokens must hold equally many; make their batches equal, or leave the padding out"
            )
