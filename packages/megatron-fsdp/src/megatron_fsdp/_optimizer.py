# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Letting any torch optimizer step the shards."""

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from megatron_fsdp._uneven import local

if TYPE_CHECKING:
    from megatron_fsdp._fully_shard import MegatronFSDP

# Rules that mix rows or look at a whole matrix: torch would apply them to chunks that are not where it thinks.
_WHOLE_TENSOR_OPTIMIZERS = ("Adafactor", "LBFGS", "Muon", "Shampoo")


def fully_shard_optimizer(optimizer: torch.optim.Optimizer, model: "MegatronFSDP") -> torch.optim.Optimizer:
    """Point an optimizer at the shards of a sharded model; it steps them in place from now on.

    Parameter groups and their options are kept one by one. ``step()`` first reduces gradients that ``no_sync`` left, and
    lets the next forward see the new values; ``zero_grad()`` also drops gradients that were not reduced yet.

    Args:
        optimizer: elementwise torch optimizer, built on the parameters of the module before it was sharded (parameters
            of other modules may be among them) or on the sharded ones. It must not have stepped yet.
        model: what ``fully_shard_model`` returned.

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
    sharded: dict[int, nn.Parameter] = {}
    for parameter in runtime.parameters:
        sharded[id(parameter.original)] = sharded[id(parameter.full)] = sharded[id(parameter.sharded)] = parameter.sharded
    found = False
    for group in optimizer.param_groups:
        found |= any(id(parameter) in sharded for parameter in group["params"])
        group["params"] = [sharded.get(id(parameter), parameter) for parameter in group["params"]]
    if not found:
        raise ValueError("optimizer holds none of the module's parameters; build it from module.parameters()")

    def before_step(*_: Any) -> None:
        runtime.finish_grad_sync()

    def after_step(*_: Any) -> None:
        runtime.mark_stale()

    optimizer.register_step_pre_hook(before_step)
    optimizer.register_step_post_hook(after_step)
    runtime.refresh_after_backward = False
    zero_grad = optimizer.zero_grad

    @functools.wraps(zero_grad)
    def zero_grad_and_buffers(set_to_none: bool = True) -> None:
        runtime.drop_unreduced()
        zero_grad(set_to_none)

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
    runtime = model.runtime
    device = next(runtime.groups).device
    dtype = functools.reduce(torch.promote_types, (group.grad_dtype for group in runtime.groups), torch.float32)
    divided, replicated = (_vector_norm(_local_gradients(model, divided=choice), norm_type, dtype, device) for choice in (True, False))
    shards = runtime.topology.shards
    if norm_type == float("inf"):
        return torch.maximum(shards.all_reduce(divided, "max"), replicated)
    return (shards.all_reduce(divided**norm_type) + replicated**norm_type) ** (1 / norm_type)


def clip_gradients(model: "MegatronFSDP", max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Scale all reduced gradients so that their norm is at most ``max_norm``; return the norm before."""
    norm = gradient_norm(model, norm_type)
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for choice in (True, False):
        for gradient in _local_gradients(model, divided=choice):
            gradient.mul_(scale)
    return norm


def _vector_norm(gradients: list[torch.Tensor], norm_type: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    # The infinity norm of nothing is undefined in torch, and zero here.
    norms = [torch.linalg.vector_norm(gradient, norm_type, dtype=dtype) for gradient in gradients if gradient.numel()]
    return torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.zeros((), dtype=dtype, device=device)


def _local_gradients(model: "MegatronFSDP", *, divided: bool) -> list[torch.Tensor]:
    """Local parts of the gradients that are divided among ranks, or of those that every rank has whole."""
    return [
        local(parameter.sharded.grad)
        for parameter in model.runtime.parameters
        if parameter.sharded.grad is not None and (parameter.place.layout.num_shards > 1) is divided
    ]
