# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The verbs of other systems: ``export-hf``, ``import-hf``, ``export-adapter``, ``merge-adapter``, ``import-torch``, ``import-megatron``,
``export-megatron``."""

import argparse
import sys
from pathlib import Path
from typing import Any

from mcore_ckpt._core import Manifest, read_manifest
from mcore_ckpt.cli._arguments import Commands, add_dtype, add_source, add_verify, check_new, chosen_dtype, progress, read_settings
from mcore_ckpt.foreign import import_torch
from mcore_ckpt.hf import StoredAdapter, export_adapter_hf, export_checkpoint_hf, import_checkpoint_hf, merge_adapter_hf
from mcore_ckpt.inspect import resolve_checkpoint, summarize
from mcore_ckpt.megatron import EXPORT_FORMATS, export_checkpoint_megatron, import_checkpoint_megatron, stored_bytes

__all__ = ["add_verbs"]

# Of states that name the model's tensors apart from the optimizer's; no model here has a part of this name.
_PREFIX = "model."


def add_verbs(commands: Commands) -> None:
    """Add the verbs of this file."""
    _add_hf(commands)
    _add_adapters(commands)
    _add_torch(commands)
    _add_megatron(commands)


def _add_hf(commands: Commands) -> None:
    command = commands.add_parser("export-hf", help="write a checkpoint's model as Hugging Face safetensors")
    add_source(command)
    command.add_argument("output", help="folder to create")
    command.add_argument("--family", metavar="NAME", help="such as llama; default: the one that an import noted in the checkpoint")
    command.add_argument("--config", type=Path, help="JSON file with the model's sizes; default: those that an import noted")
    command.add_argument("--prefix", help="what precedes the names of weights there; default: 'model.' where it does, else nothing")
    add_dtype(command)
    command.set_defaults(run=_export_hf)

    command = commands.add_parser("import-hf", help="make a checkpoint of a Hugging Face model; its sizes go to extra['config']")
    command.add_argument("directory", help="folder with config.json and safetensors")
    command.add_argument("output", help="folder to create")
    command.add_argument("--prefix", default="", help="what to put before the model's names")
    command.add_argument(
        "--ignore", action="append", default=[], metavar="NAME", help="entry of config.json to pass over: dropout, or what changes nothing"
    )
    add_dtype(command)
    command.set_defaults(run=_import_hf)


def _export_hf(options: argparse.Namespace) -> int:
    checkpoint = resolve_checkpoint(options.directory)
    manifest = read_manifest(checkpoint)
    stored_extra = manifest.extra
    family, config = options.family or stored_extra.get("family"), stored_extra.get("config")
    if options.config is not None:
        config = read_settings(options.config)
    prefix = _prefix(options, manifest)
    if family is None or not isinstance(config, dict):
        if not any(name.startswith(f"{prefix}layers.") for name in manifest.tensors):
            raise ValueError(
                f"{checkpoint} holds no {prefix}layers.*, as every family has: no family is an encoder with a decoder, and other names "
                "need --prefix"
            )
        raise ValueError(f"{checkpoint} does not say what model it holds; give --family and --config")
    more = {"dtype": chosen_dtype(options), "hf_config": stored_extra.get("hf_config")}
    tensors = [tensor for name, tensor in manifest.tensors.items() if name.startswith(prefix)]
    files = {chunk.file for tensor in tensors for chunk in tensor.chunks}
    total = sum(tensor.num_bytes for tensor in tensors) + sum(manifest.files[file].bytes for file in files)
    with progress("exporting", total) as on_bytes:
        more |= {"family": family, "config": config, "prefix": prefix, "on_bytes": on_bytes}
        export_checkpoint_hf(checkpoint, options.output, **more)
    return 0


def _prefix(options: argparse.Namespace, manifest: Manifest) -> str:
    """What precedes the names of weights: as was said, or found."""
    if options.prefix is not None:
        return options.prefix
    return _PREFIX if any(name.startswith(_PREFIX) for name in manifest.tensors) else ""


def _import_hf(options: argparse.Namespace) -> int:
    check_new(options.output)
    dtype, stored = chosen_dtype(options), sum(path.stat().st_size for path in Path(options.directory).glob("*.safetensors"))
    with progress("importing", stored) as on_bytes:
        more = {"prefix": options.prefix, "dtype": dtype, "on_bytes": on_bytes, "ignore": options.ignore}
        import_checkpoint_hf(options.directory, options.output, **more)
    return 0


def _add_adapters(commands: Commands) -> None:
    command = commands.add_parser("export-adapter", help="write the LoRA adapters of a checkpoint as a folder of PEFT")
    add_source(command)
    command.add_argument("output", help="folder to create")
    add_verify(command)
    command.set_defaults(run=_export_adapter)

    command = commands.add_parser("merge-adapter", help="write a Hugging Face model with a LoRA adapter of PEFT added")
    command.add_argument("base", help="folder with config.json and safetensors")
    command.add_argument("adapter", help="folder with adapter_config.json and adapter_model.safetensors")
    command.add_argument("output", help="folder to create")
    add_dtype(command)
    command.set_defaults(run=_merge_adapter)


def _export_adapter(options: argparse.Namespace) -> int:
    checkpoint = resolve_checkpoint(options.directory)
    stored, extra = StoredAdapter.of(checkpoint), read_manifest(checkpoint).extra
    if stored is None:
        raise ValueError(f"{checkpoint} holds a whole model and no adapters; export-hf writes it")
    if not extra.get("family") or not isinstance(extra.get("config"), dict):
        raise ValueError(f"{checkpoint} holds adapters of a model that no family of Hugging Face expresses")
    tensors = stored.tensors(verify=options.verify)
    export_adapter_hf(tensors, options.output, family=extra["family"], config=extra["config"], adapter=stored.adapter)
    return 0


def _merge_adapter(options: argparse.Namespace) -> int:
    merge_adapter_hf(options.base, options.adapter, options.output, dtype=chosen_dtype(options))
    return 0


def _add_torch(commands: Commands) -> None:
    command = commands.add_parser("import-torch", help="make a checkpoint of one file of torch.save; nothing in it is run")
    command.add_argument("file", type=Path, help="such as pytorch_model.bin or mp_rank_00/model_optim_rng.pt")
    command.add_argument("output", help="folder to create")
    command.add_argument("--prefix", default="", help="what to put before the names of tensors")
    command.set_defaults(run=_run_torch)


def _run_torch(options: argparse.Namespace) -> int:
    check_new(options.output)
    left = import_torch(options.file, options.output, prefix=options.prefix)
    if left:
        print(f"left out, because they are neither tensors nor JSON values: {', '.join(sorted(left))}", file=sys.stderr)
    return 0


def _add_megatron(commands: Commands) -> None:
    command = commands.add_parser(
        "import-megatron", help="make a checkpoint of a GPT model in Megatron's torch_dist, fsdp_dtensor or legacy torch form"
    )
    command.add_argument("directory", help="one iteration, or the folder whose latest_checkpointed_iteration.txt names one")
    command.add_argument("output", help="folder to create, or address of an object store")
    command.add_argument("--prefix", default="", help="what to put before the names of weights; without it `mcore train` takes them")
    command.add_argument("--config", help="JSON file with settings that the checkpoint does not say, such as num_query_groups")
    command.add_argument("--drop", action="append", default=[], metavar="PATTERN", help="leave out what matches, such as 'mtp.*'")
    command.add_argument("--no-optimizer", dest="optimizer", action="store_false", help="weights only")
    command.set_defaults(run=_run_import_megatron)

    command = commands.add_parser("export-megatron", help="write a GPT model's checkpoint as Megatron's torch_dist or fsdp_dtensor")
    add_source(command)
    command.add_argument("output", help="folder to create, or address of an object store")
    command.add_argument("--prefix", help="what precedes the names of weights; default: 'model.' where it does, else nothing")
    command.add_argument("--no-optimizer", dest="optimizer", action="store_false", help="weights only")
    command.add_argument(
        "--format", choices=EXPORT_FORMATS, default=EXPORT_FORMATS[0], help="fsdp_dtensor is for Megatron-FSDP (default: %(default)s)"
    )
    command.add_argument(
        "--optimizer-config", metavar="FILE", help="JSON with lr, adam_beta1 ...: parameter groups other than the checkpoint's"
    )
    add_verify(command)
    command.set_defaults(run=_run_export_megatron)


def _run_import_megatron(options: argparse.Namespace) -> int:
    config: dict[str, Any] = {} if options.config is None else read_settings(options.config)
    total = stored_bytes(options.directory, config, optimizer=options.optimizer)
    arguments = {"prefix": options.prefix, "config": config, "optimizer": options.optimizer, "drop": tuple(options.drop)}
    with progress("importing", total) as on_bytes:
        left = import_checkpoint_megatron(options.directory, options.output, **arguments, on_bytes=on_bytes)
    if left:
        print(f"left out: {', '.join(left)}", file=sys.stderr)
    return 0


def _run_export_megatron(options: argparse.Namespace) -> int:
    summary = summarize(options.directory)
    tensors = sum(tensor.num_bytes for tensor in summary.manifest.tensors.values())
    config = None if options.optimizer_config is None else read_settings(options.optimizer_config, "--optimizer-config")
    arguments = {"format": options.format, "prefix": _prefix(options, summary.manifest), "optimizer": options.optimizer}
    arguments |= {"optimizer_config": config, "verify": options.verify}
    with progress("exporting", tensors + (summary.num_bytes if options.verify else 0)) as on_bytes:
        left = export_checkpoint_megatron(summary.directory, options.output, **arguments, on_bytes=on_bytes)
    if left:
        print(f"left out: {', '.join(left)}", file=sys.stderr)
    return 0
