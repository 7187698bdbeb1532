# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""``mcore-ckpt export-hf`` and ``import-hf``."""

import argparse
from pathlib import Path

from mcore_ckpt._core import read_manifest
from mcore_ckpt.cli._parts import Commands, add_dtype, add_source, chosen_dtype, read_settings
from mcore_ckpt.cli._progress import progress
from mcore_ckpt.hf import FAMILIES, export_checkpoint_hf, import_checkpoint_hf
from mcore_ckpt.inspect import resolve_checkpoint

__all__ = ["add_to"]


def add_to(commands: Commands) -> None:
    """Add the verbs."""
    command = commands.add_parser("export-hf", help="write a checkpoint's model as Hugging Face safetensors")
    add_source(command)
    command.add_argument("output", help="folder to create")
    command.add_argument("--family", choices=sorted(FAMILIES), help="default: the one that an import noted in the checkpoint")
    command.add_argument("--config", type=Path, help="JSON file with the model's sizes; default: those that an import noted")
    command.add_argument("--prefix", default="", help="what precedes the model's names in the checkpoint, for instance 'model.'")
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
    noted = manifest.extra
    family, config = options.family or noted.get("family"), noted.get("config")
    if options.config is not None:
        config = read_settings(options.config)
    if family is None or not isinstance(config, dict):
        raise ValueError(f"{checkpoint} does not say what model it holds; give --family and --config")
    more = {"dtype": chosen_dtype(options), "hf_config": noted.get("hf_config")}
    tensors = [tensor for name, tensor in manifest.tensors.items() if name.startswith(options.prefix)]
    files = {chunk.file for tensor in tensors for chunk in tensor.chunks}
    total = sum(tensor.num_bytes for tensor in tensors) + sum(manifest.files[file].bytes for file in files)
    with progress("exporting", total) as on_bytes:
        more |= {"family": family, "config": config, "prefix": options.prefix, "on_bytes": on_bytes}
        export_checkpoint_hf(checkpoint, options.output, **more)
    return 0


def _import_hf(options: argparse.Namespace) -> int:
    dtype, stored = chosen_dtype(options), sum(path.stat().st_size for path in Path(options.directory).glob("*.safetensors"))
    with progress("importing", stored) as on_bytes:
        more = {"prefix": options.prefix, "dtype": dtype, "on_bytes": on_bytes, "ignore": options.ignore}
        import_checkpoint_hf(options.directory, options.output, **more)
    return 0
