# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Adapters for the linear layers of a whole model."""

import fnmatch
import hashlib
from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from mcore_parallel.comm import all_reduce
from mcore_parallel.groups import ProcessGroups
from mcore_parallel.tensor_parallel._batch_invariant import BatchInvariantProducts
from mcore_parallel.tensor_parallel._linear import ColumnParallelLinear, RowParallelLinear
from mcore_parallel.tensor_parallel._lora_adapter import LoraAdapter, LoraConfig
from mcore_parallel.tensor_parallel._replicated import ReplicatedLinear

_Linear = ColumnParallelLinear | RowParallelLinear | ReplicatedLinear


@runtime_checkable
class LoraTarget(Protocol):
    """A module that puts adapters beside weights of its own, such as stacked experts; their names end in ``_lora.A`` and ``_lora.B``."""

    @property
    def has_lora(self) -> bool:
        """Whether it has adapters now."""
        ...

    def add_lora(self, config: LoraConfig, seed: int) -> None:
        """Make them; ValueError where it cannot."""
        ...

    def merge_lora(self) -> None:
        """Add them to the weights, and remove them."""
        ...


@runtime_checkable
class QuantizableLoraTarget(LoraTarget, Protocol):
    """A `LoraTarget` that keeps its frozen weights as ``LoraConfig.base_dtype`` says; ``add_lora`` of it raises where it cannot."""

    def quantize_base(self) -> bool:
        """Round them, once they are loaded; whether something was rounded."""
        ...


@runtime_checkable
class RecomputedModel(Protocol):
    """A model that may run its linear layers again in the backward."""

    def check_noise(self, noise_fields: str) -> None:
        """ValueError where a second run would have other random numbers than the first.

        Args:
            noise_fields: by which linear layers draw them.
        """
        ...


def add_lora(model: nn.Module, config: LoraConfig, groups: ProcessGroups, *, seed: int = 0) -> list[str]:
    """Freeze a model and give the linear layers that ``config.targets`` name an adapter each.

    The adapter of a layer is its child ``lora`` with parameters ``lora.A`` and ``lora.B``, so that the base parameters keep their names. B
    is zero: outputs stay those of the base model, to the bit. Call it before gradients, optimizer or sharding are set up.

    Args:
        model: one stage, or the chunks of one; changed in place.
        config: which layers, and the adapters' size.
        groups: of the model. Patterns are looked up on all pipeline stages, so every rank calls this.
        seed: of A. Values depend on it and the layer's name, not on the layout.

    Returns:
        Names of the layers of this stage that have adapters, in the model's order.

    Raises:
        ValueError: a pattern that names no linear layer on any stage, or a layer with weights that takes no adapter; one that has one;
            ``config.base_dtype`` of weights that cannot be kept so; dropout that a recomputation would draw anew (`RecomputedModel`).

    Example:
        >>> groups = ProcessGroups.single()
        >>> model = nn.ModuleDict({"up": ColumnParallelLinear(4, 8, groups), "down": RowParallelLinear(8, 4, groups)})
        >>> add_lora(model, LoraConfig(rank=2, targets=("up",)), groups)
        ['up']
        >>> [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        ['up.lora.A', 'up.lora.B']
    """
    for part in model.modules():
        if config.dropout and isinstance(part, RecomputedModel):
            part.check_noise(f"dropout={config.dropout} of LoraConfig")
    chosen: dict[str, _Linear | LoraTarget] = {}
    counts = [0] * len(config.targets)
    refused = ""
    for name, module in model.named_modules():
        matched = [number for number, pattern in enumerate(config.targets) if _matches(name, pattern)]
        if not matched:
            continue
        if not isinstance(module, _Linear | LoraTarget):
            # Norms and containers beside the linear layers are no one's target.
            if any(parameter.dim() > 1 for parameter in module.parameters(recurse=False)):
                refused = refused or f"targets={config.targets[matched[0]]!r} names {name}, and {type(module).__name__} takes no adapter"
            continue
        if module.has_lora if isinstance(module, LoraTarget) else module.lora is not None:
            raise ValueError(f"{name} has an adapter; merge_lora ends it")
        if config.base_dtype is not None and isinstance(module, LoraTarget) and not isinstance(module, QuantizableLoraTarget):
            raise ValueError(
                f"base_dtype={config.base_dtype!r} is for linear layers and stacked experts, and targets={config.targets[matched[0]]!r} "
                f"names {name}, a {type(module).__name__}; leave it out of targets, or base_dtype"
            )
        if isinstance(getattr(module, "products", None), BatchInvariantProducts):
            raise ValueError(f"{name} has batch-invariant matmuls, and an adapter none; build the model without batch_invariant")
        chosen[name] = module
        for number in matched:
            counts[number] += 1
    if refused:
        raise ValueError(f"{refused}; name column-parallel, row-parallel and replicated linear layers, or stacked experts")
    _check_matched(config, counts, model, groups)
    frozen = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # Those that may refuse come first.
    for name, module in chosen.items():
        if isinstance(module, LoraTarget):
            module.add_lora(config, _seed(seed, name))
    for name, module in chosen.items():
        if isinstance(module, _Linear):
            weight = module.weight
            place = {"dtype": weight.dtype, "device": weight.device}
            module.lora = LoraAdapter(config, module.weight_spec, module.groups, seed=_seed(seed, name), **place)
            module.lora.train(module.training)
    for parameter in frozen:
        parameter.requires_grad_(False)
    return list(chosen)


def merge_lora(model: nn.Module) -> list[str]:
    """Add each adapter's product to its base weight and remove the adapter; every parameter can be trained again.

    Returns:
        Names of the layers that had adapters, linear ones first.

    Raises:
        ValueError: a base weight is in fp8 and can take no sum; nothing is merged.
    """
    merged = []
    bases = [(f"{name}.weight", layer.weight) for name, layer in adapted_layers(model)]
    for name, module in model.named_modules():
        own = module.named_parameters(recurse=False)
        bases += [(f"{name}.{part}", parameter) for part, parameter in own if isinstance(module, LoraTarget) and module.has_lora]
    for name, weight in bases:
        if weight.dtype == torch.float8_e4m3fn:
            raise ValueError(f"{name} is in fp8 (quantize_base); merge into a model with the weights as they were loaded")
    for name, layer in adapted_layers(model):
        assert layer.lora is not None
        with torch.no_grad():
            delta = layer.lora.delta()
            layer.weight.copy_(layer.weight.to(delta.dtype) + delta)
        layer.lora = None
        layer.parameters_changed()
        merged.append(name)
    for name, module in model.named_modules():
        if isinstance(module, LoraTarget) and module.has_lora:
            module.merge_lora()
            merged.append(name)
    model.requires_grad_(True)
    return merged


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, _Linear]]:
    """The linear layers with adapters by name, in the model's order."""
    for name, module in model.named_modules():
        if isinstance(module, _Linear) and module.lora is not None:
            yield name, module


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name belongs to an adapter.

    Example:
        >>> is_adapter("layers.0.mlp.up.lora.A"), is_adapter("layers.0.mlp.up.weight")
        (True, False)
    """
    return name.endswith((".lora.A", ".lora.B", "_lora.A", "_lora.B"))


def _matches(name: str, pattern: str) -> bool:
    """Of the whole name, or of its end after a dot."""
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, f"*.{pattern}")


def _check_matched(config: LoraConfig, counts: list[int], model: nn.Module, groups: ProcessGroups) -> None:
    if groups.pp.size > 1:
        device = next(model.parameters()).device
        counts = all_reduce(torch.tensor(counts, device=None if device.type == "meta" else device), groups.pp).tolist()
    for pattern, count in zip(config.targets, counts, strict=True):
        if not count:
            linears = sorted(
                {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, _Linear | LoraTarget)}
            )
            raise ValueError(f"targets={pattern!r} names no linear layer; the model has {', '.join(linears)}")


def _seed(seed: int, name: str) -> int:
    """63 bits that differ between names."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little") >> 1
