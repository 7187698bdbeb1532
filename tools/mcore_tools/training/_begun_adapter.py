# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""An adapter in PEFT's format that a run begins with, beside the weights of its base model."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mcore_ckpt import CheckpointManager
from mcore_ckpt.hf import HFAdapter, import_adapter_hf
from mcore_ckpt.manifest import read_manifest
from mcore_ckpt.storage import Folder
from mcore_parallel import ProcessGroups
from mcore_parallel.tensor_parallel import LoraConfig, add_lora
from mcore_tools.assembly import build_model
from mcore_tools.recipes import LoadConfig, RunConfig, override
from mcore_tools.training._conversion import fill_parts
from mcore_tools.training._pretrained import HuggingFaceFolder
from mcore_tools.training._start import find_base
from mcore_tools.training._stored import stored_model


def with_adapter(config: RunConfig, assignments: Sequence[str]) -> RunConfig:
    """``config`` with the ``lora`` of the adapter in ``load.adapter``, so that ``assignments`` need not say it; without one as it is.

    Args:
        config: a run, before ``assignments`` change it.
        assignments: ``path=value``, of which those of ``load`` are looked at.

    Raises:
        ValueError: the base model does not say what it is, or a field of ``load`` is wrong.
        CheckpointingException: of ``read_adapter``.
    """
    ours = [one for one in assignments if one.strip().startswith("load.")]
    named = config.load.adapter or any(one.partition("=")[0].strip() == "load.adapter" for one in ours)
    if not named or config.lora is not None:
        return config
    load = override(config, ours).load
    if not load.adapter:
        return config
    settings, tensors = read_adapter(load)
    stored = stored_model(_base(load))
    assert stored is not None, "read_adapter has its sizes"
    model = build_model(RunConfig(model=stored[0], moe=stored[1]), ProcessGroups.single(), "meta")
    layers = _layers(tensors)
    # The last names, where they name the same layers.
    ends = tuple(sorted({name.rpartition(".")[2] for name in layers}))
    lora = LoraConfig(rank=settings.rank, alpha=settings.alpha, dropout=settings.dropout, targets=ends)
    if set(add_lora(model, lora, ProcessGroups.single())) != layers:
        lora = dataclasses.replace(lora, targets=tuple(sorted(layers)))
    return dataclasses.replace(config, load=load, lora=lora)


def read_adapter(load: LoadConfig) -> HFAdapter:
    """The adapter of ``load.adapter``, by our names.

    Raises:
        ValueError: ``load.path`` holds no base model of a family.
        CheckpointingException: the folder holds no adapter of PEFT's, or one of another model.
    """
    origin = _base(load)
    if isinstance(origin, HuggingFaceFolder):
        family, sizes = origin.family, origin.sizes()
    else:
        extra = read_manifest(origin).extra
        family, sizes = extra.get("family"), extra.get("config")
    if not family or not isinstance(sizes, Mapping):
        raise ValueError(
            f"{origin} is of no family of Hugging Face, of whose models load.adapter={load.adapter!r} has adapters; leave it out"
        )
    return import_adapter_hf(load.adapter, family=family, config=sizes)


def check_adapter(config: RunConfig, layers: Sequence[str]) -> None:
    """Refuse a run whose adapters are others than those of ``load.adapter``, but for fields in ``load.override``.

    Args:
        config: the run.
        layers: of its model that have adapters.

    Raises:
        ValueError: names each field that differs with both values.
        CheckpointingException: of ``read_adapter``.
    """
    assert config.lora is not None
    place = f"load.adapter={config.load.adapter!r}"
    settings, tensors = read_adapter(config.load)
    ours, theirs = config.lora, _layers(tensors)
    # The scale stays with another rank.
    alpha = settings.scaling * ours.rank
    missing, more = sorted(theirs - set(layers)), sorted(set(layers) - theirs)
    differing = {
        "lora.rank": "" if ours.rank == settings.rank else f"{settings.rank} there, {ours.rank} here",
        "lora.alpha": ""
        if math.isclose(ours.alpha, alpha)
        else f"{alpha:g} there{' with this rank' * (ours.rank != settings.rank)}, {ours.alpha:g} here",
        "lora.targets": f"{_listed(missing)} there and not here" if missing else f"{_listed(more)} here and not there" if more else "",
    }
    if differing := {name: both for name, both in differing.items() if both and name not in config.load.override}:
        shown = "; ".join(f"{name}: {both}" for name, both in differing.items())
        scaled = "lora.alpha" in differing and ours.rank != settings.rank
        kept = f" With lora.rank={ours.rank} the adapter keeps its scale by lora.alpha={alpha:g}." if scaled else ""
        raise ValueError(
            f"{place} holds other adapters: {shown}.{kept} Leave these fields out to have its own, or to change them on purpose set "
            f"load.override=[{','.join(differing)}]"
        )
    if ours.rank < settings.rank or missing:
        lost = (
            f"lora.rank={ours.rank} is below its {settings.rank}"
            if ours.rank < settings.rank
            else f"lora.targets leaves out {_listed(missing)}"
        )
        raise ValueError(f"{place} would be lost in part: {lost}; merge it first (mcore convert merge-adapter), and begin with the result")


@torch.no_grad()
def fill_adapter(state: Mapping[str, Any], config: LoadConfig) -> None:
    """Copy the adapter of ``load.adapter`` into the parts of this rank; rows of A and columns of B beyond its rank, and layers that it
    does not have, keep their values.

    Args:
        state: name -> ``TensorShard``, or several of them, as of ``model_state``.
        config: where it is.

    Raises:
        CheckpointingException: of ``read_adapter``.
    """
    for name, tensor in read_adapter(config).tensors.items():
        fill_parts(state.get(name, ()), tensor)


def _base(load: LoadConfig) -> Folder | HuggingFaceFolder:
    source = find_base(load)
    if isinstance(source, CheckpointManager):
        return source.folder(load.step if load.step is not None else source.latest() or 0)
    return source


def _layers(tensors: Mapping[str, Any]) -> set[str]:
    return {name.removesuffix(".lora.A") for name in tensors if name.endswith(".lora.A")}


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
