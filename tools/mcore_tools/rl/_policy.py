# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The policy of a run: its distribution is over the tokens that the engine draws."""

import torch

from mcore_parallel import ProcessGroups
from mcore_parallel.data import Tokenizer
from mcore_parallel.models import OutputLayer
from mcore_tools.assembly import Parts, TorchShardedModel, assemble
from mcore_tools.recipes import RunConfig


def assemble_policy(config: RunConfig, tokenizer: Tokenizer, device: torch.device, groups: ProcessGroups | None = None) -> Parts:
    """``assemble``, with the rows of padding after those of the tokenizer out of every loss and log-probability."""
    parts = assemble(config, device, groups)
    sharded = parts.model
    whole = sharded.module if isinstance(sharded, TorchShardedModel) else sharded
    for module in whole.modules():
        if isinstance(module, OutputLayer):
            # The engine draws no row of padding, so the policy has none.
            module.unpadded_vocab_size = tokenizer.vocab_size
    return parts
