# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The command ``mcore-ckpt``: inspect, verify, convert, export and import checkpoints.

Exit status 0: done; 1: verify found damage; 2: it could not be done.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from mcore_ckpt._errors import CheckpointingException
from mcore_ckpt._storage import dtype_of
from mcore_ckpt.hf import export_checkpoint_hf, import_checkpoint_hf
from mcore_ckpt.hf._families import FAMILIES
from mcore_ckpt.inspect import resolve_checkpoint, summarize, verify
from mcore_ckpt.manifest import read_manifest
from mcore_ckpt.restack import to_hybrid, to_uniform

_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with ``arguments`` (None for the process's own) and return its exit status."""
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except (CheckpointingException, ValueError, OSError) as error:
        reason = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else error
        print(f"mcore-ckpt: {reason}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mcore-ckpt", description="Look at, check and convert checkpoints.")
    commands = parser.add_subparsers(required=True, metavar="command")

    command = commands.add_parser("inspect", help="list the tensors of a checkpoint")
    command.add_argument("directory", help="a checkpoint, or a folder of steps (its newest)")
    command.add_argument("--json", action="store_true", help="everything in the manifest, as JSON")
    command.set_defaults(run=_inspect)

    command = commands.add_parser("verify", help="compare every byte with the manifest")
    command.add_argument("directory", help="a checkpoint, or a folder of steps (its newest)")
    command.set_defaults(run=_verify)

    command = commands.add_parser("export-hf", help="write a checkpoint's model as Hugging Face safetensors")
    command.add_argument("directory", help="a checkpoint, or a folder of steps (its newest)")
    command.add_argument("output", help="folder to create")
    command.add_argument("--family", choices=sorted(FAMILIES), help="default: the one that an import noted in the checkpoint")
    command.add_argument("--config", type=Path, help="JSON file with the model's sizes; default: those that an import noted")
    command.add_argument("--prefix", default="", help="what precedes the model's names in the checkpoint, for instance 'model.'")
    command.add_argument("--dtype", choices=sorted(_DTYPES), help="convert to it; default: keep")
    command.set_defaults(run=_export_hf)

    command = commands.add_parser("import-hf", help="make a checkpoint of a Hugging Face model; its sizes go to extra['config']")
    command.add_argument("directory", help="folder with config.json and safetensors")
    command.add_argument("output", help="folder to create")
    command.add_argument("--prefix", default="", help="what to put before the model's names")
    command.add_argument("--dtype", choices=sorted(_DTYPES), help="convert to it; default: keep")
    command.set_defaults(run=_import_hf)

    for name, convert, text in (
        ("to-hybrid", to_hybrid, 'rename layers of attention and feed-forward to a stack of the pattern "*-*-..."'),
        ("to-uniform", to_uniform, 'rename a stack of the pattern "*-*-..." to layers of attention and feed-forward'),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("directory", help="a checkpoint, or a folder of steps (its newest)")
        command.add_argument("output", help="folder to create")
        command.set_defaults(run=_restack, convert=convert)
    return parser


def _inspect(options: argparse.Namespace) -> int:
    summary = summarize(options.directory)
    print(json.dumps(summary.to_json(), indent=1) if options.json else summary.to_table())
    return 0


def _verify(options: argparse.Namespace) -> int:
    problems = verify(options.directory)
    for problem in problems:
        print(problem)
    if not problems:
        print(f"{resolve_checkpoint(options.directory)}: sound")
    return 1 if problems else 0


def _export_hf(options: argparse.Namespace) -> int:
    checkpoint = resolve_checkpoint(options.directory)
    noted = read_manifest(checkpoint).extra
    family, config = options.family or noted.get("family"), noted.get("config")
    if options.config is not None:
        config = _read_sizes(options.config)
    if family is None or not isinstance(config, dict):
        raise ValueError(f"{checkpoint} does not say what model it holds; give --family and --config")
    more = {"dtype": _dtype(options), "hf_config": noted.get("hf_config")}
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


def _dtype(options: argparse.Namespace) -> torch.dtype | None:
    return None if options.dtype is None else dtype_of(_DTYPES[options.dtype])


def _import_hf(options: argparse.Namespace) -> int:
    import_checkpoint_hf(options.directory, options.output, prefix=options.prefix, dtype=_dtype(options))
    return 0


def _restack(options: argparse.Namespace) -> int:
    options.convert(resolve_checkpoint(options.directory), options.output)
    return 0
