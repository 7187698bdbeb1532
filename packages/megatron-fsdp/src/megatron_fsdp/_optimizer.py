# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Letting any torch optimizer step the shards."""

import functools
from typing import Any

import torch
from torch import nn

from megatron_fsdp._module import MegatronFSDP
from megatron_fsdp._parameters import ManagedParameter, as_dtensor, local
from megatron_fsdp._state_dict import forget_initial_state

# Rules that mix rows, and keep state that does not lie as the parameter does.
_WHOLE_TENSOR_OPTIMIZERS = ("Adafactor", "LBFGS", "Shampoo")
# Rules that look at one whole matrix at a time, and keep state of its shape.
_MATRIX_OPTIMIZERS = ("Muon",)

# Rules written with operators that DTensors lack.
_PLAIN_OPTIMIZERS = ("Adagrad", "Rprop")
# Packages whose kernels take the memory of a tensor as it is.
_PLAIN_PACKAGES = ("transformer_engine", "apex")


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Refuse what cannot step the shards of any model, before one is sharded for it.

    Raises:
        TypeError: it is no optimizer of torch.
        ValueError: it has stepped already, or is not elementwise.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer is a {type(optimizer).__name__}; pass a torch.optim.Optimizer, or step flat_shards() by one of another kind"
        )
    if any(not (isinstance(entries, dict) and entries.get("step", 1) == 0) for entries in optimizer.state.values()):
        raise ValueError("optimizer has state for unsharded parameters; call fully_shard before the first step, then load the state")
    if type(optimizer).__name__ in _WHOLE_TENSOR_OPTIMIZERS:
        raise ValueError(f"optimizer={type(optimizer).__name__} is not elementwise and cannot step shards; use AdamW, Adam, SGD or similar")


def fully_shard_optimizer(
    optimizer: torch.optim.Optimizer, model: MegatronFSDP, *, plain_shards: bool | None = None
) -> torch.optim.Optimizer:
    """Point an optimizer at the shards of a sharded model; it steps them in place from now on.

    Parameter groups and their options are kept one by one. ``step()`` first reduces gradients that ``no_sync`` left, and
    lets the next forward see the new values; ``zero_grad()`` also drops gradients that were not reduced yet.

    Args:
        optimizer: elementwise torch optimizer or Muon, built on the parameters of the module before it was sharded (parameters
            of other modules may be among them) or on the sharded ones. It must not have stepped yet; state that it has all the same
            (Adagrad) is divided. Several may share a model.
        model: what ``fully_shard_model`` returned.
        plain_shards: hand it this rank's rows as plain tensors and not as DTensors, which optimizers with kernels of their own do not
            know; they share memory. None does so for optimizers of Transformer Engine and Apex, Adagrad and Rprop. Muon always gets
            them, and only of parameters that lie whole on a rank (``TensorAtomic``).

    Returns:
        The same optimizer.

    Raises:
        TypeError: one of the two is something else.
        ValueError: it has stepped already, is not elementwise, is Muon with a parameter that is divided, or knows none of the model;
            gradients are wider than parameters.
    """
    check_optimizer(optimizer)
    if not isinstance(model, MegatronFSDP):
        raise TypeError(f"model is a {type(model).__name__}; pass what fully_shard_model returned")
    runtime = model.runtime
    for managed in runtime.groups:
        if managed.trainable and managed.gradients.dtype != managed.main.dtype:
            raise ValueError(
                f"main_grads_dtype={managed.gradients.dtype} differs from the main parameters' {managed.main.dtype}, and torch's "
                "optimizers want one dtype; leave it None, or step flat_shards() by an optimizer of your own"
            )
    whole = type(optimizer).__name__ in _MATRIX_OPTIMIZERS
    foreign = type(optimizer).__module__.startswith(_PLAIN_PACKAGES) or type(optimizer).__name__ in _PLAIN_OPTIMIZERS
    plain = whole or (foreign if plain_shards is None else plain_shards)
    forms = ((form, item) for item in runtime.parameters for form in (item.original, item.full, item.sharded) if form is not None)
    managed_by_id = {id(form): item for form, item in forms}
    stepped_here: list[ManagedParameter] = []
    for group in optimizer.param_groups:
        pairs = [(parameter, managed_by_id.get(id(parameter))) for parameter in group["params"]]
        stepped_here += [item for _, item in pairs if item is not None]
        for item in stepped_here if whole else ():
            if not item.place.is_whole:
                raise ValueError(
                    f"optimizer={type(optimizer).__name__} looks at whole matrices and {item.name!r} is divided; "
                    f"set shard_placements={{{item.name!r}: TensorAtomic()}}, or step it by AdamW"
                )
        group["params"] = [parameter if item is None else _stepped(runtime.plain_shards, item, plain=plain) for parameter, item in pairs]
        for (parameter, item), stepped in zip(pairs, group["params"], strict=True):
            if item is not None and stepped is not parameter and parameter in optimizer.state:
                optimizer.state[stepped] = _divided(item, parameter, stepped, optimizer.state.pop(parameter))
    if not stepped_here:
        raise ValueError("optimizer holds none of the module's parameters; build it from module.parameters()")

    def before_step(*_: Any) -> None:
        forget_initial_state(runtime, optimizer)
        runtime.finish_grad_sync()
        runtime.settle()
        for item in stepped_here if plain else ():
            if item.sharded.grad is not None:
                runtime.plain_shards[item.name].grad = local(item.sharded.grad)

    def after_step(*_: Any) -> None:
        runtime.mark_stale()
        for item in stepped_here if plain else ():
            runtime.plain_shards[item.name].grad = None

    optimizer.register_step_pre_hook(before_step)
    optimizer.register_step_post_hook(after_step)
    runtime.refresh_after_backward = False
    zero_grad = optimizer.zero_grad

    @functools.wraps(zero_grad)
    def zero_grad_and_buffers(set_to_none: bool = True) -> None:
        runtime.drop_unreduced()
        zero_grad(set_to_none)
        for item in stepped_here if plain else ():
            item.sharded.grad = None
        for managed in runtime.groups:
            managed.gradients.release()

    optimizer.zero_grad = zero_grad_and_buffers  # type: ignore[method-assign]
    return optimizer


def _stepped(plain_shards: dict[str, nn.Parameter], item: ManagedParameter, *, plain: bool) -> nn.Parameter:
    """What an optimizer steps for a parameter."""
    if not plain:
        return item.sharded
    rows = local(item.sharded.detach())
    return plain_shards.setdefault(item.name, nn.Parameter(rows, requires_grad=item.sharded.requires_grad))


def _divided(item: ManagedParameter, parameter: nn.Parameter, stepped: nn.Parameter, entries: dict[str, Any]) -> dict[str, Any]:
    """State that an optimizer made for a parameter, whole or sharded, for what it steps instead."""
    divided = {}
    for key, value in entries.items():
        if key != "step" and isinstance(value, torch.Tensor) and local(value).shape == local(parameter).shape:
            if value.is_meta:
                raise ValueError(
                    f"optimizer has state for {item.name!r} on the meta device; "
                    "build it from the sharded parameters, after fully_shard_model"
                )
            rows = local(value) if parameter is item.sharded else item.place.cut_own(local(value))
            rows = rows.to(local(stepped.detach()))
            value = rows if as_dtensor(stepped) is None else item.place.wrap(rows)
        divided[key] = value
    return divided
