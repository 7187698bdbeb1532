# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Sharded and whole state: what a checkpoint is made of."""

import ctypes
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_fsdp._layout import Shape
from megatron_fsdp._parameters import ManagedParameter, Place, as_dtensor, local
from megatron_fsdp._runtime import Runtime

_SAFETENSORS_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


# State of torch's optimizers that is one number for a parameter of any shape.
_COUNTERS = frozenset({"eta", "mu", "mu_product", "step"})


def safetensors_header(entries: Sequence[tuple[str, torch.dtype, Shape]]) -> bytes:
    """What the file begins with: the length of a JSON text in 8 bytes, little end first, and the text, padded to 8 bytes.

    Raises:
        ValueError: a dtype that the format lacks.
    """
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, dtype, shape in entries:
        if dtype not in _SAFETENSORS_NAMES:
            raise ValueError(f"{name!r} has dtype {dtype}, which safetensors lacks; give a dtype of {sorted(map(str, _SAFETENSORS_NAMES))}")
        end = begin + torch.Size(shape).numel() * dtype.itemsize
        table[name] = {"dtype": _SAFETENSORS_NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_safetensors(path: Path, entries: Sequence[tuple[str, torch.dtype, Shape]], tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Write ``tensors`` (on the CPU, as ``entries`` announce them, in their order); the file appears when it is complete."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(safetensors_header(entries))
        for (name, tensor), (announced, dtype, shape) in zip(tensors, entries, strict=True):
            assert (name, tensor.dtype, tuple(tensor.shape)) == (announced, dtype, tuple(shape)), "the stream follows its announcement"
            tensor = tensor.contiguous()
            # The memory itself: numpy may be missing, and lacks some dtypes.
            file.write((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()) if tensor.numel() else b"")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def model_state_dict(runtime: Runtime, state: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Replace managed entries of a plain state dict by shards that share memory with the main parameters."""
    for name, parameter in _by_name(runtime).items():
        if prefix + name in state:
            state[prefix + name] = parameter.place.wrap(local(parameter.sharded.detach()))
    return state


def load_parameter(parameter: ManagedParameter, value: torch.Tensor, name: str) -> None:
    """Copy a value into the shard; it may be a shard of the same layout, any DTensor, or a whole plain tensor.

    Raises:
        ValueError: the shape is not the parameter's.
    """
    place = parameter.place
    target = local(parameter.sharded.detach())
    dtensor = as_dtensor(value)
    if dtensor is not None:
        target.copy_(place.rows_of(name, dtensor))
        return
    if tuple(value.shape) != place.shape:
        raise ValueError(f"{name!r} has shape {tuple(value.shape)} in the state dict and {place.shape} in the module")
    target.copy_(place.cut(value))


def full_state(runtime: Runtime, *, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Stream whole main parameters to the CPU of every rank, one at a time. A collective: every rank must exhaust it.

    A tied parameter comes once for each of its names.
    """
    for parameter in runtime.parameters:
        full = parameter.place.gather(local(parameter.sharded)).to("cpu", dtype if parameter.sharded.is_floating_point() else None)
        for name in parameter.names:
            yield name, full


def optimizer_state_dict(runtime: Runtime, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """State of an optimizer by parameter name.

    Returns:
        ``{"state": {name: {"exp_avg": shard, ..., "step": tensor}}, "param_groups": {name: {"lr": ...}}}``; shards share memory with
        the optimizer, and torch's distributed checkpoint saves and loads them in any layout.
    """
    state: dict[str, dict[str, Any]] = {}
    options: dict[str, dict[str, Any]] = {}
    by_id = _by_stepped(runtime)
    for group in optimizer.param_groups:
        for sharded in group["params"]:
            parameter = by_id.get(id(sharded))
            if parameter is None:
                continue
            options[parameter.name] = {key: value for key, value in group.items() if key != "params"}
            if sharded in optimizer.state:
                plain = parameter.name in runtime.plain_shards
                entries = optimizer.state[sharded].items()
                state[parameter.name] = {key: _shard_like(parameter.place, value, plain=plain) for key, value in entries}
    return {"state": state, "param_groups": options}


def load_optimizer_state(runtime: Runtime, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load what ``optimizer_state_dict`` returned, in any layout whose tensors were filled in; options are loaded group by group.

    Raises:
        ValueError: the state lacks a parameter of the optimizer, or two parameters of a group disagree on an option.
    """
    by_id = _by_stepped(runtime)
    runtime.initial_states.pop(optimizer, None)
    for group in optimizer.param_groups:
        options: dict[str, Any] = {}
        for sharded in group["params"]:
            parameter = by_id.get(id(sharded))
            if parameter is None:
                continue
            if parameter.name not in state["param_groups"]:
                raise ValueError(f"the optimizer state has no entry for {parameter.name!r}; it has {sorted(state['param_groups'])[:5]}...")
            for key, value in state["param_groups"][parameter.name].items():
                if options.setdefault(key, value) != value:
                    raise ValueError(
                        f"{parameter.name!r} has {key}={value} but its group has {options[key]}; build the groups as they were saved"
                    )
            for key, value in state["state"].get(parameter.name, {}).items():
                optimizer.state[sharded][key] = _load_entry(parameter, sharded, key, optimizer.state[sharded].get(key), value)
        group.update(options)


def initialize_optimizer_state(runtime: Runtime, optimizer: torch.optim.Optimizer) -> None:
    """Let optimizer state exist before the first step, so that a checkpoint can be loaded into it: parameters keep their values.

    Takes one step on zero gradients with zero learning rate and weight decay, and sets step counters back to zero. What nobody loads into
    is forgotten by the first step (``forget_initial_state``), for some rules begin otherwise than with zeros.
    """
    gradients = [(item.sharded, item.sharded.grad) for item in runtime.parameters]
    for sharded, _ in gradients:
        sharded.grad = None
    saved = [{key: group[key] for key in ("lr", "weight_decay") if key in group} for group in optimizer.param_groups]
    touched = []
    for group in optimizer.param_groups:
        for key in ("lr", "weight_decay"):
            if key in group:
                group[key] = torch.zeros_like(group[key]) if isinstance(group[key], torch.Tensor) else 0.0
        for parameter in group["params"]:
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
                touched.append(parameter)
    optimizer.step()
    for group, values in zip(optimizer.param_groups, saved, strict=True):
        group.update(values)
    for parameter in touched:
        parameter.grad = None
    for sharded, gradient in gradients:
        sharded.grad = gradient
    for entries in optimizer.state.values():
        if isinstance(entries.get("step"), torch.Tensor):
            entries["step"].zero_()
        elif "step" in entries:
            entries["step"] = 0
    runtime.initial_states[optimizer] = {parameter: _extremes(entries) for parameter, entries in optimizer.state.items()}


def forget_initial_state(runtime: Runtime, optimizer: torch.optim.Optimizer) -> None:
    """Before the first step: drop what ``initialize_optimizer_state`` made and nothing was loaded into."""
    for parameter, extremes in runtime.initial_states.pop(optimizer, {}).items():
        if _extremes(optimizer.state[parameter]) == extremes:
            del optimizer.state[parameter]


def _extremes(entries: Mapping[str, Any]) -> dict[str, Any]:
    """The state of one parameter in so few numbers that a change of it shows, as it does in state that is all zeros."""
    tensors = {key: local(value.detach()) for key, value in entries.items() if isinstance(value, torch.Tensor)}
    ranges = {key: (value.amin().item(), value.amax().item()) for key, value in tensors.items() if value.numel()}
    return ranges | {key: value for key, value in entries.items() if key not in tensors}


def _shard_like(place: Place, value: Any, *, plain: bool) -> Any:
    """The state as it lies in the whole; a step count has no place in it, and neither dimensions nor a mesh."""
    if not isinstance(value, torch.Tensor) or local(value).shape != place.local_shape:
        return value
    divided = as_dtensor(value) is not None or place.topology.mesh is None or (plain and value.ndim > 0)
    return place.wrap(local(value)) if divided else value


def _load_entry(parameter: ManagedParameter, stepped: torch.Tensor, key: str, current: Any, value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    dtensor = as_dtensor(value)
    if dtensor is not None:
        rows = parameter.place.rows_of(parameter.name, dtensor)
    elif tuple(value.shape) == parameter.place.shape and (value.ndim > 0 or key not in _COUNTERS):
        rows = parameter.place.cut(value)
    else:
        return value.clone() if current is None or not isinstance(current, torch.Tensor) else current.copy_(value)
    if isinstance(current, torch.Tensor):
        local(current).copy_(rows)
        return current
    rows = rows.clone().to(local(stepped).device)
    return rows if as_dtensor(stepped) is None else parameter.place.wrap(rows)


def _by_stepped(runtime: Runtime) -> dict[int, ManagedParameter]:
    """Managed parameters by the identity of what an optimizer steps for them."""
    plain = runtime.plain_shards
    return {id(plain.get(parameter.name, parameter.sharded)): parameter for parameter in runtime.parameters}


def _by_name(runtime: Runtime) -> dict[str, ManagedParameter]:
    return {name: parameter for parameter in runtime.parameters for name in parameter.names}
