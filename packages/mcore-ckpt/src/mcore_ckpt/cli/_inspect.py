# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The verbs that look at checkpoints: ``inspect``, ``verify``, ``diff``; and those that take parts out: ``extract``, ``extract-assets``."""

import argparse
import json
import os
import secrets
from functools import partial
from pathlib import Path

from mcore_ckpt._core import CheckpointReader, check_files
from mcore_ckpt._storage import LocalFolder, StoredFile, WatchedFolder, sync_folder, write_safetensors
from mcore_ckpt.assets import extract_assets
from mcore_ckpt.cli._arguments import Commands, add_source, add_verify, choose, progress
from mcore_ckpt.inspect import diff, resolve_folder, summarize, verify

__all__ = ["add_verbs"]


def add_verbs(commands: Commands) -> None:
    """Add the verbs of this file."""
    _add_inspect(commands)
    _add_verify(commands)
    _add_diff(commands)
    _add_extract(commands)
    _add_extract_assets(commands)


def _add_inspect(commands: Commands) -> None:
    command = commands.add_parser("inspect", help="list the tensors of a checkpoint")
    add_source(command)
    command.add_argument("--json", action="store_true", help="everything in the manifest, as JSON")
    command.set_defaults(run=_run_inspect)


def _run_inspect(options: argparse.Namespace) -> int:
    summary = summarize(options.directory)
    print(json.dumps(summary.to_json(), indent=1) if options.json else summary.to_table())
    return 0


def _add_verify(commands: Commands) -> None:
    command = commands.add_parser("verify", help="compare every byte with the manifest")
    add_source(command)
    command.set_defaults(run=_run_verify)


def _run_verify(options: argparse.Namespace) -> int:
    summary = summarize(options.directory)
    with progress("verifying", summary.num_bytes) as on_bytes:
        problems = verify(summary.directory, on_bytes=on_bytes)
    for problem in problems:
        print(problem)
    if not problems:
        print(f"{summary.directory}: sound")
    return 1 if problems else 0


def _add_diff(commands: Commands) -> None:
    command = commands.add_parser("diff", help="what two checkpoints do not have alike, whatever their layouts and formats")
    add_source(command, "first")
    add_source(command, "second")
    command.add_argument("--names-only", action="store_true", help="names, shapes, dtypes and extra values; read no tensor")
    command.add_argument("--atol", type=float, default=0.0, help="elements a, b are alike where |a - b| <= atol + rtol |b|")
    command.add_argument("--rtol", type=float, default=0.0, help="see --atol; with both 0 (default) bits must be equal")
    command.add_argument("--json", action="store_true", help="a list of objects with name, kind and text")
    command.set_defaults(run=_run_diff)


def _run_diff(options: argparse.Namespace) -> int:
    one, two = summarize(options.first), summarize(options.second)
    tolerance = {"atol": options.atol, "rtol": options.rtol}
    with progress("comparing", sum(tensor.num_bytes for tensor in one.manifest.tensors.values())) as on_bytes:
        differences = diff(one.directory, two.directory, values=not options.names_only, on_bytes=on_bytes, **tolerance)
    if options.json:
        print(json.dumps([difference.to_json() for difference in differences], indent=1))
    else:
        for difference in differences:
            print(difference)
    return 1 if differences else 0


def _add_extract(commands: Commands) -> None:
    command = commands.add_parser("extract", help="write some tensors, whole, as one safetensors file")
    add_source(command)
    command.add_argument("output", type=Path, help="file to create")
    command.add_argument("patterns", nargs="+", metavar="PATTERN", help="a tensor's name, or a pattern such as 'layers.0.*'")
    add_verify(command)
    command.set_defaults(run=_run_extract)


def _run_extract(options: argparse.Namespace) -> int:
    reader = CheckpointReader(resolve_folder(options.directory))
    chosen = sorted(choose(reader.manifest.tensors, options.patterns))
    if os.path.lexists(options.output):
        raise ValueError(f"{options.output} exists; name a file to create")
    files = sorted({chunk.file for name in chosen for chunk in reader.record(name).chunks})
    total = sum(reader.record(name).num_bytes for name in chosen)
    compared = sum(reader.manifest.files[file].bytes for file in files) if options.verify else 0
    draft = options.output.with_name(f"{options.output.name}.{secrets.token_hex(4)}.partial")
    with progress("extracting", total + compared) as on_bytes:
        if options.verify:
            check_files(WatchedFolder(reader.folder, on_bytes), reader.manifest, files)
        entries = [(name, reader.record(name).dtype, reader.record(name).shape, partial(reader.read, name)) for name in chosen]
        write_safetensors(StoredFile(WatchedFolder(LocalFolder(draft.parent), on_bytes), draft.name), entries)
    os.replace(draft, options.output)
    sync_folder(draft.parent)
    return 0


def _add_extract_assets(commands: Commands) -> None:
    command = commands.add_parser("extract-assets", help="write the files kept beside the tensors, such as the tokenizer's")
    add_source(command)
    command.add_argument("output", type=Path, help="folder; no file in it is overwritten")
    command.add_argument("patterns", nargs="*", default=["*"], metavar="PATTERN", help="such as 'tokenizer/*'; default: all")
    command.set_defaults(run=_run_extract_assets)


def _run_extract_assets(options: argparse.Namespace) -> int:
    for path in extract_assets(resolve_folder(options.directory), options.output, options.patterns):
        print(path)
    return 0
