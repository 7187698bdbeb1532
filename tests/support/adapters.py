# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Adapters with random numbers, and models that they are merged into."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mcore_inference import LoraWeights
from mcore_inference.decoder import FusedDecoder
from mcore_parallel.models import GPTModel
from mcore_parallel.nn import Step
from mcore_parallel.tensor_parallel import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear

TARGETS = ("qkv", "out", "up", "down")


def adaptable(model: GPTModel, targets: Sequence[str] = TARGETS) -> dict[str, torch.nn.Module]:
    """Linear layers of the blocks by name."""
    kinds = (ColumnParallelLinear, RowParallelLinear, ReplicatedLinear)
    return {
        name: layer
        for name, layer in model.named_modules()
        if type(layer) in kinds and name.startswith("layers.") and name.rpartition(".")[2] in targets
    }


def random_adapter(model: GPTModel, rank: int, seed: int, targets: Sequence[str] = TARGETS, *, std: float = 0.3) -> LoraWeights:
    """Of all such layers of a whole model; what it adds is about as large as what it is added to."""
    generator, matrices = torch.Generator().manual_seed(seed), {}
    for name, layer in adaptable(model, targets).items():
        *out, width = layer.weight_spec.shape
        shapes = (rank, width), (*out, rank)
        matrices[name] = tuple(std * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return LoraWeights(rank=rank, alpha=0.7 * rank, matrices=matrices)


def merged(model: GPTModel, adapter: LoraWeights | None) -> GPTModel:
    """A copy of a whole model whose weights have the adapter in them."""
    other = copy.deepcopy(model)
    if adapter is not None:
        layers = dict(other.named_modules())
        with torch.no_grad():
            for name, (A, B) in adapter.matrices.items():
                weight = layers[name].weight
                delta = adapter.scaling * (B.flatten(0, -2) @ A).view(weight.shape)
                weight.copy_(weight.double() + delta.to(weight.device))
    return other


def attend_by_torch(decoder: FusedDecoder, qkv: Tensor, attention: Any, step: Step) -> Tensor:
    """``FusedDecoder._attend`` without the kernel."""
    heads = qkv.view(len(qkv), attention.local_kv_heads, -1, attention.head_dim)
    return attention._attend(*attention._heads(heads, attention._tables(step)), step)
