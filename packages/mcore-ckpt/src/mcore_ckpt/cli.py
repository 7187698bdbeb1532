# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The command ``mcore-ckpt``: inspect, verify, export and import checkpoints.

Exit status 0: done; 1: verify found damage; 2: it could not be done.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from mcore_ckpt._errors import CheckpointingException
from mcore_ckpt._save import save
from mcore_ckpt.hf import export_checkpoint_hf, import_hf
from mcore_ckpt.hf._families import FAMILIES
from mcore_ckpt.inspect import resolve_checkpoint, summarize, verify

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
    command.add_argument("--family", required=True, choices=sorted(FAMILIES))
    command.add_argument("--config", required=True, type=Path, help="JSON file with the model's sizes")
    command.add_argument("--prefix", default="", help="what precedes the model's names in the checkpoint, for instance 'model.'")
    command.set_defaults(run=_export_hf)

    command = commands.add_parser("import-hf", help="make a checkpoint of a Hugging Face model; its sizes go to extra['config']")
    command.add_argument("directory", help="folder with config.json and safetensors")
    command.add_argument("output", help="folder to create")
    command.add_argument("--prefix", default="", help="what to put before the model's names")
    command.set_defaults(run=_import_hf)
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
    try:
        config = json.loads(options.config.read_text())
    except ValueError as error:
        raise ValueError(f"--config {options.config} is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"--config {options.config} holds a {type(config).__name__}; give an object with the model's sizes")
    export_checkpoint_hf(resolve_checkpoint(options.directory), options.output, family=options.family, config=config, prefix=options.prefix)
    return 0


def _import_hf(options: argparse.Namespace) -> int:
    model = import_hf(options.directory)
    state = {options.prefix + name: tensor for name, tensor in model.tensors}
    save(state, options.output, extra={"family": model.family, "config": model.config})
    return 0
