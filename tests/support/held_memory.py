# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What a model holds on its device between forward and backward, and what it computes."""

import gc

import torch
from torch import Tensor

from mcore_parallel.models import GPTModel
from mcore_parallel.nn import Step


def held_and_results(model: GPTModel) -> tuple[int, list[Tensor]]:
    """Bytes that 2 sequences of 1,024 tokens hold until the backward; their loss, and the gradients of the parameters that have one."""
    device = next(model.parameters()).device
    tokens = torch.arange(2048, device=device) % 128
    # What others left is not freed in between.
    gc.collect()
    before = torch.cuda.memory_allocated()
    output, _ = model(tokens, Step.causal(2, 1024, device))
    held = torch.cuda.memory_allocated() - before
    loss = output.logits().float().logsumexp(-1).sum()
    loss.backward()
    return held, [loss.detach(), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]
