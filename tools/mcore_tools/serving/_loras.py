# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Adapters beside a served model: of folders, and memory for them by the flags of a command line."""

import argparse
import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from mcore_ckpt import CheckpointingException
from mcore_ckpt.hf import StoredAdapter, import_adapter_hf
from mcore_ckpt.inspect import resolve_folder
from mcore_ckpt.manifest import read_manifest
from mcore_inference import LoraSlots, LoraWeights
from mcore_tools.arguments import folder, integer
from mcore_tools.training import HuggingFaceFolder, is_huggingface

ONE_LORA = "lora"
"""Name of an adapter that is given without one."""
LORA_OPTIONS = ("max_loras", "max_lora_rank", "lora_targets")
"""Of the slots, as options."""
_OF_EXPERTS = ("_lora.A", "_lora.B")


def check_lora_base(checkpoint: str | Path) -> None:
    """See that a checkpoint is served as it is, so that adapters of it fit beside.

    Raises:
        CheckpointingException: there is none.
        ValueError: it holds adapters itself.
    """
    if not is_huggingface(checkpoint) and (own := StoredAdapter.of(resolve_folder(checkpoint))) is not None:
        raise ValueError(
            f"{checkpoint} holds adapters of {own.adapter.base_model}, into which they are merged when it is served; serve that model, and "
            f"name {checkpoint} as an adapter of it"
        )


def read_lora(checkpoint: str | Path, place: str | Path) -> LoraWeights:
    """The adapter of a folder, for the model of a checkpoint.

    Args:
        checkpoint: as of ``open_engine``.
        place: a folder in PEFT's format; or a run that trains adapters, its steps, or one of them.

    Raises:
        CheckpointingException: there is no adapter, or one of a model with other layers.
        ValueError: the checkpoint holds adapters itself, or the adapter is one of experts or of another layer without slots.
    """
    check_lora_base(checkpoint)
    if (Path(place) / "adapter_config.json").is_file():
        family, sizes = _described(checkpoint, place)
        settings, tensors = import_adapter_hf(place, family=family, config=sizes)
    else:
        stored = None if is_huggingface(place) else StoredAdapter.of(resolve_folder(place))
        if stored is None:
            raise CheckpointingException(
                f"{place} holds a whole model; name the folder of an adapter, of a run with lora or in PEFT's format"
            )
        settings, tensors = stored.adapter, stored.tensors()
    if experts := [name for name in tensors if name.endswith(_OF_EXPERTS)]:
        raise ValueError(f"{place} has adapters of experts, such as {experts[0]}, for which an engine has no slots; merge it instead")
    weights = LoraWeights.of(tensors, rank=settings.rank, alpha=settings.alpha)
    for layer in weights.matrices:
        if not layer.startswith("layers.") or layer.count(".") != 3:
            raise ValueError(
                f"{place} has an adapter of {layer}, for which an engine has no slots: they are beside mixers and feed-forwards without "
                "experts; merge it instead"
            )
        try:
            LoraSlots(targets=(_last_name(layer),))
        except ValueError as error:
            raise ValueError(f"{place} has an adapter of {layer}, for which an engine has no slots: {error}") from error
    return weights


def _described(checkpoint: str | Path, place: str | Path) -> tuple[str, Mapping[str, object]]:
    """Family and sizes of a served model."""
    if is_huggingface(checkpoint):
        source = HuggingFaceFolder(directory=Path(checkpoint))
        return source.family, source.sizes()
    origin = resolve_folder(checkpoint)
    extra = read_manifest(origin).extra
    family, sizes = extra.get("family"), extra.get("config")
    if not family or not isinstance(sizes, Mapping):
        raise ValueError(f"{origin} is of no family of Hugging Face, and {place} is an adapter of one's model; leave it out")
    return str(family), sizes


def lora_address(place: str | Path) -> str:
    """Where the adapter of ``read_lora`` is: of a run its newest step.

    Raises:
        CheckpointingException: there is none.
    """
    is_peft = (Path(place) / "adapter_config.json").is_file()
    return str(Path(place if is_peft else resolve_folder(place).address).resolve())


def lora_digest(loras: Mapping[str, LoraWeights]) -> str:
    """Of names and numbers; equal ones have the same."""
    digest = hashlib.sha256()
    for name, weights in loras.items():
        digest.update(repr((name, weights.rank, weights.alpha)).encode())
        for matrix, tensor in sorted(weights.tensors().items()):
            digest.update(repr((matrix, tuple(tensor.shape), tensor.dtype)).encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def add_lora_argument(parser: argparse.ArgumentParser) -> None:
    """One adapter that everything goes through."""
    parser.add_argument(
        "--lora",
        metavar="FOLDER",
        type=folder,
        help="answer by an adapter of the model: in PEFT's format, or a run of `mcore sft` with lora (default: by the model alone)",
    )


def add_lora_arguments(parser: argparse.ArgumentParser) -> None:
    """Several adapters that requests choose from, and memory for them."""
    parser.add_argument(
        "--lora",
        metavar="NAME=FOLDER",
        type=_named_folder,
        action="append",
        default=[],
        help="an adapter that requests name as their model: in PEFT's format, or a run of `mcore sft` with lora; may be given again",
    )
    parser.add_argument(
        "--max-loras", metavar="N", type=integer(1, 1024), help="adapters that are loaded at a time (default: those of --lora, at least 4)"
    )
    parser.add_argument(
        "--max-lora-rank",
        metavar="N",
        type=integer(1, 4096),
        help="of an adapter; one of PEFT has the sum of the ranks of q, k and v here (default: the greatest of --lora, at least 16)",
    )
    parser.add_argument(
        "--lora-targets",
        metavar="NAMES",
        type=_targets,
        help="layers that adapters may change, with commas between (default: those of --lora, else of attention and feed-forwards)",
    )


def read_loras(checkpoint: str | Path, named: Sequence[tuple[str, Path]]) -> dict[str, LoraWeights]:
    """The adapters of ``--lora`` by their names.

    Raises:
        CheckpointingException: as of ``read_lora``.
        ValueError: as of ``read_lora``, or two have one name.
    """
    loras: dict[str, LoraWeights] = {}
    for name, place in named:
        if name in loras:
            raise ValueError(f"--lora names {name!r} twice; give each adapter a name of its own")
        try:
            loras[name] = read_lora(checkpoint, place)
        except CheckpointingException as error:
            raise CheckpointingException(f"--lora {name}={place}: {error}") from error
        except ValueError as error:
            raise ValueError(f"--lora {name}={place}: {error}") from error
    return loras


def settle_lora_slots(options: argparse.Namespace, loras: Mapping[str, LoraWeights]) -> None:
    """Give what was not said of the slots the values that hold these adapters. Slots are said by any of their flags, or by what needs some.

    Raises:
        ValueError: the slots do not hold them.
    """
    for name in LORA_OPTIONS:
        if not hasattr(options, name):
            setattr(options, name, None)
    if not loras:
        if getattr(options, "lora_folder", None) is not None and lora_slots(options) is None:
            options.max_loras = LoraSlots().max_loras
        return
    slots, usual = slots_for(loras), LoraSlots()
    if isinstance(options.lora, list):
        # Others may come beside those of the command.
        more = {name: max(getattr(slots, name), getattr(usual, name)) for name in ("max_loras", "max_lora_rank")}
        slots = dataclasses.replace(slots, **more)
    defaults = (slots.max_loras, slots.max_lora_rank, ",".join(slots.wanted))
    for name, value in zip(LORA_OPTIONS, defaults, strict=True):
        if getattr(options, name) is None:
            setattr(options, name, value)
    if len(loras) > options.max_loras:
        raise ValueError(f"--max-loras {options.max_loras} is less than the {len(loras)} adapters of --lora; raise it")
    if (rank := max(weights.rank for weights in loras.values())) > options.max_lora_rank:
        raise ValueError(f"--max-lora-rank {options.max_lora_rank} is less than the rank {rank} of an adapter of --lora; raise it")


def slots_for(loras: Mapping[str, LoraWeights]) -> LoraSlots:
    """That hold these adapters, and no more."""
    ends = {_last_name(layer) for weights in loras.values() for layer in weights.matrices}
    rank = max(weights.rank for weights in loras.values())
    return LoraSlots(max_loras=len(loras), max_lora_rank=rank, targets=tuple(sorted(ends)))


def lora_slots(options: argparse.Namespace) -> LoraSlots | None:
    """Memory for adapters, where any of its options is given or settled.

    Raises:
        ValueError: as of ``LoraSlots``.
    """
    given = {name: value for name in LORA_OPTIONS if (value := getattr(options, name, None)) is not None}
    if not given:
        return None
    if "lora_targets" in given:
        given["targets"] = tuple(given.pop("lora_targets").split(","))
    return LoraSlots(**given)


def _last_name(layer: str) -> str:
    return layer.rpartition(".")[2]


def _named_folder(text: str) -> tuple[str, Path]:
    """``NAME=FOLDER``."""
    name, equals, place = text.partition("=")
    if not equals or not 0 < len(name) <= 256 or not name.isprintable() or name != name.strip():
        raise argparse.ArgumentTypeError(f"{text[:80]!r} must be NAME=FOLDER, a name of 1 to 256 characters and a folder")
    return name, folder(place)


def _targets(text: str) -> str:
    try:
        LoraSlots(targets=tuple(text.split(",")))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text
