# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A checkpoint of ours as one of theirs."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from mcore_ckpt._core import CheckpointReader, DeferredTensor, SaveOptions, asset_sources, check_files, is_checkpoint, run_save
from mcore_ckpt._errors import CheckpointingException
from mcore_ckpt._formats import Place, write_objects
from mcore_ckpt._storage import Folder, WatchedFolder, dtype_of, open_folder
from mcore_ckpt.chunks import Box
from mcore_ckpt.megatron._args import args_of
from mcore_ckpt.megatron._fsdp_dtensor import fsdp_groups, fsdp_tensors, precision_of, write_values
from mcore_ckpt.megatron._names import LAYERS, their_name, their_shape
from mcore_ckpt.megatron._source import common_groups, make_groups

__all__ = ["EXPORT_FORMATS", "export_checkpoint_megatron"]

EXPORT_FORMATS = ("torch_dist", "fsdp_dtensor")
"""What `export_checkpoint_megatron` writes."""

_KINDS = {"master": "param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
_STATE = "optimizer.state."


def export_checkpoint_megatron(
    checkpoint: str | Path | Folder,
    output: str | Path | Folder,
    *,
    format: str = "torch_dist",
    prefix: str = "model.",
    optimizer: bool = True,
    optimizer_config: Mapping[str, Any] | None = None,
    verify: bool = True,
    on_bytes: Callable[[int], None] | None = None,
) -> list[str]:
    """Write a GPT model's checkpoint with Megatron's names: as its ``torch_dist`` or, for Megatron-FSDP, its ``fsdp_dtensor``.

    In ``torch_dist`` layers are stacked and optimizer state is ``fully_reshardable``; settings and the iteration go into ``common.pt``,
    which both generations read. In ``fsdp_dtensor`` layers and experts are apart, a gate is apart from its values, masters are in the
    place of their 16-bit weights, and each plain value is an entry. Settings come from ``extra``: those of the model from "config"; the
    optimizer's parameter groups from "optimizer_param_groups", which an import keeps, or made from "optimizer_config" and
    ``optimizer_config``; the schedule's state from "opt_param_scheduler". Host memory holds one tensor of one layer at a time. Not
    collective.

    Args:
        checkpoint: a committed checkpoint.
        output: where to write, as for `mcore_ckpt.save`.
        format: "torch_dist" or "fsdp_dtensor".
        prefix: what precedes the names of the model's weights.
        optimizer: also write the optimizer's state.
        optimizer_config: makes the parameter groups anew: "lr", and "min_lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps" and
            "decoupled_weight_decay" where they differ from what the checkpoint says ("optimizer_config" in ``extra``), or else from the
            defaults of `mcore_parallel.optim.OptimizerConfig`; groups are told apart by these numbers there, so they must be those of the
            run that reads them. "expert_model_parallel_size": 1 where that run keeps all experts on each rank.
        verify: compare the SHA-256 of every file first.
        on_bytes: told of bytes as they are compared and as they are written.

    Returns:
        Names of tensors that have no place there, and were left out; "optimizer_param_groups" where there is optimizer state and nothing
        says what its groups are, without which it does not load there.

    Raises:
        CheckpointingException: ``checkpoint`` is none, or damaged; ``output`` holds one; no layer has a name there; a tensor is in a
            floating-point format of one byte, whose scales have no place there; parameter groups of which none, or several, can be that of
            a weight.
        ValueError: another ``format``; a config that they cannot express; an ``optimizer_config`` without lr, or with what these groups
            cannot express.
    """
    if format not in EXPORT_FORMATS:
        raise ValueError(f"format={format!r} is not written; the formats of an export are: {', '.join(EXPORT_FORMATS)}")
    reader, target = CheckpointReader(checkpoint), open_folder(output)
    if is_checkpoint(target):
        raise CheckpointingException(f"{target} already holds a checkpoint; choose another folder or remove it first")
    if verify:
        seen = reader.folder if on_bytes is None else WatchedFolder(reader.folder, on_bytes)
        check_files(seen, reader.manifest, sorted(reader.manifest.files))
    keys, left = _keys(reader, prefix, optimizer=optimizer)
    if not any(name.startswith(f"{prefix}layers.") for name in keys):
        raise CheckpointingException(
            f"{reader.folder} holds no layers of a GPT model ({prefix}layers.*), and only these have names there; export a run with "
            "spans=none, or give the prefix of its weights"
        )
    for name in map(_stored, keys):
        dtype = reader.record(name).torch_dtype
        if dtype.is_floating_point and dtype.itemsize == 1:
            raise CheckpointingException(
                f"{name} is in {dtype}, a format whose scales are no part of it; export the weights as they were before rounding"
            )
    extra = reader.manifest.extra
    config = extra.get("config")
    common: dict[str, Any] = {"checkpoint_version": 3.0, "iteration": _iteration(extra)}
    common["args"] = args_of(config) if isinstance(config, Mapping) else {}
    groups, step = [], int(extra.get("optimizer_step") or 0)
    if any(key.startswith(_STATE) for key in keys.values()):
        groups = _groups(extra, optimizer_config, experts=any(".mlp.experts." in key for key in keys.values()))
        if not groups:
            left = [*left, "optimizer_param_groups"]
        if isinstance(extra.get("opt_param_scheduler"), Mapping):
            common["opt_param_scheduler"] = dict(extra["opt_param_scheduler"])
        elif "optimizer_config" in extra:
            left = [*left, "opt_param_scheduler"]
    if format == "torch_dist":
        state, values = _dist(reader, target, keys, common, groups, step), {}
    else:
        state, values = _fsdp(reader, target, keys, common, groups, step)
    place = target if on_bytes is None else WatchedFolder(target, on_bytes)
    options = SaveOptions(format=format, assets=asset_sources(reader.folder, reader.manifest), values=values)
    run_save(state, place, {}, None, options)
    return left


def _dist(
    reader: CheckpointReader, target: Folder, keys: Mapping[str, str], common: dict[str, Any], groups: Sequence[Any], step: int
) -> dict[str, Any]:
    """Write ``common.pt``; the tensors, of all layers stacked."""
    state = _stacked(reader, keys)
    kinds = {"distrib_optim_sharding_type": "fully_reshardable", "singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    kinds["non_homogeneous_layers"] = bool(_mixtures(keys))
    common = {**common, "args": argparse.Namespace(**common["args"]), "content_metadata": kinds}
    if any(key.startswith(_STATE) for key in keys.values()):
        common["optimizer_step"] = step
    if groups:
        common["optimizer"] = common_groups(groups, step)
    target.create()
    target.write("common.pt", [memoryview(write_objects(common))])
    return state


def _fsdp(
    reader: CheckpointReader, target: Folder, keys: Mapping[str, str], common: dict[str, Any], groups: Sequence[Any], step: int
) -> tuple[dict[str, Any], dict[str, Place]]:
    """Write the plain values; the tensors, and where the values lie."""
    weights: dict[str, str] = {}
    states: dict[tuple[str, str], str] = {}
    for name, key in keys.items():
        if not key.startswith(_STATE):
            weights[key] = name
        elif name == _stored(name):
            # What has a name of its own: a weight of 32 bits is its own master here and there.
            kind, _, rest = key.removeprefix(_STATE).partition(".")
            states[kind, rest] = name
    state = fsdp_tensors(reader, weights, states, step)
    values = {key: value for key, value in common.items() if key != "opt_param_scheduler"}
    values["args"] = argparse.Namespace(**{**common["args"], **precision_of(reader, list(weights.values()))})
    values |= {f"opt_param_scheduler.{key}": value for key, value in common.get("opt_param_scheduler", {}).items()}
    if groups:
        values |= fsdp_groups(groups, {key: reader.record(name).shape for key, name in weights.items()}, step)
    target.create()
    return state, write_values(target, values)


def _groups(extra: Mapping[str, Any], config: Mapping[str, Any] | None, *, experts: bool) -> list[Any]:
    """Parameter groups: those of an import, or made from what a run and ``config`` say; empty where nothing says enough."""
    stored = extra.get("optimizer_config")
    settings = dict(stored) if isinstance(stored, Mapping) else {}
    if config is None:
        if groups := extra.get("optimizer_param_groups"):
            return groups
        try:
            groups = make_groups(settings, experts=experts)
        except (TypeError, ValueError):
            return []
    else:
        groups = make_groups({**settings, **config}, experts=experts)
    rate = extra.get("learning_rate")
    if type(rate) is float and "lr" not in (config or {}):
        groups = [{**group, "lr": rate} for group in groups]
    return groups


def _iteration(extra: Mapping[str, Any]) -> int:
    trainer = extra.get("trainer")
    candidates = (extra.get("iteration"), extra.get("step"), trainer.get("step") if isinstance(trainer, Mapping) else None)
    return next((int(value) for value in candidates if value), 0)


def _keys(reader: CheckpointReader, prefix: str, *, optimizer: bool) -> tuple[dict[str, str], list[str]]:
    """Their per-layer key, with what precedes it, by our name; names without one."""
    names, keys, left = set(reader.manifest.tensors), {}, []
    for name in sorted(names):
        before, ours = "", name.removeprefix(prefix)
        first, _, rest = name.removeprefix("optimizer.").partition(".")
        if name.startswith("optimizer.") and first in _KINDS:
            if not optimizer:
                continue
            before, ours = f"{_STATE}{_KINDS[first]}.", rest
        elif not name.startswith(prefix):
            left.append(name)
            continue
        layer = ours.partition(".")[2].partition(".")[0]
        experts = f"{prefix}layers.{layer}.mlp.router.weight" in names
        latent = f"{prefix}layers.{layer}.attention.kv_down.weight" in names
        key = their_name(ours, experts=experts, latent=latent)
        if key is None:
            left.append(name)
            continue
        keys[name] = before + key
        if optimizer and not before and f"optimizer.exp_avg.{ours}" in names and f"optimizer.master.{ours}" not in names:
            # A weight of 32 bits is its own master here, and has one there.
            keys[f"{name}\0master"] = f"{_STATE}param.{key}"
    return keys, left


def _stacked(reader: CheckpointReader, keys: Mapping[str, str]) -> dict[str, Any]:
    """Their tensors: what each layer has becomes one, a part for each layer."""
    layers: dict[str, dict[int, str]] = {}
    state: dict[str, Any] = {}
    for name, key in keys.items():
        before, separator, after = key.partition(LAYERS)
        number, _, part = after.partition(".")
        if separator and number.isdigit():
            layers.setdefault(f"{before}{LAYERS}{part}", {})[int(number)] = name
        else:
            state[key] = [_part(reader, name, None, 0)]
    count = 1 + max((number for names in layers.values() for number in names), default=-1)
    mixtures = _mixtures(keys)
    for key, names in layers.items():
        if mixtures and set(names) in ({*range(count)}, mixtures, {*range(count)} - mixtures):
            # Layers of two kinds are apart, all of them.
            before, _, part = key.partition(LAYERS)
            state |= {f"{before}{LAYERS}{number}.{part}": [_part(reader, name, None, 0)] for number, name in names.items()}
        elif not mixtures and len(names) == count and len({reader.record(_stored(name)).shape for name in names.values()}) == 1:
            state[key] = [_part(reader, name, number, count) for number, name in sorted(names.items())]
        else:
            raise CheckpointingException(f"{key}: only the layers {sorted(names)} of {count} have it; a stack of layers alike is expected")
    return state


def _mixtures(keys: Mapping[str, str]) -> set[int]:
    """Numbers of the layers with experts where others have none; empty where all layers are of one kind."""
    theirs = {key for key in keys.values() if key.startswith(LAYERS)}
    layers = {key.removeprefix(LAYERS).partition(".")[0] for key in theirs}
    mixtures = {number for number in layers if f"{LAYERS}{number}.mlp.router.weight" in theirs}
    return set() if mixtures == layers else {int(number) for number in mixtures}


def _stored(name: str) -> str:
    return name.partition("\0")[0]


def _part(reader: CheckpointReader, name: str, layer: int | None, count: int) -> DeferredTensor:
    stored = _stored(name)
    record = reader.record(stored)
    shape = their_shape(stored, record.shape)
    if layer is None:
        return DeferredTensor(dtype_of(record.dtype), shape, partial(_read, reader, stored, shape))
    box = Box((layer, *(0 for _ in shape)), (1, *shape))
    return DeferredTensor(dtype_of(record.dtype), (count, *shape), partial(_read, reader, stored, box.shape), part=box)


def _read(reader: CheckpointReader, name: str, shape: Sequence[int]) -> Tensor:
    return reader.read(name).reshape(tuple(shape))
