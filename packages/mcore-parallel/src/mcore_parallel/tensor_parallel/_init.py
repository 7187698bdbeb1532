# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Values of a sharded parameter that do not depend on the layout."""

import torch
from torch import nn

from mcore_parallel._stability import internal_api
from mcore_parallel.groups import ProcessGroups, ShardSpec


@internal_api
def normal_shard_(parameter: nn.Parameter, spec: ShardSpec, groups: ProcessGroups, *, std: float, seed: int) -> None:
    """Draw the whole tensor in float32 on the CPU and keep this rank's part."""
    if parameter.is_meta:
        return
    generator = torch.Generator().manual_seed(seed)
    whole = torch.empty(spec.shape).normal_(0.0, std, generator=generator)
    with torch.no_grad():
        parameter.copy_(whole[spec.slices(groups)])
