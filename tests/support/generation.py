# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Generation without an engine, as the reference of those with one."""

import torch
from torch import Tensor

from mcore_parallel.models import GPTModel
from mcore_parallel.nn import Step


def naive_greedy(model: GPTModel, prompt: list[int], count: int) -> list[int]:
    """The likeliest tokens behind a prompt, each by a forward over all before it."""
    tokens = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            output, _ = model(torch.tensor(tokens), Step.causal(1, len(tokens)))
        tokens.append(int(output.logits()[-1].argmax()))
    return tokens[len(prompt) :]


def full_log_probs(model: GPTModel, tokens: list[int]) -> Tensor:
    """[T, V] of a sequence, computed at once."""
    with torch.no_grad():
        output, _ = model(torch.tensor(tokens), Step.causal(1, len(tokens)))
    return output.logits().double().log_softmax(-1)
