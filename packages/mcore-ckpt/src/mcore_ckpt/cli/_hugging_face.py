# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""``mcore-ckpt export-hf`` and ``import-hf``."""

import argparse
import json
from pathlib import Path
from typing import Any

from mcore_ckpt.cli._parts import Commands, add_dtype, add_source, chosen_dtype
from mcore_ckpt.hf import export_checkpoint_hf, import_checkpoint_hf
from mcore_ckpt.hf._families import FAMILIES
from mcore_ckpt.inspect import resolve_checkpoint
from mcore_ckpt.manifest import read_manifest

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
    add_dtype(command)
    command.set_defaults(run=_import_hf)


def _export_hf(options: argparse.Namespace) -> int:
    checkpoint = resolve_checkpoint(options.directory)
    noted = read_manifest(checkpoint).extra
    family, config = options.family or noted.get("family"), noted.get("config")
    if options.config is not None:
        config = _read_sizes(options.config)
    if family is None or not isinstance(config, dict):
        raise ValueError(f"{checkpoint} does not say what model it holds; give --family and --config")
    more = {"dtype": chosen_dtype(options), "hf_config": noted.get("hf_config")}
    export_checkpoint_hf(checkpoint, options.output, family=family, config=config, prefix=options.prefix, **more)
    return 0


def _read_sizes(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"--config {path} is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"--config {path} holds a {type(config).__name__}; give an object with the model's sizes")
    return config


def _import_hf(options: argparse.Namespace) -> int:
    import_checkpoint_hf(options.directory, options.output, prefix=options.prefix, dtype=chosen_dtype(options))
    return 0
