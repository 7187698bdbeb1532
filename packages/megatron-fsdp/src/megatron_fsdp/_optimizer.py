# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Letting any torch optimizer step the shards."""

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from megatron_fsdp._dtensor import local
from megatron_fsdp._ranks import Ranks

if TYPE_CHECKING:
    from megatron_fsdp._module import MegatronFSDP

# Rules that mix rows or look at a whole matrix: torch would apply them to chunks that are not where it thinks.
_WHOLE_TENSOR_OPTIMIZERS = ("Adafactor", "LBFGS", "Muon", "Shampoo")


# Packages whose kernels take the memory of a tensor as it is.
_PLAIN_PACKAGES = ("transformer_engine", "apex")


def fully_shard_optimizer(
    optimizer: torch.optim.Optimizer, model: "MegatronFSDP", *, plain_shards: bool | None = None
) -> torch.optim.Optimizer:
    """Point an optimizer at the shards of a sharded model; it steps them in place from now on.

    Parameter groups and their options are kept one by one. ``step()`` first reduces gradients that ``no_sync`` left, and
    lets the next forward see the new values; ``zero_grad()`` also drops gradients that were not reduced yet.

    Args:
        optimizer: elementwise torch optimizer, built on the parameters of the module before it was sharded (parameters
            of other modules may be among them) or on the sharded ones. It must not have stepped yet.
        model: what ``fully_shard_model`` returned.
        plain_shards: hand it this rank's rows as plain tensors and not as DTensors, which optimizers with kernels of their own do not
            know; they share memory. None does so for optimizers of Transformer Engine and Apex.

    Returns:
        The same optimizer.

    Raises:
        ValueError: it has state already, is not elementwise, or knows no parameter of the model; gradients are wider than parameters.
    """
    if optimizer.state:
        raise ValueError("optimizer has state for unsharded parameters; call fully_shard before the first step, then load the state")
    if type(optimizer).__name__ in _WHOLE_TENSOR_OPTIMIZERS:
        raise ValueError(f"optimizer={type(optimizer).__name__} is not elementwise and cannot step shards; use AdamW, Adam, SGD or similar")
    runtime = model.runtime
    for managed in runtime.groups:
        if managed.trainable and managed.grad_dtype != managed.main.dtype:
            raise ValueError(
                f"main_grads_dtype={managed.grad_dtype} differs from the main parameters' {managed.main.dtype}, and torch's optimizers "
                "want one dtype; leave it None, or step flat_shards() by an optimizer of your own"
            )
    plain = type(optimizer).__module__.startswith(_PLAIN_PACKAGES) if plain_shards is None else plain_shards
    sharded: dict[int, nn.Parameter] = {}
    for parameter in runtime.parameters:
        stepped = parameter.sharded
        if plain:
            rows = local(parameter.sharded.detach())
            stepped = model.plain_shards.setdefault(parameter.name, nn.Parameter(rows, requires_grad=parameter.sharded.requires_grad))
        sharded[id(parameter.original)] = sharded[id(parameter.full)] = sharded[id(parameter.sharded)] = stepped
    found = False
    for group in optimizer.param_groups:
        found |= any(id(parameter) in sharded for parameter in group["params"])
        group["params"] = [sharded.get(id(parameter), parameter) for parameter in group["params"]]
    if not found:
        raise ValueError("optimizer holds none of the module's parameters; build it from module.parameters()")

    def before_step(*_: Any) -> None:
        runtime.finish_grad_sync()
        for parameter in runtime.parameters:
            if plain and parameter.sharded.grad is not None:
                model.plain_shards[parameter.name].grad = local(parameter.sharded.grad)

    def after_step(*_: Any) -> None:
        runtime.mark_stale()
        for shard in model.plain_shards.values():
            shard.grad = None

    optimizer.register_step_pre_hook(before_step)
    optimizer.register_step_post_hook(after_step)
    runtime.refresh_after_backward = False
    zero_grad = optimizer.zero_grad

    @functools.wraps(zero_grad)
    def zero_grad_and_buffers(set_to_none: bool = True) -> None:
        runtime.drop_unreduced()
        zero_grad(set_to_none)
        if plain:
            model.zero_grad(set_to_none)

    optimizer.zero_grad = zero_grad_and_buffers  # type: ignore[method-assign]
    return optimizer


def gradient_norm(model: "MegatronFSDP", norm_type: float = 2.0) -> torch.Tensor:
    """Norm of all reduced gradients as one vector; every parameter counts once, on every rank the same.

    Returns:
        A scalar, float32 (float64 if any gradient is).

    Raises:
        ValueError: ``norm_type`` is not positive.
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type={norm_type} must be positive")
    groups = list(model.runtime.groups)
    dtype = functools.reduce(torch.promote_types, (group.grad_dtype for group in groups), torch.float32)
    total = torch.zeros((), dtype=dtype, device=groups[0].device)
    # Gradients cut over the same ranks, whose squares add up over them.
    cuts: dict[tuple[str, ...], tuple[list[Ranks], list[torch.Tensor]]] = {}
    for group in groups:
        for parameter in group.parameters:
            topology = group.topology
            ranks = [topology.shards, topology.outer, *(topology.model_ranks(axis) for axis, _ in parameter.place.part.cuts)]
            ranks = [one for one in ranks if one.size > 1]
            _, gradients = cuts.setdefault(tuple(one.name for one in ranks), (ranks, []))
            if parameter.sharded.grad is not None:
                gradients.append(local(parameter.sharded.grad))
    for ranks, gradients in cuts.values():
        norm = _vector_norm(gradients, norm_type, dtype, total.device)
        if norm_type == float("inf"):
            for one in ranks:
                norm = one.all_reduce(norm, "max")
            total = torch.maximum(total, norm)
            continue
        power = norm**norm_type
        for one in ranks:
            power = one.all_reduce(power)
        total = total + power
    return total if norm_type == float("inf") else total ** (1 / norm_type)


def clip_gradients(model: "MegatronFSDP", max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Scale all reduced gradients so that their norm is at most ``max_norm``; return the norm before."""
    norm = gradient_norm(model, norm_type)
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parameter in model.runtime.parameters:
        if parameter.sharded.grad is not None:
            local(parameter.sharded.grad).mul_(scale)
    return norm


def _vector_norm(gradients: list[torch.Tensor], norm_type: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    # The infinity norm of nothing is undefined in torch, and zero here.
    norms = [torch.linalg.vector_norm(gradient, norm_type, dtype=dtype) for gradient in gradients if gradient.numel()]
    return torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.zeros((), dtype=dtype, device=device)
