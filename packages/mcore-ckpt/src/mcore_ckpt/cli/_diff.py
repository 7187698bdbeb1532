# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""``mcore-ckpt diff``."""

import argparse
import json

from mcore_ckpt.cli._parts import Commands, add_source
from mcore_ckpt.cli._progress import progress
from mcore_ckpt.inspect import diff, summarize

__all__ = ["add_to"]


def add_to(commands: Commands) -> None:
    """Add the verb."""
    command = commands.add_parser("diff", help="what two checkpoints do not have alike, whatever their layouts and formats")
    add_source(command, "first")
    add_source(command, "second")
    command.add_argument("--names-only", action="store_true", help="names, shapes, dtypes and extra values; read no tensor")
    command.add_argument("--atol", type=float, default=0.0, help="elements a, b are alike where |a - b| <= atol + rtol |b|")
    command.add_argument("--rtol", type=float, default=0.0, help="see --atol; with both 0 (default) bits must be equal")
    command.add_argument("--json", action="store_true", help="a list of objects with name, kind and text")
    command.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    one, two = summarize(options.first), summarize(options.second)
    tolerance = {"atol": options.atol, "rtol": options.rtol}
    with progress("comparing", sum(tensor.num_bytes for tensor in one.manifest.tensors.values())) as on_bytes:
        found = diff(one.directory, two.directory, values=not options.names_only, on_bytes=on_bytes, **tolerance)
    if options.json:
        print(json.dumps([difference.to_json() for difference in found], indent=1))
    else:
        for difference in found:
            print(difference)
    return 1 if found else 0
