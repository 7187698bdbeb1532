# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The verbs ``import-megatron`` and ``export-megatron``."""

import argparse
import sys
from typing import Any

from mcore_ckpt.cli._parts import Commands, add_source, add_verify, read_settings
from mcore_ckpt.cli._progress import progress
from mcore_ckpt.inspect import summarize
from mcore_ckpt.megatron import FORMATS, export_checkpoint_megatron, import_checkpoint_megatron, open_megatron

__all__ = ["add_to"]


def add_to(commands: Commands) -> None:
    """Add the verbs."""
    command = commands.add_parser(
        "import-megatron", help="make a checkpoint of a GPT model in Megatron's torch_dist, fsdp_dtensor or legacy torch form"
    )
    command.add_argument("directory", help="one iteration, or the folder whose latest_checkpointed_iteration.txt names one")
    command.add_argument("output", help="folder to create, or address of an object store")
    command.add_argument("--prefix", default="model.", help="what to put before the names of weights (default: %(default)s)")
    command.add_argument("--config", help="JSON file with settings that the checkpoint does not say, such as num_query_groups")
    command.add_argument("--drop", action="append", default=[], metavar="PATTERN", help="leave out what matches, such as 'mtp.*'")
    command.add_argument("--no-optimizer", dest="optimizer", action="store_false", help="weights only")
    command.set_defaults(run=_import)

    command = commands.add_parser("export-megatron", help="write a GPT model's checkpoint as Megatron's torch_dist or fsdp_dtensor")
    add_source(command)
    command.add_argument("output", help="folder to create, or address of an object store")
    command.add_argument("--prefix", default="model.", help="what precedes the names of weights (default: %(default)s)")
    command.add_argument("--no-optimizer", dest="optimizer", action="store_false", help="weights only")
    command.add_argument("--format", choices=FORMATS, default=FORMATS[0], help="fsdp_dtensor is for Megatron-FSDP (default: %(default)s)")
    command.add_argument("--optimizer-config", metavar="FILE", help="JSON with lr, adam_beta1 ...: makes the parameter groups")
    add_verify(command)
    command.set_defaults(run=_export)


def _import(options: argparse.Namespace) -> int:
    config: dict[str, Any] = {} if options.config is None else read_settings(options.config)
    _, source = open_megatron(options.directory, config, optimizer=options.optimizer)
    total = sum(tensor.num_bytes for tensor in (*source.tensors.values(), *source.states.values()))
    given = {"prefix": options.prefix, "config": config, "optimizer": options.optimizer, "drop": tuple(options.drop)}
    with progress("importing", total) as on_bytes:
        left = import_checkpoint_megatron(options.directory, options.output, **given, on_bytes=on_bytes)
    if left:
        print(f"left out: {', '.join(left)}", file=sys.stderr)
    return 0


def _export(options: argparse.Namespace) -> int:
    summary = summarize(options.directory)
    tensors = sum(tensor.num_bytes for tensor in summary.manifest.tensors.values())
    config = None if options.optimizer_config is None else read_settings(options.optimizer_config, "--optimizer-config")
    given = {"format": options.format, "prefix": options.prefix, "optimizer": options.optimizer}
    given |= {"optimizer_config": config, "verify": options.verify}
    with progress("exporting", tensors + (summary.num_bytes if options.verify else 0)) as on_bytes:
        left = export_checkpoint_megatron(summary.directory, options.output, **given, on_bytes=on_bytes)
    if left:
        print(f"left out: {', '.join(left)}", file=sys.stderr)
    return 0
